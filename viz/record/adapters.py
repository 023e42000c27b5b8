"""How each logger takes the numbers of a step: files, TensorBoard, MLflow, Weights & Biases, Trackio, a function."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...trainer.checkpoint import files
from .event_files import EventFile

__all__ = ["Adapter", "adapter"]

MOST_METRICS = 1000  # that one call of MLflow's store takes


class Adapter:
    """A function of a step and its numbers by name. The base of those of loggers that want more than that.

    Args:
        log: takes the step and the numbers, and nothing else.
        name: of the logger, for messages.
    """

    takes_histograms = False

    def __init__(self, log: Callable[[int, dict[str, float]], Any], name: str) -> None:
        self.log, self.name = log, name

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log counts [n] of a step, between edges [n + 1]."""

    def flush(self) -> None:
        """Called after each few steps."""

    def close(self) -> None:
        """Close what this adapter has opened; what users have opened stays open."""


class _File(Adapter):
    """A new file of text, of which each step is a line that ends in a newline."""

    def __init__(self, path: Path) -> None:
        super().__init__(self._log, f"file {str(path)!r}")
        self.path = path
        if not path.parent.is_dir():
            raise FileNotFoundError(f"to has {str(path)!r}: there is no folder {str(path.parent)!r}")
        try:
            self._file: IO[str] = open(path, "x", encoding="utf-8", newline="")  # noqa: SIM115  # open while training is
        except FileExistsError:
            raise FileExistsError(f"to has {str(path)!r}: there is such a file; choose another name, or remove it") from None

    def _log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _JsonLines(_File):
    def _log(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step} | values) + "\n")


class _Csv(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: dict[str, int] = {}  # their places after that of the step

    def _log(self, step: int, values: dict[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._widen(new)
        row = [""] * len(self._columns)
        for name, value in values.items():
            row[self._columns[name]] = repr(value)
        csv.writer(self._file, lineterminator="\n").writerow([step, *row])

    def _widen(self, new: list[str]) -> None:
        """Write the file again with these columns, too: a name seldom comes after the first step."""
        columns, more = [*self._columns, *new], [""] * len(new)
        self._file.close()

        def write(file: IO[bytes]) -> None:
            with open(self.path, encoding="utf-8", newline="") as old:
                text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
                writer = csv.writer(text, lineterminator="\n")
                writer.writerow(["step", *columns])
                rows = csv.reader(old)
                next(rows, None)
                writer.writerows([*row, *more] for row in rows)
                text.detach()

        try:
            files.replace("to", self.path, write)
            self._columns = {name: place for place, name in enumerate(columns)}
        finally:
            self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115


class _TensorBoard(Adapter):
    """Another event file in a SummaryWriter's folder.

    One event has all numbers of a step, which takes a small part of the time of an `add_scalar` for each.
    """

    takes_histograms = True

    def __init__(self, writer: Any) -> None:
        folder = str(writer.get_logdir())
        super().__init__(self._log, f"TensorBoard in {folder!r}")
        protocol: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._summary, self._histogram = protocol.Summary, protocol.HistogramProto
        self._file: Any
        if "://" in folder:  # a bucket, say, to which TensorBoard's writer knows the way
            self._file = import_module("torch.utils.tensorboard").FileWriter(folder, filename_suffix=".tristep")
        else:
            self._file = EventFile(folder, import_module("tensorboard.compat.proto.event_pb2").Event)

    def _log(self, step: int, values: dict[str, float]) -> None:
        value = self._summary.Value
        self._file.add_summary(
            self._summary(value=[value(tag=name, simple_value=number) for name, number in values.items()]), step
        )

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        middle, there = (edges[1:] + edges[:-1]) / 2, np.flatnonzero(counts)
        histogram = self._histogram(
            min=edges[there[0]] if there.size else 0.0,
            max=edges[there[-1] + 1] if there.size else 0.0,
            num=counts.sum(),
            sum=(counts * middle).sum(),
            sum_squares=(counts * middle**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._file.add_summary(self._summary(value=[self._summary.Value(tag=name, histo=histogram)]), step)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _MLflow(Adapter):
    """MLflow's module, or a run that it has started. Its active run is that of a thread, so the run is named."""

    def __init__(self, target: Any) -> None:
        self._mlflow = import_module("mlflow")
        active = self._mlflow.active_run() if target is self._mlflow else target
        if active is None:
            raise ValueError("to has mlflow, which has no active run: call mlflow.start_run() before")
        self._run = active.info.run_id
        super().__init__(self._log, f"MLflow's run {self._run}")

    def _log(self, step: int, values: dict[str, float]) -> None:
        items = list(values.items())
        for first in range(0, len(items), MOST_METRICS):
            part = dict(items[first : first + MOST_METRICS])
            self._mlflow.log_metrics(part, step=step, run_id=self._run, synchronous=True)


class _LogMethod(Adapter):
    """What has `log(numbers, step=...)`: the runs and modules of Weights & Biases and of Trackio."""

    def __init__(self, target: Any, library: str) -> None:
        super().__init__(lambda step, values: target.log(values, step=step), f"{library}'s {_short(target)}")
        self._target = target
        self._histogram = getattr(import_module("wandb"), "Histogram", None) if library == "wandb" else None
        self.takes_histograms = self._histogram is not None

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        if self._histogram is not None:
            self._target.log({name: self._histogram(np_histogram=(counts.astype(np.int64), edges))}, step=step)


def adapter(target: Any) -> Adapter:
    """The adapter of what a user has given as a logger.

    Raises:
        TypeError, ValueError: it is nothing that can be logged to.
        FileExistsError, FileNotFoundError: it is the name of a file that is there, or in no folder.
    """
    if isinstance(target, (str, os.PathLike)):
        path = Path(target)
        kinds: Mapping[str, type[_File]] = {".csv": _Csv, ".jsonl": _JsonLines}
        if path.suffix not in kinds:
            raise ValueError(
                f"to has {str(target)!r}: a file's name must end in .csv or .jsonl; TensorBoard is a SummaryWriter"
            )
        return kinds[path.suffix](path)
    library = str(getattr(target, "__name__", type(target).__module__)).partition(".")[0]
    boards = sys.modules.get("torch.utils.tensorboard")
    if boards is not None and isinstance(target, boards.SummaryWriter):
        return _TensorBoard(target)
    if library == "mlflow":
        return _MLflow(target)
    if callable(getattr(target, "add_scalar", None)):  # tensorboardX, and others with TensorBoard's methods

        def add(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return Adapter(add, _short(target))
    if callable(getattr(target, "log", None)):
        return _LogMethod(target, library)
    if callable(target):
        return Adapter(target, _short(target))
    raise TypeError(
        f"to has {target!r} ({type(target).__name__}): must be the name of a .csv or .jsonl file, a SummaryWriter, a run of "
        "W&B, Trackio or MLflow, or a function that takes a step and a dict"
    )


def _short(target: Any) -> str:
    return getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
