"""tristep.optim: numbers, states and arguments are those of torch.optim, with each of their arguments."""

import copy
import inspect

import pytest
import torch
from torch_peers import ARGUMENTS, CLOSE, CLOSE_IN_FLOAT32, classes_with_argument, small_net

import tristep

STEPS = 6

CONFIGURATIONS = [
    pytest.param(name, given, id=f"{name}-{', '.join(f'{key}={value}' for key, value in given.items())}")
    for name, choices in ARGUMENTS.items()
    for given in choices
]

RICHEST = {name: max(choices, key=len) for name, choices in ARGUMENTS.items()}


def _parameters(name, dtype, device="cpu"):
    """Parameters of all layouts that the optimizer takes, with values that every type holds exactly."""
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def values(*shape):
        return torch.randn(shape, dtype=wide).bfloat16().to(dtype) if not dtype.is_complex else _coarse(shape, dtype)

    tensors = [values(4, 3), values(3, 4).t(), values(2, 6)[:, ::2]]
    if name not in ("Muon", "SparseAdam"):
        tensors += [values(5), values(), values(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)]
    if name not in ("Muon", "SparseAdam", "Adafactor"):  # torch's Adafactor divides by the number of elements
        tensors += [values(0), values(0, 3)]
    if (
        name == "SparseAdam" and torch.device(device).type == "cuda"
    ):  # where torch adds sparse tensors to contiguous ones only
        tensors = list(map(torch.Tensor.contiguous, tensors))
    return [torch.nn.Parameter(tensor.to(device)) for tensor in tensors]


def _coarse(shape, dtype):
    return torch.complex(torch.randn(shape).bfloat16().float(), torch.randn(shape).bfloat16().float()).to(dtype)


def _gradients(parameters, step):
    """Gradients for a step, None now and then."""
    for i, parameter in enumerate(parameters):
        if (step + i) % 4 == 2:
            yield None
        elif parameter.is_complex():
            yield _coarse(parameter.shape, parameter.dtype)
        else:
            yield torch.randn(parameter.shape).bfloat16()


def _trained(library, name, arguments, dtype, rounded=None, device="cpu", steps=STEPS):
    """An optimizer of two groups after some steps, and its parameters.

    With `rounded`, a narrower type, parameters are rounded to it after each step, as if they were of that type.
    """
    torch.manual_seed(0)
    parameters = _parameters(name, dtype, device)
    make = getattr(library, name)
    arguments = copy.deepcopy(arguments)
    if isinstance(arguments.get("lr"), torch.Tensor):
        arguments["lr"] = arguments["lr"].double()  # or torch computes in the rate's type
    if "foreach" in inspect.signature(make).parameters:
        arguments["foreach"] = False
    middle = len(parameters) // 2
    other = {"params": parameters[middle:], "lr": 0.05}
    if "weight_decay" in inspect.signature(make).parameters:
        other["weight_decay"] = 0.05
    optimizer = make([{"params": parameters[:middle]}, other], **arguments)
    for step in range(3 if name == "Muon" else steps):  # its matrix products in bfloat16 are slow on some processors
        for parameter, gradient in zip(parameters, _gradients(parameters, step), strict=True):
            gradient = None if gradient is None else gradient.to(parameter)
            parameter.grad = gradient.to_sparse() if gradient is not None and name == "SparseAdam" else gradient
        if step == steps // 2:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] / 2
        optimizer.step()
        if rounded is not None:
            for parameter in parameters:
                parameter.data.copy_(parameter.data.to(rounded))
    return parameters, optimizer


def _assert_same_states(optimizer, peer, dtype=None, **close):
    ours, theirs = optimizer.state_dict(), peer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, row in theirs["state"].items():
        assert set(ours["state"][index]) == set(row)
        for key, value in row.items():
            own = ours["state"][index][key]
            if not isinstance(value, torch.Tensor):  # SparseAdam's count
                assert (type(own), own) == (type(value), value)
                continue
            assert own.dtype == (value.dtype if dtype is None or key == "step" else dtype)
            if value.ndim == 0:  # counts, and ASGD's factors, of which torch has some on the CPU, and tristep all
                value = value.to(own.device)
            torch.testing.assert_close(own, value, check_dtype=False, msg=lambda text, key=key: f"{key}: {text}", **close)


