"""Streams of GPUs: everything is queued on the device of the tensors that it works on, whichever is the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Whether work on this device is queued on a stream, so that the host need not wait for it."""
    return device.type == "cuda" and torch.cuda.is_available()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which this is the current GPU; it does nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current(device: torch.device) -> Any:
    """The stream on which work on this device is queued; None where there are none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """A context in which this is the current stream of its device; it does nothing for None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on the device's current stream becomes part of a CUDA graph."""
    if not is_asynchronous(device):
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host, page-locked, which copies to and from a GPU use behind the host's back."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host as a copy to this device with `non_blocking=True` takes it without making the host wait.

    For a GPU that is a copy in page-locked memory, which torch reuses only when the copy out of it is over.
    """
    if not is_asynchronous(device):
        return tensor
    found = pinned(*tensor.shape, dtype=tensor.dtype)
    return found.copy_(tensor)


def record_event(device: torch.device) -> Any:
    """An event that is over when all that has been queued on the device's current stream is: `query()`, `synchronize()`."""
    event = torch.cuda.Event()
    event.record(current(device))
    return event
