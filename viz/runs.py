"""What was recorded of training runs, as plain arrays of bounded size, in memory and in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..trainer import files

__all__ = ["Curve", "Run", "RunSet", "Series"]

POINTS = 2048  # of a curve at most; more than there are pixels across
FORMAT = 1
_PARTS = ("first", "last", "low", "mean", "high", "nonfinite", "recent_steps", "recent", "counts")  # of a series in a file


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

    def _state(self) -> dict[str, np.ndarray]:
        n = self._blocks + bool(self._in_open_block())
        names = ("first", "last", "low", "mean", "high", "nonfinite")
        steps, values = self.recent()
        blocks = {name: array[:n] for name, array in zip(names, self._arrays(), strict=True)}
        return blocks | {"recent_steps": steps, "recent": values, "counts": np.array([self._count, self._each])}

    @classmethod
    def _of_state(cls, state: Mapping[str, np.ndarray]) -> Series:
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


class Run:
    """What was recorded of one run.

    Attributes:
        name: what pictures call it.
        scalars: numbers over steps by name, such as "loss" and "learning_rate".
        tensors: by quantity, such as "gradient_norm", a number for each parameter, [n_parameters].
        histograms: by what, such as "gradient", counts for each parameter, [n_parameters, n_bins].
        weights: by the parameter's name, the values of elements of it that are followed.
        parameters: names of the parameters, in the order of the tensors' columns.
        edges: float64 [n_bins - 1], between the histograms' bins.
        notes: of the run, as words by name: which optimizer, and so on.
        version: a number that grows with each change, for whoever draws it.
    """

    def __init__(
        self,
        name: str = "run",
        parameters: Iterable[str] = (),
        edges: Iterable[float] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.parameters, self.edges = str(name), list(parameters), np.array(list(edges), dtype=np.float64)
        self.notes = {str(key): str(value) for key, value in (notes or {}).items()}
        self.scalars: dict[str, Series] = {}
        self.tensors: dict[str, Series] = {}
        self.histograms: dict[str, Series] = {}
        self.weights: dict[str, Series] = {}
        self.version = 0

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of one step, by name.

        Raises:
            ValueError: the step is not later than the last one of a name; nothing has been changed.
        """
        for name in values:
            last = self.scalars[name].last_step if name in self.scalars else None
            if last is not None and step <= last:
                raise ValueError(f"step={step}: {name!r} has a value of step {last} already; steps must increase")
        for name, value in values.items():
            self.scalars.setdefault(name, Series()).append(step, value)
        self.version += 1

    def add_tensors(self, steps: Sequence[int] | np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Add what was measured of all parameters: [n_steps, n_parameters], and for histograms their bins."""
        for name, array in values.items():
            kind = self.tensors if array.ndim == 2 else self.histograms
            kind.setdefault(name, Series(array.shape[1:], np.float32)).extend(steps, array)
        self.version += 1

    def add_weights(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Add the values of followed elements at one step, by the parameter's name."""
        for name, array in values.items():
            self.weights.setdefault(name, Series(array.shape, np.float32)).append(step, array)
        self.version += 1

    @property
    def last_step(self) -> int | None:
        """The last step of which anything is known; None before the first."""
        lasts = [each.last_step for kind in self._kinds().values() for each in kind.values()]
        return max((last for last in lasts if last is not None), default=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as a set of one run."""
        RunSet([self]).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run in a file that `save` wrote.

        Raises:
            ValueError: the file has not exactly one run, or is none.
        """
        runs = RunSet.load(path)
        if len(runs) != 1:
            raise ValueError(f"path={str(path)!r} has {len(runs)} runs: use RunSet.load")
        return next(iter(runs))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: a row for each step that is still there as it was, a column for each scalar.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas as pd

        columns = {}
        for name, series in self.scalars.items():
            steps, values = series.recent()
            columns[name] = pd.Series(values, index=steps)
        return pd.DataFrame(columns).rename_axis("step")

    def _kinds(self) -> dict[str, dict[str, Series]]:
        return {"scalars": self.scalars, "tensors": self.tensors, "histograms": self.histograms, "weights": self.weights}

    def __repr__(self) -> str:
        known = ", ".join([*self.scalars, *self.tensors, *(f"{what} histogram" for what in self.histograms)])
        return (
            f"Run({self.name!r}, {self.last_step or 0} steps, {len(self.parameters)} parameters, {known or 'nothing yet'})"
        )


class RunSet:
    """Several runs, by name, to be compared.

    Args:
        runs: runs of different names.

    Example:
        >>> from tristep.viz import Run, RunSet
        >>> run = Run("adam")
        >>> run.add_scalars(1, {"loss": 2.3})
        >>> RunSet([run])["adam"].scalars["loss"].curve().mean
        array([2.3])
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs: dict[str, Run] = {}
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Add a run.

        Raises:
            TypeError, ValueError: it is none, or there is one of its name.
        """
        if not isinstance(run, Run):
            raise TypeError(f"run must be a Run, got {type(run).__name__}; a Recorder has one as its attribute `run`")
        if run.name in self._runs:
            raise ValueError(f"there is a run {run.name!r} already: give this one another name")
        self._runs[run.name] = run

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            raise KeyError(f"there is no run {name!r}; there are {', '.join(map(repr, self._runs)) or 'none'}")
        return self._runs[name]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunSet({', '.join(map(repr, self._runs))})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all runs to one file (NumPy's npz, without pickles): whole, or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        arrays: dict[str, np.ndarray] = {}
        described = []
        for i, run in enumerate(self):
            kinds = run._kinds()
            for kind, members in kinds.items():
                for k, series in enumerate(members.values()):
                    arrays |= {f"{i}/{kind}/{k}/{part}": array for part, array in series._state().items()}
            names = {kind: list(members) for kind, members in kinds.items()}
            own = {"name": run.name, "parameters": run.parameters, "edges": run.edges.tolist(), "notes": run.notes}
            described.append(own | {"series": names})
        files.write_npz("path", path, "runs", {"tristep runs": FORMAT, "runs": described}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunSet:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not such a file, or damaged.
        """
        with files.contents("path", path, "a file of runs"):
            about, arrays = files.read_npz(path, "runs")
            if about is None:  # as earlier versions have written them
                about = files.parse_array(arrays.pop("header"))
            if about["tristep runs"] != FORMAT:
                raise ValueError(f"it has format {about['tristep runs']}, this version knows {FORMAT}")
            runs = cls(_run(i, own, arrays) for i, own in enumerate(about["runs"]))
            if arrays:
                raise ValueError(f"{next(iter(arrays))!r} is of no run")
            return runs


def _run(i: int, own: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """The run of this description; its arrays are taken out of those of the file."""
    texts = [own["name"], *own["parameters"], *own["notes"].values()]
    if not all(isinstance(text, str) for text in texts) or not isinstance(own["parameters"], list):
        raise ValueError(f"names and notes of run {i} must be strings")
    run = Run(own["name"], own["parameters"], own["edges"], own["notes"])
    if run.edges.ndim != 1 or set(own["series"]) != set(run._kinds()):
        raise ValueError(f"run {i} has edges {own['edges']!r:.80} and series of {', '.join(own['series'])}")
    for kind, names in own["series"].items():
        for k, name in enumerate(names):
            state = {part: arrays.pop(f"{i}/{kind}/{k}/{part}") for part in _PARTS}
            if not isinstance(name, str) or name in run._kinds()[kind]:
                raise ValueError(f"a name of {kind} of run {i} is {name!r}")
            run._kinds()[kind][name] = Series._of_state(state)
    return run


def _longer(array: np.ndarray, room: int) -> np.ndarray:
    longer = np.zeros((max(room, len(array)), *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def _pairs(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return array[0::2], array[1::2]


def _shortened(steps: np.ndarray) -> str:
    return str(steps.tolist()) if len(steps) < 5 else f"{int(steps[0])} ... {int(steps[-1])}"
