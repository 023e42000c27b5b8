"""Read runs that other programs recorded: CSV, JSON lines, TensorBoard event files, Hugging Face's trainer_state.json."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...trainer.serialization import files
from ...viz.record.probes import QUANTITIES
from ...viz.record.runs import Run, readable
from ...viz.record.series import POINTS, Series

__all__ = ["read_run"]

Rows = Iterator[tuple[int, dict[str, float]]]  # each step, and its numbers by name
# The argument counts what the reader skips, by reason. None for the numbers: values so far from this step on are void.
Reader = Callable[[Counter[str]], Iterator[tuple[int, dict[str, float] | None]]]

HUGGING_FACE = "trainer_state.json"
STEP_NAMES = ("step", "_step", "global_step", "iteration")  # in any case
MOST_SCALARS, MOST_PARAMETERS = 4096, 1 << 16  # names in a run
MOST_VALUES = MOST_SCALARS + MOST_PARAMETERS * len(QUANTITIES)  # in a line
MOST_LINE, MOST_RECORD = 1 << 24, 1 << 26  # bytes
MOST_STEP = 1 << 62
NO_NUMBER, AGAIN = "values that are no numbers", "values of steps that come again or go back"  # reasons to skip
BATCH = 1024  # values of a scalar that are added to the run at once
MOST_ROOM, MOST_EMPTY = 1 << 21, 8  # array elements: for any file, and for each number in the file


def read_run(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    names: Mapping[str, str] | None = None,
    step: str | None = None,
) -> Run:
    """Read a run that another program recorded, for all views of runs.

    Names that a `Recorder` logs for parameters, such as "gradient_norm/0.weight", become `Run.tensors`; all others become
    `Run.scalars`. Files are read in bounded memory, and nothing in them is executed.

    Args:
        path: one of: a .csv file with a header (from Lightning, TensorBoard, W&B, MLflow, ...); a .jsonl file with an object
            in each line; a TensorBoard event file or a folder of them (needs `tensorboard`); the trainer_state.json of a
            Hugging Face `Trainer`, or the folder of its checkpoint; a file of `Run.save`.
        name: the name of the run; None means the name of the file or folder.
        names: new names for names in the file, such as {"train/loss": "loss", "lr": "learning_rate"}. Views know "loss",
            "learning_rate", "epoch", "seconds" and "samples".
        step: the column of a .csv or .jsonl file with the steps; None means the first of "step", "_step", "global_step" and
            "iteration" that exists.

    Returns:
        The run; its `notes["source"]` is the kind of file.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: the file is damaged or of another kind, has more than 4,096 scalars or 65,536 parameters, or has numbers
            of only a few parameters at most steps.
        ModuleNotFoundError: `tensorboard` is not installed.

    Warns:
        UserWarning: values were skipped: text, images and histograms; values of a step that is not later than the step
            before; an incomplete end of a file, as a killed program leaves it.

    Example:
        >>> import pathlib, tempfile
        >>> from tristep.viz import read_run
        >>> file = pathlib.Path(tempfile.mkdtemp(), "metrics.csv")
        >>> _ = file.write_text("step,train_loss\\n1,2.5\\n2,1.5\\n")
        >>> read_run(file, names={"train_loss": "loss"}).scalars["loss"].recent()[1]
        array([2.5, 1.5])
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        run = Run.load(path)
        run.name = run.name if name is None else name
        return run
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such file or folder")
    kind, readers = _readers(path, step)
    left: Counter[str] = Counter()

    purges: list[int] = []  # where a resumed program has said that values from a step on are void

    def rows(left: Counter[str]) -> Rows:
        # Before each purge, the first void step; unknown in the first of two calls.
        limits = list(accumulate(reversed(purges), min))[::-1]
        purges.clear()
        for file, reader in readers:
            with files.contents("path", file, f"a {kind} file"):
                for number, values in reader(left):
                    if abs(number) >= MOST_STEP:
                        raise ValueError(f"step {number} is too large")
                    if values is None:
                        purges.append(number)
                    elif len(purges) >= len(limits) or number < limits[len(purges)]:
                        yield number, {readable((names or {}).get(key, key)): value for key, value in values.items()}

    run = _assembled(rows, path.stem if name is None else name, left)
    run.notes["source"] = kind
    if left:
        what = ", ".join(f"{count:,} {reason}" for reason, count in left.items())
        warnings.warn(f"path={str(path)!r}: left out {what}", stacklevel=2)
    return run


def _readers(path: Path, step: str | None) -> tuple[str, list[tuple[Path, Reader]]]:
    """Return the kind of file in words, and the files with their readers."""
    if path.suffix in (".csv", ".jsonl"):
        read = _csv_rows if path.suffix == ".csv" else _json_rows
        return {".csv": "CSV", ".jsonl": "JSON lines"}[path.suffix], [(path, partial(read, path, step))]
    if step is not None:
        raise ValueError(f"step={step!r} is for .csv and .jsonl files: leave it out for {path.name!r}")
    state = path / HUGGING_FACE if path.is_dir() else path
    if state.suffix == ".json" and state.is_file():
        return "Hugging Face", [(state, partial(_hugging_face_rows, state))]
    inside = sorted(path.iterdir(), key=_in_order) if path.is_dir() else [path]
    events = [file for file in inside if ".tfevents." in file.name]
    if not events:
        raise ValueError(
            f"path={str(path)!r}: must be a .csv, .jsonl or .safetensors file, {HUGGING_FACE}, an event file of "
            "TensorBoard, or a folder of event files"
        )
    return "TensorBoard", [(file, partial(_tensorboard_rows, file)) for file in events]


