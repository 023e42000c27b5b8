"""Reader of MXNet's binary format of an array."""

from __future__ import annotations

import math
import struct
import warnings
from typing import Any

import torch

# Before version 1 an array began with its number of dimensions. Version 3 has arrays of shape () with one element.
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DEFAULT, _ROW_SPARSE, _CSR = 0, 1, 2
_DTYPES = {
    0: torch.float32,
    1: torch.float64,
    2: torch.float16,
    3: torch.uint8,
    4: torch.int32,
    5: torch.int8,
    6: torch.int64,
    7: torch.bool,
    12: torch.bfloat16,
}
_MOST_DIMENSIONS = 32


class Cursor:
    """Reader of bytes that remembers how far it has read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = memoryview(data), 0

    @property
    def left(self) -> int:
        """The number of bytes that have not been read."""
        return len(self._data) - self._place

    def take(self, count: int) -> memoryview:
        """Read and return the next `count` bytes; raise ValueError if there are fewer."""
        if not 0 <= count <= self.left:
            raise ValueError(f"it ends too early: {count:,} bytes are to come, and there are {self.left:,}")
        self._place += count
        return self._data[self._place - count : self._place]

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Read and return little-endian numbers; `form` is a format of `struct` without the byte order, such as "QQ"."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))


def read_array(cursor: Cursor) -> torch.Tensor | None:
    """Read the array at the cursor.

    Row-sparse arrays become sparse COO tensors, csr arrays sparse CSR tensors. Memory use is bounded by the number of bytes.

    Returns:
        The array as a tensor on the CPU; None for an array that has never been given a shape.

    Raises:
        ValueError: the bytes are no array, or are damaged.
        RuntimeError: the indices of a sparse array are damaged.

    Source: MXNet 1.9.1, `NDArray::Save` and `NDArray::Load` in src/ndarray/ndarray.cc.
    """
    (magic,) = cursor.numbers("I")
    storage, stored = _DEFAULT, None
    if magic in (_V2, _V3):
        (storage,) = cursor.numbers("i")
        if storage not in (_DEFAULT, _ROW_SPARSE, _CSR):
            raise ValueError(f"an array has the storage type {storage}")
        if storage != _DEFAULT:
            stored = _shape(cursor)
    shape = _shape(cursor) if magic in (_V1, _V2, _V3) else _dimensions(cursor, magic, "I")
    if shape is None or (shape == () and magic != _V3):
        return None
    cursor.numbers("ii")  # the device that it was on
    dtype = _dtype(cursor)
    if stored is None:
        return _dense(cursor, shape, dtype)
    kinds = []
    for _ in range(storage):  # one index of row-sparse arrays, two of csr
        kind = _dtype(cursor)
        kinds.append((_shape(cursor) or (), kind))
    values = _dense(cursor, stored, dtype)
    indices = [_dense(cursor, *kind) for kind in kinds]
    if storage == _ROW_SPARSE:
        return torch.sparse_coo_tensor(indices[0][None], values, shape, check_invariants=True).coalesce()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        make: Any = torch.sparse_csr_tensor  # whose stub lacks this form
        return make(*indices, values, shape, check_invariants=True)


def _shape(cursor: Cursor) -> tuple[int, ...] | None:
    """Read a shape; None means that MXNet did not know it."""
    (count,) = cursor.numbers("i")
    return None if count == -1 else _dimensions(cursor, count, "q")


def _dimensions(cursor: Cursor, count: int, form: str) -> tuple[int, ...]:
    if not 0 <= count <= _MOST_DIMENSIONS:
        raise ValueError(f"an array has {count} dimensions")
    return cursor.numbers(form * count)


def _dtype(cursor: Cursor) -> torch.dtype:
    (flag,) = cursor.numbers("i")
    if flag not in _DTYPES:
        raise ValueError(f"an array has the unknown type {flag}")
    return _DTYPES[flag]


def _dense(cursor: Cursor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if min(shape, default=0) < 0:
        raise ValueError(f"an array has the shape {shape}")
    data = bytearray(cursor.take(math.prod(shape) * dtype.itemsize))
    if not data:
        return torch.zeros(shape, dtype=dtype)
    if dtype == torch.bool:
        return torch.frombuffer(data, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
