"""What the processes of a parameter server send each other, over the point-to-point calls of torch.distributed.

A message is a header of eight numbers and, where they say so, a body: a value, encoded by `wire`, and raw tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import wire

__all__ = ["Buffer", "Channel", "Kind", "Layout", "Lost", "Message", "Pool", "Tag"]

_HEADER = 8
_OWN = 2  # numbers of a header that are the message's own: bytes of the encoded value, and of the tensors
_ALIGNMENT = 64


class Kind(enum.IntEnum):
    """What a worker asks for."""

    INIT = 0
    OPTIMIZER = 1
    PUSH = 2
    PULL = 3
    PUSHPULL = 4
    SAVE = 5
    LOAD = 6
    STALENESS = 7
    BARRIER = 8
    BYE = 9


class Tag(enum.IntEnum):
    """Which way a message goes. Its body has the next number."""

    REQUEST = 10
    REPLY = 12


class Lost(RuntimeError):
    """The other process is gone, or has not been heard of for longer than the process group's timeout."""


class Layout:
    """Where tensors of these shapes and types lie one after the other in a buffer of `nbytes` bytes."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self.nbytes = 0
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            self._places.append((self.nbytes, self.nbytes + size, dtype, torch.Size(shape)))
            self.nbytes += max(_aligned(size), _ALIGNMENT)  # so that there is a body even for nothing

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in these bytes, not copied."""
        return [flat[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in self._places]


class Buffer:
    """Bytes of a message's body, with the views that were last taken of them."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._last: tuple[Layout | None, int, list[torch.Tensor]] = None, 0, []

    def views(self, layout: Layout, start: int = 0) -> list[torch.Tensor]:
        """The tensors of a layout that begins at this byte."""
        known, where, views = self._last
        if known is not layout or where != start:
            views = layout.views(self.bytes[start:])
            self._last = layout, start, views
        return views


class Pool:
    """Buffers to be used again. Safe to be used by several threads."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._free: dict[int, list[Buffer]] = {}

    def take(self, nbytes: int) -> Buffer:
        """A buffer of this size."""
        free = self._free.get(nbytes)
        try:
            return free.pop() if free else Buffer(nbytes, self.pinned)
        except IndexError:  # another thread was quicker
            return Buffer(nbytes, self.pinned)

    def give(self, buffer: Buffer | None) -> None:
        """Take one back that nobody reads or writes any more."""
        if buffer is None:
            return
        if len(self._free) > 8 and buffer.bytes.numel() not in self._free:
            self._free = {}  # sizes that may not be used again
        self._free.setdefault(buffer.bytes.numel(), []).append(buffer)


class Message(NamedTuple):
    """A message that has come.

    Attributes:
        numbers: six ints, of which the first is a `Kind`, or 0 for a reply and 1 for one that says what went wrong.
        buffer: the body, or None. Give it back to the pool when its tensors have been used.
        encoded: how many bytes of it are an encoded value.
        start: where in it the tensors begin.
    """

    numbers: list[int]
    buffer: Buffer | None
    encoded: int
    start: int

    def value(self) -> Any:
        """The value in the body, or None.

        Raises:
            ValueError, TypeError: it cannot be read.
        """
        if self.buffer is None or not self.encoded:
            return None
        return wire.decode(self.buffer.bytes[: self.encoded].numpy().tobytes())

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        """The tensors in the body."""
        return [] if self.buffer is None else self.buffer.views(layout, self.start)


class Sent:
    """A message on its way. What it reads must stay as it is until `wait` has returned."""

    def __init__(self, works: list[Any], kept: tuple[Any, ...], buffer: Buffer | None) -> None:
        self._works, self._kept, self.buffer = works, kept, buffer

    def wait(self) -> None:
        """Wait until all of it has been sent."""
        for work in self._works:
            work.wait()
        self._works, self._kept = [], ()


class Channel:
    """Sends and receives messages.

    Args:
        group: a process group over all workers and servers. Its methods are called, not torch.distributed's functions:
            so the channel outlives `destroy_process_group()`, and the servers can be told that a worker is finished.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.pool = Pool()

    def body(self, value: Any, layout: Layout | None) -> tuple[bytes, Buffer | None, list[torch.Tensor]]:
        """The encoded value, a buffer for it and for the tensors of a layout, and these tensors, to be filled.

        Raises:
            TypeError: `wire` does not encode the value.
        """
        encoded = b"" if value is None else wire.encode(value)
        start, size = _aligned(len(encoded)), 0 if layout is None else layout.nbytes
        if not start + size:
            return encoded, None, []
        buffer = self.pool.take(start + size)
        if encoded:
            buffer.bytes[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return encoded, buffer, [] if layout is None else buffer.views(layout, start)

    def send(self, peer: int, tag: Tag, numbers: Sequence[int], encoded: bytes = b"", buffer: Buffer | None = None) -> Sent:
        """Begin to send a message; `encoded` and `buffer` as `body` gave them."""
        size = 0 if buffer is None else buffer.bytes.numel()
        padded = [*numbers, *[0] * (_HEADER - _OWN - len(numbers)), len(encoded), size - _aligned(len(encoded))]
        header = torch.tensor(padded, dtype=torch.int64)
        works = [self._group.send([header], peer, int(tag))]
        if buffer is not None:
            works.append(self._group.send([buffer.bytes], peer, int(tag) + 1))
        return Sent(works, (header, None if buffer is None else buffer.bytes), buffer)

    def expect(self, peer: int, tag: Tag) -> tuple[torch.Tensor, Any]:
        """Begin to receive the header of the next message from this process."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        return header, self._group.recv([header], peer, int(tag))

    def receive(self, peer: int, tag: Tag, expected: tuple[torch.Tensor, Any] | None = None) -> Message:
        """The next message from this process, or that which `expect` began to receive.

        Raises:
            Lost: it will not come.
        """
        header, work = expected or self.expect(peer, tag)
        try:
            work.wait()
            *numbers, encoded, size = header.tolist()
            start, buffer = _aligned(encoded), None
            if start + size:
                buffer = self.pool.take(start + size)
                self._group.recv([buffer.bytes], peer, int(tag) + 1).wait()
        except RuntimeError as error:
            raise Lost(str(error)) from error
        return Message(numbers, buffer, encoded, start)

    def close(self) -> None:
        """Let the process group go."""
        self._group = None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
