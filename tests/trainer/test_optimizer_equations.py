"""Optimizers: steps by the equations of papers and of MXNet: in which order they rescale, clip and decay."""

import math

import numpy as np
import pytest
import torch
from trainer_cases import values_of

from tristep.trainer.optimizer import (
    DCASGD,
    LARS,
    NAG,
    SGD,
    AdaBelief,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    RMSProp,
    Signum,
    get_updater,
)

pytestmark = pytest.mark.usefixtures("clean_registry")


W, G = np.linspace(-2, 2, 9), np.array([5.0, -3.0, 0.4, -0.2, 0.0, 1.5, -0.6, 4.0, -8.0])

R, LR, WD = 0.25, 0.5, 0.3


def _clip(x, bound):
    return np.clip(x, -bound, bound)


def _rms(*x):
    return np.sqrt(np.mean(np.square(x)))


def _first_adam(w, g, decay):
    return w - 0.5 * math.sqrt(0.001) / 0.1 * (0.1 * g / (np.sqrt(0.001 * g**2) + 0.1) + decay)


def _first_ftrl(g):
    z = g - np.abs(g) * W / LR
    return np.where(np.abs(z) > 0.1, (np.sign(z) * 0.1 - z) / ((1 + np.abs(g)) / LR + WD), 0.0)


# The first step of each, as the equations of MXNet 1.9.1 (AdamW: 2.0) have it. The epsilons are large so that the size of
# the gradient matters.
FIRST_STEPS = {
    "sgd": (SGD, {}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "momentum": (SGD, {"momentum": 0.9}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "nag": (NAG, {"momentum": 0.9}, lambda c: W - 1.9 * LR * (_clip(R * G, c) + WD * W)),
    "signum": (Signum, {"wd_lh": 0.1}, lambda c: (1 - LR * 0.1) * W - LR * np.sign(_clip(R * G, c) + WD * W)),
    "signum without momentum": (Signum, {"momentum": 0.0}, lambda c: (1 - LR * WD) * W - LR * np.sign(G)),
    "adam": (Adam, {"epsilon": 0.1}, lambda c: _first_adam(W, _clip(R * G + WD * W, c), 0.0)),
    "adamw": (AdamW, {"epsilon": 0.1}, lambda c: _first_adam(W, _clip(R * G, c), WD * W)),
    "adagrad": (AdaGrad, {"eps": 0.1}, lambda c: W - LR * (_clip(R * G, c) / np.sqrt(_clip(R * G, c) ** 2 + 0.1) + WD * W)),
    "rmsprop": (
        RMSProp,
        {"epsilon": 0.1},
        lambda c: W - LR * _clip(R * G + WD * W, c) / np.sqrt(0.1 * _clip(R * G + WD * W, c) ** 2 + 0.1),
    ),
    "rmsprop centered": (
        RMSProp,
        {"epsilon": 0.1, "centered": True},
        lambda c: W - LR * _clip(R * G + WD * W, c) / np.sqrt((0.1 - 0.01) * _clip(R * G + WD * W, c) ** 2 + 0.1),
    ),
    "dcasgd": (DCASGD, {"lamda": 0.5}, lambda c: W - LR * (_clip(R * G, c) + WD * W)),
    "adadelta": (
        AdaDelta,
        {"epsilon": 0.1},
        lambda c: W - (np.sqrt(0.1 / (0.1 * _clip(R * G, c) ** 2 + 0.1)) * _clip(R * G, c) + WD * W),
    ),
    "adamax": (Adamax, {}, lambda c: W - LR * np.sign(_clip(R * G + WD * W, c))),
    "adabelief": (
        AdaBelief,
        {"epsilon": 0.1},
        lambda c: (
            W
            - 0.5
            * math.sqrt(0.001)
            / 0.1
            * (0.1 * _clip(R * G + WD * W, c) / (np.sqrt(0.001 * (0.9 * _clip(R * G + WD * W, c)) ** 2 + 0.1) + 0.1))
        ),
    ),
    "ftrl": (Ftrl, {"lamda1": 0.1}, lambda c: _first_ftrl(_clip(R * G, c))),
    "lars": (
        LARS,
        {"eta": 0.5},
        lambda c: W - LR * 0.5 * _rms(W) / (R * _rms(G) + WD * _rms(W)) * (_clip(R * G, c) + WD * W),
    ),
    "clipped weights": (
        RMSProp,
        {"epsilon": 0.1, "clip_weights": 1.25},
        lambda c: _clip(W - LR * _clip(R * G + WD * W, c) / np.sqrt(0.1 * _clip(R * G + WD * W, c) ** 2 + 0.1), 1.25),
    ),
}


@pytest.mark.sample(1, "cpu")
@pytest.mark.sample(0, "triton")
@pytest.mark.parametrize("clip", [0.3, None, 0.0, -0.3])
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_order_of_rescaling_clipping_and_decay(name, clip, engine, device, monkeypatch):
    """A clip_gradient of 0 or less is none, as in MXNet's kernels."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    make, kwargs, first_step = FIRST_STEPS[name]
    updater = get_updater(make(learning_rate=LR, wd=WD, rescale_grad=R, clip_gradient=clip, **kwargs))
    weight, gradient = (torch.tensor(x, dtype=torch.float32, device=device) for x in (W, G))
    updater(0, gradient, weight)
    np.testing.assert_allclose(
        values_of(weight)[0], first_step(clip if clip and clip > 0 else math.inf), rtol=1e-5, atol=1e-6
    )
    assert gradient.tolist() == torch.tensor(G, dtype=torch.float32).tolist()
