"""What tests of transforms give to rules: hyper-parameters, weights, gradients and states, none of them 0; and compare."""

import math

import numpy as np
import torch

from tristep.kernels.states import states_for

OF_ALL = ("clip_norm_of_all", "skip_square_of_all")  # the hyper-parameters of a second limit
SHAPES = ((5, 3), (), (1500,))
VALUES = {
    "lr": 0.1, "wd": 0.3, "decay": 0.02, "clip": math.inf, "epsilon": 1e-3, "correction1": 1.5, "correction2": 1.2,
    "correction3": 1.1, "lower_bound": 0.0, "upper_bound": math.inf, "eta": 0.5, "scaled": 1.0, "seen": 1.0, "alpha": 2.0,
    "rho": 0.5, "momentum": 0.9, "key0": 1.0, "key1": 2.0, "d0": 1e-2, "d_coef": 1.0, "growth_rate": 1.5, "safeguard": 0.0,
    "decoupled_decay": 0.02, "lookahead_alpha": 0.3, "one_minus_ema_decay": 0.25, "clip_norm": 0.7,
    "agc": 0.5, "skip_square": math.inf, "clip_norm_of_all": math.inf, "skip_square_of_all": math.inf, "scale": 0.2,
    "split": 0.0, "one_minus_momentum": 0.1, "of_gradient": 0.3, "of_mean": 0.9, "adam_lr": 0.1, "adam_decay": 0.02,
    "adam_epsilon": 1e-3, "epsilon1": 1e-6, "epsilon2": 1e-3, "limit": 1.0,
}  # fmt: skip
VALUES |= dict.fromkeys(("beta1", "beta2", "beta3"), 0.9) | {f"one_minus_beta{k}": 0.1 for k in (1, 2, 3)}


def hyper(made, rescale=1.0, **others):
    """A row of hyper-parameters, `rescale_grad` first; `others` replace those of `VALUES`."""
    values = VALUES | others
    return [rescale, *(values[name] for name in made.hyper)]


def rows(made, **others):
    """The rows of the three weights of `numbers`, whose gradients are halved."""
    return [hyper(made, 0.5, **others)] * len(SHAPES)


def numbers(place, made, dtypes=torch.float64, gradient_dtype=None, kept=False):
    """Weights, gradients and states of a rule, always the same; if `kept`, what it keeps of sums, too: a number for all."""
    rng, dtypes = np.random.default_rng(0), dtypes if isinstance(dtypes, tuple) else (dtypes,)
    kinds = [dtypes[i % len(dtypes)] for i in range(len(SHAPES))]
    weights = [place.tensor(rng.normal(size=shape), kind) for shape, kind in zip(SHAPES, kinds, strict=True)]
    gradients = [place.tensor(rng.normal(size=w.shape), gradient_dtype or w.dtype) for w in weights]
    states = states_for(made, weights)
    for k in range(len(made.slots if kept else made.state)):
        number = np.abs(rng.normal()) + 0.1
        for row in states:
            shaped = np.abs(rng.normal(size=row[k].shape)) + 0.1
            row[k].copy_(torch.tensor(number if k >= len(made.state) else shaped))
    return weights, gradients, states


def norm_of(gradients):
    """Of all gradients, halved as by the rows of hyper-parameters."""
    return math.sqrt(sum(float((0.5 * g.double()).square().sum()) for g in gradients))


def clipped_to(limit, norm):
    return min(1.0, limit / (norm + 1e-6))


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def same_rows(found, expected):
    for row, other in zip(found, expected, strict=True):
        same_bits(row, other)


def close(found, expected, name):
    """Weights and states; Muon's weights are no closer, as its products are of bfloat16."""
    loose = {"rtol": 0.02, "atol": 2e-3} if name == "muon" else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found[0], expected[0], **loose)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)


def result(place, made, weights, gradients, states, **others):
    """New weights, and new states by name, as NumPy arrays after a step of this rule on these."""
    place.run(made, weights, gradients, states, [hyper(made, **others)] * len(weights))
    rows = [dict(zip(made.slots, (state.cpu().numpy() for state in row), strict=True)) for row in states]
    return [w.cpu().numpy() for w in weights], rows


def same_states(found, expected):
    """Of the names that are expected."""
    for row, other in zip(found, expected, strict=True):
        for name, values in other.items():
            np.testing.assert_allclose(row[name], values, rtol=1e-12, err_msg=name)