@pytest.mark.sample(56)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "arguments"), CONFIGURATIONS)
def test_like_torch(name, arguments, dtype):
    _assert_like_torch(name, arguments, dtype, **(CLOSE if dtype == torch.float64 else CLOSE_IN_FLOAT32))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    ("name", "arguments"), [case for case in CONFIGURATIONS if case.values[0] not in ("Adafactor", "Muon", "SparseAdam")]
)
def test_complex_parameters_like_torch(name, arguments, dtype):
    _assert_like_torch(name, arguments, dtype, **(CLOSE if dtype == torch.complex128 else CLOSE_IN_FLOAT32))


def _assert_like_torch(name, arguments, dtype, **close):
    theirs, peer = _trained(torch.optim, name, arguments, dtype)
    ours, optimizer = _trained(tristep.optim, name, arguments, dtype)
    torch.testing.assert_close(ours, theirs, **close)
    _assert_same_states(optimizer, peer, **close)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "arguments"), CONFIGURATIONS)
def test_bfloat16_like_torch_in_float32_rounded_after_each_step(name, arguments):
    exact = dict(arguments)
    if name == "Adafactor":
        exact["eps"] = (torch.finfo(torch.bfloat16).eps, 1e-3)  # which is the default for bfloat16
    theirs, peer = _trained(torch.optim, name, exact, torch.float32, rounded=torch.bfloat16)
    ours, optimizer = _trained(tristep.optim, name, exact, torch.bfloat16)
    # A step that falls between two values may go to the other one: a unit in the last place.
    torch.testing.assert_close([p.float() for p in ours], [p.detach() for p in theirs], rtol=2**-7, atol=1e-4)
    equal = sum((a == b).sum().item() for a, b in zip(ours, theirs, strict=True))
    assert equal > 0.9 * sum(p.numel() for p in ours)
    _assert_same_states(optimizer, peer, dtype=torch.float32, rtol=0.01, atol=1e-4)
    if name == "Adafactor":
        default, _ = _trained(tristep.optim, name, arguments, torch.bfloat16)
        assert all(map(torch.equal, default, ours))


@pytest.mark.sample(2, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_engine_like_torch(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    theirs, peer = _trained(torch.optim, name, RICHEST[name], torch.float64, device=device, steps=3)
    ours, optimizer = _trained(tristep.optim, name, RICHEST[name], torch.float64, device=device, steps=3)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _assert_same_states(optimizer, peer, **CLOSE)


def test_lbfgs_is_not_offered():
    classes = (name for name, each in vars(torch.optim).items() if inspect.isclass(each))
    names = {name for name in classes if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    assert names - {"Optimizer", "LBFGS"} == set(ARGUMENTS) & names
    assert not hasattr(tristep.optim, "LBFGS")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", classes_with_argument("differentiable"))
def test_a_differentiable_step_is_refused(name):
    with pytest.raises(ValueError, match=f"differentiable=True: .* use torch.optim.{name}"):
        getattr(tristep.optim, name)([torch.nn.Parameter(torch.ones(1))], differentiable=True)


def test_adafactor_takes_parameters_without_elements():
    """torch's divides by their number."""
    empty, full = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = tristep.optim.Adafactor([empty, full])
    for parameter in (empty, full):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (full < 1).all()


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_about_speed_change_no_number(flag):
    runs = []
    for flags in ({}, {flag: True}):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = tristep.optim.AdamW([parameter], amsgrad=True, **flags)
        for step in range(3):
            parameter.grad = torch.full((7,), step + 1.0)
            optimizer.step()
        runs.append(parameter)
    assert torch.equal(*runs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", classes_with_argument("capturable"))
def test_capturable_changes_no_number_and_goes_to_torch_and_back(name):
    """Steps on the CPU; torch's has the numbers without the flag, which it refuses there at the step."""
    ours, plain, torchs = ([torch.nn.Parameter(torch.linspace(-1, 1, 7))] for _ in range(3))
    optimizers = [
        getattr(tristep.optim, name)(ours, lr=0.1, capturable=True),
        getattr(tristep.optim, name)(plain, lr=0.1),
        getattr(torch.optim, name)(torchs, lr=0.1),
    ]
    for step in range(4):
        for optimizer, (parameter,) in zip(optimizers, (ours, plain, torchs), strict=True):
            parameter.grad = torch.linspace(1, 3, 7) * (-1.0) ** step
            optimizer.step()
        if step == 1:
            saved = copy.deepcopy(optimizers[0].state_dict())
            assert saved["param_groups"][0]["capturable"] is True
            getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(7))], capturable=True).load_state_dict(saved)
            optimizers[0].load_state_dict(saved)
    assert torch.equal(ours[0], plain[0])
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "capturable": True})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"SparseAdam"}))
def test_a_closure_is_called_once_with_gradients_enabled(name):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(tristep.optim, name)([parameter], lr=0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 4.0
    assert (parameter < 1).all()
    assert optimizer.step() is None


@pytest.mark.parametrize("rate", [torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)])
def test_a_rate_that_is_a_tensor_is_read_at_every_step(rate):
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = tristep.optim.SGD([parameter], lr=rate.clone())
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.4)


