"""Messages between the processes of a parameter server, by point-to-point calls of torch.distributed.

A message is a header of five integers and a body with a value and tensors; without either there is no body. The body has the
value, encoded by `wire`, then the shapes and dtypes of the tensors, then the tensors as raw bytes.
"""

from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import wire

_ALIGNMENT = 64
_HEADER = 5  # opcode or status, number, bytes of the encoded value, of the encoded layout, and of the whole body


class Opcode(enum.IntEnum):
    """The kinds of requests of workers."""

    INIT = 0
    OPTIMIZER = 1
    PUSH = 2
    PULL = 3
    PUSHPULL = 4
    SAVE = 5
    LOAD = 6
    STALENESS = 7
    BARRIER = 8
    SHUTDOWN = 9


class Tag(enum.IntEnum):
    """The tags of message headers by direction. The body has the next number as tag."""

    REQUEST = 10
    REPLY = 12


class Lost(RuntimeError):
    """The other process is lost, or has sent nothing for longer than the process group's timeout."""


class Layout:
    """The offsets of consecutive tensors of these shapes and dtypes in a buffer of `nbytes` bytes."""

    def __init__(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self.nbytes = 0
        self.encoded = json.dumps([[list(shape), str(dtype).partition(".")[2]] for shape, dtype in kinds]).encode()
        self._tensors: list[tuple[int, int, torch.dtype, torch.Size]] = []
        for shape, dtype in kinds:
            size = math.prod(shape) * dtype.itemsize
            self._tensors.append((self.nbytes, self.nbytes + size, dtype, torch.Size(shape)))
            self.nbytes += _aligned(size)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in these bytes as views."""
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
    """The memory of a message's body, with the last views of it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._last: tuple[Layout | None, int, list[torch.Tensor]] = None, 0, []

    def views(self, layout: Layout, start: int) -> list[torch.Tensor]:
        """Return views of the tensors of a layout that begins at this byte."""
        last_layout, last_start, views = self._last
        if last_layout is not layout or last_start != start:
            views = layout.views(self.bytes[start:])
            self._last = layout, start, views
        return views


class Pool:
    """A thread-safe pool of bodies for reuse."""

    def __init__(self) -> None:
        self.pinned = False
        self._free: dict[int, list[Body]] = {}

    def take(self, nbytes: int) -> Body:
        """Return a body of this size, in bytes."""
        free = self._free.get(nbytes)
        try:
            return free.pop() if free else Body(nbytes, self.pinned)
        except IndexError:  # another thread was quicker
            return Body(nbytes, self.pinned)

    def give(self, body: Body | None) -> None:
        """Put a body back that is no longer read or written; None does nothing."""
        if body is None:
            return
        if len(self._free) > 8 and body.bytes.numel() not in self._free:
            self._free = {}  # other sizes may not occur again
        self._free.setdefault(body.bytes.numel(), []).append(body)


class Message(NamedTuple):
    """A received message, or a message to send.

    Attributes:
        body: the memory of value and tensors, or None. Give it back to the pool after use.
        encoded: the number of bytes of the encoded value.
        layout: the number of bytes of the encoded layout.
        code: the `Opcode` of a request; whether a reply is an error.
        number: the optimizer's `num_update` in a reply; the number of some requests.
    """

    body: Body | None
    encoded: int
    layout: int
    code: int = 0
    number: int = 0

    def value(self) -> Any:
        """Decode the value; None if the message has none.

        Raises:
            ValueError, TypeError: the value cannot be decoded.
        """
        return wire.decode(self._bytes(0, self.encoded)) if self.encoded else None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors as views of the body."""
        if self.body is None or not self.layout:
            return []
        start = self.encoded + self.layout
        return self.body.views(_layout_from(self._bytes(self.encoded, start)), _aligned(start))

    def _bytes(self, start: int, stop: int) -> bytes:
        assert self.body is not None
        return self.body.bytes[start:stop].numpy().tobytes()


class Sent:
    """A message that is being sent. Do not write to its body before `wait` has returned."""

    def __init__(self, works: list[Any], header: torch.Tensor, body: Body | None) -> None:
        self._works, self._header, self.body = works, header, body

    def wait(self) -> None:
        """Wait until the whole message has been sent."""
        for work in self._works:
            work.wait()
        self._works = []


class Channel:
    """Sends and receives messages.

    Args:
        group: a process group of all workers and the server. The channel calls its methods, not torch.distributed's
            functions, so it works after `destroy_process_group()`, when a worker tells the server that it has finished.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.pool = Pool()

    def pack(self, value: Any = None, like: Sequence[torch.Tensor] = ()) -> tuple[Message, list[torch.Tensor]]:
        """Return a message with this value and uninitialized tensors like these, and these tensors, to be filled.

        Raises:
            TypeError: `wire` cannot encode the value.
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
        """Start to send a message of `pack`."""
        body = message.body
        sizes = message.encoded, message.layout, 0 if body is None else body.bytes.numel()
        header = torch.tensor([message.code, message.number, *sizes], dtype=torch.int64)
        works = [self._group.send([header], peer, int(tag))]
        if body is not None:
            works.append(self._group.send([body.bytes], peer, int(tag) + 1))
        return Sent(works, header, body)

    def expect(self, peer: int, tag: Tag) -> tuple[torch.Tensor, Any]:
        """Start to receive the header of the next message from a process."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        return header, self._group.recv([header], peer, int(tag))

    def receive(self, peer: int, tag: Tag, expected: tuple[torch.Tensor, Any] | None = None) -> Message:
        """Wait for a message from a process: the next one, or the one that `expect` started to receive.

        Raises:
            Lost: the process is lost.
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
    """Copy each tensor of `values` to its tensor of `into`, and wait for the copies."""
    devices = {tensor.device for tensors in (into, values) for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        if into:
            torch._foreach_copy_(list(into), list(values))
        return
    for to, value in zip(into, values, strict=True):
        to.copy_(value, non_blocking=True)
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def without_tensors(states: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Split collected states into plain data with the names of the tensors, and the tensors."""
    names = {name: list(slots) for name, slots in states["state"].items()}
    return dict(states) | {"state": names}, [tensor for slots in states["state"].values() for tensor in slots.values()]


def with_tensors(states: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return collected states from the results of `without_tensors`."""
    each = iter(tensors)
    return dict(states) | {"state": {name: {slot: next(each) for slot in slots} for name, slots in states["state"].items()}}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
