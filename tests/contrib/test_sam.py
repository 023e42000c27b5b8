"""tristep.optim.SAM against two steps of torch.optim by hand, and a peer; what it refuses and restores."""

import copy
import doctest

import pytest
import torch

import tristep
import tristep.contrib.sam as module

SHAPES = ((5, 3), (7,), (), (2, 3, 2))
BASES = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01},
}


def parameters(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def loss_of(params):
    return sum((each.abs() ** 2).sum() + each.real.cos().sum() for each in params)


def closure_of(optimizer, params):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    return closure


def gradients(params):
    return torch.autograd.grad(loss_of(params), params)


def step_by_hand(optimizer, params, rhos, adaptive=False):
    """Foret et al. (2021), alg. 1, and Kwon et al. (2021), eq. 8, with torch's own operations."""
    before = [each.detach().clone() for each in params]
    first = gradients(params)
    scales = [each.abs() if adaptive else torch.ones_like(each) for each in before]
    norm = torch.sqrt(sum(((scale * g).abs() ** 2).sum() for scale, g in zip(scales, first, strict=True)))
    with torch.no_grad():
        for each, g, scale, rho in zip(params, first, scales, rhos, strict=True):
            each.add_(rho * scale**2 * g / norm)
    for each, g in zip(params, gradients(params), strict=True):
        each.grad = g
    with torch.no_grad():
        for each, old in zip(params, before, strict=True):
            each.copy_(old)
    optimizer.step()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", BASES)
def test_like_two_steps_by_hand(name, adaptive):
    """By `ascend`, by a closure, and by one that leaves zeroing to its caller; complex weights among them for SGD.

    The adaptive scale of a complex weight is that of its two numbers, as all of torch's optimizers take it.
    """
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs) if name == "SGD" and not adaptive else ():
        params.append(torch.nn.Parameter(torch.tensor([3.0 + 4.0j, -1.0j], dtype=torch.complex128)))
    optimizer = tristep.optim.SAM(ours, name, rho=0.3, adaptive=adaptive, **BASES[name])
    torchs = getattr(torch.optim, name)(theirs, **BASES[name])
    for k in range(6):
        expected = loss_of(theirs)
        optimizer.zero_grad()
        if k % 3 == 0:
            assert optimizer.step(closure_of(optimizer, ours)).item() == pytest.approx(expected.item(), rel=1e-12)
        elif k % 3 == 1:
            optimizer.step(lambda: loss_of(ours).backward())
        else:
            loss_of(ours).backward()
            optimizer.ascend()
            optimizer.zero_grad()
            loss_of(ours).backward()
            assert optimizer.step() is None
        step_by_hand(torchs, theirs, [0.3] * len(ours), adaptive)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("base", [torch.optim.SGD, tristep.optim.Lion, "lion", "dion2"])
def test_any_base_takes_the_step(base):
    """A class of torch or of ours, or a name; the reference steps with the gradients of the moved weights."""
    ours, alone = parameters(torch.float32), parameters(torch.float32)
    optimizer = tristep.optim.SAM(ours, base, rho=0.2, lr=0.05)
    peer = type(optimizer.base)(alone, lr=0.05)
    for _ in range(3):
        optimizer.step(closure_of(optimizer, ours))
        for each, own in zip(alone, ours, strict=True):
            each.grad = own.grad.clone()
        peer.step()
    assert all(map(torch.equal, ours, alone))


