"""Runs that others have recorded: CSV, JSON lines, TensorBoard's event files, offline runs of Weights & Biases."""

from __future__ import annotations

import csv
import json
import os
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...trainer.checkpoint import files
from ...viz.record.probes import QUANTITIES
from ...viz.record.runs import Run, readable
from ...viz.record.series import POINTS, Series
from .wandb_files import wandb_rows

__all__ = ["read_run"]

Rows = Iterator[tuple[int, dict[str, float]]]  # steps, and numbers of each by name
Reader = Callable[[Counter[str]], Rows]  # it counts what it leaves out

STEP_NAMES = ("step", "_step", "global_step", "iteration")  # upper case, too
MOST_SCALARS, MOST_PARAMETERS = 4096, 1 << 16  # names in a run
MOST_LINE, MOST_RECORD = 1 << 24, 1 << 26  # bytes
MOST_STEP = 1 << 62
NO_NUMBER, AGAIN = "values that are no numbers", "values of steps that come again or go back"  # what is left out
AT_ONCE = 1024  # values of a name
MOST_ROOM, MOST_EMPTY = 1 << 21, 8  # room for numbers of parameters that any file gets, and for each number in it


def read_run(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    names: Mapping[str, str] | None = None,
    step: str | None = None,
) -> Run:
    """A run that another program has recorded, for all views of runs.

    What `Recorder` has logged by names such as "gradient_norm/0.weight" are numbers of parameters again. All else are
    scalars. Files are read in bounded memory, and nothing in them is executed.

    Args:
        path: of a .csv file with a header (of Lightning, TensorBoard, W&B, MLflow ...), or of a .jsonl file with an object
            in each line; an event file of TensorBoard, or a folder of such, which need `tensorboard`; a .wandb file of
            Weights & Biases, or the folder of an offline run; or a file of `Run.save`.
        name: of the run; None is that of the file or folder.
        names: new names by those in the file, such as {"train/loss": "loss", "lr": "learning_rate"}: "loss",
            "learning_rate", "epoch" and "seconds" are those that views know.
        step: the column of a .csv or .jsonl file that has the steps; None is the first of "step", "_step", "global_step"
            and "iteration".

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it is none of these, or damaged, or has more than 4,096 scalars or 65,536 parameters, or numbers of
            few of its parameters at most steps.
        ModuleNotFoundError: `tensorboard` is not installed.

    Warns:
        UserWarning: something was left out: text, images and histograms; values of a step that is not later than the one
            before; an incomplete end, such as that of a program that was killed.

    Example:
        >>> import pathlib, tempfile
        >>> from tristep.viz import read_run
        >>> file = pathlib.Path(tempfile.mkdtemp(), "metrics.csv")
        >>> _ = file.write_text("step,train_loss\\n1,2.5\\n2,1.5\\n")
        >>> read_run(file, names={"train_loss": "loss"}).scalars["loss"].recent()[1]
        array([2.5, 1.5])
    """
    path = Path(path)
    if path.suffix in (".safetensors", ".npz"):  # earlier versions wrote npz files
        run = Run.load(path)
        run.name = run.name if name is None else name
        return run
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such file or folder")
    kind, readers = _readers(path, step)
    left: Counter[str] = Counter()

    def rows(left: Counter[str]) -> Rows:
        for file, reader in readers:
            with files.contents("path", file, f"a {kind} file"):
                for number, values in reader(left):
                    if abs(number) >= MOST_STEP:
                        raise ValueError(f"step {number} is too large")
                    yield number, {readable((names or {}).get(key, key)): value for key, value in values.items()}

    run = _assembled(rows, path.stem if name is None else name, left)
    run.notes["source"] = kind
    if left:
        what = ", ".join(f"{count:,} {reason}" for reason, count in left.items())
        warnings.warn(f"path={str(path)!r}: left out {what}", stacklevel=2)
    return run


