"""The learning rate at which each optimizer does best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.validation import choice, integer
from .catalog import function
from .functions import Function
from .trajectories import Trajectories, checked_starts, farthest, simulate

__all__ = ["Sensitivity", "tune_learning_rates"]

RATES = tuple(np.logspace(-4, 1, 41).tolist())  # among which a best one is looked for; eight in a decade
ASTRAY = 2.0  # the same for `tune_learning_rates`, where that would be no good rate even if the path comes back


@dataclass(frozen=True)
class Sensitivity:
    """How the loss depends on the learning rate, and each optimizer's best one.

    Attributes:
        names: of the optimizers.
        learning_rates: float64 [n_rates].
        losses: float32 [n_optimizers, n_rates, n_starts], of each start; infinite where it diverged, or, with known minima,
            went astray: to twice as far from the middle of the map as its edge, or as its start beyond that.
        quartiles: float32 [n_optimizers, n_rates, 3], over starts: a quarter, half and three quarters of them are not above.
        best: float64 [n_optimizers], the rate whose median is the least; NaN where all are infinite.
        trajectories: the paths at all of these rates.
    """

    names: tuple[str, ...]
    learning_rates: np.ndarray
    losses: np.ndarray
    quartiles: np.ndarray
    best: np.ndarray
    trajectories: Trajectories


def tune_learning_rates(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizers: Any,
    start: Any = None,
    steps: int = 200,
    *,
    learning_rates: Sequence[float] = RATES,
    judged_by: str = "final",
    repeats: int = 1,
    seed: int = 0,
    engine: str | None = None,
) -> Sensitivity:
    """Try many learning rates with each optimizer, so that they can be compared each at its best.

    Args:
        on, optimizers, start, steps, seed, engine: as for `simulate`.
        learning_rates: to try; by default 41 from 0.0001 to 10.
        judged_by: "final", the loss after the last step, or "best", the least of all steps.
        repeats: how often to start from each start, >= 1; only where the gradients are noisy do they differ.

    Example:
        >>> from tristep.viz import simulate, tune_learning_rates
        >>> found = tune_learning_rates("ill_conditioned_bowl", ["sgd"], learning_rates=[0.001, 0.01, 0.1])
        >>> float(found.best[0])
        0.01
        >>> at_best = {name: {"learning_rate": rate} for name, rate in zip(found.names, found.best)}
        >>> fair = simulate("ill_conditioned_bowl", at_best)
    """
    judged_by, repeats = choice("judged_by", judged_by, ("final", "best")), integer("repeats", repeats, low=1)
    starts = np.repeat(checked_starts(function(on), start), repeats, axis=0)
    trajectories = simulate(on, optimizers, starts, steps, learning_rates=learning_rates, seed=seed, engine=engine)
    with np.errstate(invalid="ignore"):
        losses = trajectories.losses[..., -1] if judged_by == "final" else np.fmin.reduce(trajectories.losses, axis=-1)
    lost = trajectories.diverged | np.isnan(losses)
    if trajectories.function.minima:  # which are in what is drawn: no leap over them and back is to win
        begun = farthest(trajectories.function, trajectories.starts[:, None])
        lost |= farthest(trajectories.function, trajectories.paths) > ASTRAY * np.maximum(begun, 1)
    losses = np.where(lost, np.float32(np.inf), losses)
    ordered = np.sort(losses, axis=-1)
    n = losses.shape[-1]
    quartiles = ordered[..., [max(0, -(-n * k // 4) - 1) for k in (1, 2, 3)]]
    rates = np.array([value["learning_rate"] for value in trajectories.values])
    median = quartiles[..., 1]
    best = np.where(np.isinf(median).all(axis=1), np.nan, rates[median.argmin(axis=1)])
    return Sensitivity(trajectories.names, rates, losses, quartiles, best, trajectories)
