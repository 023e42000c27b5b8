"""The store of several processes that work in step: what they push is added up by torch.distributed's collectives.

Below it what the other files for several processes need, too: a process group, and a check that all ranks mean the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import checkpoint
from . import collectives
from .base import Key, KVStore
from .compressors import CompressedAllReduce, create_compressor, wait_all
from .local import LocalStore

__all__ = ["NAMES", "CollectiveStore", "broadcast", "check_alike", "check_same", "global_rank", "process_group"]

NAMES = ("dist", "dist_sync", "dist_device_sync")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BYTES = 25 * 2**20  # of a message in which several tensors travel together


class CollectiveStore(LocalStore):
    """Values by key, the same on all ranks. Every call but `pull` is to be made on all ranks, with the same keys.

    `init` begins with rank 0's value. What is pushed to a key is added up over all ranks, each rank's list first; the sum
    takes the place of what is stored, or goes to the updater, which does the same on every rank. A call with a list of keys
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
        self.group = process_group(group, type)
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
            check_alike("key", new, self.group)
        except ValueError:
            for each in set(self._values) - known:
                del self._values[each]
            raise
        broadcast(list(new.values()), self.group)

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
        self._optimizers_updater()
        failure: str | None = None
        if self.rank == 0:
            try:
                super().save_optimizer_states(fname, dump_optimizer)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        failure = collectives.broadcast_object(failure, global_rank(self.group, 0), self.group)
        if failure is not None:
            raise RuntimeError(f"rank 0 could not save the optimizer's states: {failure}")

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote, on every rank.

        Raises:
            RuntimeError: no optimizer updates what is stored.
            ValueError, FileNotFoundError: on some rank there is no such file, or it does not fit; nothing has been changed
                there or on any other.
        """
        self._optimizers_updater()
        failure: Exception | None = None
        try:
            checkpoint.read(fname)
        except (ValueError, FileNotFoundError) as error:
            failure = error
        answers = collectives.all_gather_objects(failure and str(failure), self.group)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise ValueError(f"rank {rank} cannot load the optimizer's states: {answer}")
        super().load_optimizer_states(fname)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        collectives.barrier(self.group)

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
        sums = _sum_over_ranks([totals[i] for i in order], self.group)
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


def process_group(group: Any = None, name: str = "dist_sync") -> Any:
    """This group; or None, which says that of all ranks. If there is none it is made of torchrun's environment.

    It is made with NCCL for CUDA, and gloo else. Whoever keeps it itself, and not None, keeps its threads alive after
    `destroy_process_group`, and these may end a program that is about to end anyway with an error.

    Raises:
        RuntimeError: there is no group of all ranks, and the environment is not torchrun's.
    """
    if not dist.is_available():
        raise RuntimeError(f"kvstore={name!r} needs a torch with torch.distributed")
    if not dist.is_initialized():
        if missing := [variable for variable in _VARIABLES if variable not in os.environ]:
            raise RuntimeError(
                f"kvstore={name!r} needs several processes: start the program with torchrun --nproc_per_node 2 train.py, "
                f"which sets {', '.join(missing)}, or call torch.distributed.init_process_group() before"
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    return None if group is dist.group.WORLD else group


def global_rank(group: Any, rank: int) -> int:
    """The number among all ranks of a rank of this group."""
    return rank if group is None else dist.get_global_rank(group, rank)


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks rank 0's values of these tensors, which are of the same shapes and types there. In few messages."""
    source = global_rank(group, 0)
    for members in _messages(tensors):
        if len(members) == 1 and tensors[members[0]].is_contiguous():
            collectives.broadcast(tensors[members[0]].detach(), source, group)
            continue
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        collectives.broadcast(flat, source, group)
        _put_back(flat, [tensors[i] for i in members])


def check_alike(what: str, named: Mapping[str, torch.Tensor], group: Any) -> None:
    """See that all ranks have tensors of the same names, shapes and types, in the same order.

    Raises:
        ValueError: on all ranks, naming the first difference. `what` is what messages call a tensor.
    """
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    check_same(what, {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items()}, group, device)


def check_same(what: str, described: Mapping[str, str], group: Any, device: torch.device) -> None:
    """See that all ranks have the same names and descriptions, in the same order. Of what is the same little is sent.

    Raises:
        ValueError: on all ranks, naming the first difference.
    """
    mine = list(described.items())
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device=device)
    ranks = dist.get_world_size(group)
    found = torch.zeros(ranks, dtype=own.dtype, device=own.device)
    collectives.all_gather(found, own, group)
    if len(set(found.tolist())) == 1:
        return
    lists = collectives.all_gather_objects(mine, group)
    rank = next(rank for rank in range(ranks) if lists[rank] != lists[0])
    first, other = lists[0], lists[rank]
    pairs = enumerate(zip(first, other, strict=False))
    k = next((k for k, (a, b) in pairs if a != b), min(len(first), len(other)))
    there = ["{!r} {}".format(*each[k]) if k < len(each) else "nothing" for each in (first, other)]
    raise ValueError(
        f"ranks differ: {what} number {k} is {there[0]} on rank 0 and {there[1]} on rank {rank} (of {len(first)} and "
        f"{len(other)}): all ranks must have the same, in the same order"
    )


def _sum_over_ranks(tensors: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """The sums over all ranks of these tensors, which are overwritten; in one message for each type."""
    running = []
    for members in _messages(tensors, limit=None):
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        running.append((members, flat, collectives.all_reduce(flat, group=group, async_op=True)))
    for members, flat, work in running:
        work.wait()
        _put_back(flat, [tensors[i] for i in members])
    return list(tensors)


def _messages(tensors: Sequence[torch.Tensor], limit: int | None = _BYTES) -> list[list[int]]:
    """Which tensors travel together: those of one device and type, up to `limit` bytes."""
    messages: list[list[int]] = []
    filled: dict[Any, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        kind, size = (tensor.device, tensor.dtype), tensor.numel() * tensor.element_size()
        members, before = filled.get(kind, ([], 0))
        if not members or (limit is not None and before + size > limit):
            members, before = [], 0
            messages.append(members)
        members.append(i)
        filled[kind] = members, before + size
    return messages


def _put_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