def _readers(path: Path, step: str | None) -> tuple[str, list[tuple[Path, Reader]]]:
    """The kind of file that it is, and the files with what reads them."""
    if path.suffix in (".csv", ".jsonl"):
        read = _csv_rows if path.suffix == ".csv" else _json_rows
        return {".csv": "CSV", ".jsonl": "JSON lines"}[path.suffix], [(path, partial(read, path, step))]
    if step is not None:
        raise ValueError(f"step={step!r} is for .csv and .jsonl files: leave it out for {path.name!r}")
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    events = [file for file in inside if ".tfevents." in file.name]
    runs = [file for file in inside if file.suffix == ".wandb"]
    if events and not runs:
        return "TensorBoard", [(file, partial(_tensorboard_rows, file)) for file in events]
    if len(runs) == 1 and not events:
        return "Weights & Biases", [(runs[0], partial(wandb_rows, runs[0]))]
    raise ValueError(
        f"path={str(path)!r}: must be a .csv, .jsonl or .safetensors file, an event file of TensorBoard, a .wandb file, or "
        f"a folder with those of one run; here are {len(events)} event files and {len(runs)} .wandb files"
    )


def _assembled(rows: Callable[[Counter[str]], Rows], name: str, left: Counter[str]) -> Run:
    """A run of these rows. They are read twice, first for the names: arrays must be as wide as there are parameters."""
    scalars: dict[str, None] = {}
    parameters: dict[str, int] = {}
    n_numbers, n_rows, latest = 0, Counter[str](), dict[str, int]()  # by quantity
    for step, values in rows(Counter()):
        for key in values:
            parameter = _parameter(key)
            if parameter is None:
                scalars.setdefault(key)
                continue
            parameters.setdefault(parameter, len(parameters))
            quantity = key.partition("/")[0]
            n_numbers += 1
            n_rows[quantity] += step > latest.get(quantity, -MOST_STEP)
            latest[quantity] = max(step, latest.get(quantity, -MOST_STEP))
        if len(scalars) > MOST_SCALARS or len(parameters) > MOST_PARAMETERS:
            raise ValueError(f"run {name!r} has more than {MOST_SCALARS:,} scalars or {MOST_PARAMETERS:,} parameters")
    room = sum(min(n, 2 * POINTS) for n in n_rows.values()) * len(parameters)
    if room > max(MOST_ROOM, MOST_EMPTY * n_numbers):
        raise ValueError(
            f"run {name!r} has {n_numbers:,} numbers of {len(parameters):,} parameters at different steps, which need room "
            f"for {room:,}: each step must have those of most parameters"
        )
    run = Run(name, parameters)
    waiting: dict[str, tuple[list[int], list[float]]] = {}
    current: dict[str, tuple[int, np.ndarray]] = {}  # the row of a quantity that is not complete yet

    def add(key: str) -> None:
        steps, numbers = waiting.pop(key)
        run.scalars.setdefault(key, Series()).extend(steps, numbers)

    for step, values in rows(left):
        for key, value in values.items():
            parameter = _parameter(key)
            if parameter is None:
                series = run.scalars.get(key)
                steps, numbers = waiting.setdefault(key, ([], []))
                last = steps[-1] if steps else None if series is None else series.last_step
                if last is not None and step <= last:
                    left[AGAIN] += 1
                    continue
                steps.append(step)
                numbers.append(value)
                if len(steps) == AT_ONCE:
                    add(key)
                continue
            quantity = key.partition("/")[0]
            if quantity in current and step < current[quantity][0]:
                left[AGAIN] += 1
                continue
            if quantity not in current or step > current[quantity][0]:
                if quantity in current:
                    _add_row(run, quantity, *current[quantity])
                current[quantity] = step, np.full(len(parameters), np.nan)
            current[quantity][1][parameters[parameter]] = value
    for key in list(waiting):
        add(key)
    for quantity, row in current.items():
        _add_row(run, quantity, *row)
    return run


