"""States of an optimizer as servers send them, and how states are divided among servers and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base import Key
from .sharding import Entry


def without_tensors(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Collected states as plain data, with the names of the tensors, and the tensors."""
    names = {name: list(slots) for name, slots in saved["state"].items()}
    return dict(saved) | {"state": names}, [tensor for slots in saved["state"].values() for tensor in slots.values()]


def with_tensors(saved: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Collected states, of what `without_tensors` gave."""
    each = iter(tensors)
    return dict(saved) | {"state": {name: {slot: next(each) for slot in slots} for name, slots in saved["state"].items()}}


def join_states(parts: Sequence[Mapping[str, Any]], entries: Mapping[Key, Entry]) -> dict[str, Any]:
    """The states of all keys, of those of all servers; arrays that are cut are whole in them."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, entry in entries.items():
        found = [parts[server]["state"][str(key)] for server, _, _ in entry.parts]
        if len(found) == 1:
            state[str(key)] = found[0]
        else:
            state[str(key)] = {slot: torch.cat([each[slot] for each in found]).view(entry.shape) for slot in found[0]}
    return dict(parts[0]) | {
        "num_update": max(part["num_update"] for part in parts),
        "counts": {name: count for part in parts for name, count in part["counts"].items()},
        "parameters": {str(key): list(entry.shape) for key, entry in entries.items()},
        "layout": {name: nesting for part in parts for name, nesting in part["layout"].items()},
        "state": state,
    }


def states_of_server(saved: Mapping[str, Any], entries: Mapping[Key, Entry], server: int) -> dict[str, Any]:
    """The part of saved states that a server is to have."""
    parts = {
        str(key): slice(start, stop) if len(entry.parts) > 1 else None
        for key, entry in entries.items()
        for where, start, stop in entry.parts
        if where == server
    }
    shapes = {name: saved["parameters"][name] if part is None else [part.stop - part.start] for name, part in parts.items()}
    state = {
        name: {slot: t if (part := parts[name]) is None else t.reshape(-1)[part] for slot, t in slots.items()}
        for name, slots in saved["state"].items()
        if name in parts
    }
    own = {what: {name: v for name, v in saved[what].items() if name in parts} for what in ("counts", "layout")}
    return dict(saved) | own | {"parameters": shapes, "state": state}
