"""The drop-in for torch.optim beside torch.optim itself: numbers, states and errors, with torch's own list of arguments."""

import copy
import inspect
import warnings

import pytest
import torch

import tristep

common_optimizers = pytest.importorskip("torch.testing._internal.common_optimizers", reason="needs the package expecttest")

STEPS = 6
INFOS = {
    info.optim_cls.__name__: info for info in common_optimizers.optim_db if hasattr(tristep.optim, info.optim_cls.__name__)
}
CONFIGURATIONS = [
    pytest.param(name, given.kwargs, id=f"{name}-{given.desc}")
    for name, info in INFOS.items()
    for given in info.optim_inputs_func(device="cpu")
]
RICHEST = {name: max((c.kwargs for c in info.optim_inputs_func(device="cpu")), key=len) for name, info in INFOS.items()}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
CLOSE_IN_FLOAT32 = {"rtol": 2e-5, "atol": 2e-6}


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
            torch.testing.assert_close(own, value, check_dtype=False, msg=lambda text, key=key: f"{key}: {text}", **close)


@pytest.mark.sample(56)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "arguments"), CONFIGURATIONS)
def test_like_torch(name, arguments, dtype):
    _assert_like_torch(name, arguments, dtype, **(CLOSE if dtype == torch.float64 else CLOSE_IN_FLOAT32))


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


@pytest.mark.parametrize("name", INFOS)
def test_every_engine_like_torch(name, engine, device, monkeypatch):
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    theirs, peer = _trained(torch.optim, name, RICHEST[name], torch.float64, device=device, steps=3)
    ours, optimizer = _trained(tristep.optim, name, RICHEST[name], torch.float64, device=device, steps=3)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    _assert_same_states(optimizer, peer, **CLOSE)


def _error_of(library, name, i):
    wrong = INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)[i]
    given = wrong.optimizer_error_input
    params = [torch.nn.Parameter(torch.ones(2, 2))] if given.params is None else given.params
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            getattr(library, name)(params, **given.kwargs).step()
        except (Exception, UserWarning) as error:
            return error
    return None


@pytest.mark.parametrize(
    ("name", "i"),
    [
        pytest.param(name, i, id=f"{name}-{wrong.optimizer_error_input.desc}")
        for name, info in INFOS.items()
        for i, wrong in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
    ],
)
def test_what_torch_refuses_is_refused_with_an_error_of_its_type(name, i):
    expected = _error_of(torch.optim, name, i)
    assert expected is not None
    assert type(_error_of(tristep.optim, name, i)) is type(expected)


@pytest.mark.parametrize("name", INFOS)
def test_arguments_and_defaults_are_torchs(name):
    ours, theirs = getattr(tristep.optim, name), getattr(torch.optim, name)
    assert issubclass(ours, theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)


def test_lbfgs_is_not_offered():
    names = {info.optim_cls.__name__ for info in common_optimizers.optim_db}
    assert names - set(INFOS) == {"LBFGS"}
    assert not hasattr(tristep.optim, "LBFGS")


def _with_argument(argument):
    return [name for name in INFOS if argument in inspect.signature(getattr(torch.optim, name)).parameters]


@pytest.mark.parametrize("name", _with_argument("differentiable"))
def test_a_differentiable_step_is_refused(name):
    with pytest.raises(ValueError, match=f"differentiable=True: .* use torch.optim.{name}"):
        getattr(tristep.optim, name)([torch.nn.Parameter(torch.ones(1))], differentiable=True)


