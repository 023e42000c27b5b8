"""The search for the best learning rate of each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .functions import Function
from .trajectories import Trajectories, farthest, simulate

__all__ = ["Sensitivity", "tune_learning_rates"]

RATES = tuple(np.logspace(-4, 1, 41).tolist())  # the default rates to try: eight per decade
ASTRAY = 2.0  # in half-widths of the drawn area: a rate whose path gets this far is bad, even if the path comes back


@dataclass(frozen=True)
class Sensitivity:
    """The loss of each optimizer by learning rate, and its best rate, as returned by `tune_learning_rates`.

    Attributes:
        names: the labels of the optimizers.
        learning_rates: float64 [n_rates], the rates that were tried.
        losses: float32 [n_optimizers, n_rates, n_starts], the loss from each start; infinite if the path diverged. On a
            function with known minima, also infinite if the path left twice the drawn area; for a start outside the area,
            twice the distance of the start from its middle.
        quartiles: float32 [n_optimizers, n_rates, 3], the quartiles of the losses over the starts.
        best: float64 [n_optimizers], the rate with the smallest median loss; NaN if all medians are infinite.
        trajectories: the paths at all rates.
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
    seed: int = 0,
    engine: str | None = None,
) -> Sensitivity:
    """Find the rate of each optimizer with the lowest loss after the last step, so that they can be compared fairly.

    Args:
        on, optimizers, start, steps, seed, engine: as for `simulate`.
        learning_rates: the rates to try; by default 41 from 0.0001 to 10.

    Returns:
        The losses at all rates, and the best rate of each optimizer.

    Example:
        >>> from tristep.viz import simulate, tune_learning_rates
        >>> found = tune_learning_rates("ill_conditioned_bowl", ["sgd"], learning_rates=[0.001, 0.01, 0.1])
        >>> float(found.best[0])
        0.01
        >>> at_best = {name: {"learning_rate": rate} for name, rate in zip(found.names, found.best)}
        >>> fair = simulate("ill_conditioned_bowl", at_best)
    """
    trajectories = simulate(on, optimizers, start, steps, learning_rates=learning_rates, seed=seed, engine=engine)
    losses = trajectories.losses[..., -1]
    lost = trajectories.diverged | np.isnan(losses)
    if trajectories.function.minima:  # they are in the drawn area: a path that leaps far out of it must not win
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
