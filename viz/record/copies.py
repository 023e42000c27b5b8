"""Values on their way from a device to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels import streams

__all__ = ["Copies"]


class Copies:
    """A queue of asynchronous copies to the host, each with a key. It never waits for a device, but in `wait`."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Any, torch.Tensor, torch.cuda.Event | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def first(self) -> Any:
        """The key of the copy that arrives next."""
        return self._queue[0][0]

    def add(self, key: Any, value: torch.Tensor) -> None:
        """Start a copy of a tensor on any device."""
        if value.device.type != "cuda":
            self._queue.append((key, value.cpu(), None))
            return
        host = streams.pinned(*value.shape, dtype=value.dtype)
        host.copy_(value, non_blocking=True)
        self._queue.append((key, host, streams.record_event(value.device)))

    def arrived(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Take out what has arrived, in order: keys and tensors on the host."""
        while self._queue and (self._queue[0][2] is None or self._queue[0][2].query()):
            key, value, _ = self._queue.popleft()
            yield key, value

    def wait(self) -> None:
        """Wait until all has arrived."""
        for _, _, event in self._queue:
            if event is not None:
                event.synchronize()