def _add_row(run: Run, quantity: str, step: int, row: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        run.add_tensors([step], {quantity: row[None].astype(np.float32)})


def _parameter(key: str) -> str | None:
    """The parameter of which the Recorder has logged this, if it has that name."""
    quantity, _, parameter = key.partition("/")
    return parameter if parameter and quantity in QUANTITIES else None


def _csv_rows(path: Path, step: str | None, left: Counter[str]) -> Rows:
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(_lines(file), strict=True)
        try:
            header = next(rows, [])
            if len(set(header)) < len(header):
                raise ValueError("two columns have the same name")
            place = header.index(_step_name(header, step))
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    if len(row) < len(header) and not _is_complete(path) and next(rows, None) is None:
                        left["incomplete last lines"] += 1
                        return
                    raise ValueError(f"line {rows.line_num} has {len(row)} cells, the header {len(header)}")
                values = {}
                for i, (name, cell) in enumerate(zip(header, row, strict=True)):
                    if i != place and cell.strip():
                        try:
                            values[name] = float(cell)
                        except ValueError:
                            left[NO_NUMBER] += 1
                if row[place].strip():
                    yield _step_number(row[place]), values
                else:
                    left["lines without a step"] += 1
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error


def _json_rows(path: Path, step: str | None, left: Counter[str]) -> Rows:
    with open(path, encoding="utf-8") as file:
        for line in _lines(file):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                if not line.endswith("\n"):
                    left["incomplete last lines"] += 1
                    return
                raise
            if not isinstance(values, dict):
                raise ValueError(f"a line is {line[:40]!r}, no object")
            own = _step_name(values, step)
            number = _step_number(values.pop(own))
            found = {key: value for key, value in values.items() if type(value) in (int, float)}
            left.update([NO_NUMBER] * (len(values) - len(found)))
            yield number, {key: float(value) for key, value in found.items()}


def _lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise ValueError(f"a line has more than {MOST_LINE:,} characters")
        yield line


def _is_complete(path: Path) -> bool:
    """Whether a file of text ends in a newline."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _step_name(names: Any, step: str | None) -> str:
    known = list(names)
    wanted = STEP_NAMES if step is None else (step,)
    for each in wanted:
        for name in known:
            if name == each or (step is None and name.lower() == each):
                return name
    raise ValueError(
        f"there is no column {' or '.join(map(repr, wanted))} among {', '.join(map(repr, known[:12]))}: name the one "
        "with the steps by step="
    )


def _step_number(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(f"a step is {value!r}: must be an integer")
    return int(number)


def _tensorboard_rows(path: Path, left: Counter[str]) -> Rows:
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader").EventFileLoader
        array = import_module("tensorboard.util.tensor_util").make_ndarray
        damaged = import_module("google.protobuf.message").DecodeError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading event files needs tensorboard: pip install tensorboard", name=error.name
        ) from error
    expected, found = _count_records(path, left), 0
    kinds: dict[str, str] = {}
    try:
        for event in loader(str(path)).Load():
            found += 1
            values = {}
            for value in event.summary.value:
                plugin = kinds.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                is_number = plugin == "scalars" and value.HasField("tensor")
                is_number &= all(dim.size == 1 for dim in value.tensor.tensor_shape.dim)  # a few bytes may claim any shape
                number = array(value.tensor) if is_number else np.zeros(0)
                if number.size == 1 and number.dtype.kind in "fiu":
                    values[value.tag] = float(number.reshape(()))
                else:
                    left[f"values of {plugin or 'unknown kind'}"] += 1
                if len(kinds) > MOST_SCALARS + MOST_PARAMETERS * len(QUANTITIES):
                    raise ValueError("it has too many names")
            if values:
                yield int(event.step), values
    except damaged as error:
        raise ValueError(f"record {found + 1}: {error}") from error
    if found < expected:
        raise ValueError(f"record {found + 1} of {expected} has a wrong checksum")


def _count_records(path: Path, left: Counter[str]) -> int:
    """How many complete records an event file has. The reader ends at a damaged one, and does not say so.

    A record is its length (uint64), that one's checksum, so many bytes, and their checksum (4 bytes each).
    """
    size, count = path.stat().st_size, 0
    with open(path, "rb") as file:
        while file.tell() < size:
            head = file.read(12)
            (length,) = struct.unpack("<Q", head[:8]) if len(head) == 12 else (0,)
            if length > MOST_RECORD:
                raise ValueError(f"record {count + 1} has {length:,} bytes, more than {MOST_RECORD:,}")
            if len(head) < 12 or file.tell() + length + 4 > size:
                left["incomplete last records"] += 1
                break
            file.seek(length + 4, os.SEEK_CUR)
            count += 1
    if not count:
        raise ValueError("it has no records")
    return count
