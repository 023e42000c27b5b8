"""Cautious weight decay against the formula of its paper in NumPy."""

import math

import numpy as np
import pytest
import torch
from option_training import SHAPES, STEPS, parameters, trained


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
