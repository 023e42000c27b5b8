"""Blocks: the smallest, the mean and the largest of as many values each, in bounded memory however many values there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["POINTS", "Blocks", "Curve", "longer"]

POINTS = 2048  # of a curve at most; more than there are pixels across


class Curve(NamedTuple):
    """Part of a series, in at most 2,048 points, each of one value or of several that follow each other.

    Attributes:
        first, last: int64 [n], the first and the last step of each point.
        low, mean, high: [n, *shape], of a point's finite values; NaN where there is none.
        nonfinite: int64 [n, *shape], how many of a point's values are infinite or NaN.
    """

    first: np.ndarray
    last: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    nonfinite: np.ndarray


class Blocks:
    """Values over the steps of a run in up to 2,048 blocks. When there is no room for another one, each two become one.

    Args:
        shape: of one value.
        dtype: how values are kept.

    Attributes:
        full: how many blocks are full; there may be one more.
        each: how many values a full one has.
        arrays: what is known of the blocks, with room for more.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._shape = tuple(shape)
        self.full, self.each = 0, 1
        low, mean, high = (np.zeros((0, *self._shape), dtype=dtype) for _ in range(3))
        steps = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.arrays = Curve(*steps, low, mean, high, np.zeros((0, *self._shape), dtype=np.int64))

    def used(self, count: int) -> int:
        """How many blocks there are of so many values."""
        return self.full + (count > self.full * self.each)

    def extend(self, count: int, steps: np.ndarray, values: np.ndarray) -> None:
        """Add the values [n, *shape] of these steps to `count` values."""
        done = 0
        while done < len(steps):
            inside = count - self.full * self.each
            if inside == 0 and self.full == POINTS:
                self._halve()
            if inside == 0 and len(steps) - done >= self.each:  # several whole blocks
                n = min((len(steps) - done) // self.each, POINTS - self.full)
                taken = n * self.each
            else:
                n, taken = 1, min(self.each - inside, len(steps) - done)
            part = slice(done, done + taken)
            self._put(steps[part].reshape(n, -1), values[part].reshape(n, taken // n, *self._shape), inside)
            done, count = done + taken, count + taken
            self.full = count // self.each

    def _put(self, steps: np.ndarray, values: np.ndarray, inside: int) -> None:
        """Put values [n, each, *shape] into the next n blocks, the first of which has so many already."""
        n, start = len(steps), self.full
        if start + n > len(self.arrays.first):
            room = min(POINTS, max(64, 2 * len(self.arrays.first), start + n))
            self.arrays = Curve(*(longer(array, room) for array in self.arrays))
        here = Curve(*(array[start : start + n] for array in self.arrays))  # views
        finite = np.isfinite(values)
        number, known = finite.sum(axis=1), inside - here.nonfinite if inside else np.zeros(())
        low = np.fmin.reduce(np.where(finite, values, np.nan), axis=1)
        high = np.fmax.reduce(np.where(finite, values, np.nan), axis=1)
        with np.errstate(invalid="ignore"):
            mean = np.where(finite, values, 0).sum(axis=1, dtype=np.float64)
            if inside:
                mean += np.where(known > 0, here.mean, 0) * known
                low, high = np.fmin(low, here.low), np.fmax(high, here.high)
            mean /= number + known
        if not inside:
            here.first[:], here.nonfinite[:] = steps[:, 0], 0
        here.last[:] = steps[:, -1]
        here.low[:], here.mean[:], here.high[:] = low, mean, high
        here.nonfinite[:] += values.shape[1] - number

    def _halve(self) -> None:
        half, old = POINTS // 2, self.arrays
        finite = self.each - old.nonfinite
        with np.errstate(invalid="ignore"):
            total = np.where(finite > 0, old.mean.astype(np.float64) * finite, 0)
            mean = (total[0::2] + total[1::2]) / (finite[0::2] + finite[1::2])
        low, high = np.fmin(old.low[0::2], old.low[1::2]), np.fmax(old.high[0::2], old.high[1::2])
        new = old.first[0::2], old.last[1::2], low, mean, high, old.nonfinite[0::2] + old.nonfinite[1::2]
        for array, values in zip(old, [values.copy() for values in new], strict=True):
            array[:half] = values
        self.full, self.each = half, 2 * self.each


def longer(array: np.ndarray, room: int) -> np.ndarray:
    """A copy with room for so many rows, at least those that it has."""
    found = np.zeros((max(room, len(array)), *array.shape[1:]), dtype=array.dtype)
    found[: len(array)] = array
    return found
