"""CUDA streams, events and pinned memory for a given device, whichever device is current."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Return whether work on this device is queued on a stream, so that the host does not wait for it."""
    return device.type == "cuda" and torch.cuda.is_available()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which this is the current GPU; it does nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def is_capturing(device: torch.device) -> bool:
    if not is_asynchronous(device):
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized page-locked memory of the host, for asynchronous copies to and from a GPU."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor that `.to(device, non_blocking=True)` copies without making the host wait.

    For a GPU it is page-locked, and torch reuses its memory only after the copy to the device has finished.
    """
    if not is_asynchronous(device):
        return tensor
    return pinned(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def record_event(device: torch.device) -> Any:
    """Return an event that completes after all work queued so far on the device's current stream."""
    event = torch.cuda.Event()
    event.record(current(device))
    return event
