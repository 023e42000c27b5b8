"""Loss scaling: numbers of torch.amp.GradScaler with torch.optim, and of MXNet; what an overflow leaves alone."""

import math

import numpy as np
import pytest
import torch
from optimizer_training import ByHand

import tristep
from tristep import Trainer, amp
from tristep.trainer.optim import base as optim_base

INFINITE, NAN = math.inf, math.nan
# By step what the input is multiplied by: overflows at the start, in a row, and after good ones.
FACTORS = [INFINITE, 1.0, 1.0, NAN, NAN, 1.0, 2.0, 1.0, 1.0, 3.0, 1.0]


@pytest.fixture(autouse=True)
def _ready(monkeypatch):
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", None)
    amp.init()
    with np.errstate(all="ignore"):  # Triton's interpreter computes in NumPy, which would warn of infinities
        yield


def network(device, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(device, dtype)


def batches(device, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(6, 4, dtype=dtype) * factor).to(device) for factor in FACTORS]


def loss_of(net, x):
    return net(x).square().mean()


def train(net, trainer, inputs):
    """Weights and scale after each step."""
    path = []
    for x in inputs:
        trainer.zero_grad()
        with amp.scale_loss(loss_of(net, x), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
        path.append(([p.detach().clone() for p in net.parameters()], trainer._loss_scaler.loss_scale))
    return path


def test_weights_and_scale_like_torchs(engine, device):
    """SGD, since it is the same whether skipped steps have been counted."""
    net, peer = network(device), network(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, engine=engine)
    amp.init_trainer(trainer, amp.LossScaler(2.0**10, scale_window=3))
    found = train(net, trainer, batches(device))
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)
    for x, (weights, scale) in zip(batches(device), found, strict=True):
        optimizer.zero_grad()
        scaler.scale(loss_of(peer, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        # MXNet's momentum has the rate in it, which makes no difference while it stays
        torch.testing.assert_close(weights, [p.detach() for p in peer.parameters()], rtol=1e-9, atol=1e-12)
        assert scale == scaler.get_scale()
    assert found[-1][1] == 2.0**9


@pytest.mark.parametrize("name", ["adam", "prodigy", "muon"])
def test_an_overflow_changes_nothing_but_the_scale(name, engine, device):
    net = network(device)
    trainer = Trainer(net, name, engine=engine)
    amp.init_trainer(trainer, amp.LossScaler(2.0**10))
    train(net, trainer, batches(device)[1:3])
    before = [p.detach().clone() for p in net.parameters()]
    states = [[t.clone() for t in row] for row in trainer._updater.states.values()]
    path = train(net, trainer, batches(device)[3:5])
    assert [scale for _, scale in path] == [2.0**9, 2.0**8]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    for row, old in zip(trainer._updater.states.values(), states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))
    after = train(net, trainer, batches(device)[5:6])[0][0]
    assert all(p.isfinite().all() for p in after)
    assert not torch.equal(after[0], before[0])


def test_the_scale_grows_up_to_its_limit_as_in_mxnet():
    """2.0**16, times 2 after 2000 good steps in a row, 2.0**24 at most; halved by an overflow, without limit."""
    scaler = amp.LossScaler()
    assert (scaler.loss_scale, scaler.scale_window, scaler.scale_factor, scaler.max_scale) == (2.0**16, 2000, 2.0, 2.0**24)
    good, bad = torch.tensor(1.0), torch.tensor(INFINITE)
    for _ in range(1999):
        scaler.end(good)
    assert scaler.loss_scale == 2.0**16
    scaler.end(good)
    assert scaler.state_dict() == {"loss_scale": 2.0**17, "good_steps": 0}
    scaler.scale_window = 1
    for _ in range(9):
        scaler.end(good)
    assert scaler.loss_scale == 2.0**24
    for _ in range(26):
        scaler.end(bad)
    assert scaler.loss_scale == 0.25


def test_a_step_left_out_is_counted(device, monkeypatch):
    net = network(device)
    trainer = Trainer(net, "adam")
    amp.init_trainer(trainer)
    train(net, trainer, batches(device)[:2])  # the first one overflows
    assert trainer.optimizer.num_update == 2
    with pytest.raises(tristep.StaleGradientError):
        trainer.step(1)

    for on_host, count in ((True, 1), (False, 2)):
        monkeypatch.setattr(optim_base, "_is_on_host", lambda tensor, on_host=on_host: on_host)
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = tristep.optim.Adam([parameter], fused=True)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        for factor in (INFINITE, 1.0):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[parameter]["step"] == count


@pytest.mark.sample(0, "cpu", "triton")
def test_clipping_sees_gradients_without_the_scale(engine, device):
    plain, scaled = network(device), network(device)
    options = {"learning_rate": 0.1, "clip_norm": 0.05, "skip_nonfinite": True}
    trainer = Trainer(plain, "adam", options, engine=engine)
    other = Trainer(scaled, "adam", options, engine=engine)
    amp.init_trainer(other, amp.LossScaler(2.0**12))
    finite = [x for x in batches(device) if x.isfinite().all()]
    for x in finite:
        trainer.zero_grad()
        loss_of(plain, x).backward()
        trainer.step(1)
    train(scaled, other, finite)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_unscaled_gradients_are_those_of_the_loss(engine, device):
    net, peer = network(device), network(device)
    (x,) = batches(device)[1:2]
    loss_of(peer, x).backward()
    trainer = Trainer(net, "sgd", {"learning_rate": 0.5}, engine=engine)
    amp.init_trainer(trainer)
    with amp.scale_loss(loss_of(net, x), trainer) as scaled:
        scaled.backward()
    weights = [p.detach().clone() for p in net.parameters()]
    assert torch.equal(net[0].weight.grad, peer[0].weight.grad * 2.0**16)
    amp.unscale(trainer)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), peer.parameters(), strict=True))
    trainer.step(2)
    for weight, old, other in zip(net.parameters(), weights, peer.parameters(), strict=True):
        torch.testing.assert_close(weight.detach(), old - 0.25 * other.grad, rtol=1e-12, atol=1e-14)


