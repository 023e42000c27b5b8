"""Split nested values into JSON data and a flat dict of tensors, and put them together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..optimizer.base import WithMaster
from .files import check_writable

_PLAIN = (bool, int, float, str, type(None))
_MOST_DEPTH = 50


def flatten(state: Any, path: str, into: dict[str, torch.Tensor]) -> Any:
    """Return the layout of a state that a user's optimizer made, and put its tensors into the dict `into`."""
    if state is None:
        return None
    if isinstance(state, torch.Tensor):
        into[path or "0"] = state
        return path or "0"
    if isinstance(state, (tuple, list)):
        items = [flatten(item, f"{path}.{k}" if path else str(k), into) for k, item in enumerate(state)]
        if isinstance(state, WithMaster):
            return {"with master": items}
        return {"tuple": items} if isinstance(state, tuple) else items
    raise TypeError(f"a state must be None, a tensor, or a tuple or list of these; got {type(state).__name__}")


def tensor_names(layout: Any) -> list[str]:
    if layout is None or isinstance(layout, str):
        return [] if layout is None else [layout]
    items = next(iter(layout.values())) if isinstance(layout, dict) else layout
    return [slot for item in items for slot in tensor_names(item)]


def unflatten(layout: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Make the state that `flatten` split, from copies of the tensors on a device."""
    if layout is None:
        return None
    if isinstance(layout, str):
        return tensors[layout].to(device, copy=True)
    if isinstance(layout, dict):
        ((kind, items),) = layout.items()
        made = unflatten(items, tensors, device)
        return WithMaster(*made) if kind == "with master" else tuple(made)
    return [unflatten(item, tensors, device) for item in layout]


def check_layout(name: str, layout: Any, depth: int = 0) -> None:
    """Raise ValueError if `flatten` cannot have returned `layout`, for the parameter `name`."""
    is_wrapped = isinstance(layout, dict) and list(layout) in (["tuple"], ["with master"])
    items = next(iter(layout.values())) if is_wrapped else layout
    if depth > _MOST_DEPTH or not (isinstance(items, list) or (not is_wrapped and isinstance(items, (str, type(None))))):
        raise ValueError(f"saved state: the layout of {name!r} is no nesting of a state: {str(layout)[:80]}")
    for item in items if isinstance(items, list) else ():
        check_layout(name, item, depth + 1)


def pack(value: Any, tensors: dict[str, torch.Tensor], what: str, depth: int = 0) -> Any:
    """Return a value as data for JSON, and put its tensors into the dict `tensors`, named by numbers, without a copy.

    The value is None, a bool, number, string, tensor or array of numbers; or a list or tuple of these, or a dict with
    strings or integers as its keys, nested up to 50 deep. Else raise TypeError, which names the value `what`.
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
    """Make the value that `pack` split; raise ValueError, TypeError or KeyError if it cannot have returned `data`."""
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
        values = [unpack(item, tensors, depth + 1) for item in items]
        return tuple(values) if kind == "tuple" else values
    raise ValueError(f"it has a {kind!r}")