def test_groups_have_their_own_distance_and_one_norm():
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours[:2], "rho": 0.5, "lr": 0.3}, {"params": ours[2:]}]
    optimizer = tristep.optim.SAM(groups, "SGD", rho=0.1, lr=0.1)
    torchs = torch.optim.SGD([{"params": theirs[:2], "lr": 0.3}, {"params": theirs[2:]}], lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, torchs)]
    rhos = [0.5, 0.5, 0.1, 0.1]
    for k in range(4):
        if k == 2:
            optimizer.param_groups[1]["rho"], rhos = 0.7, [0.5, 0.5, 0.7, 0.7]
        optimizer.step(closure_of(optimizer, ours))
        step_by_hand(torchs, theirs, rhos)
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert [group["lr"] for group in optimizer.base.param_groups] == [group["lr"] for group in torchs.param_groups]


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "of the base"])
def test_a_saved_training_goes_on(way):
    ours, others = parameters(torch.float32), parameters(torch.float32)
    optimizer = tristep.optim.SAM(ours, "AdamW", rho=0.3, lr=0.01)
    for _ in range(2):
        optimizer.step(closure_of(optimizer, ours))
    if way == "deepcopy":
        resumed = copy.deepcopy(optimizer)
        others = resumed.param_groups[0]["params"]
    else:
        saved = copy.deepcopy(optimizer.base.state_dict() if way == "of the base" else optimizer.state_dict())
        assert saved["param_groups"][0]["rho"] == 0.3
        resumed = tristep.optim.SAM(others, "AdamW", rho=0.1, lr=0.5)
        resumed.load_state_dict(saved)
        for each, own in zip(others, ours, strict=True):
            each.data.copy_(own.data)
    for one, params in ((optimizer, ours), (resumed, others)):
        for _ in range(2):
            one.step(closure_of(one, params))
    assert all(map(torch.equal, ours, others))
    plain = torch.optim.AdamW(others, lr=0.02)  # whose states know no distance
    plain.step()
    resumed.load_state_dict(plain.state_dict())
    assert [resumed.param_groups[0][name] for name in ("lr", "rho")] == [0.02, 0.3]


def test_torch_makes_states_before_the_first_step():
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = torch.nn.Linear(2, 2)
    before = copy.deepcopy(net.state_dict())
    optimizer = tristep.optim.SAM(net.parameters(), "AdamW", lr=0.1)
    _, saved = get_state_dict(net, optimizer)
    assert len(saved["state"]) == 2
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_weights_return_when_a_closure_fails_or_a_step_is_skipped():
    ours = parameters(torch.float32)
    before = [each.detach().clone() for each in ours]
    optimizer = tristep.optim.SAM(ours, "SGD", lr=0.1)
    called = []

    def closure():
        called.append(loss_of(ours).backward())
        if len(called) == 2:
            assert not torch.equal(ours[0], before[0])
            raise KeyError("second")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert all(map(torch.equal, ours, before))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(ours)).backward()
    optimizer.ascend()
    optimizer.zero_grad()
    scaler.scale(loss_of(ours) * float("inf")).backward()
    scaler.step(optimizer)
    optimizer.restore()
    assert all(map(torch.equal, ours, before))
    optimizer.restore()  # nothing is pending
    assert all(map(torch.equal, ours, before))


def test_between_ascend_and_step_nothing_else_is_done():
    ours = parameters(torch.float32)
    optimizer = tristep.optim.SAM(ours, "SGD", lr=0.1)
    saved = optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"step\(\) without ascend\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="without gradients"):
        optimizer.ascend()
    loss_of(ours).backward()
    optimizer.ascend()
    for call in (
        optimizer.ascend,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.step(closure_of(optimizer, ours)),
    ):
        with pytest.raises(RuntimeError, match=r"between ascend\(\) and step\(\)"):
            call()
    with torch.no_grad():
        ours[0].zero_()
    with pytest.raises(RuntimeError, match="written to between"):
        optimizer.step()
    assert not ours[0].any()


def test_a_group_can_be_added():
    ours = parameters(torch.float32)
    optimizer = tristep.optim.SAM(ours[:2], "SGD", rho=0.3, lr=0.1)
    optimizer.add_param_group({"params": ours[2:], "lr": 0.2})
    assert [group["rho"] for group in optimizer.param_groups] == [0.3, 0.3]
    with pytest.raises(ValueError, match="rho=-1: must be"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "rho": -1})
    assert len(optimizer.param_groups) == 2
    before = [each.detach().clone() for each in ours]
    optimizer.step(closure_of(optimizer, ours))
    assert not any(map(torch.equal, ours, before))


def test_sparse_gradients_are_refused():
    net = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = tristep.optim.SAM(net.parameters(), "SGD", lr=0.1)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of params\[0\] is sparse"):
        optimizer.ascend()


def test_the_docstrings_example():
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