def _in_order(file: Path) -> list[Any]:
    """Return the parts of a name to sort by, numbers as such: a writer that is reopened in one second counts, 9, 10, ..."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]{1,18})", file.name))]


def _assembled(rows: Callable[[Counter[str]], Rows], name: str, left: Counter[str]) -> Run:
    """Make a run from rows. `rows` is called twice, first for the number of parameters, which is the width of arrays."""
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
    current: dict[str, tuple[int, np.ndarray]] = {}  # the incomplete row of each quantity, and its step

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
                if len(steps) == BATCH:
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
    """Return the parameter of a name such as "gradient_norm/0.weight"; None for a scalar's name."""
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
                            values[name] = _number(cell)
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
            if line.count(",") > MOST_VALUES:
                raise ValueError(f"a line has more than {MOST_VALUES:,} values")
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                if not line.endswith("\n"):
                    left["incomplete last lines"] += 1
                    return
                raise
            if not isinstance(values, dict):
                raise ValueError(f"a line is {line[:40]!r}, no object")
            number = _step_number(values.pop(_step_name(values, step)))
            numbers = {key: float(value) for key, value in values.items() if type(value) in (int, float)}
            left.update([NO_NUMBER] * (len(values) - len(numbers)))
            yield number, numbers


def _hugging_face_rows(path: Path, left: Counter[str]) -> Rows:
    """Rows of `log_history`, a list of objects with "step". One step may have several: of training, of evaluation."""
    if path.stat().st_size > MOST_RECORD:
        raise ValueError(f"it has more than {MOST_RECORD:,} bytes")
    state = json.loads(path.read_bytes())
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(entry, dict) and "step" in entry for entry in history):
        raise ValueError('it has no list "log_history" of objects with a "step"')
    for number, entries in groupby(history, key=lambda entry: _step_number(entry["step"])):
        values: dict[str, float] = {}
        for entry in entries:
            numbers = {key: float(value) for key, value in entry.items() if type(value) in (int, float) and key != "step"}
            left.update([NO_NUMBER] * (len(entry) - 1 - len(numbers)))
            values = numbers | values
        yield number, values


def _lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise ValueError(f"a line has more than {MOST_LINE:,} characters")
        yield line


def _is_complete(path: Path) -> bool:
    """Return whether a text file ends in a newline."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _step_name(names: Any, step: str | None) -> str:
    columns = list(names)
    wanted = STEP_NAMES if step is None else (step,)
    for each in wanted:
        for name in columns:
            if name == each or (step is None and name.lower() == each):
                return name
    raise ValueError(
        f"there is no column {' or '.join(map(repr, wanted))} among {', '.join(map(repr, columns[:12]))}: name the one "
        "with the steps by step="
    )


def _step_number(value: Any) -> int:
    if type(value) is int or (isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,25}\s*", value)):
        return int(value)
    try:
        number = _number(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number.is_integer() or abs(number) >= 1 << 53:  # from which on floats are not exact
        raise ValueError(f"a step is {str(value)[:40]!r}: must be an integer")
    return int(number)


def _number(text: Any) -> float:
    """Return `float(text)`; raise ValueError if it has underscores, as a date such as 20240101_120000 may have."""
    if isinstance(text, bool) or (isinstance(text, str) and "_" in text):
        raise ValueError
    return float(text)


def _tensorboard_rows(path: Path, left: Counter[str]) -> Iterator[tuple[int, dict[str, float] | None]]:
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader").EventFileLoader
        array = import_module("tensorboard.util.tensor_util").make_ndarray
        damaged = import_module("google.protobuf.message").DecodeError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading event files needs tensorboard: pip install tensorboard", name=error.name
        ) from error
    expected, n_read = _count_records(path, left), 0
    kinds: dict[str, str] = {}
    try:
        for event in loader(str(path)).Load():
            n_read += 1
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                yield int(event.step), None
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
                if len(kinds) > MOST_VALUES:
                    raise ValueError("it has too many names")
            if values:
                yield int(event.step), values
    except damaged as error:
        raise ValueError(f"record {n_read + 1}: {error}") from error
    if n_read < expected:
        raise ValueError(f"record {n_read + 1} of {expected} has a wrong checksum")


def _count_records(path: Path, left: Counter[str]) -> int:
    """Count the complete records of an event file, because TensorBoard's reader stops at a damaged one silently.

    A record is a length (uint64), the length's checksum (4 bytes), that many bytes, and their checksum (4 bytes).
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
