"""Values over the steps of a run, kept in arrays of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["NEVER", "POINTS", "Curve", "Series"]

BLOCK_PARTS = ("first", "last", "low", "mean", "high", "nonfinite")
FIRSTS = ("first_nonfinite", "first_positive")
PARTS = (*BLOCK_PARTS, "recent_steps", "recent", "counts", *FIRSTS)  # the arrays in a file
NEVER = np.iinfo(np.int64).max  # a step that no run reaches
POINTS = 2048  # of a curve, at most: more than the pixels across a screen's plot


class Curve(NamedTuple):
    """A series as at most 2,048 points. Each point summarizes one value or several consecutive ones.

    Attributes:
        first, last: the first and the last step of each point, int64 [n]. Draw its mean at (first + last) / 2.
        low, mean, high: minimum, mean and maximum of each point's finite values, [n, *shape]; NaN if it has none.
        nonfinite: how many values of each point are infinite or NaN, int64 [n, *shape].
    """

    first: np.ndarray
    last: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    nonfinite: np.ndarray


class Series:
    """Values over the steps of a run: the last 2,048 unchanged, and all of them summarized in up to 2,048 blocks.

    A block holds the minimum, mean and maximum of consecutive values, of equally many in each block. When there is no room
    for another block, each two neighbours are merged. So memory is bounded for any number of steps, and no peak is lost.

    Args:
        shape: the shape of one value; () for numbers.
        dtype: the dtype of stored values.

    Attributes:
        first_nonfinite: the first step with an infinite or NaN value, for each element of the values, int64 [*shape];
            `NEVER`, the largest int64, if there is none.
        first_positive: the first step with a finite value above 0; likewise.

    Example:
        >>> from tristep.viz import Series
        >>> loss = Series()
        >>> loss.extend(range(1, 10_001), [1 / step for step in range(1, 10_001)])
        >>> len(loss), len(loss.curve().mean)
        (10000, 1250)
        >>> loss.recent()[1][-2:].tolist()
        [0.00010001000100010001, 0.0001]
    """

    def __init__(self, shape: Sequence[int] = (), dtype: Any = np.float64) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._count = 0  # how many values have been added
        self._whole: tuple[int, Curve] | None = None  # a cache: a count of values, and their whole curve
        # A cache for `means`: values in a block and blocks in a point, the means of points, and how many points are full.
        self._coarse: tuple[tuple[int, int], np.ndarray, int] | None = None
        self._blocks = _Blocks(self.shape, self.dtype)
        self._recent_steps = np.zeros(0, dtype=np.int64)  # a ring, once it is full
        self._recent = np.zeros((0, *self.shape), dtype=self.dtype)
        self.first_nonfinite, self.first_positive = (np.full(self.shape, NEVER, dtype=np.int64) for _ in FIRSTS)

    def __len__(self) -> int:
        """How many values have been added."""
        return self._count

    @property
    def last_step(self) -> int | None:
        """The step of the last value; None before the first."""
        return int(self._recent_steps[(self._count - 1) % len(self._recent_steps)]) if self._count else None

    def append(self, step: int, value: Any) -> None:
        """Add the value of one step, which must be later than all earlier ones."""
        self.extend([step], np.asarray(value, dtype=self.dtype)[None])

    def extend(self, steps: Sequence[int] | np.ndarray, values: Any) -> None:
        """Add the values of several steps.

        Args:
            steps: [n], increasing, and later than the last step.
            values: [n, *shape].

        Raises:
            ValueError: shapes do not match, or steps do not increase; nothing has changed.
        """
        steps, values = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=self.dtype)
        if steps.ndim != 1 or values.shape != (len(steps), *self.shape):
            raise ValueError(f"values are {values.shape} for steps {steps.shape}: must be {(len(steps), *self.shape)}")
        if len(steps) == 0:
            return
        last = self.last_step
        if (np.diff(steps) <= 0).any() or (last is not None and steps[0] <= last):
            shown = steps.tolist() if len(steps) < 5 else f"{steps[0]} ... {steps[-1]}"
            raise ValueError(
                f"steps {shown} after step {last}: each must be later than the one before; to continue from an "
                "earlier step, use another run"
            )
        finite = np.isfinite(values)
        _find_first(self.first_nonfinite, ~finite, steps)
        _find_first(self.first_positive, finite & (values > 0), steps)
        self._blocks.extend(self._count, steps, values)
        self._put_into_ring(steps, values)
        self._count += len(steps)

    def recent(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the last values, at most 2,048: their steps, int64 [n], and the values, [n, *shape]."""
        return self.since(0)

    def since(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return steps [n] and values [n, *shape] added after the first `count` values, but at most the last 2,048."""
        n = len(self._recent_steps)
        places = np.arange(max(count, self._count - n), self._count) % max(n, 1)
        return self._recent_steps[places], self._recent[places]

    def curve(self) -> Curve:
        """Return all points; their arrays are read-only, because they are shared."""
        if self._whole is not None and self._whole[0] == self._count:
            return self._whole[1]  # a picture asks several times
        if self._count <= len(self._recent_steps):
            steps, values = self.recent()
            is_finite = np.isfinite(values)
            finite = values if is_finite.all() else np.where(is_finite, values, np.nan).astype(self.dtype)
            curve = Curve(steps, steps, finite, finite, finite, (~is_finite).astype(np.int64))
        else:
            n = self._blocks.used(self._count)
            curve = Curve(*(array[:n].copy() for array in self._blocks.arrays))
        for array in curve:
            array.flags.writeable = False
        self._whole = self._count, curve
        return curve

    def means(self, most: int = 512) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole series as a few means, for pictures of many lines.

        Args:
            most: the greatest number of points, >= 1.

        Returns:
            The step in the middle of each point, float64 [n], and the mean of its finite values, float64 [n, *shape]; NaN if
            it has none.
        """
        blocks, arrays, n = self._blocks, self._blocks.arrays, self._blocks.used(self._count)
        each = -(-n // most) or 1
        kind = blocks.each, each
        # Full points do not change, so a live picture computes only those after them.
        if self._coarse is None or self._coarse[0] != kind or len(self._coarse[1]) != most:
            self._coarse = kind, np.empty((most, *self.shape)), 0
        _, means, done = self._coarse
        part = arrays.mean[done * each : n]
        count = -(-len(part) // each)
        padded = np.full((count * each, *self.shape), np.nan)
        padded[: len(part)] = part
        rows = padded.reshape(count, each, *self.shape)
        is_finite = np.isfinite(rows)
        number = is_finite.sum(axis=1)
        total = np.where(is_finite, rows, 0.0).sum(axis=1)
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
        """Return the whole series as arrays by name, for a file; `from_arrays` reads them.

        Blocks and first steps are left out if no values have been merged, because they follow from the values then.
        """
        n, (steps, values) = self._blocks.used(self._count), self.recent()
        arrays = {"recent_steps": steps, "recent": values, "counts": np.array([self._count, self._blocks.each])}
        if self._count <= POINTS:
            return arrays
        arrays |= {name: array[:n] for name, array in self._blocks.arrays._asdict().items()}
        return arrays | {name: getattr(self, name) for name in FIRSTS}

    @classmethod
    def from_arrays(cls, state: Mapping[str, np.ndarray]) -> Series:
        """Make a series from the arrays that `to_arrays` returned.

        Raises:
            ValueError: the arrays are damaged: their shapes, dtypes or counts contradict each other.
        """
        recent, steps, counts = state["recent"], state["recent_steps"], state["counts"]
        if counts.shape != (2,) or counts.dtype.kind != "i" or recent.ndim < 1 or recent.dtype.kind != "f":
            raise ValueError(f"its values are {recent.dtype} {recent.shape}, with counts {counts.dtype} {counts.shape}")
        series = cls(recent.shape[1:], recent.dtype)
        if len(state) == 3 and counts.tolist() == [len(steps), 1] and steps.dtype == np.int64:
            series.extend(steps, recent)
            return series
        blocks = series._blocks
        series._count, blocks.each = (int(number) for number in counts)
        if series._count <= POINTS or blocks.each < 1 or len(recent) != POINTS:
            raise ValueError("its numbers of values contradict each other")
        blocks.full = series._count // blocks.each
        n = blocks.used(series._count)
        kinds: dict[str, tuple[Any, tuple[int, ...]]]
        kinds = dict.fromkeys(("low", "mean", "high"), (recent.dtype, (n, *series.shape)))
        kinds |= {"first": (np.int64, (n,)), "last": (np.int64, (n,)), "nonfinite": (np.int64, (n, *series.shape))}
        kinds |= {"recent_steps": (np.int64, (len(recent),))} | dict.fromkeys(FIRSTS, (np.int64, series.shape))
        for name, (dtype, shape) in kinds.items():
            array = state[name]
            if array.shape != shape or array.dtype != dtype or n > POINTS:
                raise ValueError(f"{name} is {array.dtype} {array.shape} instead of {np.dtype(dtype)} {shape}")
        first, last = state["first"], state["last"]
        if (np.diff(steps) <= 0).any() or (first > last).any() or (first[1:] <= last[:-1]).any():
            raise ValueError("its steps do not increase")
        series.first_nonfinite, series.first_positive = (state[name].copy() for name in FIRSTS)
        blocks.arrays = Curve(*(_longer(state[name], POINTS if n > POINTS // 2 else n) for name in Curve._fields))
        turn = series._count % POINTS  # of the ring, so that the next value overwrites the oldest
        series._recent_steps, series._recent = np.roll(steps, turn), np.roll(recent, turn, axis=0)
        return series


def _find_first(found: np.ndarray, marked: np.ndarray, steps: np.ndarray) -> None:
    """Set, in place, the first of `steps` at which an element is `marked`, bool [n, *shape], if it has none yet."""
    new = marked.any(axis=0) & (found == NEVER)
    if new.any():
        found[new] = steps[marked.argmax(axis=0)[new]]


class _Blocks:
    """The blocks of a `Series`, up to 2,048. When there is no room for another one, each two neighbours are merged.

    Attributes:
        full: how many blocks are full; one more may have begun.
        each: how many values a full block has.
        arrays: the summaries of the blocks, and unused rows after them.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self._shape = tuple(shape)
        self.full, self.each = 0, 1
        low, mean, high = (np.zeros((0, *self._shape), dtype=dtype) for _ in range(3))
        steps = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.arrays = Curve(*steps, low, mean, high, np.zeros((0, *self._shape), dtype=np.int64))

    def used(self, count: int) -> int:
        """Return how many blocks `count` values take."""
        return self.full + (count > self.full * self.each)

    def extend(self, count: int, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values [n, *shape] and their steps [n]; the blocks have `count` values so far."""
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
        """Put values [n, each, *shape] into the next n blocks, the first of which has `inside` values already."""
        n, start = len(steps), self.full
        if start + n > len(self.arrays.first):
            room = min(POINTS, max(64, 2 * len(self.arrays.first), start + n))
            self.arrays = Curve(*(_longer(array, room) for array in self.arrays))
        blocks = Curve(*(array[start : start + n] for array in self.arrays))  # views
        finite = np.isfinite(values)
        number, before = finite.sum(axis=1), inside - blocks.nonfinite if inside else np.zeros(())
        low = np.fmin.reduce(np.where(finite, values, np.nan), axis=1)
        high = np.fmax.reduce(np.where(finite, values, np.nan), axis=1)
        with np.errstate(invalid="ignore"):
            mean = np.where(finite, values, 0).sum(axis=1, dtype=np.float64)
            if inside:
                mean += np.where(before > 0, blocks.mean, 0) * before
                low, high = np.fmin(low, blocks.low), np.fmax(high, blocks.high)
            mean /= number + before
        if not inside:
            blocks.first[:], blocks.nonfinite[:] = steps[:, 0], 0
        blocks.last[:] = steps[:, -1]
        blocks.low[:], blocks.mean[:], blocks.high[:] = low, mean, high
        blocks.nonfinite[:] += values.shape[1] - number

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
    """Return a copy with at least `room` rows; new rows are 0."""
    longer = np.zeros((max(room, len(array)), *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer
