"""Options that change how weights decay: against the papers' formulas in NumPy, and what is refused."""

import math

import numpy as np
import pytest
import torch
from option_training import SHAPES, STEPS, parameters, trained

from tristep import Trainer, lr_scheduler


def adam_steps(lr=0.05, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """For each step the tensors' steps of Adam on the gradients of `train` (Kingma & Ba 2015, alg. 1)."""
    means, squares = [0.0] * len(SHAPES), [0.0] * len(SHAPES)
    torch.manual_seed(1)
    for t in range(1, STEPS + 1):
        steps = []
        for i, shape in enumerate(SHAPES):
            g = torch.randn(shape, dtype=torch.float64).numpy()
            means[i] = beta1 * means[i] + (1 - beta1) * g
            squares[i] = beta2 * squares[i] + (1 - beta2) * g * g
            steps.append(lr * means[i] / (1 - beta1**t) / (np.sqrt(squares[i] / (1 - beta2**t)) + epsilon))
        yield steps


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize(("name", "options"), [("adamw", {}), ("adam", {"decoupled_wd": True})])
def test_cautious_decay_like_the_paper(name, options, engine, device):
    """Alg. 1 with Adam's step."""
    arguments = {"wd": 0.4, "cautious_wd": True, "epsilon": 1e-300, **options}
    params, trainer = trained(device, name, arguments, engine)
    weights = [param.detach().cpu().numpy() for param in parameters("cpu")]
    for t, steps in enumerate(adam_steps(epsilon=0.0), 1):
        lr = 0.05 * (math.sqrt(1 - 0.999**t) / (1 - 0.9**t) if name == "adamw" else 1)  # MXNet's has the corrected rate
        weights = [w - (u + lr * 0.4 * (u * w >= 0) * w) for w, u in zip(weights, steps, strict=True)]
    for param, expected in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-11)
    assert "cautious_wd=True" in repr(trainer.optimizer)
    plain, _ = trained(device, name, arguments | {"cautious_wd": False}, engine)
    assert not torch.allclose(params[0], plain[0], rtol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_weights_on_spheres_like_the_paper(name, engine, device):
    """With Adam's direction: AdamH of Wen et al. (2026). The schedule's rate is the length of a step."""
    schedule = lr_scheduler.FactorScheduler(step=4, factor=0.5, base_lr=0.05)
    arguments = {"hyperball": True, "epsilon": 1e-300, "lr_scheduler": schedule}
    params, trainer = trained(device, name, {"learning_rate": None, **arguments}, engine)
    weights = [param.detach().cpu().numpy() for param in parameters("cpu")]
    radii = [np.linalg.norm(w) for w in weights]
    for t, steps in enumerate(adam_steps(epsilon=0.0), 1):
        for i, u in enumerate(steps):
            v = weights[i] - schedule(t) * radii[i] * u / np.linalg.norm(u)
            weights[i] = radii[i] * v / np.linalg.norm(v)
    for param, expected in zip(params, weights, strict=True):
        np.testing.assert_allclose(param.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-11)
    assert list(trainer.optimizer.kept("radius").values()) == pytest.approx(radii, rel=1e-12)


def test_a_step_for_the_curvature_leaves_weights_on_their_spheres(device):
    param = torch.nn.Parameter(torch.tensor([3.0, -4.0], device=device))
    trainer = Trainer([param], "sophia", {"learning_rate": 0.1, "hyperball": True})
    param.grad = torch.tensor([1.0, 2.0], device=device)
    with trainer.optimizer.estimating(scale=2.0):
        trainer.step(1)
    assert param.tolist() == [3.0, -4.0]
    param.grad = torch.tensor([1.0, 2.0], device=device)
    trainer.step(1)
    assert param.tolist() != [3.0, -4.0]
    assert float(param.detach().norm()) == pytest.approx(5.0, rel=1e-6)
