"""Options against spikes of gradients: skipped steps and adaptive clipping; alone, together, and with a loss scaler.

The judge is `torch.optim`.
"""

import math

import pytest
import torch
from option_training import parameters, same_bits, states_of

import tristep
from tristep import Trainer

NORMS = (1.0, 1.2, 0.7, 1.1, 8.0, 1.0, 0.2, 2.5, 900.0, 1.1)


pytestmark = pytest.mark.usefixtures("quiet_numpy")


def set_gradients(params, t, norm):
    """Gradients of all parameters whose norm together is this."""
    torch.manual_seed(t)
    values = [torch.randn(param.shape, dtype=torch.float64) for param in params]
    scale = norm / math.sqrt(sum(float(value.square().sum()) for value in values))
    for param, value in zip(params, values, strict=True):
        param.grad = (scale * value).to(param)


def train(params, step, norms=NORMS):
    for t, norm in enumerate(norms):
        set_gradients(params, t, norm)
        step()


@pytest.mark.sample(0, "cpu", "triton")
def test_steps_above_a_norm_are_skipped(engine, device):
    """As if there had been none, by torch's SGD, which counts none either; the others are clipped."""
    params, expected = parameters(device), parameters(device)
    trainer = Trainer(
        params, "sgd", {"learning_rate": 0.1, "momentum": 0.9, "skip_norm": 2.0, "clip_norm": 1.05}, engine=engine
    )
    peer = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    train(params, lambda: trainer.step(1))
    for t, norm in enumerate(NORMS):
        if norm <= 2.0:
            set_gradients(expected, t, norm)
            torch.nn.utils.clip_grad_norm_(expected, 1.05)
            peer.step()
    torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-11)
    assert trainer.optimizer.num_update == len(NORMS)
    assert "skip_norm=2.0" in repr(trainer.optimizer)


GUARDS = {"agc": 0.5, "skip_norm": 500.0}
OTHERS = {"clip_norm": 3.0, "ema_decay": 0.9, "cautious": True, "lookahead": 2}
OF_MATRICES = {"clip_norm": 3.0, "ema_decay": 0.9, "skip_norm": 500.0}


@pytest.mark.sample(6)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "novograd", "prodigy", "muon"])
def test_a_skipped_step_changes_no_bit_of_any_option(name, dtype, engine, device):
    params = parameters(device, dtype)
    options = OF_MATRICES if name == "muon" else {**GUARDS, **OTHERS}
    trainer = Trainer(params, name, {"multi_precision": True, **options}, engine=engine)
    train(params, lambda: trainer.step(1), NORMS[:4])
    weights, states = [param.detach().clone() for param in params], states_of(trainer)
    for norm in (501.0, math.nan, math.inf):
        set_gradients(params, 7, 501.0 if math.isfinite(norm) else 1.0)
        if not math.isfinite(norm):
            params[3].grad.fill_(norm)
        trainer.step(1)
        same_bits([param.detach() for param in params], weights)
        for key, row in states_of(trainer).items():
            same_bits(list(row.values()), list(states[key].values()))
    set_gradients(params, 8, 400.0)
    trainer.step(1)
    # In bfloat16 a step may be lost in a weight, but not in its master, which is among the states.
    moved = [not torch.equal(new, states[key][name]) for key, row in states_of(trainer).items() for name, new in row.items()]
    assert any(moved)
    assert dtype == torch.bfloat16 or all(not torch.equal(a, b) for a, b in zip(params[:3], weights, strict=False))


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.usefixtures("loss_scaling")
def test_a_norm_that_is_too_large_is_no_overflow(engine, device):
    """Norms are those of the unscaled gradients. The scale goes down for infinity only."""
    param = torch.nn.Parameter(torch.ones(4, device=device))
    trainer = Trainer([param], "sgd", {"learning_rate": 0.1, "skip_norm": 3.0}, engine=engine)
    tristep.amp.init_trainer(trainer, tristep.amp.LossScaler(init_scale=1024.0, scale_window=100))
    for factor, moves, scale in ((1.0, True, 1024.0), (2.0, False, 1024.0), (math.inf, False, 512.0), (1.0, True, 512.0)):
        before = param.detach().clone()
        trainer.zero_grad()
        with tristep.amp.scale_loss((param * factor).sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
        assert torch.equal(before, param.detach()) != moves
        assert trainer._loss_scaler.loss_scale == scale
