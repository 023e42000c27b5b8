"""Write TensorBoard's event files.

A record is the length of its data (8 bytes, little-endian), a checksum of the length, the data, and a checksum of the data;
see `record_writer.h` in TensorFlow. TensorBoard's own writer computes checksums byte by byte in Python. For an event of 446
numbers that takes three times as long as everything else, and it holds the GIL.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["EventFile", "crc32c"]

BLOCK = 256  # bytes for which NumPy computes checksums at once


class EventFile:
    """A new event file, open for writing, in a folder that is created if necessary; its name ends in ".tristep".

    `event` is the class `Event` of TensorBoard's protocol buffers.
    """

    def __init__(self, folder: str | os.PathLike[str], event: Any) -> None:
        self._event = event
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        for number in count():
            try:
                self._file = open(Path(folder) / f"{name}.{number}.tristep", "xb")  # noqa: SIM115  # open while training is
                break
            except FileExistsError:
                continue
        self._write(file_version="brain.Event:2")
        self.flush()

    def add_summary(self, summary: Any, step: int) -> None:
        """Write a `Summary` for a step. This class has the methods of torch's `FileWriter`."""
        self._write(step=step, summary=summary)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join([length, _masked(length), data, _masked(data)]))


def _masked(data: bytes) -> bytes:
    """Return the masked CRC-32C of a record. TensorFlow masks it because a CRC of data that contains CRCs is weak."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of at least 4 bytes. Source: RFC 3720, section 12.1."""
    tables = _tables()
    blocks = -(-len(data) // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.uint8)  # zeros in front of data leave a remainder of 0 as it is
    padded.reshape(-1)[-len(data) :] = np.frombuffer(data, np.uint8)
    padded.reshape(-1)[-len(data) :][:4] ^= 0xFF  # the remainder that a CRC begins with
    crc = 0
    for block_crc in np.bitwise_xor.reduce(tables[np.arange(BLOCK), padded], axis=1).tolist():
        first = crc.to_bytes(4, "little")
        crc = block_crc
        for table, byte in zip(tables[:4], first, strict=True):
            crc ^= int(table[byte])
    return crc ^ 0xFFFFFFFF


@cache
def _tables() -> np.ndarray:
    """Return the remainder of each byte value at each position of a block, [BLOCK, 256]."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = (last >> 1) ^ np.where(last & 1, np.uint32(0x82F63B78), np.uint32(0))
    tables = [last]
    for _ in range(BLOCK - 1):
        tables.append((tables[-1] >> 8) ^ last[tables[-1] & 0xFF])
    return np.stack(tables[::-1])
