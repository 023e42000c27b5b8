"""What the processes of a parameter server send each other, over the point-to-point calls of torch.distributed.

A message is a header of five integers and, unless both are empty, a body: a value and tensors. The body begins with the
value, encoded by `wire`, and the shapes and types of the tensors; then the tensors follow as raw bytes.
"""

from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import wire

_ALIGNMENT = 64
_HEADER = 5  # opcode or status, number, bytes of the encoded value, of the encoded layout, and of the whole body


class Opcode(enum.IntEnum):
    """What a worker asks for."""

    INIT = 0
    UPDATER = 1
    PUSH = 2
    PULL = 3
    PUSHPULL = 4
    SAVE = 5
    LOAD = 6
    STALENESS = 7
    BARRIER = 8
    SHUTDOWN = 9


class Tag(enum.IntEnum):
    """The direction of a message. Its body has the next number."""

    REQUEST = 10
    REPLY = 12


class Lost(RuntimeError):
    """The other process is gone, or has not been heard of for longer than the process group's timeout."""


class Layout:
    """The offsets of tensors of these shapes and types, one after the other, in a buffer of `nbytes` bytes."""

    def __init__(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self.nbytes = 0
        self.encoded = json.dumps([[list(shape), str(dtype).partition(".")[2]] for shape, dtype in kinds]).encode()
        self._tensors: list[tuple[int, int, torch.dtype, torch.Size]] = []
        for shape, dtype in kinds:
            size = math.prod(shape) * dtype.itemsize
            self._tensors.append((self.nbytes, self.nbytes + size, dtype, torch.Size(shape)))
            self.nbytes += _aligned(size)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in these bytes, not copied."""
        return [flat[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in self._tensors]


@functools.lru_cache(maxsize=64)  # a training sends the same tensors again and again
def _layout_of(*kinds: tuple[torch.Size, torch.dtype]) -> Layout:
    return Layout(kinds)


@functools.lru_cache(maxsize=64)
def _layout_from(encoded: bytes) -> Layout:
    kinds = []
    for shape, name in json.loads(encoded):
        if not isinstance(dtype := getattr(torch, name, None), torch.dtype) or min(shape, default=0) < 0:
            raise ValueError(f"a message with tensors of type {name!r} and shape {shape}")
        kinds.append((shape, dtype))
    return Layout(kinds)


class Body:
    """The memory of a message's body, with the views that were last taken of it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._last: tuple[Layout | None, int, list[torch.Tensor]] = None, 0, []

    def views(self, layout: Layout, start: int) -> list[torch.Tensor]:
        """The tensors of a layout that begins at this byte."""
        known, where, views = self._last
        if known is not layout or where != start:
            views = layout.views(self.bytes[start:])
            self._last = layout, start, views
        return views


class Pool:
    """Bodies to be used again. Safe to be used by several threads."""

    def __init__(self) -> None:
        self.pinned = False
        self._free: dict[int, list[Body]] = {}

    def take(self, nbytes: int) -> Body:
        """A body of this size."""
        free = self._free.get(nbytes)
        try:
            return free.pop() if free else Body(nbytes, self.pinned)
        except IndexError:  # another thread was quicker
            return Body(nbytes, self.pinned)

    def give(self, body: Body | None) -> None:
        """Take one back that nobody reads or writes any more."""
        if body is None:
            return
        if len(self._free) > 8 and body.bytes.numel() not in self._free:
            self._free = {}  # sizes that may not be used again
        self._free.setdefault(body.bytes.numel(), []).append(body)


class Message(NamedTuple):
    """A message, received or to be sent.

    Attributes:
        body: the memory of its value and tensors, or None. Give it back to the pool when these have been used.
        encoded: the bytes of the encoded value.
        layout: the bytes of the encoded layout.
        code: of a request its `Opcode`, of a reply whether it is an error.
        number: of a reply the optimizer's `num_update`, of some requests their number.
    """

    body: Body | None
    encoded: int
    layout: int
    code: int = 0
    number: int = 0

    def value(self) -> Any:
        """The value, or None.

        Raises:
            ValueError, TypeError: it cannot be read.
        """
        return wire.decode(self._bytes(0, self.encoded)) if self.encoded else None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, as views of the body."""
        if self.body is None or not self.layout:
            return []
        start = self.encoded + self.layout
        return self.body.views(_layout_from(self._bytes(self.encoded, start)), _aligned(start))

    def _bytes(self, start: int, stop: int) -> bytes:
        assert self.body is not None
        return self.body.bytes[start:stop].numpy().tobytes()


class Sent:
    """A message on its way. What it reads must stay as it is until `wait` has returned."""

    def __init__(self, works: list[Any], header: torch.Tensor, body: Body | None) -> None:
        self._works, self._header, self.body = works, header, body

    def wait(self) -> None:
        """Wait until all of it has been sent."""
        for work in self._works:
            work.wait()
        self._works = []


class Channel:
    """Sends and receives messages.

    Args:
        group: a process group over all workers and servers. Its methods are called, not torch.distributed's functions:
            so the channel outlives `destroy_process_group()`, and the servers can be told that a worker is finished.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.pool = Pool()

    def pack(self, value: Any = None, like: Sequence[torch.Tensor] = ()) -> tuple[Message, list[torch.Tensor]]:
        """A message of this value and of tensors like these, and its tensors, to be written to.

        Raises:
            TypeError: `wire` does not encode the value.
        """
        encoded = b"" if value is None else wire.encode(value)
        layout = _layout_of(*((tensor.shape, tensor.dtype) for tensor in like)) if like else None
        head = encoded + (b"" if layout is None else layout.encoded)
        if not head:
            return Message(None, 0, 0), []
        body = self.pool.take(_aligned(len(head)) + (0 if layout is None else layout.nbytes))
        body.bytes[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        tensors = [] if layout is None else body.views(layout, _aligned(len(head)))
        return Message(body, len(encoded), len(head) - len(encoded)), tensors

    def send(self, peer: int, tag: Tag, message: Message) -> Sent:
        """Begin to send a message that `pack` has made."""
        body = message.body
        sizes = message.encoded, message.layout, 0 if body is None else body.bytes.numel()
        header = torch.tensor([message.code, message.number, *sizes], dtype=torch.int64)
        works = [self._group.send([header], peer, int(tag))]
        if body is not None:
            works.append(self._group.send([body.bytes], peer, int(tag) + 1))
        return Sent(works, header, body)

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
            code, number, encoded, layout, size = header.tolist()
            body = self.pool.take(size) if size else None
            if body is not None:
                self._group.recv([body.bytes], peer, int(tag) + 1).wait()
        except RuntimeError as error:
            raise Lost(str(error)) from error
        return Message(body, encoded, layout, code, number)

    def close(self) -> None:
        """Release the process group."""
        self._group = None


def copy_all(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each of `values` to one of `into`, and wait for it."""
    devices = {tensor.device for tensors in (into, values) for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        if into:
            torch._foreach_copy_(list(into), list(values))
        return
    for to, value in zip(into, values, strict=True):
        to.copy_(value, non_blocking=True)
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
