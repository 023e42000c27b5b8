"""tristep.optim: state_dict in both directions, copies, and what is refused."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch_peers import plain_data

import tristep

TORCHS = [name for name in tristep.optim.__all__ if hasattr(torch.optim, name)]

OTHERS = ("as_torch", "clip_grad_norm_", "FusedOptimizer", "MultiOptimizer", "SAM")
OURS = [name for name in tristep.optim.__all__ if name not in (*TORCHS, *OTHERS)]

# Of each, arguments that give it all the states that it may have.
RICH = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {"t0": 1},
    "LARS": {"momentum": 0.9},
    "DCASGD": {"momentum": 0.9},
    "Muon": {"ns_steps": 1},  # as they are slow on some processors
}


def _parameters(name, dtype):
    torch.manual_seed(0)
    shapes = [(4, 3), (3, 5)] if name in ("Muon", "SparseAdam") else [(4, 3), (5,), (), (3, 5)]
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def _make(library, name, parameters, **more):
    half = len(parameters) // 2
    arguments = {"lr": 0.02, **RICH.get(name, {}), **more}
    return getattr(library, name)([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.05}], **arguments)


def _steps(name, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.randn(parameter.shape).to(parameter.dtype)
                parameter.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
        optimizer.step()


def _saved_by_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _equal(ours, theirs):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TORCHS + OURS)
def test_a_training_resumed_goes_on_as_if_nothing_had_happened(name, dtype):
    uninterrupted = _parameters(name, dtype)
    _steps(name, _make(tristep.optim, name, uninterrupted), 0, 6)

    parameters = _parameters(name, dtype)
    optimizer = _make(tristep.optim, name, parameters)
    _steps(name, optimizer, 0, 3)
    resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    again = _make(tristep.optim, name, resumed, lr=0.5)
    saved = optimizer.state_dict()
    states = [item for row in saved["state"].values() for item in row.items() if isinstance(item[1], torch.Tensor)]
    counted = torch.float64 if name in OURS else torch.float32  # float32 ends at 2^24, in torch, too
    assert all(value.dtype == (counted if key == "step" else torch.float32) for key, value in states)
    again.load_state_dict(_saved_by_torch(saved))
    assert plain_data(again.state_dict()) == plain_data(saved)
    _steps(name, again, 3, 6)
    assert _equal(resumed, uninterrupted)
    _steps(name, optimizer, 3, 6)  # and so does the one that was saved
    assert _equal(parameters, uninterrupted)
    assert plain_data(again.state_dict()) == plain_data(optimizer.state_dict())


@pytest.mark.parametrize("source", ["torch", "ours"])
@pytest.mark.parametrize("name", TORCHS)
def test_a_training_goes_on_in_the_other_library(name, source):
    libraries = (torch.optim, tristep.optim) if source == "torch" else (tristep.optim, torch.optim)
    uninterrupted = _parameters(name, torch.float64)
    _steps(name, _make(torch.optim, name, uninterrupted), 0, 6)

    parameters = _parameters(name, torch.float64)
    optimizer = _make(libraries[0], name, parameters)
    _steps(name, optimizer, 0, 3)
    other = _make(libraries[1], name, parameters, lr=0.5)
    other.load_state_dict(_saved_by_torch(optimizer.state_dict()))
    _steps(name, other, 3, 6)
    # Numbers that torch keeps in float32 are float64 in torch after loading.
    torch.testing.assert_close(parameters, uninterrupted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", TORCHS)
def test_states_of_an_old_checkpoint_count_in_plain_numbers(name):
    parameters = _parameters(name, torch.float64)
    peers = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizer, peer = _make(tristep.optim, name, parameters), _make(torch.optim, name, peers)
    _steps(name, peer, 0, 3)
    torch._foreach_copy_([p.data for p in parameters], [p.data for p in peers])
    saved = copy.deepcopy(peer.state_dict())
    for row in saved["state"].values():
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and key in ("step", "eta", "mu", "mu_product"):
                row[key] = value.item()
    for group in saved["param_groups"]:  # what torch has come to have since
        for flag in ("foreach", "fused", "maximize", "capturable", "differentiable"):
            group.pop(flag, None)
    if name in ("Adafactor", "SparseAdam"):  # younger than the flags, or not for these
        for group in saved["param_groups"]:
            group["maximize"] = False
    optimizer.load_state_dict(saved)
    _steps(name, peer, 3, 5)
    _steps(name, optimizer, 3, 5)
    torch.testing.assert_close(parameters, peers, rtol=1e-6, atol=1e-8)


def test_16_bit_states_of_torch_become_float32_at_the_first_step():
    parameters = _parameters("Adam", torch.bfloat16)
    peer = torch.optim.Adam(parameters, lr=0.1)
    _steps("Adam", peer, 0, 2)
    optimizer = tristep.optim.Adam(parameters, lr=0.1)
    optimizer.load_state_dict(peer.state_dict())
    before = peer.state[parameters[0]]["exp_avg"].float()
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    after = optimizer.state[parameters[0]]["exp_avg"]
    torch.testing.assert_close(after, 0.9 * before)
    assert after.dtype == torch.float32


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TORCHS + OURS)
@pytest.mark.parametrize("way", ["deepcopied", "pickled"])
def test_a_copy_goes_on_like_its_original(name, way):
    parameters = _parameters(name, torch.float32)
    optimizer = _make(tristep.optim, name, parameters)
    _steps(name, optimizer, 0, 2)
    clone = copy.deepcopy(optimizer) if way == "deepcopied" else pickle.loads(pickle.dumps(optimizer))
    assert type(clone) is type(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    _steps(name, clone, 2, 4)
    copies = [parameter for group in clone.param_groups for parameter in group["params"]]
    assert _equal(parameters, before)
    _steps(name, optimizer, 2, 4)
    assert _equal(copies, parameters)
    assert plain_data(clone.state_dict()) == plain_data(optimizer.state_dict())


def test_loading_other_groups_is_refused_and_changes_nothing():
    optimizer = _make(tristep.optim, "Adam", _parameters("Adam", torch.float32))
    _steps("Adam", optimizer, 0, 1)
    other = tristep.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    before = plain_data(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(other.state_dict())
    assert plain_data(optimizer.state_dict()) == before
    _steps("Adam", optimizer, 1, 2)


@pytest.mark.parametrize(
    ("name", "part", "wrong", "error", "text"),
    [
        ("Adam", "group", {"lr": math.nan}, ValueError, r"param_groups\[0\]\['lr'\] is nan: must be finite"),
        ("Adam", "group", {"betas": (0.9, 2.0)}, ValueError, r"param_groups\[0\]: Invalid beta parameter"),
        ("Lion", "group", {"beta1": 2.0}, ValueError, r"param_groups\[0\]: beta1=2.0"),
        ("Lion", "group", {"state_dtype": "3bit"}, ValueError, r"param_groups\[0\]: state_dtype='3bit'"),
        ("Adam", "state", {"step": torch.tensor(1e30)}, ValueError, "'step' of parameter 0"),
        ("Adam", "state", {"step": torch.tensor(0.5)}, TypeError, "'step' of parameter 0"),
        ("NAdam", "state", {"mu_product": torch.tensor(math.nan)}, ValueError, "'mu_product' of parameter 0 is nan"),
    ],
)
def test_numbers_that_it_could_not_have_are_refused(name, part, wrong, error, text):
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(tristep.optim, name)([parameter], lr=0.1)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    (saved["param_groups"][0] if part == "group" else saved["state"][0]).update(wrong)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


def test_the_state_of_a_training_that_diverged_loads():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = tristep.optim.NovoGrad([parameter], lr=0.1)
    parameter.grad = torch.full((2, 2), math.nan)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert any(value.dim() == 0 and value.isnan() for value in saved["state"][0].values())  # per-tensor state
    optimizer.load_state_dict(saved)


def _stepped(library, name, **arguments):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    optimizer = getattr(library, name)([parameter], lr=0.01, **arguments)
    parameter.grad = torch.linspace(-2, 1, 12).view(3, 4)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("target", [name for name in TORCHS if name != "SparseAdam"])
@pytest.mark.parametrize("source", [name for name in TORCHS if name not in ("SparseAdam", "SGD")])  # SGD has no states
def test_the_state_of_another_optimizer_is_refused_where_torch_fails(source, target):
    saved = _stepped(torch.optim, source).state_dict()
    reference = _stepped(torch.optim, target)
    try:
        reference.load_state_dict(copy.deepcopy(saved))
        reference.param_groups[0] = {**reference.defaults, **reference.param_groups[0]}
        reference.step()  # its options are there, so what it lacks are states
    except Exception:
        optimizer = _stepped(tristep.optim, target)
        before = plain_data(optimizer.state_dict())
        with pytest.raises((ValueError, TypeError), match="saved state: param_groups"):
            optimizer.load_state_dict(saved)
        assert plain_data(optimizer.state_dict()) == before


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", ["shape", "option"])
@pytest.mark.parametrize("name", [name for name in TORCHS + OURS if name != "SparseAdam"])
def test_what_the_next_step_could_not_use_is_refused_at_the_load(name, change):
    optimizer = _stepped(tristep.optim, name)
    saved, before = copy.deepcopy(optimizer.state_dict()), plain_data(optimizer.state_dict())
    if change == "option":
        del saved["param_groups"][0]["lr"]
    else:
        states = {key: value for key, value in saved["state"].get(0, {}).items() if getattr(value, "dim", int)()}
        if not states:
            pytest.skip("has no states of the parameter's shape")
        saved["state"][0] |= {key: torch.zeros(5, 7) for key in states}
    with pytest.raises(
        ValueError, match=r"saved state: (param_groups\[0\] has no 'lr'|'\w+' of params\[0\] has shape \(5, 7\))"
    ):
        optimizer.load_state_dict(saved)
    assert plain_data(optimizer.state_dict()) == before


@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "ScheduleFreeSGD", "Lion"])
@pytest.mark.parametrize("before", ["loaded", "copied", "pickled"])
def test_a_state_saved_in_eval_loads_into_an_optimizer_that_was_loaded_before(name, before):
    """As Accelerate's `prepare` does, before it loads a checkpoint."""
    options = {"ema_decay": 0.9} if name == "Lion" else {}
    optimizer = _stepped(tristep.optim, name, **options)
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    other = _stepped(tristep.optim, name, **options)
    if before == "loaded":
        other.load_state_dict(other.state_dict())
    else:
        other = copy.deepcopy(other) if before == "copied" else pickle.loads(pickle.dumps(other))
    other.load_state_dict(saved)
    other.train()
    for each in (optimizer, other):
        each.param_groups[0]["params"][0].grad = torch.ones(3, 4)
        each.step()
    assert torch.equal(*(each.param_groups[0]["params"][0] for each in (optimizer, other)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OURS)
def test_our_own_optimizers_refuse_the_states_of_torchs(name):
    optimizer = _stepped(tristep.optim, name)
    before = plain_data(optimizer.state_dict())
    for source in TORCHS:
        if source not in ("SparseAdam", "SGD"):  # SGD has no states
            slots, options = (
                rf"than {name}'s: it lacks \[.*\], and has unknown \['",
                r"eps=\(None|must be a tuple of beta1, beta2, beta3",
            )
            with pytest.raises((ValueError, TypeError), match=f"{slots}|{options}"):
                optimizer.load_state_dict(_stepped(torch.optim, source).state_dict())
    assert plain_data(optimizer.state_dict()) == before


@pytest.mark.parametrize(
    ("source", "target"), [("AdaBelief", "SOAP"), ("SOAP", "AdaBelief"), ("Adan", "Lion"), ("Adan", "Tiger")]
)
def test_states_with_some_of_the_same_names_are_refused(source, target):
    with pytest.raises(ValueError, match=f"another optimizer's than {target}'s|betas=.*: must be a tuple of beta1, beta2$"):
        _stepped(tristep.optim, target).load_state_dict(_stepped(tristep.optim, source).state_dict())


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax"])
def test_states_of_torchs_adam_continue_in_ours(name):
    """With a negligible epsilon, which ours does not correct, both are the same algorithm, but for the decay of AdamW."""
    decay = 0.0 if name == "AdamW" else 0.1
    theirs = _stepped(torch.optim, name, betas=(0.8, 0.97), eps=1e-30, weight_decay=decay)
    parameter = torch.nn.Parameter(theirs.param_groups[0]["params"][0].detach().clone())
    ours = tristep.optim.as_torch(getattr(tristep.optimizer, name))([parameter])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["params"][0].grad = torch.full((3, 4), 1.0 + step)
            optimizer.step()
    torch.testing.assert_close(parameter, theirs.param_groups[0]["params"][0], rtol=1e-6, atol=1e-7)
    assert ours.state[parameter]["step"] == 4


@pytest.mark.parametrize("decoupled", [True, False])
def test_torchs_adam_is_not_loaded_where_it_decays_otherwise(decoupled):
    """`torch.optim.AdamW` is Adam with decoupled decay, which its groups say."""
    source, target = ("AdamW", "Adam") if decoupled else ("Adam", "AdamW")
    optimizer = tristep.optim.as_torch(getattr(tristep.optimizer, target))([torch.nn.Parameter(torch.ones(3, 4))])
    with pytest.raises(ValueError, match=f"another optimizer's than {target}'s"):
        optimizer.load_state_dict(_stepped(torch.optim, source, weight_decay=0.1).state_dict())


def test_a_loaded_count_goes_on_in_the_tensor_that_the_load_made():
    """The counts of all parameters are one array; each is yet pickled alone, and none is the loaded one."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = tristep.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    before = [row["step"].clone() for row in saved["state"].values()]
    optimizer.load_state_dict(saved)
    counts = [optimizer.state[parameter]["step"] for parameter in parameters]
    counts[1] = optimizer.state[parameters[1]]["step"] = torch.tensor(7.0)  # a user's own, of other memory
    for row in saved["state"].values():
        row["step"].fill_(100.0)
    optimizer.step()
    assert [float(count) for count in counts] == [before[0] + 1, 8, before[2] + 1]
    assert all(optimizer.state[parameter]["step"] is count for parameter, count in zip(parameters, counts, strict=True))
    assert [count.untyped_storage().nbytes() for count in counts] == [4, 4, 4]
