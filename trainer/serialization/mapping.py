"""Files that are mapped instead of read: the system loads their pages when they are used, and takes them back when it must.

Large tensors are handled in parts, so that neither a copy of one nor its pages are ever needed at once.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from typing import IO
from weakref import WeakKeyDictionary

import torch

AT_A_TIME = 1 << 21  # elements, and bytes
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)  # Python < 3.13
# The mappings in use: address, and bytes read since pages went back.
_mappings: WeakKeyDictionary[mmap.mmap, list[int]] = WeakKeyDictionary()


def map_file(file: IO[bytes]) -> mmap.mmap | None:
    """Map an open file for reading; None where the system or the file system cannot do that.

    The mapping stays as long as a tensor of it, also if the file is replaced or removed. On Windows that would be an error.
    """
    if os.name != "posix":
        return None
    with suppress(OSError):
        # Private, because torch warns of memory that is read-only; no memory is set aside for copies of pages.
        view = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
        _mappings[view] = [torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr(), 0]
        return view
    return None


def is_mapped(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and any(
        start <= tensor.data_ptr() < start + len(view) for view, (start, _) in list(_mappings.items())
    )


def used(tensor: torch.Tensor) -> None:
    """Say that a tensor, which may be in a mapped file, has been read: its pages go back to the system from time to time."""
    for view, place in list(_mappings.items()):
        place[1] += tensor.nbytes
        if place[1] >= AT_A_TIME and hasattr(mmap, "MADV_DONTNEED"):
            view.madvise(mmap.MADV_DONTNEED)
            place[1] = 0


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most `AT_A_TIME` elements of a tensor, in the order of its elements; its shape decides which."""
    rows = len(tensor) * AT_A_TIME // tensor.numel() if tensor.numel() > AT_A_TIME else None
    if rows is None:
        yield tensor
    elif rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from parts(row)


def copy(new: torch.Tensor, old: torch.Tensor) -> None:
    """Copy the values of `old`, which may be in a mapped file, to `new`, of the same shape."""
    for to, part in zip(parts(new), parts(old), strict=True):
        to.copy_(part)
        used(part)
