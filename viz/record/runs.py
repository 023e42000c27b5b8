"""Recorded runs: series by name, in memory and in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.messages import there_are
from ...trainer.serialization import files
from ...trainer.validation import instance
from .series import PARTS, Series

__all__ = ["Run", "RunSet", "readable"]


def readable(name: str) -> str:
    """Return the name with lone surrogates escaped, which neither files nor fonts can represent."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


class Run:
    """The recording of one training run.

    Attributes:
        name: the run's name in pictures.
        scalars: series of numbers by name, such as "loss" and "learning_rate".
        tensors: series by quantity, such as "gradient_norm", of one number for each parameter, [n_parameters].
        histograms: series by tensor kind ("weight", "gradient", "update") of counts, [n_parameters, n_bins].
        weights: series by parameter name of the values of single elements, [n_elements]; see the argument `weights` of
            `Recorder`.
        parameters: names of the parameters, in the order of the columns of `tensors` and `histograms`.
        edges: edges between the bins of the histograms, float64 [n_bins - 1].
        notes: facts about the run as text, by name, such as its optimizer.
        storage: how each parameter is stored, such as "bfloat16 with float32 master"; empty if unknown.
        activations: a run of the layers' outputs, whose `parameters` are names of layers, and whose `tensors` are
            "activation_mean", "activation_std" and "activation_zeros", a share; None if they are not recorded.
        version: a counter of changes, by which renderers notice them.
    """

    def __init__(
        self,
        name: str = "run",
        parameters: Iterable[str] = (),
        edges: Iterable[float] = (),
        notes: Mapping[str, str] | None = None,
        storage: Iterable[str] = (),
        layers: Iterable[str] = (),
    ) -> None:
        self.name, self.parameters = readable(str(name)), list(map(readable, parameters))
        self.edges = np.array(list(edges), dtype=np.float64)
        self.notes = {readable(str(key)): readable(str(value)) for key, value in (notes or {}).items()}
        self.storage = list(storage)
        if self.storage and len(self.storage) != len(self.parameters):
            raise ValueError(
                f"storage has {len(self.storage)} texts for {len(self.parameters)} parameters: one for each, or none"
            )
        self.scalars: dict[str, Series] = {}
        self.tensors: dict[str, Series] = {}
        self.histograms: dict[str, Series] = {}
        self.weights: dict[str, Series] = {}
        layers = list(layers)
        self.activations = Run(self.name, layers) if layers else None
        self.version = 0

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of one step to `scalars`.

        Raises:
            ValueError: a name already has a value of this step or a later one; nothing has changed.
        """
        values = {readable(name): value for name, value in values.items()}
        for name in values:
            last = self.scalars[name].last_step if name in self.scalars else None
            if last is not None and step <= last:
                raise ValueError(f"step={step}: {name!r} has a value of step {last} already; steps must increase")
        for name, value in values.items():
            self.scalars.setdefault(name, Series()).append(step, value)
        self.version += 1

    def add_tensors(self, steps: Sequence[int] | np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Add several steps to `tensors`, [n_steps, n_parameters], and `histograms`, [n_steps, n_parameters, n_bins]."""
        for name, array in values.items():
            kind = self.tensors if array.ndim == 2 else self.histograms
            kind.setdefault(name, Series(array.shape[1:], np.float32)).extend(steps, array)
        self.version += 1

    def add_weights(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Add the elements of one step to `weights`: values [n_elements] by parameter name."""
        for name, array in values.items():
            self.weights.setdefault(name, Series(array.shape, np.float32)).append(step, array)
        self.version += 1

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose outputs are recorded; empty if none are."""
        return [] if self.activations is None else self.activations.parameters

    @property
    def last_step(self) -> int | None:
        """The last step with any value; None for an empty run."""
        lasts = [each.last_step for kind in self._kinds().values() for each in kind.values()]
        return max((last for last in lasts if last is not None), default=None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file, which `Run.load` and `RunSet.load` read."""
        RunSet([self]).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run from a file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, is not a file of runs, or has more than one run.
        """
        runs = RunSet.load(path)
        if len(runs) != 1:
            raise ValueError(f"path={str(path)!r} has {len(runs)} runs: use RunSet.load")
        return next(iter(runs))

    def to_pandas(self) -> Any:
        """Return the last 2,048 values of each scalar as a `pandas.DataFrame`: a row for each step, a column for each name.

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
        names = ", ".join([*self.scalars, *self.tensors, *(f"{what} histogram" for what in self.histograms)])
        return (
            f"Run({self.name!r}, {self.last_step or 0} steps, {len(self.parameters)} parameters, {names or 'nothing yet'})"
        )


class RunSet:
    """Runs by name, for comparison. Iterating gives the runs; `runs["adam"]` is the run of that name.

    Args:
        runs: runs with different names.

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
            TypeError: `run` is not a `Run`.
            ValueError: the set already has a run of this name.
        """
        instance("run", run, Run, "a Run", "; a Recorder has one as its attribute `run`")
        if run.name in self._runs:
            raise ValueError(f"there is a run {run.name!r} already: give this one another name")
        self._runs[run.name] = run

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            raise KeyError(f"there is no run {name!r}.{there_are(name, self._runs)}")
        return self._runs[name]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunSet({', '.join(map(repr, self._runs))})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all runs to one safetensors file. The file is written completely or not at all.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        arrays: dict[str, np.ndarray] = {}
        described = []
        for i, run in enumerate(self):
            described.append(_header(str(i), run, arrays))
        files.write_arrays("path", path, "runs", {"runs": described}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunSet:
        """Read a file that `save` has written.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, or is not a file of runs.
        """
        with files.contents("path", path, "a file of runs"):
            about, arrays = files.read_arrays(path, "runs")
            runs = cls(_run(str(i), header, arrays) for i, header in enumerate(about["runs"]))
            if arrays:
                raise ValueError(f"{next(iter(arrays))!r} is of no run")
            return runs


def _header(place: str, run: Run, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the header of a run in a file, and add its arrays to `arrays` under names that begin with `place`."""
    kinds = run._kinds()
    for kind, members in kinds.items():
        for k, series in enumerate(members.values()):
            arrays.update({f"{place}/{kind}/{k}/{part}": array for part, array in series.to_arrays().items()})
    return {
        "name": run.name,
        "parameters": run.parameters,
        "edges": run.edges.tolist(),
        "notes": run.notes,
        "storage": run.storage,
        "series": {kind: list(members) for kind, members in kinds.items()},
        "activations": run.activations and _header(f"{place}/activations", run.activations, arrays),
    }


def _run(i: str, header: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Return run `i` of a file from its header, and remove its arrays from `arrays`."""
    texts = [header["name"], *header["parameters"], *header["notes"].values(), *header["storage"]]
    if not all(isinstance(text, str) for text in texts) or not isinstance(header["parameters"], list):
        raise ValueError(f"names and notes of run {i} must be strings")
    run = Run(header["name"], header["parameters"], header["edges"], header["notes"], header["storage"])
    if run.edges.ndim != 1 or set(header["series"]) != set(run._kinds()):
        raise ValueError(f"run {i} has edges {header['edges']!r:.80} and series of {', '.join(header['series'])}")
    for kind, names in header["series"].items():
        for k, name in enumerate(names):
            places = {part: f"{i}/{kind}/{k}/{part}" for part in PARTS}
            state = {part: arrays.pop(place) for part, place in places.items() if place in arrays}
            if not isinstance(name, str) or name in run._kinds()[kind]:
                raise ValueError(f"a name of {kind} of run {i} is {name!r}")
            run._kinds()[kind][name] = Series.from_arrays(state)
    if header.get("activations") is not None:
        run.activations = _run(f"{i}/activations", header["activations"], arrays)
    return run
