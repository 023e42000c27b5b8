"""Values over the steps of a run, as plain arrays of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Curve", "Series"]

POINTS = 2048  # of a curve at most; more than there are pixels across
PARTS = ("first", "last", "low", "mean", "high", "nonfinite", "recent_steps", "recent", "counts")  # of a series in a file


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
        self._each = 1  # values of one block
        self._blocks = 0  # that are full
        self._recent_steps = np.zeros(0, dtype=np.int64)  # a ring, once it is full
        self._recent = np.zeros((0, *self.shape), dtype=self.dtype)
        room = 0
        self._first, self._last = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        self._low, self._mean, self._high = (np.zeros((room, *self.shape), dtype=self.dtype) for _ in range(3))
        self._nonfinite = np.zeros((room, *self.shape), dtype=np.int64)

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
        self._put_into_blocks(steps, values)
        self._put_into_ring(steps, values)
        self._count += len(steps)

    def recent(self) -> tuple[np.ndarray, np.ndarray]:
        """The last values as they are, at most 2,048: steps int64 [n] and values [n, *shape]."""
        n = len(self._recent_steps)
        if self._count <= n:
            return self._recent_steps[: self._count].copy(), self._recent[: self._count].copy()
        order = np.arange(self._count, self._count + n) % n
        return self._recent_steps[order], self._recent[order]

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
            n = self._blocks + bool(self._in_open_block())
            found = Curve(*(array[:n].copy() for array in self._arrays()))
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
        n = self._blocks + bool(self._in_open_block())
        each = -(-n // most) or 1
        kind = self._each, each
        # Points that are full stay as they are: a live picture looks at those after them only.
        if self._coarse is None or self._coarse[0] != kind or len(self._coarse[1]) != most:
            self._coarse = kind, np.empty((most, *self.shape)), 0
        _, means, done = self._coarse
        part = self._mean[done * each : n]
        count = -(-len(part) // each)
        padded = np.full((count * each, *self.shape), np.nan)
        padded[: len(part)] = part
        rows = padded.reshape(count, each, *self.shape)
        there = np.isfinite(rows)
        number = there.sum(axis=1)
        total = np.where(there, rows, 0.0).sum(axis=1)
        means[done : done + count] = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
        self._coarse = kind, means, self._blocks // each
        starts = np.arange(0, n, each)
        middle = (self._first[starts] + self._last[np.minimum(starts + each, n) - 1]) / 2
        return middle, means[: len(starts)].copy()

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self._first, self._last, self._low, self._mean, self._high, self._nonfinite

    def _in_open_block(self) -> int:
        return self._count - self._blocks * self._each

    def _put_into_ring(self, steps: np.ndarray, values: np.ndarray) -> None:
        steps, values, start = steps[-POINTS:], values[-POINTS:], self._count + max(len(steps) - POINTS, 0)
        room = len(self._recent_steps)
        if room < POINTS and start + len(steps) > room:
            room = min(POINTS, max(64, 2 * room, start + len(steps)))
            self._recent_steps, self._recent = _longer(self._recent_steps, room), _longer(self._recent, room)
        where = np.arange(start, start + len(steps)) % room
        self._recent_steps[where], self._recent[where] = steps, values

    def _put_into_blocks(self, steps: np.ndarray, values: np.ndarray) -> None:
        done, count = 0, self._count
        while done < len(steps):
            inside = count - self._blocks * self._each
            if inside == 0 and self._blocks == POINTS:
                self._halve()
            if inside == 0 and len(steps) - done >= self._each:  # several whole blocks
                n = min((len(steps) - done) // self._each, POINTS - self._blocks)
                taken = n * self._each
            else:
                n, taken = 1, min(self._each - inside, len(steps) - done)
            part = slice(done, done + taken)
            self._put(steps[part].reshape(n, -1), values[part].reshape(n, taken // n, *self.shape), inside)
            done, count = done + taken, count + taken
            self._blocks = count // self._each

    def _put(self, steps: np.ndarray, values: np.ndarray, inside: int) -> None:
        """Put values [n, each, *shape] into the next n blocks, the first of which has so many already."""
        n, start = len(steps), self._blocks
        if start + n > len(self._first):
            room = min(POINTS, max(64, 2 * len(self._first), start + n))
            names = ("_first", "_last", "_low", "_mean", "_high", "_nonfinite")
            for name, array in zip(names, self._arrays(), strict=True):
                setattr(self, name, _longer(array, room))
        where = slice(start, start + n)
        finite = np.isfinite(values)
        number, known = finite.sum(axis=1), inside - self._nonfinite[where] if inside else np.zeros(())
        low = np.fmin.reduce(np.where(finite, values, np.nan), axis=1)
        high = np.fmax.reduce(np.where(finite, values, np.nan), axis=1)
        with np.errstate(invalid="ignore"):
            mean = np.where(finite, values, 0).sum(axis=1, dtype=np.float64)
            if inside:
                mean += np.where(known > 0, self._mean[where], 0) * known
                low, high = np.fmin(low, self._low[where]), np.fmax(high, self._high[where])
            mean /= number + known
        if not inside:
            self._first[where], self._nonfinite[where] = steps[:, 0], 0
        self._last[where] = steps[:, -1]
        self._low[where], self._mean[where], self._high[where] = low, mean, high
        self._nonfinite[where] += values.shape[1] - number

    def _halve(self) -> None:
        half = POINTS // 2
        finite = self._each - self._nonfinite
        with np.errstate(invalid="ignore"):
            total = np.where(finite > 0, self._mean.astype(np.float64) * finite, 0)
            mean = (total[0::2] + total[1::2]) / (finite[0::2] + finite[1::2])
        self._mean[:half] = mean
        self._low[:half], self._high[:half] = np.fmin(self._low[0::2], self._low[1::2]), np.fmax(*_pairs(self._high))
        self._first[:half], self._last[:half] = self._first[0::2].copy(), self._last[1::2].copy()
        self._nonfinite[:half] = np.add(*_pairs(self._nonfinite))
        self._blocks, self._each = half, 2 * self._each

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays by name, for a file."""
        n = self._blocks + bool(self._in_open_block())
        names = ("first", "last", "low", "mean", "high", "nonfinite")
        steps, values = self.recent()
        blocks = {name: array[:n] for name, array in zip(names, self._arrays(), strict=True)}
        return blocks | {"recent_steps": steps, "recent": values, "counts": np.array([self._count, self._each])}

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
        series._count, series._each = (int(number) for number in counts)
        if series._count < 0 or series._each < 1 or len(recent) != min(series._count, POINTS):
            raise ValueError("its numbers of values contradict each other")
        series._blocks = series._count // series._each
        n = series._blocks + bool(series._in_open_block())
        kinds: dict[str, tuple[int, Any, tuple[int, ...]]]
        kinds = dict.fromkeys(("low", "mean", "high"), (n, recent.dtype, series.shape))
        kinds |= {"first": (n, np.int64, ()), "last": (n, np.int64, ()), "nonfinite": (n, np.int64, series.shape)}
        kinds["recent_steps"] = (len(recent), np.int64, ())
        for name, (length, dtype, shape) in kinds.items():
            array = state[name]
            if array.shape != (length, *shape) or array.dtype != dtype or n > POINTS:
                raise ValueError(f"{name} is {array.dtype} {array.shape} instead of {np.dtype(dtype)} {(length, *shape)}")
            if name != "recent_steps":
                setattr(series, f"_{name}", _longer(array, POINTS if n > POINTS // 2 else n))
        first, last = state["first"], state["last"]
        if (np.diff(steps) <= 0).any() or (first > last).any() or (first[1:] <= last[:-1]).any():
            raise ValueError("its steps do not increase")
        series._recent_steps, series._recent = steps.copy(), recent.copy()
        if series._count > POINTS:  # the ring begins where its oldest value is to be overwritten
            turn = series._count % POINTS
            series._recent_steps, series._recent = np.roll(steps, turn), np.roll(recent, turn, axis=0)
        return series


def _longer(array: np.ndarray, room: int) -> np.ndarray:
    longer = np.zeros((max(room, len(array)), *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def _pairs(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return array[0::2], array[1::2]


def _shortened(steps: np.ndarray) -> str:
    return str(steps.tolist()) if len(steps) < 5 else f"{int(steps[0])} ... {int(steps[-1])}"
