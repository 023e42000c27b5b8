"""The emulated GPU's stream: launches and asynchronous copies are queued, and run as late as a GPU may run them.

So a host that overwrites a buffer before it has been copied, or reads one before the copy to it is over, gets wrong numbers.
Tensors are CPU tensors, so other operations of torch on them cannot be queued: these run at once, after all that is queued.

While a CUDA graph is captured, nothing runs: launches, copies and all operations on tensors become the graph's, and each
replay queues them as they were, with the arguments that they had. There is one stream; the names of others stand for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tristep.kernels import streams
from tristep.trainer.step import capture

__all__ = ["Event", "Graph", "Stream", "late"]


class Stream:
    """Work in the order in which it was queued.

    Attributes:
        queued: how much has been queued so far.
        done: how much of that has been run.
        is_running: whether some of it is being run.
        graph: that is being captured, or None.
    """

    def __init__(self) -> None:
        self.queued = self.done = 0
        self.is_running = False
        self.graph: Graph | None = None
        self._waiting: deque[Callable[[], Any]] = deque()

    def add(self, work: Callable[[], Any]) -> None:
        """Queue work, or make it part of the graph that is being captured."""
        if self.graph is not None:
            self.graph.work.append(work)
            return
        self._waiting.append(work)
        self.queued += 1

    @torch.no_grad()
    def run(self, until: int | None = None) -> None:
        """Run what has been queued, the first `until` pieces of it.

        Raises:
            RuntimeError: a graph is being captured, so the host cannot wait.
        """
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
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


class Graph:
    """As torch.cuda.CUDAGraph.

    Attributes:
        work: what a replay does, in order.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.work: list[Callable[[], Any]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As torch.cuda.graph."""
        self._stream.run()
        self._stream.graph = self
        try:
            yield
        finally:
            self._stream.graph = None

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make an operation of torch part of the graph; its result has no numbers before a replay."""
        schema = func._schema
        if schema.is_mutable:
            self.work.append(lambda: func(*args, **kwargs))
            return _changed(schema, args, kwargs)
        result = func(*args, **kwargs)
        tensors = [each for each in _pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        for each in tensors:
            if each.is_floating_point():
                each.fill_(float("nan"))

        def again() -> None:
            found = [each for each in _pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
            for old, new in zip(tensors, found, strict=True):
                old.copy_(new)

        self.work.append(again)
        return result

    def replay(self) -> None:
        for each in self.work:
            self._stream.add(each)


def _changed(schema: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that changes its arguments returns: those, in order."""
    every = [kwargs.get(each.name, args[k] if k < len(args) else None) for k, each in enumerate(schema.arguments)]
    found = [
        given
        for each, given in zip(schema.arguments, every, strict=True)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return None if not schema.returns else found[0] if len(schema.returns) == 1 else tuple(found)


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
        if self._stream.graph is not None and func in _READING:
            self._stream.run()  # which raises
        returned = func._schema.returns
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if self._stream.graph is not None and not is_view:
            return self._stream.graph.record(func, args, kwargs)
        if not is_view and any(isinstance(each, torch.Tensor) for each in _pytree.tree_leaves((args, kwargs))):
            self._stream.run()
        return func(*args, **kwargs)


_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)  # whose result the host takes


def _unset(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory whose contents are wrong for sure, not what an earlier tensor has left there."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0xA5, dtype=dtype)


@contextmanager
def late(emulator: Any, event: Callable[[Stream], Any] = Event) -> Iterator[Stream]:
    """A context in which the emulator's launches, and asynchronous copies, run late; all have been run at its end.

    `Trainer.capture` captures there, by the names of torch.cuda that it uses.

    Args:
        emulator: the installed one.
        event: makes what `streams.record_event` gives, to plant a defect.
    """
    stream = emulator.stream = Stream()
    patches = {
        "is_asynchronous": lambda device: True,
        "is_capturing": lambda device: stream.graph is not None,
        "pinned": _unset,
        "record_event": lambda device: event(stream),
    }
    one = SimpleNamespace(wait_stream=lambda other: None)
    cuda = {
        "CUDAGraph": lambda: Graph(stream),
        "graph": lambda graph, **options: graph.capture(),
        "Stream": lambda: one,
        "current_stream": lambda: one,
        "stream": lambda wanted: nullcontext(),
        "device": lambda wanted: nullcontext(),
    }
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(streams, **patches))
            stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
            stack.enter_context(mock.patch.object(capture, "has_graphs", return_value=True))
            stack.enter_context(_Operations(stream))
            yield stream
            stream.run()
    finally:
        emulator.stream = None
