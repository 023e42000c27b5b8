"""The emulated GPU's stream: launches and asynchronous copies are queued, and run as late as a GPU may run them.

So a host that overwrites a buffer before it has been copied, or reads one before the copy to it is over, gets wrong numbers.
Tensors are CPU tensors, so other operations of torch on them cannot be queued: these run at once, after all that is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tristep.kernels import streams

__all__ = ["Event", "Stream", "late"]


class Stream:
    """Work in the order in which it was queued.

    Attributes:
        queued: how much has been queued so far.
        done: how much of that has been run.
        is_running: whether some of it is being run.
    """

    def __init__(self) -> None:
        self.queued = self.done = 0
        self.is_running = False
        self._waiting: deque[Callable[[], Any]] = deque()

    def add(self, work: Callable[[], Any]) -> None:
        self._waiting.append(work)
        self.queued += 1

    def run(self, until: int | None = None) -> None:
        """Run what has been queued, the first `until` pieces of it."""
        self.is_running = True
        try:
            while self._waiting and (until is None or self.done < until):
                self._waiting.popleft()()
                self.done += 1
        finally:
            self.is_running = False


class Event:
    """As torch.cuda.Event, recorded where it is made."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.queued

    def query(self) -> bool:
        return self._stream.done >= self._until

    def synchronize(self) -> None:
        self._stream.run(self._until)


class _Operations(TorchDispatchMode):
    """Queues asynchronous copies; runs what is queued before any other operation that reads or writes a tensor."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stream.is_running:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:] == (True,)):
            self._stream.add(lambda: func(*args, **kwargs))
            return args[0]
        returned = func._schema.returns
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if not is_view and any(isinstance(each, torch.Tensor) for each in torch.utils._pytree.tree_leaves((args, kwargs))):
            self._stream.run()
        return func(*args, **kwargs)


def _unset(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory whose contents are wrong for sure, not what an earlier tensor has left there."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0xA5, dtype=dtype)


@contextmanager
def late(emulator: Any, event: Callable[[Stream], Any] = Event) -> Iterator[Stream]:
    """A context in which the emulator's launches, and asynchronous copies, run late; all have been run at its end.

    Args:
        emulator: the installed one.
        event: makes what `streams.record_event` gives, to plant a defect.
    """
    stream = emulator.stream = Stream()
    patches = {
        "is_asynchronous": lambda device: True,
        "is_capturing": lambda device: False,
        "pinned": _unset,
        "record_event": lambda device: event(stream),
    }
    try:
        with mock.patch.multiple(streams, **patches), _Operations(stream):
            yield stream
            stream.run()
    finally:
        emulator.stream = None
