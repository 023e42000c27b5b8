"""Basins of attraction: the minimum that an optimizer reaches from each start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.validation import integer, number
from .candidates import one_optimizer
from .functions import Function, Minimum
from .trajectories import Simulation

__all__ = ["Basins", "basin_map"]

CHUNK = 16384  # points updated together: few enough for the cache, and enough to hide the overhead of numpy's calls
EVERY = 4  # steps between two checks for arrivals


@dataclass(frozen=True)
class Basins:
    """The minimum that an optimizer reaches from each start on a grid, as returned by `basin_map`.

    Attributes:
        function: the function that the optimizer minimized.
        x, y: float32 [n], the coordinates of the starts.
        minima: the function's known minima; if none are known, the minima that paths ended at.
        reached: int8 [n, n], rows along y: the index in `minima` of the minimum at which the path ends; -1 if it ends
            elsewhere.
        steps: int32 [n, n], the first step at which the path was near that minimum, checked every 4 steps; -1 if it ends
            elsewhere.
        tolerance: the largest distance that counts as near a minimum.
    """

    function: Function
    x: np.ndarray
    y: np.ndarray
    minima: tuple[Minimum, ...]
    reached: np.ndarray
    steps: np.ndarray
    tolerance: float


def basin_map(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizer: Any,
    n: int = 256,
    steps: int = 300,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    engine: str | None = None,
) -> Basins:
    """Run an optimizer from every point of a grid over the drawn area, and return the minimum at which each path ends.

    Args:
        on, seed, engine: as for `simulate`.
        optimizer: one optimizer as for `simulate`: a name, a dict of arguments with the name under "optimizer", and so on.
        n: the number of grid points in each direction, >= 2.
        steps: the number of steps, >= 1.
        tolerance: the largest distance from a minimum at which a path may end to count as reaching it, > 0; None for a
            hundredth of the larger side of the area.

    Example:
        >>> from tristep.viz import basin_map
        >>> found = basin_map("himmelblau", {"optimizer": "adam", "learning_rate": 0.1}, n=32)
        >>> sorted(set(found.reached.flatten().tolist()))
        [0, 1, 2, 3]
    """
    n, simulation = integer("n", n, low=2), Simulation(on, one_optimizer(optimizer), steps, seed=seed, engine=engine)
    where, steps = simulation.function, simulation.steps
    side = max(high - low for low, high in (where.xlim, where.ylim))
    near = side / 100 if tolerance is None else number("tolerance", tolerance, above=0)
    xs, ys = np.linspace(*where.xlim, n, dtype=np.float32), np.linspace(*where.ylim, n, dtype=np.float32)
    starts = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    ends, looks = np.empty_like(starts), [t for t in range(steps + 1) if t % EVERY == 0 or t == steps]
    noise = simulation.noise(len(starts))
    seen: list[np.ndarray] = []  # the points of each chunk at all checks; only kept while the minima are unknown
    arrivals: list[np.ndarray] = []
    for first in range(0, len(starts), CHUNK):
        part = slice(first, min(first + CHUNK, len(starts)))
        ways = simulation.walk(starts[part], None if noise is None else noise[..., part])
        seen.append(np.stack([np.stack([x, y]) for t, (x, y, *_) in enumerate(ways) if t in looks]))
        ends[part] = seen[-1][-1].T
        if where.minima:
            arrivals.append(_arrivals(where.minima, seen.pop(), looks, near))
    minima = where.minima or _found_minima(where, starts, ends, near)
    arrivals += [_arrivals(minima, each, looks, near) for each in seen]
    steps_to = np.concatenate(arrivals, axis=1)
    reached, when = np.full(len(starts), -1, np.int8), np.full(len(starts), -1, np.int32)
    nearest = np.full(len(starts), np.inf, np.float32)
    for i, minimum in enumerate(minima):
        distance = np.hypot(ends[:, 0] - np.float32(minimum.x), ends[:, 1] - np.float32(minimum.y))
        mine = (distance <= near) & (distance < nearest)
        reached[mine], when[mine], nearest[mine] = i, steps_to[i, mine], distance[mine]
    return Basins(where, xs, ys, minima, reached.reshape(n, n), when.reshape(n, n), near)


def _near(x: np.ndarray, y: np.ndarray, minimum: Minimum, distance: float) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        dx, dy = x - np.float32(minimum.x), y - np.float32(minimum.y)
        return dx * dx + dy * dy <= np.float32(distance * distance)


def _found_minima(where: Function, starts: np.ndarray, ends: np.ndarray, near: float) -> tuple[Minimum, ...]:
    """Return the minima at which paths came to rest, lowest first; minima within twice the tolerance are merged."""
    evaluate = where.evaluator((len(ends),))
    with np.errstate(all="ignore"):
        drawn = evaluate(*np.ascontiguousarray(starts.T))[0]
        depth = float(np.nanmedian(drawn) - np.nanmin(drawn)) if np.isfinite(drawn).any() else 0.0
        x, y = np.ascontiguousarray(ends.T)
        value, dx, dy = (each.copy() for each in evaluate(x, y))
        # At rest: over the tolerance the function falls by no more than a thousandth of its usual height.
        left = np.flatnonzero(np.isfinite(value) & (np.hypot(dx, dy) * near <= 1e-3 * depth))
    angles = np.arange(8) * (np.pi / 4)
    ring = where.evaluator((8,))
    left = left[np.argsort(value[left], kind="stable")]
    minima: list[Minimum] = []
    while len(left) and len(minima) < 100:
        best = left[0]
        around = (x[best] + near * np.cos(angles)).astype(np.float32), (y[best] + near * np.sin(angles)).astype(np.float32)
        minimum = Minimum(float(x[best]), float(y[best]), float(value[best]))
        if (ring(*around)[0] >= value[best]).all():  # not a saddle
            minima.append(minimum)
        left = left[~_near(x[left], y[left], minimum, 2 * near)]
    return tuple(minima)


def _arrivals(minima: Sequence[Minimum], seen: np.ndarray, looks: Sequence[int], near: float) -> np.ndarray:
    """Return the step of the first check at which each point was near each minimum, [n_minima, n].

    `seen` has the points at all checks, float32 [n_looks, 2, n], and `looks` the steps of the checks.
    """
    arrivals = np.full((len(minima), seen.shape[-1]), looks[-1] + 1, np.int32)
    for t, (x, y) in zip(reversed(looks), reversed(seen), strict=True):
        for minimum, when in zip(minima, arrivals, strict=True):
            when[_near(x, y, minimum, near)] = t
    return arrivals