@pytest.mark.parametrize("name", _with_argument("capturable"))
def test_capture_in_a_graph_is_refused(name):
    optimizer = getattr(tristep.optim, name)([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(NotImplementedError, match=f"capturable=True: {name} cannot"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "capturable": True})
    assert len(optimizer.param_groups) == 1


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


# What may happen to a model and its optimizer between two steps. Each is done to ours and to torch's.


def _freeze(net, optimizer):
    net[0].bias.requires_grad_(False)
    net[0].bias.grad = None


def _move(net, optimizer):
    net[0].weight.data = net[0].weight.data.clone()


def _turn(net, optimizer):
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


def _replace_parameter(net, optimizer):
    net[2].bias = torch.nn.Parameter(torch.full_like(net[2].bias, 0.5))
    optimizer.param_groups[0]["params"][-1] = net[2].bias


def _drop_parameter(net, optimizer):
    del optimizer.param_groups[0]["params"][1]


def _add_group(net, optimizer):
    optimizer.add_param_group({"params": [net.scale], "lr": 0.3})


def _forget(net, optimizer):
    optimizer.state.clear()


def _forget_one(net, optimizer):
    del optimizer.state[net[0].weight]


def _replace_states(net, optimizer):
    for row in optimizer.state.values():
        for key, value in row.items():
            row[key] = value * 0.5 if value.dim() else value


def _change_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.mul_(0.5)


def _move_states(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.share_memory_()


def _move_states_through_data(net, optimizer):
    for row in optimizer.state.values():
        for value in row.values():
            if value.dim():
                value.data = value.detach() * 0.5


def _replace_steps(net, optimizer):
    for row in optimizer.state.values():
        if "step" in row:
            row["step"] = torch.tensor(50.0)


def _change_one_step(net, optimizer):
    if "step" in optimizer.state[net[0].weight]:
        optimizer.state[net[0].weight]["step"].fill_(50.0)


def _other_options(net, optimizer):
    group = optimizer.param_groups[0]
    group["weight_decay"], group["maximize"] = 0.1, True
    if "momentum" in group:
        group["momentum"], group["nesterov"] = 0.5, False


def _no_momentum(net, optimizer):
    if "momentum" in optimizer.param_groups[0]:
        optimizer.param_groups[0].update(momentum=0.0, nesterov=False)


def _zero_gradients(net, optimizer):
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def _no_gradients(net, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def _load(net, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _average(net, optimizer):
    for parameter in net.parameters():  # as an average of weights is put in their place
        parameter.data.mul_(0.9)


CHANGES = [
    _freeze, _move, _turn, _replace_parameter, _drop_parameter, _add_group, _forget, _forget_one, _replace_states,
    _change_states, _move_states, _move_states_through_data, _replace_steps, _change_one_step, _other_options, _no_momentum,
    _zero_gradients, _no_gradients, _load, _average,
]  # fmt: skip


def _net(dtype=torch.float64):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)
    net.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=dtype))
    return net


def _steps(net, optimizer, n):
    for _ in range(n):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 15, dtype=net.scale.dtype).view(5, 3)
        (net.scale * net(x) - 1).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("AdamW", {"amsgrad": True}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("ASGD", {"t0": 2}),
    ],
    ids=["SGD", "AdamW", "NAdam", "ASGD"],
)
def test_changes_between_steps_like_torch(name, arguments, change):
    nets = []
    for library in (tristep.optim, torch.optim):
        net = _net()
        layers = [*net[0].parameters(), *net[2].parameters()]
        optimizer = getattr(library, name)(layers, lr=0.02, foreach=False, **arguments)
        _steps(net, optimizer, 3)
        change(net, optimizer)
        _steps(net, optimizer, 4)
        nets.append(net)
    # NAdam's and ASGD's own numbers are float32, but torch's are float64 once they have been loaded.
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_model_converted_between_steps(before, after):
    """torch's own steps fail then, unless the states are converted, which loading them does."""
    nets = []
    for library in (tristep.optim, torch.optim):
        net = _net(before)
        optimizer = library.Adam(net.parameters(), lr=0.02)
        _steps(net, optimizer, 3)
        net.to(after)
        if library is torch.optim:
            optimizer.load_state_dict(optimizer.state_dict())
        _steps(net, optimizer, 3)
        nets.append(net)
    assert nets[0].scale.dtype == after
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=1e-4, atol=1e-5)


def test_a_model_made_bfloat16_between_steps_keeps_its_states():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = tristep.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.full((3,), 1e-3)
    optimizer.step()
    mean = optimizer.state[parameter]["exp_avg"].clone()
    parameter.data = parameter.data.bfloat16()
    parameter.grad = torch.zeros(3, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.9 * mean)