def test_conjugated_gradients():
    """As autograd gives them for complex parameters; they are views that know that they are to be conjugated."""
    weights = []
    for library in (tristep.optim, torch.optim):
        parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        optimizer = library.SGD([parameter], lr=0.1)
        (parameter.conj() * torch.tensor([2 + 1j, 1 - 1j])).real.sum().backward()
        assert parameter.grad.is_conj()
        optimizer.step()
        weights.append(parameter)
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_gradients_that_have_a_graph(name, dtype):
    """A step records nothing: neither weights nor states depend on what the gradients were made of."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((4, 3), (3,))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = getattr(tristep.optim, name)(ours, lr=0.1), getattr(torch.optim, name)(theirs, lr=0.1)
    for _ in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = (parameters[0] @ parameters[1]).abs().square().sum()
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            assert all(gradient.requires_grad for gradient in gradients)
            optimizer.step()
    states = [tensor for row in optimizers[0].state.values() for tensor in row.values() if torch.is_tensor(tensor)]
    assert not any(tensor.requires_grad for tensor in states)
    assert all(parameter.is_leaf for parameter in ours)
    torch.testing.assert_close(ours, theirs)


def test_parameters_of_all_types_in_one_optimizer_like_each_alone():
    types = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
    together = [torch.nn.Parameter(torch.arange(5).to(dtype)) for dtype in types]
    alone = [torch.nn.Parameter(torch.arange(5).to(dtype)) for dtype in types]
    optimizers = [tristep.optim.Adam(together, lr=0.1), *(tristep.optim.Adam([parameter], lr=0.1) for parameter in alone)]
    for step in range(3):
        for parameter in together + alone:
            parameter.grad = torch.full_like(parameter, step + 1)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, together, alone))
    assert not torch.equal(alone[0], torch.arange(5.0))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_given_twice_is_updated_once():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = tristep.optim.SGD([parameter, parameter], lr=0.25)
    optimizer.step()
    assert parameter.tolist() == [0.75] * 2


def test_a_graph_from_before_the_step_notices_it():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = tristep.optim.SGD([parameter], lr=0.1)
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["training function", "step"])
def test_compiled_by_torch_it_gives_the_same_weights(what):
    weights = []
    for compiled in (False, True):
        net = small_net(torch.float32)
        optimizer = tristep.optim.AdamW(net.parameters(), lr=0.02)
        step = optimizer.step
        if compiled and what == "step":
            step = torch.compile(step, backend="eager")

        def train(net=net, optimizer=optimizer, step=step):
            optimizer.zero_grad()
            net.scale.mul(net(torch.ones(2, 3))).square().sum().backward()
            step()

        if compiled and what == "training function":
            train = torch.compile(train, backend="eager")
        for _ in range(4):
            train()
        weights.append(net.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
