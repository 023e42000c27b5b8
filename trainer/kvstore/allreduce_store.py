"""The store of several processes that run synchronously: pushed values are summed by an all-reduce."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import checkpoint, dist_utils
from ..compression import CompressedAllReduce, create_compressor, wait_all
from .base import Key, KVStore, optimizer_updater
from .local import LocalStore

__all__ = ["NAMES", "CollectiveStore"]

NAMES = ("dist", "dist_sync", "dist_device_sync")


class CollectiveStore(LocalStore):
    """Values by key, the same on all ranks. Every call but `pull` is to be made on all ranks, with the same keys.

    `init` begins with rank 0's value. What is pushed to a key is added up over all ranks, each rank's list first; the sum
    replaces what is stored, or goes to the updater, which does the same on every rank. A call with a list of keys
    is one message for each type. Values stay on the device where they are.

    Args:
        type: "dist", "dist_sync" or "dist_device_sync", which mean the same.
        group: a process group of torch.distributed; by default that of all ranks, which is made if there is none, of the
            environment that torchrun sets.

    Raises:
        RuntimeError: there is no process group, nor torchrun's environment.

    Source: MXNet 1.9.1, `KVStoreDist`; there a server keeps the values.
    """

    in_step = True

    def __init__(self, type: str = "dist_sync", group: Any = None) -> None:
        super().__init__(type)
        self.group = dist_utils.process_group(group, type)
        self.rank = dist.get_rank(self.group)
        self.num_workers = dist.get_world_size(self.group)
        self._compression_params: dict[str, Any] | None = None
        self._reducers: dict[Key, CompressedAllReduce] = {}

    @torch.no_grad()
    def init(self, key: Any, value: Any) -> None:
        """As `KVStore.init`; every rank gets rank 0's value.

        Raises:
            TypeError, ValueError: as of a local store, and where ranks have other keys, shapes or types; nothing has been
                changed.
        """
        known = set(self._values)
        super().init(key, value)
        new = {str(each): stored for each, stored in self._values.items() if each not in known}
        try:
            dist_utils.check_alike("key", new, self.group)
        except ValueError:
            for each in set(self._values) - known:
                del self._values[each]
            raise
        dist_utils.broadcast_coalesced(list(new.values()), self.group)

    def replace(self, key: Any, value: Any) -> None:
        """Refused, as in MXNet: a rank alone could not tell the others."""
        KVStore.replace(self, key, value)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress the sums over the ranks, with what is left of each key kept for the next time.

        Args:
            compression_params: as for `create_compressor`.

        Raises:
            TypeError, ValueError: they do not fit.
        """
        create_compressor(compression_params)
        self._compression_params, self._reducers = dict(compression_params), {}

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, which are the same on all ranks, to a file; rank 0 does.

        Raises:
            RuntimeError: no optimizer updates what is stored, or rank 0 could not write the file.
        """
        optimizer_updater(self._updater)
        failure: str | None = None
        if self.rank == 0:
            try:
                super().save_optimizer_states(fname, dump_optimizer)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        failure = dist_utils.broadcast_object(failure, dist_utils.global_rank(self.group, 0), self.group)
        if failure is not None:
            raise RuntimeError(f"rank 0 could not save the optimizer's states: {failure}")

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote, on every rank.

        Raises:
            RuntimeError: no optimizer updates what is stored.
            ValueError, FileNotFoundError: on some rank there is no such file, or it does not fit; nothing has been changed
                there or on any other.
        """
        optimizer_updater(self._updater)
        failure: Exception | None = None
        try:
            checkpoint.read(fname)
        except (ValueError, FileNotFoundError) as error:
            failure = error
        answers = dist_utils.all_gather_objects(failure and str(failure), self.group)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise ValueError(f"rank {rank} cannot load the optimizer's states: {answer}")
        super().load_optimizer_states(fname)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        dist_utils.barrier(self.group)

    def __repr__(self) -> str:
        return f"CollectiveStore({self.type!r}, rank {self.rank} of {self.num_workers}, {len(self._values)} keys)"

    def _sums(self, keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        for key, tensors in zip(keys, values, strict=True):
            for tensor in tensors:
                if tensor.layout != torch.strided:
                    raise TypeError(f"value of key {key!r} is sparse ({tensor.layout}): this store adds up dense tensors")
        totals = super()._sums(keys, values)
        order = sorted(range(len(keys)), key=lambda i: keys[i])  # the same on all ranks, however their lists are ordered
        if self._compression_params is not None:
            self._add_compressed([keys[i] for i in order], [totals[i] for i in order])
            return totals
        sums = dist_utils.all_reduce_coalesced([totals[i] for i in order], self.group)
        return [total for _, total in sorted(zip(order, sums, strict=True), key=lambda pair: pair[0])]

    def _add_compressed(self, keys: Sequence[Key], tensors: Sequence[torch.Tensor]) -> None:
        """Turn these tensors, contiguous ones, into their sums over all ranks."""
        params: Any = self._compression_params
        for key, tensor in zip(keys, tensors, strict=True):
            if tensor.dtype != torch.float32:
                raise TypeError(f"the gradient of key {key!r} is {tensor.dtype}: compression takes dense torch.float32")
            known = self._reducers.get(key)
            if known is None or known.numel != tensor.numel() or known.device != tensor.device:
                shapes = [tensor.shape]
                made = CompressedAllReduce(params, tensor.numel(), shapes, device=tensor.device, group=self.group)
                self._reducers[key] = made
        flats = [tensor.contiguous().view(-1) for tensor in tensors]
        wait_all([self._reducers[key].start(flat) for key, flat in zip(keys, flats, strict=True)])
        for tensor, flat in zip(tensors, flats, strict=True):
            if tensor.data_ptr() != flat.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