def test_a_parameter_of_another_shape_is_named():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = tristep.optim.Adam([("layer.weight", parameter)], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    parameter.data = torch.ones(4)
    parameter.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"'exp_avg' of 'layer.weight' has shape \(3,\), the parameter \(4,\)"):
        optimizer.step()
    assert parameter.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", sorted(set(INFOS) - {"SparseAdam"}))
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_leaves_gradients_as_they_are(name, to_none):
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = getattr(tristep.optim, name)([parameter], **({"maximize": True} if name != "Muon" else {}))
    parameter.grad = gradient = torch.arange(6.0).view(2, 3)
    optimizer.step()
    assert parameter.grad is gradient
    assert gradient.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    optimizer.zero_grad(set_to_none=to_none)
    assert parameter.grad is None if to_none else torch.equal(parameter.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("name", sorted(set(INFOS) - {"SparseAdam"}))
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


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_negated_gradients(shape):
    """As autograd gives them for what became an imaginary part: views that know that they are to be negated."""
    runs, negated = [], []
    for library in (tristep.optim, torch.optim):
        parts = [torch.nn.Parameter(torch.full(shape, 2.0)) for _ in range(2)]
        optimizer = library.Adam(parts, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            number = torch.complex(*parts)
            ((number.conj() if step > 1 else number) * (1 + 2j)).abs().sum().backward()
            negated.append(parts[1].grad.is_neg())
            optimizer.step()
        runs.append(parts)
    assert any(negated) == (shape != (3,))
    torch.testing.assert_close(*runs)


def test_gradients_that_are_one_number_expanded():
    weights = []
    for library in (tristep.optim, torch.optim):
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.tensor(2.0).expand(4)
        library.Adam([parameter], lr=0.1).step()
        weights.append(parameter)
    torch.testing.assert_close(*weights)


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


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD"])
def test_numbers_in_states_are_float64_where_that_is_the_default_type(name):
    torch.set_default_dtype(torch.float64)
    try:
        theirs, peer = _trained(torch.optim, name, {}, torch.float32)
        ours, optimizer = _trained(tristep.optim, name, {}, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ours, theirs, **CLOSE_IN_FLOAT32)
    _assert_same_states(optimizer, peer, **CLOSE_IN_FLOAT32)


def test_another_default_device_is_no_hindrance():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with torch.device("meta"):
        optimizer = tristep.optim.SGD([parameter], lr=0.25, momentum=0.5)
        optimizer.step()
        optimizer.step()
    assert parameter.tolist() == [0.375] * 3


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


@pytest.mark.parametrize("what", ["training function", "step"])
def test_compiled_by_torch_it_gives_the_same_weights(what):
    weights = []
    for compiled in (False, True):
        net = _net(torch.float32)
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


# Sparse gradients

quiet_sparse = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch makes them unchecked, too


def _embedding(library, name, arguments, batches, dtype=torch.float64, sparse=True):
    torch.manual_seed(0)
    layer = torch.nn.Embedding(6, 2, sparse=sparse, dtype=dtype)
    optimizer = getattr(library, name)(layer.parameters(), **arguments)
    for batch in batches:
        optimizer.zero_grad()
        layer(torch.tensor(batch, dtype=torch.int64)).square().sum().backward()
        optimizer.step()
    return layer.weight, optimizer


SPARSE = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("SparseAdam", {"lr": 0.1}),
    ("SparseAdam", {"lr": torch.tensor(0.1, dtype=torch.float64), "betas": (0.5, 0.9), "eps": 0.1, "maximize": True}),
]


@quiet_sparse
@pytest.mark.parametrize(("name", "arguments"), SPARSE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sparse_gradients_like_torch(name, arguments, dtype):
    batches = [[0, 3, 3], [1], [3, 5, 0, 5], [], [2, 2, 2]]
    ours, optimizer = _embedding(tristep.optim, name, arguments, batches, dtype)
    theirs, peer = _embedding(torch.optim, name, arguments, batches, dtype)
    close = CLOSE if dtype == torch.float64 else CLOSE_IN_FLOAT32
    torch.testing.assert_close(ours, theirs, **close)
    for key, value in peer.state[theirs].items():
        own = optimizer.state_dict()["state"][0][key]
        assert own == value if isinstance(value, int) else torch.allclose(own, value.to_dense(), **close)


@quiet_sparse
def test_sparse_gradients_decayed_by_sgd_like_dense_ones_in_torch():
    batches = [[0, 3, 3], [1], [3, 5, 0, 5]]
    arguments = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    ours, _ = _embedding(tristep.optim, "SGD", arguments, batches)
    theirs, _ = _embedding(torch.optim, "SGD", arguments, batches, sparse=False)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@quiet_sparse
def test_sparse_states_of_torch_are_made_dense():
    arguments = {"lr": 0.1, "momentum": 0.9}
    theirs, peer = _embedding(torch.optim, "SGD", arguments, [[0, 3], [1]])
    ours = torch.nn.Parameter(theirs.detach().clone())
    optimizer = tristep.optim.SGD([ours], **arguments)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    for parameter, each in ((ours, optimizer), (theirs, peer)):
        parameter.grad = torch.ones(6, 2, dtype=torch.float64).to_sparse(1)
        each.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    buffer = optimizer.state[ours]["momentum_buffer"]
    torch.testing.assert_close(buffer, peer.state[theirs]["momentum_buffer"].to_dense(), **CLOSE)


@quiet_sparse
def test_sparse_and_dense_gradients_together_like_torch():
    weights = []
    for library in (tristep.optim, torch.optim):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 2)).double()
        optimizer = library.Adagrad([{"params": net[0].parameters()}, {"params": net[1].parameters(), "weight_decay": 0.1}])
        for batch in ([0, 1], [1, 5, 5]):
            optimizer.zero_grad()
            net(torch.tensor(batch)).square().sum().backward()
            optimizer.step()
        weights.append(net.state_dict())
    torch.testing.assert_close(*weights, **CLOSE)


def test_adagrad_refuses_to_decay_with_sparse_gradients_as_torch_does():
    for library in (torch.optim, tristep.optim):
        with pytest.raises(RuntimeError, match="weight_decay"):
            _embedding(library, "Adagrad", {"weight_decay": 0.1}, [[0]])


def _classes():
    return [name for name in tristep.optim.__all__ if name not in ("as_torch", "clip_grad_norm_", "FusedOptimizer")]


def _plain(value):
    """Data that can be compared for being the same to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _everything(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return _plain([parameters, optimizer.state_dict()])


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", sorted(set(_classes()) - {"SGD", "Adagrad", "SparseAdam"}))
def test_sparse_gradients_are_refused_by_the_others_and_nothing_is_changed(name, steps_before):
    parameters = [torch.nn.Parameter(torch.ones(3, 2) * (i + 1)) for i in range(3)]
    named = [(f"layer{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = getattr(tristep.optim, name)([{"params": named[:2]}, {"params": named[2:]}], lr=0.01)
    for _ in range(steps_before):
        for parameter in parameters:
            parameter.grad = torch.ones(3, 2)
        optimizer.step()
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(3, 2)
    parameters[2].grad = torch.ones(3, 2).to_sparse(1)
    before = _everything(optimizer)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError), match=r"gradient of 'layer2' is sparse"):
            optimizer.step()
        assert _everything(optimizer) == before
    parameters[2].grad = torch.ones(3, 2)
    optimizer.step()
    assert _everything(optimizer)[1]["state"] != before[1]["state"]


def test_dense_gradients_are_refused_by_sparse_adam_and_nothing_is_changed():
    parameters = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = tristep.optim.SparseAdam(parameters)
    parameters[0].grad, parameters[1].grad = torch.ones(3, 2).to_sparse(1), torch.ones(3, 2)
    before = _everything(optimizer)
    with pytest.raises(RuntimeError, match=r"gradient of params\[1\] is dense"):
        optimizer.step()
    assert _everything(optimizer) == before


# Bad input


def test_a_step_that_one_group_makes_impossible_changes_nothing():
    """The groups have rules of their own, and the one that fails is the last."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = tristep.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "amsgrad": True}])
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = "fast"
    before = _everything(optimizer)
    with pytest.raises(ValueError, match="fast"):
        optimizer.step()
    assert _everything(optimizer) == before


@pytest.mark.parametrize(
    ("parameter", "error", "words"),
    [
        (torch.ones(2, dtype=torch.int64), TypeError, "'last' is torch.int64"),
        (torch.ones(2, dtype=torch.float8_e4m3fn), TypeError, "'last' is torch.float8_e4m3fn"),
        (torch.ones(2).to_sparse(), ValueError, "'last' is sparse"),
    ],
)
def test_a_parameter_that_cannot_be_trained_is_named_and_not_added(parameter, error, words):
    first = torch.nn.Parameter(torch.ones(2))
    optimizer = tristep.optim.Adam([("first", first)])
    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": [("last", parameter)]})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


def test_parameters_made_of_other_tensors_are_refused():
    """As those of a sharded model are; they have no memory that could be updated."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    parameter = torch.nn.Parameter(two_tensor.TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(TypeError, match="'shard' is a TwoTensor, .* use torch.optim"):
        tristep.optim.Adam([("shard", parameter)])
    with pytest.raises(TypeError, match="'0' is a TwoTensor: a Trainer takes plain parameters"):
        tristep.Trainer([parameter], "adam")


def test_muon_refuses_what_is_no_matrix_later_too():
    optimizer = tristep.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=r"params\[0\] has shape \(2,\)"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_complex_parameters_are_refused_by_name_where_torch_refuses_them(name):
    with pytest.raises(RuntimeError, match=rf"'layer' is torch.complex64: {name} does not support complex"):
        getattr(tristep.optim, name)([("layer", torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))])


def test_states_of_another_model_are_refused_by_name():
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)
    optimizer, donor = (tristep.optim.Adam(module.named_parameters()) for module in (net, other))
    for module, each in ((net, optimizer), (other, donor)):
        module(torch.ones(1, module.in_features)).sum().backward()
        each.step()
    optimizer.load_state_dict(donor.state_dict())
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(ValueError, match=r"'exp_avg' of 'weight' has shape \(3, 3\), the parameter \(3, 2\)"):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before))
