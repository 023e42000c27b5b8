"""Adapters to loggers: files, TensorBoard, Weights & Biases, functions."""

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

from ...trainer.serialization import files
from ...trainer.validation import absolute_path

__all__ = ["Adapter", "adapter"]


class Adapter:
    """The interface to one logger. Instances call the function `log` with a step and its numbers by name.

    Subclasses adapt other loggers. `name` is the logger's name in messages.
    """

    takes_histograms = False  # whether `log_histogram` does anything

    def __init__(self, log: Callable[[int, dict[str, float]], Any], name: str) -> None:
        self.log, self.name = log, name

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log a histogram of one step: counts [n] of the bins between `edges` [n + 1]."""

    def flush(self) -> None:
        """Write buffered numbers; called every few steps."""

    def close(self) -> None:
        """Close the files that this adapter has opened. Loggers that the user has opened stay open."""


class _File(Adapter):
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
        self._columns: dict[str, int] = {}  # index of each column, not counting "step"

    def _log(self, step: int, values: dict[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._widen(new)
        row = [""] * len(self._columns)
        for name, value in values.items():
            row[self._columns[name]] = repr(value)
        csv.writer(self._file, lineterminator="\n").writerow([step, *row])

    def _widen(self, new: list[str]) -> None:
        """Rewrite the file with additional columns. That is rare: most names occur from the first step on."""
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
    """A further event file in a SummaryWriter's folder.

    One event holds all numbers of a step, which is much faster than one `add_scalar` for each number.
    """

    takes_histograms = True

    def __init__(self, writer: Any) -> None:
        folder = str(writer.get_logdir())
        super().__init__(self._log, f"TensorBoard in {folder!r}")
        if "://" not in folder and not Path(folder).is_dir():
            raise FileNotFoundError(
                f"to has a SummaryWriter of {folder!r}, and {str(Path(folder).absolute())!r} does not exist: after os.chdir "
                "make the SummaryWriter with an absolute log_dir"
            )
        protocol: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._summary, self._histogram = protocol.Summary, protocol.HistogramProto
        place = folder if "://" in folder else str(Path(folder).absolute())  # the writer opens its file again and again
        self._file: Any = import_module("torch.utils.tensorboard").FileWriter(place, filename_suffix=".tristep")

    def _log(self, step: int, values: dict[str, float]) -> None:
        value = self._summary.Value
        self._file.add_summary(
            self._summary(value=[value(tag=name, simple_value=number) for name, number in values.items()]), step
        )

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        centers, nonzero = (edges[1:] + edges[:-1]) / 2, np.flatnonzero(counts)
        histogram = self._histogram(
            min=edges[nonzero[0]] if nonzero.size else 0.0,
            max=edges[nonzero[-1] + 1] if nonzero.size else 0.0,
            num=counts.sum(),
            sum=(counts * centers).sum(),
            sum_squares=(counts * centers**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._file.add_summary(self._summary(value=[self._summary.Value(tag=name, histo=histogram)]), step)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _WandB(Adapter):
    """A run of Weights & Biases, or its module."""

    takes_histograms = True

    def __init__(self, target: Any) -> None:
        super().__init__(lambda step, values: target.log(values, step=step), f"wandb's {_short(target)}")
        self._target, self._histogram = target, import_module("wandb").Histogram

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._target.log({name: self._histogram(np_histogram=(counts.astype(np.int64), edges))}, step=step)


def adapter(target: Any) -> Adapter:
    """Return the adapter for a logger, an element of a recorder's argument `to`; raise for any other object or path."""
    if isinstance(target, (str, os.PathLike)):
        path = absolute_path("to", target)
        kinds: Mapping[str, type[_File]] = {".csv": _Csv, ".jsonl": _JsonLines}
        if path.suffix not in kinds:
            raise ValueError(
                f"to has {str(target)!r}: a file's name must end in .csv or .jsonl; TensorBoard is a SummaryWriter"
            )
        return kinds[path.suffix](path)
    boards = sys.modules.get("torch.utils.tensorboard")
    if boards is not None and isinstance(target, boards.SummaryWriter):
        return _TensorBoard(target)
    if str(getattr(target, "__name__", type(target).__module__)).partition(".")[0] == "wandb":
        return _WandB(target)
    if callable(target):
        return Adapter(target, _short(target))
    raise TypeError(
        f"to has {target!r} ({type(target).__name__}): must be the name of a .csv or .jsonl file, a SummaryWriter, a run of "
        "W&B, or a function that takes a step and a dict"
    )


def _short(target: Any) -> str:
    return getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
