"""States of optimizers that update by hand: any nesting of tuples, lists and tensors, as a layout and a flat dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..optimizer.base import WithMaster


def flatten(state: Any, path: str, into: dict[str, torch.Tensor]) -> Any:
    """The nesting of a state that a user's optimizer made; its tensors go `into` a flat dict."""
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
    raise TypeError(f"a state to save is None, a tensor, or a tuple or list of such; got {type(state).__name__}")


def tensor_names(layout: Any) -> list[str]:
    """The names of the tensors in a nesting."""
    if layout is None or isinstance(layout, str):
        return [] if layout is None else [layout]
    items = next(iter(layout.values())) if isinstance(layout, dict) else layout
    return [slot for item in items for slot in tensor_names(item)]


def unflatten(layout: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """A state of this layout, of copies of the tensors on the device."""
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
    """Refuse what `flatten` does not return."""
    items = layout
    if isinstance(layout, dict) and len(layout) == 1 and next(iter(layout)) in ("tuple", "with master"):
        (items,) = layout.values()
    if depth > 50 or not (items is None or isinstance(items, (str, list))) or (isinstance(layout, dict) and items is None):
        raise ValueError(f"saved state: the layout of {name!r} is no nesting of a state: {str(layout)[:80]}")
    for item in items if isinstance(items, list) else ():
        check_layout(name, item, depth + 1)
