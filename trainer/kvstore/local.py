"""The store of one process: it sums what the replicas of a model push, on the CPU or on their device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import checkpoint
from ..compression import GradientCompression, local_compression
from ..optimizer import Optimizer, Updater, get_updater
from .base import Key, KVStore, known_values, new_values, optimizer_updater

__all__ = ["NAMES", "LocalStore"]

NAMES = ("local", "device", "nccl")


class LocalStore(KVStore):
    """Values by key in one process.

    Args:
        type: "local" keeps and adds up values on the CPU, "device" and "nccl" where a key's first value was.

    Source: MXNet 1.9.1, `KVStoreLocal`, but that a pushed tensor is always copied.
    """

    takes_lists = True

    def __init__(self, type: str = "local") -> None:
        self.type = type
        self._values: dict[Key, torch.Tensor] = {}
        self._updater: Callable[..., None] | None = None
        self._compression: GradientCompression | None = None

    def init(self, key: Any, value: Any) -> None:
        """As `KVStore.init`.

        Raises:
            TypeError, ValueError: a key of another kind than those before, or one that is there already, or a value that is
                no tensor; nothing has been changed.
        """
        for each, tensor in new_values(key, value, self._values).items():
            self._values[each] = tensor.to("cpu", copy=True) if self.type == "local" else tensor.clone()

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """As `KVStore.push`. Sums are taken in the order of the list.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been changed.
        """
        found = known_values(key, value, "value", self._values)
        keys = [each for each, _ in found]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = self._sums(keys, [tensors for _, tensors in found])
        if self._updater is None:
            self._values.update(zip(keys, totals, strict=True))
        elif isinstance(self._updater, Updater):
            self._updater(keys, totals, [self._values[each] for each in keys])
        else:
            for each, total in zip(keys, totals, strict=True):
                self._updater(each, total, self._values[each])

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As `KVStore.pull`.

        Raises:
            TypeError, ValueError: keys or tensors that do not fit; nothing has been changed.
        """
        for each, tensors in known_values(key, out, "out", self._values):
            for tensor in tensors:
                tensor.copy_(self._values[each])

    @torch.no_grad()
    def row_sparse_pull(self, key: Any, out: Any, row_ids: Any, priority: int = 0) -> None:
        """Copy these rows of what is stored to `out`, and fill its other rows with zeros.

        Args:
            key: a key or a list of them.
            out: a tensor for each, or a list of them.
            row_ids: integer tensors, one for all of a key's `out` or one for each.
        """
        for each, tensors in known_values(key, out, "out", self._values):
            ids = row_ids[each] if isinstance(row_ids, Mapping) else row_ids
            listed = list(ids) if isinstance(ids, (list, tuple)) else [ids] * len(tensors)
            if len(listed) != len(tensors):
                raise ValueError(f"{len(listed)} row_ids for {len(tensors)} tensors of key {each!r}: one, or one for each")
            for tensor, rows in zip(tensors, listed, strict=True):
                stored = self._values[each]
                rows = torch.unique(rows).to(stored.device, torch.int64)
                tensor.zero_()
                tensor[rows.to(tensor.device)] = stored[rows].to(tensor.device, tensor.dtype)

    @torch.no_grad()
    def replace(self, key: Any, value: Any) -> None:
        """As `KVStore.replace`.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been changed.
        """
        stored, values = [], []
        for each, (tensor, *_) in known_values(key, value, "value", self._values):
            if tensor.dtype == self._values[each].dtype:
                stored.append(self._values[each])
                values.append(tensor.detach())
            else:
                self._values[each] = tensor.detach().to(self._values[each].device, copy=True)
        if stored:
            torch._foreach_copy_(stored, values)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let this optimizer update what is stored, with states of its own from now on."""
        self._updater = get_updater(optimizer)

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """As `KVStore.set_updater`."""
        if not callable(updater):
            raise TypeError(f"updater must be a function (key, pushed, stored), got {type(updater).__name__}")
        self._updater = updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what each copy pushes, with a residual for each key and copy.

        Args:
            compression_params: {"type": "2bit" or "1bit", "threshold": 0.5}.

        Raises:
            TypeError, ValueError: they do not fit, or this kind of store does not compress.
        """
        local_compression(compression_params)
        if self.type != "device":
            raise ValueError(f"a store of type {self.type!r} does not compress gradients: 'device' does")
        self._compression = GradientCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file; its settings, too, whatever `dump_optimizer` says.

        Raises:
            RuntimeError: no optimizer updates what is stored.
        """
        updater, names = optimizer_updater(self._updater), list(map(str, self._values))
        checkpoint.write(fname, checkpoint.collect(updater, names, list(self._values.values()), list(self._values)))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote.

        Raises:
            RuntimeError: no optimizer updates what is stored.
            ValueError, FileNotFoundError: there is no such file, or it does not fit; nothing has been changed.
        """
        updater, names, saved = optimizer_updater(self._updater), list(map(str, self._values)), checkpoint.read(fname)
        checkpoint.restore(updater, names, list(self._values.values()), saved, list(self._values))

    def __repr__(self) -> str:
        return f"LocalStore({self.type!r}, {len(self._values)} keys)"

    def _inside(self) -> tuple[Updater, dict[Key, torch.Tensor]] | None:
        return (self._updater, self._values) if isinstance(self._updater, Updater) else None

    def _residuals(self) -> dict[tuple[Any, Any], torch.Tensor]:
        return {} if self._compression is None else self._compression.residuals

    def _sums(self, keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The sum of each key's tensors, compressed first if that is wanted, in the order of their list."""
        copies = max(map(len, values), default=0)
        totals: list[torch.Tensor] = []
        for d in range(copies):
            members = [i for i, tensors in enumerate(values) if d < len(tensors)]
            given = [values[i][d].detach() for i in members]
            if self._compression is not None:
                given = self._compression.sent([keys[i] for i in members], d, given)
            moved = [_moved(tensor, self._values[keys[i]].device) for i, tensor in zip(members, given, strict=True)]
            if d == 0:
                totals = [tensor.clone() for tensor in moved]
                continue
            dense = [k for k, i in enumerate(members) if moved[k].layout == totals[i].layout == torch.strided]
            if dense:
                torch._foreach_add_([totals[members[k]] for k in dense], [moved[k] for k in dense])
            for k in set(range(len(members))).difference(dense):
                totals[members[k]] = totals[members[k]] + moved[k]
        return totals


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The CPU would not wait for what comes from a GPU.
    return tensor.to(device, non_blocking=device.type != "cpu")
