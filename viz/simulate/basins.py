"""Which minimum an optimizer reaches from where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.validation import integer, number
from .candidates import Candidate
from .catalog import function
from .functions import Function, Minimum
from .runners import BatchedRunner, Runner, SequentialRunner
from .trajectories import gradient_noise

__all__ = ["Basins", "basin_map"]

CHUNK = 16384  # points of a basin map at a time: what a step touches is to stay in a cache, but numpy's calls have a price
EVERY = 4  # steps of a basin map between two looks at who has arrived


@dataclass(frozen=True)
class Basins:
    """Which minimum is reached from where.

    Attributes:
        function: what the optimizer ran on.
        x, y: float32 [n], the coordinates of the starts.
        minima: those that are told apart: the function's own, or, where it has none, those that were found.
        reached: int8 [n, n], by y and x: the place in `minima` of the one that the path ends at; -1 where it ends at none.
        steps: int32 [n, n], after how many steps the path was near that minimum for the first time, as looked at every 4
            steps; -1 where it ends at none.
        tolerance: how near is near, a distance.
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
    """Start from every point of a grid over the drawn part, and see at which minimum each path ends.

    Args:
        on, seed, engine: as for `simulate`.
        optimizer: one of what `simulate` takes: a name, a dict of arguments with "optimizer" among them, and so on.
        n: points in each direction, >= 2.
        steps: >= 1.
        tolerance: how near a minimum a path must end, > 0; by default a hundredth of the larger side.

    Example:
        >>> from tristep.viz import basin_map
        >>> found = basin_map("himmelblau", {"optimizer": "adam", "learning_rate": 0.1}, n=32)
        >>> sorted(set(found.reached.flatten().tolist()))
        [0, 1, 2, 3]
    """
    where, n, steps = function(on), integer("n", n, low=2), integer("steps", steps, low=1)
    side = max(high - low for low, high in (where.xlim, where.ylim))
    near = side / 100 if tolerance is None else number("tolerance", tolerance, above=0)
    label = optimizer if isinstance(optimizer, str) else "optimizer"
    xs, ys = np.linspace(*where.xlim, n, dtype=np.float32), np.linspace(*where.ylim, n, dtype=np.float32)
    starts = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    ends = np.empty_like(starts)
    looks = np.array([t for t in range(steps + 1) if t % EVERY == 0 or t == steps])
    waited = np.zeros((len(where.minima), len(starts)), np.int32)  # looks until it was near
    parts = [slice(first, min(first + CHUNK, len(starts))) for first in range(0, len(starts), CHUNK)]
    snapshots: list[list[np.ndarray]] = [[] for _ in parts]
    noise = gradient_noise(where, seed, steps, len(starts))

    runner: Runner | None = None
    for k, part in enumerate(parts):
        chunk = starts[part]
        away = np.ones((len(where.minima), len(chunk)), bool)  # whether it has never been near
        count = len(chunk)
        if runner is None or count != runner.size or not runner.restart(chunk):
            own = Candidate(label, {} if isinstance(optimizer, str) else optimizer, [{}], False)
            if own.together is None:
                runner = SequentialRunner(own.trainings, chunk)
            else:
                runner = BatchedRunner(own.trainings, chunk, own.together, engine)
            evaluate, near_one = where.evaluator((count,)), _Near(count, near)
            x, y = np.empty(count, np.float32), np.empty(count, np.float32)
        for t in range(steps + 1):
            runner.read(x, y)
            if t % EVERY == 0 or t == steps:
                for minimum, never, looked in zip(where.minima, away, waited[:, part], strict=True):
                    np.greater(never, near_one(x, y, minimum), out=never)  # it was never near, and is not now
                    np.add(looked, never, out=looked)
                if not where.minima:
                    snapshots[k].append(np.stack([x, y]))
            if t == steps:
                break
            _, dx, dy = evaluate(x, y)
            if noise is not None:
                dx, dy = dx + noise[t, 0, part], dy + noise[t, 1, part]
            runner.step(dx, dy)
        ends[part, 0], ends[part, 1] = x, y

    minima, arrivals = where.minima, np.append(looks, steps + 1)[waited].astype(np.int32)
    if not minima:
        minima = _found_minima(where, starts, ends, near)
        arrivals = _arrivals(minima, snapshots, steps, near)
    reached, when = np.full(len(starts), -1, np.int8), np.full(len(starts), -1, np.int32)
    nearest = np.full(len(starts), np.inf, np.float32)
    for i, minimum in enumerate(minima):
        distance = np.hypot(ends[:, 0] - np.float32(minimum.x), ends[:, 1] - np.float32(minimum.y))
        mine = (distance <= near) & (distance < nearest)
        reached[mine], when[mine], nearest[mine] = i, arrivals[i][mine], distance[mine]
    return Basins(where, xs, ys, minima, reached.reshape(n, n), when.reshape(n, n), near)


