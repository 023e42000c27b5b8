"""Options that need the norm of all gradients, and the moving average of the weights: with masters and sparse rows, too.

The judges are `torch.optim.swa_utils`, and the same steps in float32 and with dense gradients.
"""

import math

import pytest
import torch
from option_training import parameters, same_bits

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


@pytest.mark.sample(0, "cpu", "triton")
def test_averages_like_torch(engine, device):
    params = parameters(device)
    module = torch.nn.ParameterList(params)
    trainer = Trainer(params, "adam", {"learning_rate": 0.05, "ema_decay": 0.9}, engine=engine)
    peer = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    peer.update_parameters(module)  # the first is a copy
    train(params, lambda: (trainer.step(1), peer.update_parameters(module)))
    before = [param.detach().clone() for param in params]
    with trainer.averaged_weights():
        torch.testing.assert_close(params, list(peer.module), rtol=1e-12, atol=1e-14)
        assert not torch.allclose(params[0], before[0])
    same_bits([param.detach() for param in params], before)


EVERYTHING = {"clip_norm": 1.0, "cautious": True, "lookahead": 2, "ema_decay": 0.9, "skip_nonfinite": True}


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
