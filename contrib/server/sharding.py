"""The division of keys and their states among servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...trainer.kvstore.base import Key
from .job import integer_variable

_BIG = 1_000_000  # smallest number of elements of an array that is sharded


class Entry(NamedTuple):
    """The shape and dtype of a key's value, and the elements that each server has."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[int, int, int], ...]  # server, first element, end


class Shard(NamedTuple):
    """One server's elements of a list of keys.

    Attributes:
        server: the server's number.
        keys: the keys of which the server has elements.
        parts: for each of these its index in the list of keys, and the range of elements; None for the whole value.
    """

    server: int
    keys: list[Key]
    parts: list[tuple[int, slice | None]]

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the server's elements of tensors, one tensor for each key in the list."""
        return [tensors[i] if part is None else tensors[i].reshape(-1)[part] for i, part in self.parts]


class Placement:
    """The servers and ranges of elements of all keys.

    Args:
        servers: the number of servers.
        entries: the entries of keys that are placed already. Default: none.

    Attributes:
        entries: the `Entry` of each key.
    """

    def __init__(self, servers: int, entries: Mapping[Key, Entry] | None = None) -> None:
        self._servers = servers
        self.entries = dict(entries or {})
        self._shards: dict[tuple[Key, ...], list[Shard]] = {}

    @property
    def cut(self) -> list[Key]:
        """The keys whose arrays are sharded over servers."""
        return [key for key, entry in self.entries.items() if len(entry.parts) > 1]

    def place(self, keys: Sequence[Key], values: Sequence[torch.Tensor], may_cut: bool) -> dict[Key, Entry]:
        """Return entries for new keys, placed as in MXNet, without adding them. Arrays are sharded only if `may_cut`."""
        bound = integer_variable("MXNET_KVSTORE_BIGARRAY_BOUND", _BIG)
        entries = {}
        for index, (key, value) in enumerate(zip(keys, values, strict=True), len(self.entries)):
            size = value.numel()
            if may_cut and self._servers > 1 and size >= bound:
                ends = [int(size * i / self._servers + 0.5) for i in range(self._servers + 1)]
                parts = [(server, ends[server], ends[server + 1]) for server in range(self._servers)]
                parts = [part for part in parts if part[1] < part[2]]
            else:
                number = key if isinstance(key, int) else index
                parts = [(number * 9973 % self._servers, 0, size)]
            entries[key] = Entry(value.shape, value.dtype, tuple(parts))
        return entries

    def shards(self, keys: Sequence[Key]) -> list[Shard]:
        """Return each server's shard of these keys; servers without elements are left out."""
        if tuple(keys) not in self._shards:
            shards = [Shard(server, [], []) for server in range(self._servers)]
            for i, key in enumerate(keys):
                parts = self.entries[key].parts
                for server, start, stop in parts:
                    shards[server].keys.append(key)
                    shards[server].parts.append((i, slice(start, stop) if len(parts) > 1 else None))
            self._shards[tuple(keys)] = [shard for shard in shards if shard.keys]
        return self._shards[tuple(keys)]


def without_tensors(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Split collected states into plain data with the names of the tensors, and the tensors."""
    names = {name: list(slots) for name, slots in saved["state"].items()}
    return dict(saved) | {"state": names}, [tensor for slots in saved["state"].values() for tensor in slots.values()]


def with_tensors(saved: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return collected states from the results of `without_tensors`."""
    each = iter(tensors)
    return dict(saved) | {"state": {name: {slot: next(each) for slot in slots} for name, slots in saved["state"].items()}}


def join_states(parts: Sequence[Mapping[str, Any]], entries: Mapping[Key, Entry]) -> dict[str, Any]:
    """Join the collected states of all servers; shards of an array are concatenated."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, entry in entries.items():
        shards = [parts[server]["state"][str(key)] for server, _, _ in entry.parts]
        if len(shards) == 1:
            state[str(key)] = shards[0]
        else:
            state[str(key)] = {slot: torch.cat([each[slot] for each in shards]).view(entry.shape) for slot in shards[0]}
    return dict(parts[0]) | {
        "num_update": max(part["num_update"] for part in parts),
        "counts": {name: count for part in parts for name, count in part["counts"].items()},
        "parameters": {str(key): list(entry.shape) for key, entry in entries.items()},
        "layout": {name: nesting for part in parts for name, nesting in part["layout"].items()},
        "state": state,
    }


def states_of_server(saved: Mapping[str, Any], entries: Mapping[Key, Entry], server: int) -> dict[str, Any]:
    """Return a server's shard of saved states."""
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
    by_name = {what: {name: v for name, v in saved[what].items() if name in parts} for what in ("counts", "layout")}
    return dict(saved) | by_name | {"parameters": shapes, "state": state}