class _Near:
    """As `_near`, again and again, with room that is made once."""

    def __init__(self, count: int, distance: float) -> None:
        self._dx, self._dy = np.empty((2, count), np.float32)
        self._found = np.empty(count, bool)
        self._most = np.float32(distance * distance)

    def __call__(self, x: np.ndarray, y: np.ndarray, minimum: Minimum) -> np.ndarray:
        dx, dy = self._dx, self._dy
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(x, np.float32(minimum.x), out=dx)
            np.subtract(y, np.float32(minimum.y), out=dy)
            np.multiply(dx, dx, out=dx)
            np.multiply(dy, dy, out=dy)
            np.add(dx, dy, out=dx)
            return np.less_equal(dx, self._most, out=self._found)


def _near(x: np.ndarray, y: np.ndarray, minimum: Minimum, distance: float) -> np.ndarray:
    return _Near(len(x), distance)(x, y, minimum)


def _found_minima(where: Function, starts: np.ndarray, ends: np.ndarray, near: float) -> tuple[Minimum, ...]:
    """Where paths have come to rest in a dent, the lowest first: a minimum for each place within twice the tolerance."""
    evaluate = where.evaluator((len(ends),))
    with np.errstate(all="ignore"):
        drawn = evaluate(*np.ascontiguousarray(starts.T))[0]
        depth = float(np.nanmedian(drawn) - np.nanmin(drawn)) if np.isfinite(drawn).any() else 0.0
        x, y = np.ascontiguousarray(ends.T)
        value, dx, dy = (each.copy() for each in evaluate(x, y))
        # As far as the tolerance reaches, the function falls by no more than a thousandth of its usual height.
        left = np.flatnonzero(np.isfinite(value) & (np.hypot(dx, dy) * near <= 1e-3 * depth))
    angles = np.arange(8) * (np.pi / 4)
    ring = where.evaluator((8,))
    left = left[np.argsort(value[left], kind="stable")]
    found: list[Minimum] = []
    while len(left) and len(found) < 100:
        best = left[0]
        around = (x[best] + near * np.cos(angles)).astype(np.float32), (y[best] + near * np.sin(angles)).astype(np.float32)
        here = Minimum(float(x[best]), float(y[best]), float(value[best]))
        if (ring(*around)[0] >= value[best]).all():  # and it is no saddle
            found.append(here)
        left = left[~_near(x[left], y[left], here, 2 * near)]
    return tuple(found)


def _arrivals(minima: Sequence[Minimum], snapshots: Sequence[Sequence[np.ndarray]], steps: int, near: float) -> np.ndarray:
    times = [t for t in range(steps + 1) if t % EVERY == 0 or t == steps]
    found = []
    for minimum in minima:
        parts = []
        for seen in snapshots:
            inside = np.stack([_near(x, y, minimum, near) for x, y in seen])
            parts.append(np.where(inside.any(axis=0), np.array(times)[inside.argmax(axis=0)], steps + 1))
        found.append(np.concatenate(parts))
    return np.array(found, dtype=np.int32)