def test_several_losses_and_several_backward_passes(device):
    net, peer = network(device), network(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 0.5})
    amp.init_trainer(trainer)
    inputs = batches(device)[5:8]
    with amp.scale_loss([loss_of(net, x) for x in inputs[:2]], trainer) as losses:
        assert len(losses) == 2
        torch.autograd.backward(losses)
    with amp.scale_loss(loss_of(net, inputs[2]), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    sum(loss_of(peer, x) for x in inputs).backward()
    for weight, other in zip(net.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(weight.detach(), other.detach() - 0.5 * other.grad, rtol=1e-9, atol=1e-12)
    # a step without scale_loss is one of a loss that was not scaled
    before = [p.detach().clone() for p in net.parameters()]
    trainer.zero_grad()
    loss_of(net, inputs[0]).backward()
    trainer.step(1)
    for weight, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(weight.detach(), old - 0.5 * weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast(dtype, engine, device):
    """Gradients in float16 that would be 0 without the scale."""
    net = torch.nn.Linear(4, 3, bias=False).to(device)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, engine=engine)
    amp.init_trainer(trainer)
    x = torch.full((2, 4), 2.0**-14, device=device)
    before = net.weight.detach().clone()
    with torch.autocast(device.type, dtype):
        out = net(x)
    assert out.dtype == dtype
    with amp.scale_loss(out.float().sum() * 2.0**-13, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    torch.testing.assert_close(before - net.weight.detach(), torch.full_like(before, 2.0**-26), rtol=1.0, atol=2.0**-24)
    assert net.weight.grad.abs().min() > 0


def test_bfloat16_has_a_scale_of_one(device):
    amp.init("bfloat16")
    net = network(device)
    trainer = Trainer(net, "sgd")
    amp.init_trainer(trainer)
    trainer._loss_scaler.scale_window = 1
    assert [scale for _, scale in train(net, trainer, batches(device)[5:8])] == [1.0] * 3


def test_an_optimizer_by_hand_is_left_alone_too(device):
    net, peer = network(device), network(device)
    trainer, other = Trainer(net, ByHand(learning_rate=0.1)), Trainer(peer, "sgd", {"learning_rate": 0.1})
    for each in (trainer, other):
        amp.init_trainer(each, amp.LossScaler(2.0**10, scale_window=3))
    found, expected = train(net, trainer, batches(device)), train(peer, other, batches(device))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert trainer.optimizer.num_update == 8


def test_saved_and_loaded(tmp_path, device):
    net = network(device)
    trainer = Trainer(net, "adam")
    amp.init_trainer(trainer, amp.LossScaler(2.0**10, scale_window=3))
    train(net, trainer, batches(device)[:3])
    trainer.save_states(tmp_path / "states")
    assert trainer.state_dict()["loss_scaler"] == {"loss_scale": 2.0**9, "good_steps": 2}
    weights = {name: p.clone() for name, p in net.state_dict().items()}
    expected = train(net, trainer, batches(device)[5:])

    net.load_state_dict(weights)
    other = Trainer(net, "adam")
    with pytest.raises(ValueError, match=r"this trainer has none: call tristep.amp.init_trainer"):
        other.load_states(tmp_path / "states")
    amp.init_trainer(other, amp.LossScaler(scale_window=3))
    other.load_states(tmp_path / "states")
    found = train(net, other, batches(device)[5:])
    assert [scale for _, scale in found] == [scale for _, scale in expected]
    assert all(torch.equal(a, b) for a, b in zip(found[-1][0], expected[-1][0], strict=True))
    for wrong in ({"loss_scale": 2.0}, {"loss_scale": -1.0, "good_steps": 0}, 3):
        with pytest.raises((ValueError, TypeError), match="saved state"):
            other.load_state_dict(trainer.state_dict() | {"loss_scaler": wrong})
    assert other.state_dict()["loss_scaler"] == trainer.state_dict()["loss_scaler"]


def test_mistakes_are_named(monkeypatch, device):
    net = network(device)
    trainer = Trainer(net, "sgd")
    with pytest.raises(RuntimeError, match="has no loss scaler: call tristep.amp.init_trainer"):
        amp.scale_loss(torch.ones(()), trainer).__enter__()
    with pytest.raises(RuntimeError, match="has no loss scaler"):
        amp.unscale(trainer)
    amp.init_trainer(trainer)
    with (
        pytest.raises(RuntimeError, match=r"loss scaler must see all gradients .* use step\(\)"),
        trainer.step_in_backward(1),
    ):
        pass
    monkeypatch.setattr(tristep.trainer.amp, "_target_dtype", None)
    with pytest.raises(RuntimeError, match=r"before amp.init\(\)"):
        amp.init_trainer(Trainer(net, "sgd"))


def test_sparse_gradients(device):
    for lazy in (True, False):
        net = torch.nn.Embedding(5, 2, sparse=True).to(device)
        trainer = Trainer(net, "sgd", {"lazy_update": lazy})
        amp.init_trainer(trainer)
        before = net.weight.detach().clone()
        with amp.scale_loss(net(torch.tensor([1, 1], device=device)).sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
        expected = before.clone()
        expected[1] -= 0.02
        torch.testing.assert_close(net.weight.detach(), expected)
        trainer.zero_grad()
        with amp.scale_loss(net(torch.tensor([2], device=device)).sum() * float("inf"), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
        torch.testing.assert_close(net.weight.detach(), expected)
        assert trainer._loss_scaler.loss_scale == 2.0**15


# torch.amp.GradScaler with tristep.optim


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Muon"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_grad_scaler_like_torch(name, on_host, device, monkeypatch):
    """What only a device knows is played on the CPU; a step that was left out has been counted then, which shows in Adam."""
    monkeypatch.setattr(optim_base, "_is_on_host", lambda tensor: on_host)
    arguments = {"momentum": 0.9} if name == "SGD" else {}
    paths = []
    for library in (tristep.optim, torch.optim):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3, bias=False).to(device)
        fused = {"fused": True} if library is tristep.optim and name in ("SGD", "Adam") else {}  # then scale is handed on
        optimizer = getattr(library, name)(net.parameters(), lr=0.1, **arguments, **fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2)
        path = []
        for x in batches(device, torch.float32):
            if name == "Adam" and not on_host and not x.isfinite().all():
                continue
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            if len(path) % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            path.append((net.weight.detach().clone(), scaler.get_scale()))
        paths.append(path)
    torch.testing.assert_close(paths[0], paths[1], rtol=2e-5, atol=2e-6)


def test_a_step_without_the_scaler_after_one_with_it(device, monkeypatch):
    monkeypatch.setattr(optim_base, "_is_on_host", lambda tensor: False)
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = tristep.optim.SGD([parameter], lr=0.25, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.75] * 2
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [0.5] * 2
