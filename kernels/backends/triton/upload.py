"""Copy gradient addresses and hyper-parameters, which change from step to step, to the GPU in one asynchronous copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ... import streams
from ...graphs import current_recording
from ...launch import GRADIENT, Launch

CAPTURED = (
    "a step is being captured in a CUDA graph, which would take the same rates and counts at every replay: use "
    "capture(function) of the Trainer, or of the optimizer of tristep.optim, which keeps them live"
)


class Uploader:
    """Keeps `gradients`, int64 addresses [n_tensors], and `hyper`, [n_tensors, 1 + n_hyper], of a launch on the device.

    Both are in one buffer, copied asynchronously out of a ring of page-locked buffers, so the host waits only if it is a
    whole ring ahead of the device.
    """

    RING = 8

    def __init__(self, launch: Launch) -> None:
        self._on = launch.device
        self._split = launch.addresses[GRADIENT].nbytes
        size = self._split + launch.hyper.nbytes
        self._is_asynchronous = streams.is_asynchronous(launch.device)
        make = streams.pinned if self._is_asynchronous else partial(torch.empty, device="cpu")
        self._ring = [make(size, dtype=torch.uint8) for _ in range(self.RING)]
        self._views = [buffer.numpy().data for buffer in self._ring]
        arrays = (launch.addresses[GRADIENT], launch.hyper)
        self._now = [array.data.cast("B") for array in arrays if array.size]
        self._events: list[Any] = [None] * self.RING  # completion of the last copy out of each buffer
        self._slot = 0
        self._sent: bytes | None = None
        self._device = torch.empty(size, dtype=torch.uint8, device=launch.device)
        self.gradients = self._device[: self._split].view(torch.int64)
        self.hyper = self._device[self._split :].view(launch.dtype)

    def __call__(self) -> None:
        """Copy both to the device, on the current stream, if they have changed since the last call."""
        if current_recording.get() is not None:
            return
        if self._is_asynchronous and streams.is_capturing(self._on):
            raise RuntimeError(CAPTURED)
        now = b"".join(self._now)
        if now == self._sent:
            return
        slot, self._slot = self._slot, (self._slot + 1) % self.RING
        if self._events[slot] is not None:
            self._events[slot].synchronize()  # that copy is a whole ring old, so it has usually finished
        self._views[slot][:] = now
        self._device.copy_(self._ring[slot], non_blocking=True)
        if self._is_asynchronous:
            self._events[slot] = streams.record_event(self._on)
        self._sent = now
