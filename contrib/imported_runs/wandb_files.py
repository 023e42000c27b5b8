"""Read the history in a .wandb file, which Weights & Biases writes for offline runs, without that library.

After 7 bytes of its own, the file is a log of LevelDB (github.com/google/leveldb, doc/log_format.md): blocks of 32 KiB with
records, each with a checksum (zlib's CRC-32), a length and a type. The records are Protocol Buffers
(wandb/proto/wandb_internal.proto), of which these fields are read: Record.history = 2; HistoryRecord.item = 1 and .step = 2;
HistoryItem.key = 1, .nested_key = 2 and .value_json = 16; HistoryStep.num = 1.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["wandb_rows"]

BLOCK, HEAD = 1 << 15, 7
MAGIC = b":W&B\xe1\xbe"
MOST_RECORD = 1 << 26  # bytes
MOST_NAMES = 1 << 20  # in a step
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_rows(path: Path, left: Counter[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each step of the history and its numbers by name.

    `_runtime` is called "seconds"; other names that begin with "_" are skipped.

    Args:
        path: the file.
        left: counts what is skipped, by reason.

    Raises:
        ValueError: the file is damaged.
    """
    with open(path, "rb") as file:
        for record in _records(file, left):
            for number, history in _fields(record):
                if number == 2:
                    yield from _row(_bytes(history), left)


def _row(history: bytes, left: Counter[str]) -> Iterator[tuple[int, dict[str, float]]]:
    step: int | None = None
    for each in _of(history, 2):
        step = 0
        for number in _of(_bytes(each), 1):
            if not isinstance(number, int):
                raise ValueError("a step is no number")
            step = number
    values: dict[str, float] = {}
    for item in _of(history, 1):
        message = _bytes(item)
        name = ".".join(_bytes(part).decode() for part in [*_of(message, 1), *_of(message, 2)] if part)
        text = b"null"
        for part in _of(message, 16):
            text = _bytes(part)
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name!r} of step {step}: {error}") from error
        if value in ("NaN", "Infinity", "-Infinity"):
            value = float(value)
        if name == "_step" and step is None and isinstance(value, int):
            step = value
        elif name == "_runtime":
            name = "seconds"
        if name.startswith("_"):
            continue
        if type(value) in (int, float):
            values[name] = float(value)
            if len(values) > MOST_NAMES:
                raise ValueError(f"step {step} has more than {MOST_NAMES:,} names")
        else:
            left["values that are no numbers"] += 1
    if step is None:
        raise ValueError("a row of the history has no step")
    if values:
        yield step, values


def _records(file: IO[bytes], left: Counter[str]) -> Iterator[bytes]:
    """Yield the records of the log. Its end may be missing, because the program was killed or still runs."""
    start = file.read(HEAD)
    if start[:6] != MAGIC:
        raise ValueError("it does not begin as a .wandb file does")
    place, block = HEAD, start + file.read(BLOCK - HEAD)
    parts: bytearray | None = None  # of an unfinished record; b"" if only its head fitted into a block
    while block:
        while place + HEAD <= len(block):
            checksum, length, kind = struct.unpack_from("<IHB", block, place)
            if not kind and not length:
                break  # room that was not written to
            body = block[place + HEAD : place + HEAD + length]
            if place + HEAD + length > len(block):
                if len(block) == BLOCK:
                    raise ValueError("a record is longer than its block")
                left["incomplete last records"] += 1
                return
            if zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
                raise ValueError("a record has a wrong checksum")
            if (kind in (FULL, FIRST)) == (parts is not None) or kind not in (FULL, FIRST, MIDDLE, LAST):
                raise ValueError("parts of records are missing")
            parts = bytearray() if parts is None else parts
            parts += body
            if len(parts) > MOST_RECORD:
                raise ValueError(f"a record has more than {MOST_RECORD:,} bytes")
            if kind in (FULL, LAST):
                yield bytes(parts)
                parts = None
            place += HEAD + length
        place, block = 0, file.read(BLOCK)
    if parts is not None:
        left["incomplete last records"] += 1


def _of(message: bytes, number: int) -> Iterator[int | bytes]:
    """Yield the values of the fields with this number."""
    return (value for field, value in _fields(message) if field == number)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a Protocol Buffers message: integers as int, all other types as bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value: int | bytes
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
        else:
            length = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                length, place = _varint(message, place)
            if length is None or place + length > len(message):
                raise ValueError("a record is no message of Protocol Buffers")
            value, place = message[place : place + length], place + length
        yield key >> 3, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for k in range(10):
        if place + k >= len(message):
            break
        byte = message[place + k]
        value |= (byte & 127) << 7 * k
        if byte < 128:
            return value, place + k + 1
    raise ValueError("a record is no message of Protocol Buffers")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a record has a number where a message or text must be")
    return value
