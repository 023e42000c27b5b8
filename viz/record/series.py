"""Values over the steps of a run, as plain arrays of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["POINTS", "Curve", "Series"]

PARTS = ("first", "last", "low", "mean", "high", "nonfinite", "recent_steps", "recent", "counts")  # of a series in a file
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


class Series:
    """Values over the steps of a run: the last 2,048 as they are, and all of them in up to 2,048 blocks.

    A block has the smallest, the mean and the largest of as many values as the others. When there is no room for another
    one, each two become one. So any number of steps fits, at a cost that does not depend on it, and no peak gets lost.

    Args:
        shape: of one value; () for numbers.
        dtype: how values are kept.

    Example:
        >>> from tristep.viz import Series
        >>> loss = Series()
        >>> loss.extend(range(1, 10_001), [1 / step for step in range(1, 10_001)])
        >>> len(loss), len(loss.curve().mean)
        (10000, 1250)
        >>> loss.curve(start=9_999).mean.tolist()
        [0.00010001000100010001, 0.0001]
    """

    def __init__(self, shape: Sequence[int] = (), dtype: Any = np.float64) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._count = 0  # values so far
        self._whole: tuple[int, Curve] | None = None  # of how many values, and all of the curve
        # Of how many values a block is and of how many blocks a point, the means of points, and how many are full.
        self._coarse: tuple[tuple[int, int], np.ndarray, int] | None = None
        self._blocks = _Blocks(self.shape, self.dtype)
        self._recent_steps = np.zeros(0, dtype=np.int64)  # a ring, once it is full
        self._recent = np.zeros((0, *self.shape), dtype=self.dtype)

    def __len__(self) -> int:
        """How many values there have been."""
        return self._count

    @property
    def last_step(self) -> int | None:
        """The step of the last value; None before the first."""
        return int(self._recent_steps[(self._count - 1) % len(self._recent_steps)]) if self._count else None

    def append(self, step: int, value: Any) -> None:
        """Add the value of one step, which must be later than all before."""
        self.extend([step], np.asarray(value, dtype=self.dtype)[None])

    def extend(self, steps: Sequence[int] | np.ndarray, values: Any) -> None:
        """Add the values of several steps.

        Args:
            steps: [n], increasing, all later than those before.
            values: [n, *shape].

        Raises:
            ValueError: these do not fit; nothing has been changed.
        """
        steps, values = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=self.dtype)
        if steps.ndim != 1 or values.shape != (len(steps), *self.shape):
            raise ValueError(f"values are {values.shape} for steps {steps.shape}: must be {(len(steps), *self.shape)}")
        if len(steps) == 0:
            return
        last = self.last_step
        if (np.diff(steps) <= 0).any() or (last is not None and steps[0] <= last):
            raise ValueError(
                f"steps {_shortened(steps)} after step {last}: each must be later than the one before; what goes on from an "
                "earlier step is another run"
            )
        self._blocks.extend(self._count, steps, values)
        self._put_into_ring(steps, values)
        self._count += len(steps)

    def recent(self) -> tuple[np.ndarray, np.ndarray]:
        """The last values as they are, at most 2,048: steps int64 [n] and values [n, *shape]."""
        n = len(self._recent_steps)
        if self._count <= n:
            return self._recent_steps[: self._count].copy(), self._recent[: self._count].copy()
        order = np.arange(self._count, self._count + n) % n
        return self._recent_steps[order], self._recent[order]

    def since(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As `recent`, without the first `count` values of the series."""
        n = len(self._recent_steps)
        places = np.arange(max(count, self._count - n), self._count) % max(n, 1)
        return self._recent_steps[places], self._recent[places]

    def curve(self, start: int | None = None, stop: int | None = None) -> Curve:
        """The points that have steps from `start` to `stop`, both included; None is the first and the last step.

        Arrays of the whole curve cannot be written to.
        """
        if start is None and stop is None and self._whole is not None and self._whole[0] == self._count:
            return self._whole[1]  # pictures ask for one several times
        n = len(self._recent_steps)
        oldest = int(self._recent_steps[self._count % n if self._count > n else 0]) if self._count else 0
        if self._count <= n or (start is not None and start >= oldest):
            steps, values = self.recent()
            there = np.isfinite(values)
            kept = values if there.all() else np.where(there, values, np.nan).astype(self.dtype)
            found = Curve(steps, steps, kept, kept, kept, (~there).astype(np.int64))
        else:
            n = self._blocks.used(self._count)
            found = Curve(*(array[:n].copy() for array in self._blocks.arrays))
        if start is not None or stop is not None:
            inside = np.ones(len(found.first), dtype=bool)
            if start is not None:
                inside &= found.last >= start
            if stop is not None:
                inside &= found.first <= stop
            return Curve(*(array[inside] for array in found))
        for array in found:
            array.flags.writeable = False
        self._whole = self._count, found
        return found

    def means(self, most: int = 512) -> tuple[np.ndarray, np.ndarray]:
        """The means of a few points each of which is several of the curve's, for pictures of many lines.

        Args:
            most: how many points there may be, >= 1.

        Returns:
            The steps in the middle of the points, float64 [n], and the means of what is finite, float64 [n, *shape]; NaN
            where nothing is.
        """
        blocks, arrays, n = self._blocks, self._blocks.arrays, self._blocks.used(self._count)
        each = -(-n // most) or 1
        kind = blocks.each, each
        # Points that are full stay as they are: a live picture looks at those after them only.
        if self._coarse is None or self._coarse[0] != kind or len(self._coarse[1]) != most:
            self._coarse = kind, np.empty((most, *self.shape)), 0
        _, means, done = self._coarse
        part = arrays.mean[done * each : n]
        count = -(-len(part) // each)
        padded = np.full((count * each, *self.shape), np.nan)
        padded[: len(part)] = part
        rows = padded.reshape(count, each, *self.shape)
        there = np.isfinite(rows)
        number = there.sum(axis=1)
        total = np.where(there, rows, 0.0).sum(axis=1)
        means[done : done + count] = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
        self._coarse = kind, means, blocks.full // each
        starts = np.arange(0, n, each)
        middle = (arrays.first[starts] + arrays.last[np.minimum(starts + each, n) - 1]) / 2
        return middle, means[: len(starts)].copy()

    def _put_into_ring(self, steps: np.ndarray, values: np.ndarray) -> None:
        steps, values, start = steps[-POINTS:], values[-POINTS:], self._count + max(len(steps) - POINTS, 0)
        room = len(self._recent_steps)
        if room < POINTS and start + len(steps) > room:
            room = min(POINTS, max(64, 2 * room, start + len(steps)))
            self._recent_steps, self._recent = _longer(self._recent_steps, room), _longer(self._recent, room)
        where = np.arange(start, start + len(steps)) % room
        self._recent_steps[where], self._recent[where] = steps, values

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays by name, for a file."""
        n, (steps, values) = self._blocks.used(self._count), self.recent()
        blocks = {name: array[:n] for name, array in self._blocks.arrays._asdict().items()}
        return blocks | {"recent_steps": steps, "recent": values, "counts": np.array([self._count, self._blocks.each])}

    @classmethod
    def from_arrays(cls, state: Mapping[str, np.ndarray]) -> Series:
        """The series of which `to_arrays` gave these.

        Raises:
            ValueError: they contradict each other.
        """
        recent, steps, counts = state["recent"], state["recent_steps"], state["counts"]
        if counts.shape != (2,) or counts.dtype.kind != "i" or recent.ndim < 1 or recent.dtype.kind != "f":
            raise ValueError(f"its values are {recent.dtype} {recent.shape}, with counts {counts.dtype} {counts.shape}")
        series = cls(recent.shape[1:], recent.dtype)
        blocks = series._blocks
        series._count, blocks.each = (int(number) for number in counts)
        if series._count < 0 or blocks.each < 1 or len(recent) != min(series._count, POINTS):
            raise ValueError("its numbers of values contradict each other")
        blocks.full = series._count // blocks.each
        n = blocks.used(series._count)
        kinds: dict[str, tuple[int, Any, tuple[int, ...]]]
        kinds = dict.fromkeys(("low", "mean", "high"), (n, recent.dtype, series.shape))
        kinds |= {"first": (n, np.int64, ()), "last": (n, np.int64, ()), "nonfinite": (n, np.int64, series.shape)}
        kinds["recent_steps"] = (len(recent), np.int64, ())
        for name, (length, dtype, shape) in kinds.items():
            array = state[name]
            if array.shape != (length, *shape) or array.dtype != dtype or n > POINTS:
                raise ValueError(f"{name} is {array.dtype} {array.shape} instead of {np.dtype(dtype)} {(length, *shape)}")
        first, last = state["first"], state["last"]
        if (np.diff(steps) <= 0).any() or (first > last).any() or (first[1:] <= last[:-1]).any():
            raise ValueError("its steps do not increase")
        blocks.arrays = Curve(*(_longer(state[name], POINTS if n > POINTS // 2 else n) for name in Curve._fields))
        series._recent_steps, series._recent = steps.copy(), recent.copy()
        if series._count > POINTS:  # the ring begins where its oldest value is to be overwritten
            turn = series._count % POINTS
            series._recent_steps, series._recent = np.roll(steps, turn), np.roll(recent, turn, axis=0)
        return series


def _shortened(steps: np.ndarray) -> str:
    return str(steps.tolist()) if len(steps) < 5 else f"{int(steps[0])} ... {int(steps[-1])}"


class _Blocks:
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
            self.arrays = Curve(*(_longer(array, room) for array in self.arrays))
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


def _longer(array: np.ndarray, room: int) -> np.ndarray:
    """A copy with room for so many rows, at least those that it has."""
    found = np.zeros((max(room, len(array)), *array.shape[1:]), dtype=array.dtype)
    found[: len(array)] = array
    return found
