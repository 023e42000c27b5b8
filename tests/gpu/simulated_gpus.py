"""Several GPUs without one: tensors of the CPU that say they are on `cuda:1`, and a `torch.cuda` that checks its calls.

While `SimulatedGpus` is active, `device="cuda:1"` gives a tensor of the CPU whose storage is labelled with that device;
`.device`, `.to`, `.cpu` and pinned memory follow the labels, so all numbers are computed. As on a GPU, operations on lists
of tensors (`torch._foreach_copy_`) do not change the tensors' versions.

It raises `WrongDevice` on an allocation, a stream, an event, a graph or a launch for another GPU than those that the test
has named, on an operation on tensors of several devices, and on whatever makes the host wait for a GPU: a copy to or from
memory that is not pinned, `.item()`, `.tolist()`, a condition, a mask as an index, a synchronisation. Where a wait is meant,
the test says so with `waits("why")`.

It uses torch.overrides.TorchFunctionMode and TorchDispatchMode, both of them from torch's notes on how to extend it. Work is
done at once and not queued: gpu_emulator/stream.py is for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from simulated_tensors import Functions, Operations, label, where

__all__ = ["SimulatedGpus", "WrongDevice"]

PAGE = 4096


class WrongDevice(AssertionError):
    """What would have been done on another device, or would have made the host wait."""


class SimulatedGpus:
    """A context in which there are several GPUs, of which tensors may be on some. The first is the current one, 0.

    Args:
        used: numbers of the GPUs whose tensors the test works on.
        count: how many GPUs there are.

    Attributes:
        found: what has been wrong, also where the product has caught the exception.
        waits_for: reasons of `waits` that have been needed.
        current: the number of the current device.
        events: of each recorded event its device.
        registered: of each page of the host that a GPU may address, the number of the GPU.
        graphs: of each CUDA graph the device, when it was made, recorded and replayed.
        capturing: the graph that is being captured, or None.
    """

    def __init__(self, used: Sequence[int] = (1,), count: int = 3) -> None:
        self.used, self.count, self.current = frozenset(used), count, 0
        self.found: list[str] = []
        self.waits_for: list[str] = []
        self.events: list[torch.device] = []
        self.registered: dict[int, int] = {}
        self.graphs: list[tuple[str, torch.device]] = []
        self._allowed: list[str] = []
        self._streams: dict[int, Any] = {}
        self.capturing: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> SimulatedGpus:  # noqa: PYI034  # Python 3.10 has no Self
        for name, value in self._replaced().items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        self._stack.enter_context(Operations(self))
        self._stack.enter_context(Functions(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if error[0] is None and self.found:
            raise WrongDevice("; ".join(self.found))

    @contextmanager
    def waits(self, why: str) -> Iterator[None]:
        """A context in which the host may wait for a GPU."""
        self._allowed.append(why)
        try:
            yield
        finally:
            self._allowed.pop()

    def refuse(self, what: str) -> None:
        self.found.append(what)
        raise WrongDevice(what)

    def check_wait(self, what: str) -> None:
        """The host waits for a GPU."""
        if not self._allowed:
            self.refuse(f"the host waits: {what}")
        if self._allowed[-1] not in self.waits_for:
            self.waits_for.append(self._allowed[-1])

    def check_device(self, device: torch.device, what: str) -> torch.device:
        """The device with its number, which must be one of those used."""
        index = self.current if device.index is None else device.index
        if index not in self.used:
            self.refuse(f"{what} on cuda:{index}, of tensors on {', '.join(f'cuda:{each}' for each in sorted(self.used))}")
        return torch.device("cuda", index)

    def launch(self, run: Callable[[], Any], arguments: Sequence[Any]) -> None:
        """Run a kernel on the current device, or let the graph that is being captured run it."""
        for each in arguments:
            if isinstance(each, torch.Tensor) and label(each) != self.current:
                self.refuse(f"a kernel is launched on cuda:{self.current} with a tensor on {where(each)}")
        if self.capturing is None:
            run()
        else:
            self.capturing.played.append(run)

    def _replaced(self) -> dict[str, Any]:
        """What stands for parts of torch.cuda."""
        gpus = self

        @contextmanager
        def device(wanted: Any) -> Iterator[None]:
            before, gpus.current = gpus.current, gpus.index_of(wanted)
            try:
                yield
            finally:
                gpus.current = before

        @contextmanager
        def use_stream(stream: Any) -> Iterator[None]:
            with device(stream.device):
                index = gpus.current
                before = current_stream()
                gpus._streams[index] = stream
                try:
                    yield
                finally:
                    gpus._streams[index] = before

        class Stream:
            cuda_stream = 0

            def __init__(self, device: Any = None, **others: Any) -> None:
                self.device = gpus.check_device(torch.device("cuda", gpus.index_of(device)), "a stream")

            def wait_stream(self, stream: Any) -> None:
                gpus.check_device(stream.device, "a stream that is waited for")

            def wait_event(self, event: Any) -> None:
                pass

            def record_event(self, event: Any = None) -> Any:
                event = Event() if event is None else event
                event.record(self)
                return event

            def synchronize(self) -> None:
                gpus.check_wait("Stream.synchronize")

        class Event:
            def __init__(self, **options: Any) -> None:
                pass

            def record(self, stream: Any = None) -> None:
                stream = current_stream() if stream is None else stream
                gpus.events.append(gpus.check_device(stream.device, "an event"))

            def query(self) -> bool:
                return True

            def wait(self, stream: Any = None) -> None:
                pass

            def synchronize(self) -> None:  # of an event that is over; test_emulator.py has events that are not
                pass

        def current_stream(device: Any = None) -> Any:
            index = gpus.index_of(device)
            if index not in gpus._streams:
                stream = Stream.__new__(Stream)
                stream.device, gpus._streams[index] = torch.device("cuda", index), stream
            return gpus._streams[index]

        class CUDAGraph:
            def __init__(self) -> None:
                self.played: list[Callable[[], Any]] = []
                gpus._note("made", torch.device("cuda", gpus.current))

            def replay(self) -> None:
                gpus._note("replayed", torch.device("cuda", gpus.current))
                for work in self.played:
                    work()

        @contextmanager
        def graph(graph: Any, stream: Any = None, **options: Any) -> Iterator[None]:
            with use_stream(current_stream() if stream is None else stream):
                gpus._note("recorded", torch.device("cuda", gpus.current))
                gpus.capturing = graph
                try:
                    yield
                finally:
                    gpus.capturing = None

        class Runtime:
            """The CUDA runtime, as far as it registers memory of the host, in whole pages."""

            @staticmethod
            def cudaHostRegister(address: int, size: int, flags: int) -> int:
                pages = range(address // PAGE, -(-(address + size) // PAGE))
                if address % PAGE or not size or not gpus.registered.keys().isdisjoint(pages):
                    gpus.refuse(f"registration of {size} bytes at {address:#x}")
                gpus.registered |= dict.fromkeys(pages, gpus.check_device(torch.device("cuda"), "a registration").index)
                return 0

            @staticmethod
            def cudaHostUnregister(address: int) -> int:
                page = address // PAGE
                while gpus.registered.pop(page, None) is not None:
                    page += 1
                return 0

        def check_error(code: int) -> None:
            assert not code

        def synchronize(device: Any = None) -> None:
            gpus.check_device(torch.device("cuda", gpus.index_of(device)), "a synchronisation")
            gpus.check_wait("torch.cuda.synchronize")

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: gpus.count,
            "current_device": lambda: gpus.current,
            "device": device,
            "Stream": Stream,
            "Event": Event,
            "stream": use_stream,
            "current_stream": current_stream,
            "default_stream": current_stream,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "is_current_stream_capturing": lambda: gpus.capturing is not None,
            "synchronize": synchronize,
            "cudart": Runtime,
            "check_error": check_error,
            "get_device_capability": lambda device=None: (9, 0),
        }

    def index_of(self, device: Any) -> int:
        """The number of a device, however it is written; that of the current one for None."""
        device = self.current if device is None else device
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index

    def _note(self, what: str, device: torch.device) -> None:
        self.graphs.append((what, self.check_device(device, f"a graph that is {what}")))
