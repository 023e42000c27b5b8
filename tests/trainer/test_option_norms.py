"""Options that need the norm of all gradients, and the moving average of the weights: alone, together and with the others.

The judges are `torch.optim` behind `torch.nn.utils.clip_grad_norm_`, `torch.optim.swa_utils`, and NumPy in float64.
"""

import math

import numpy as np
import pytest
import torch
from option_training import parameters, same_bits, states_of

from tristep import Trainer

STEPS = 9


pytestmark = pytest.mark.usefixtures("quiet_numpy")


def gradients(params, t, scale=1.0):
    torch.manual_seed(t)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, dtype=torch.float64)).to(param)


def train(params, step, scales=(0.1, 1.0, 30.0)):
    """Gradients of very different norms, some of them below the limit."""
    for t in range(STEPS):
        gradients(params, t, scales[t % len(scales)])
        step()


PEERS = {
    "sgd": ({"momentum": 0.9, "wd": 0.01}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adam": ({"wd": 0.1, "decoupled_wd": True, "epsilon": 1e-300}, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-300}),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("scale", [1, 4])
def test_clipping_like_torch(name, scale, engine, device):
    """Of gradients divided by the batch size; those in `.grad` stay as they are."""
    arguments, peer, theirs = PEERS[name]
    params, expected = parameters(device), parameters(device)
    trainer = Trainer(params, name, {"learning_rate": 0.05, "clip_norm": 1.0, **arguments}, engine=engine)
    other = peer(expected, lr=0.05, **theirs)

    def clipped():
        for param in expected:
            param.grad /= scale
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
        other.step()

    train(params, lambda: trainer.step(scale))
    train(expected, clipped)
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
    gradients(expected, STEPS - 1, 30.0)
    same_bits([param.grad for param in params], [param.grad for param in expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages_like_torch(dtype, engine, device):
    params = parameters(device, dtype)
    module = torch.nn.ParameterList(params)
    trainer = Trainer(params, "adam", {"learning_rate": 0.05, "ema_decay": 0.9}, engine=engine)
    peer = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    peer.update_parameters(module)  # the first is a copy
    train(params, lambda: (trainer.step(1), peer.update_parameters(module)))
    before = [param.detach().clone() for param in params]
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    with trainer.averaged_weights():
        torch.testing.assert_close(params, list(peer.module), rtol=rtol, atol=1e-7)
        assert not torch.allclose(params[0], before[0])
    same_bits([param.detach() for param in params], before)


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
def test_all_options_at_once_in_numpy(engine, device):
    """SGD with momentum: clipped, masked, decayed, synchronised, averaged; and a skipped step."""
    lr, wd, k, alpha, limit, keep = 0.05, 0.1, 3, 0.5, 1.5, 0.8
    options = {"clip_norm": limit, "cautious": True, "decoupled_wd": True, "lookahead": k, "lookahead_alpha": alpha}
    options |= {"ema_decay": keep, "skip_nonfinite": True, "wd": wd, "momentum": 0.9, "learning_rate": lr}
    params = parameters(device)
    trainer = Trainer(params, "sgd", options, engine=engine)
    weights = [param.detach().cpu().numpy() for param in parameters("cpu")]
    slow, averages, momenta = list(weights), list(weights), [0.0] * 4
    for t in range(1, 12):
        gradients(params, t)
        raw = [param.grad.cpu().numpy().copy() for param in params]
        if t == 5:
            params[2].grad[1, 1] = math.inf
        trainer.step(1)
        if t == 5:
            continue
        factor = min(1.0, limit / (math.sqrt(sum((g**2).sum() for g in raw)) + 1e-6))
        for i, w in enumerate(weights):
            g = factor * raw[i]
            momenta[i] = 0.9 * momenta[i] - lr * g
            mask = momenta[i] * g < 0
            w = w + momenta[i] * mask / max(mask.mean(), 1e-3) - lr * wd * w
            if t % k == 0:
                slow[i] = w = slow[i] + alpha * (w - slow[i])
            weights[i], averages[i] = w, keep * averages[i] + (1 - keep) * w
    for param, expected in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-11)
    with trainer.averaged_weights():
        for param, expected in zip(params, averages, strict=True):
            np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-11)


EVERYTHING = {"clip_norm": 1.0, "cautious": True, "lookahead": 2, "ema_decay": 0.9, "skip_nonfinite": True}
OPTIMIZERS = ("sgd", "adamw", "lamb", "novograd", "prodigy", "lion")


@pytest.mark.sample(6)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_nonfinite_gradients_is_skipped(name, dtype, value, engine, device):
    params = parameters(device, dtype)
    trainer = Trainer(params, name, {"multi_precision": True, **EVERYTHING}, engine=engine)
    for t in range(3):
        gradients(params, t)
        trainer.step(1)
    before, states = [param.detach().clone() for param in params], states_of(trainer)
    gradients(params, 3)
    params[3].grad.fill_(value)
    trainer.step(1)
    same_bits([param.detach() for param in params], before)
    for key, row in states_of(trainer).items():
        same_bits(list(row.values()), list(states[key].values()))
    assert trainer.optimizer.num_update == 4  # counted by the host, which does not know
    gradients(params, 4)
    trainer.step(1)
    assert all(param.isfinite().all() for param in params)
    assert not torch.equal(trainer.state_dict()["state"]["0"]["ema"], states["0"]["ema"])


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
def test_masters_are_what_options_work_on(engine, device):
    """bfloat16 weights with masters are the rounding of float32 weights that have the same gradients."""
    wide = [torch.nn.Parameter(param.detach().bfloat16().float()) for param in parameters(device)]
    narrow = [torch.nn.Parameter(param.detach().bfloat16()) for param in wide]
    arguments = {"learning_rate": 0.01, "multi_precision": True, "wd": 0.1, "decoupled_wd": True, **EVERYTHING}
    trainers = [Trainer(params, "adam", arguments, engine=engine) for params in (wide, narrow)]
    for t in range(5):
        gradients(narrow, t)
        for a, b in zip(wide, narrow, strict=True):
            a.grad = b.grad.float()
        for trainer in trainers:
            trainer.step(1)
    for i, a in enumerate(wide):
        states = [trainer.state_dict()["state"][str(i)] for trainer in trainers]
        torch.testing.assert_close(states[1]["master copy"], a.detach(), rtol=4e-6, atol=1e-6)
        torch.testing.assert_close(states[1]["ema"], states[0]["ema"], rtol=4e-6, atol=1e-6)


@pytest.mark.sample(0, "cpu", "triton")
def test_options_may_be_switched_on_later(engine, device):
    params = parameters(device)
    trainer = Trainer(params, "sgd", {"learning_rate": 0.05}, engine=engine)
    train(params, lambda: trainer.step(1))
    trainer.optimizer.clip_norm = 1e-3
    before = [param.detach().clone() for param in params]
    gradients(params, 1)
    trainer.step(1)
    moved = torch.cat([(a.detach() - b).flatten() for a, b in zip(params, before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.05 * 1e-3, rel=2e-3)


OF_ALL = {"ema_decay": 0.9, "agc": 0.1}


@pytest.mark.parametrize("option", OF_ALL)
def test_rows_of_sparse_gradients_are_not_whole_tensors(option):
    layer = torch.nn.Embedding(5, 2, sparse=True)
    before = layer.weight.detach().clone()
    trainer = Trainer(layer, "sgd", {option: OF_ALL[option]})
    layer(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError, match=f"{option}=.* whose gradient is sparse"):
        trainer.step(1)
    same_bits([layer.weight.detach()], [before])


LIMITS = {
    "clip_norm": {"clip_norm": 0.5},
    "skip_nonfinite": {"skip_nonfinite": True},
    "skip_norm": {"skip_norm": 3.0},
}


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "several"])
@pytest.mark.parametrize("limit", LIMITS)
def test_rows_of_sparse_gradients_are_limited_with_all_others(limit, several):
    """Without decay and momentum, an update of the rows is one of the whole tensor, whose other gradients are 0."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=sparse), torch.nn.Linear(2, 3)).double()
        rate = {"learning_rate": 0.1}
        entries = [("0.*", "sgd", rate), ("*", "sgd", rate)] if several else "sgd"
        trainer = Trainer(net, entries, LIMITS[limit] if several else {**rate, **LIMITS[limit]})
        for step in range(8):
            trainer.zero_grad()
            factor = math.nan if step == 3 and "skip" in limit else (1.0, 0.2, 3.0)[step % 3]
            (net(torch.tensor([1, 3, 3, step % 5])) * factor).square().sum().backward()
            trainer.step(1)
        found.append([param.detach().clone() for param in net.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert all(param.isfinite().all() for param in found[0])
