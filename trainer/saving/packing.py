"""Nestings of plain data, tensors and arrays as JSON and a flat dict of tensors; and copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..files import check_writable

_PLAIN = (bool, int, float, str, type(None))
_MOST_DEPTH = 50


def pack(value: Any, tensors: dict[str, torch.Tensor], what: str, depth: int = 0) -> Any:
    """A value as data for JSON; its tensors go into a flat dict, not copied.

    Args:
        value: None, a bool, number, string, tensor or array of numbers, or a list, tuple or dict of such, whose keys are
            strings or integers.
        tensors: what the tensors go into.
        what: what messages call it.

    Raises:
        TypeError: it is something else, or has that inside, or a tensor that files do not have.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if depth == _MOST_DEPTH:
        raise TypeError(f"{what} is nested more than {_MOST_DEPTH} times, too deeply to be saved")
    if isinstance(value, torch.Tensor):
        check_writable(what, value)
        tensors[str(len(tensors))] = value
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": pack(torch.from_numpy(np.ascontiguousarray(value)), tensors, what, depth + 1)["tensor"]}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"{what} has the key {odd[0]!r} in a dict: to be saved it must be a string or an integer")
        return {"dict": [[key, pack(item, tensors, f"{what}[{key!r}]", depth + 1)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, tensors, f"{what}[{i}]", depth + 1) for i, item in enumerate(value)]}
    raise TypeError(
        f"{what} is a {type(value).__name__}: to be saved it must be None, a number, a string, a tensor, an array of "
        "numbers, or a list, tuple or dict of such"
    )


def unpack(data: Any, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """What `pack` was given.

    Raises:
        ValueError, TypeError, KeyError: it has not come from `pack`.
    """
    if isinstance(data, _PLAIN):
        return data
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    ((kind, items),) = data.items()
    if kind == "tensor":
        return tensors[items]
    if kind == "array":
        return tensors[items].numpy()
    if kind == "dict":
        if odd := [key for key, _ in items if type(key) not in (str, int)]:
            raise ValueError(f"it has a dict with the key {odd[0]!r}")
        return {key: unpack(item, tensors, depth + 1) for key, item in items}
    if kind in ("tuple", "list"):
        found = [unpack(item, tensors, depth + 1) for item in items]
        return tuple(found) if kind == "tuple" else found
    raise ValueError(f"it has a {kind!r}")


def host_copies(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Copies of tensors in the host's memory, and what to call, in any thread, before they are read.

    From a GPU they are copied into pinned memory on the current stream: the host waits for nothing, and what the stream does
    next, which may overwrite the tensors, comes after.
    """
    copies: dict[str, torch.Tensor] = {}
    devices: set[torch.device] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        else:
            copies[name] = tensor.to("cpu", copy=True)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait
