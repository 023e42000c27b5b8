"""A small race for tests: its network and data, and a result with given steps to the target."""

import numpy as np
import torch
from torch import nn

import tristep
from tristep.trainer import RaceResult

LOSS = nn.CrossEntropyLoss()


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(n=8, size=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, size, 6, generator=generator)
    return [(each, each[:, :3].argmax(dim=1)) for each in inputs]


TWO = {"sgd": {"learning_rate": 0.1}, "adam": {}}


def raced(optimizers=TWO, make=network, loss=LOSS, data=None, **settings):
    data = batches() if data is None else data
    settings = {"target": 0.9, "steps": 12, "every": 4, "trials": 2, "seeds": 2, "progress": False} | settings
    return tristep.race(make, loss, data, optimizers, **settings)


def planted(needed, *, target=1.0, rates=(0.1, 0.2, 0.4), chosen=1, seconds=(0.01, 0.02), n=11):
    """A result in which optimizers "a", "b", ... reach the target after these steps [n_optimizers, n_seeds]; None: never."""
    names, seeds = tuple("abcdef"[: len(needed)]), len(needed[0])
    measured = np.arange(n) * 10
    losses = np.full((len(needed), seeds, n), 2.0, dtype=np.float32)
    for i, row in enumerate(needed):
        for k, steps in enumerate(row):
            if steps is not None:
                losses[i, k, measured >= steps] = target
    return RaceResult(
        names, "a", target, True, tuple(range(seeds)), measured, losses, np.tile(measured * 4, (seeds, 1)),
        tuple({"learning_rate": np.array(rates), "wd": np.full(len(rates), 0.001)} for _ in names),
        np.repeat(losses[:, None, :1], len(rates), axis=1), np.full(len(names), chosen),
        np.tile(seconds, (len(names), 1)) * np.arange(1, len(names) + 1)[:, None],
    )  # fmt: skip
