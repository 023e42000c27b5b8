"""torch.distributed's collectives under one set of names, with errors that name the missing ranks.

torch 2.12 renamed some of them and warns of the old names. Where a rank has ended or hangs, the backend tells the others
which connection broke, or that time is up. So the first thing that a rank does then is to leave a mark in the store of its
process group, where all ranks look for those of the others: ranks without a mark are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 5.0  # seconds in which ranks that have noticed that one is missing wait for each other's marks
_MARK = "tristep/noticed/{}"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BYTES = 25 * 2**20  # of a message in which several tensors travel together

# There are none in a torch that was built without torch.distributed.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # what was wrong with a process group


class Work:
    """A collective that is under way; after it `wait` calls `then`."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work, self._group = work, group
        self.then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until it is over; on a GPU, let the stream do so.

        Raises:
            RuntimeError: a rank is missing.
        """
        _call(self._group, self._work.wait)
        if self.then is not None:
            self.then()


def all_reduce(values: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """Make `values` the sums over all ranks, or what `op` says. With `async_op` a `Work` to wait for, else None."""
    return _run(group, async_op, dist.all_reduce, values, dist.ReduceOp.SUM if op is None else op)


def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `output` with the `own` of all ranks in their order. As all of these, it gives what `all_reduce` gives."""
    return _run(group, async_op, _all_gather, output, own)


def reduce_scatter(output: torch.Tensor, values: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `output` with the own part, of as many as there are ranks, of the sum of the `values` of all ranks."""
    return _run(group, async_op, _reduce_scatter, output, values)


def all_to_all(
    output: torch.Tensor,
    values: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Any:
    """Send part i of `values`, of as many as there are ranks, to rank i; `output` gets the parts in the ranks' order.

    Args:
        sizes: those of the parts in `output`, and in `values`; by default all are equal.
    """
    got, sent = (None, None) if sizes is None else map(list, sizes)
    return _run(group, async_op, dist.all_to_all_single, output, values, got, sent)


def broadcast(values: torch.Tensor, source: int, group: Any = None) -> None:
    """Give all ranks the values of rank `source` of this group."""
    _run(group, False, dist.broadcast, values, _global_rank(group, source))


def all_gather_objects(own: Any, group: Any = None) -> list[Any]:
    """The objects of all ranks in their order. Slow."""
    found: list[Any] = [None] * dist.get_world_size(group)
    _call(group, dist.all_gather_object, found, own, group=group)
    return found


def broadcast_object(own: Any, group: Any = None) -> Any:
    """Rank 0's object. Slow."""
    found = [own]
    _call(group, dist.broadcast_object_list, found, src=_global_rank(group, 0), group=group)
    return found[0]


def barrier(group: Any = None) -> None:
    """Wait until every rank has come here."""
    _call(group, dist.barrier, group=group)


def refuse_lost(group: Any) -> None:
    """An error where a rank has been found to be missing before: the others cannot go on without it."""
    if _lost and (world := _made(group)) is not None and (text := _lost.get(world)) is not None:
        raise RuntimeError(text)


def process_group(group: Any = None, name: str = "dist_sync") -> Any:
    """This group; or None, which says that of all ranks. If there is none it is made of torchrun's environment.

    It is made with NCCL for CUDA, and gloo else. A reference to it, rather than None, keeps its threads alive after
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


def _global_rank(group: Any, rank: int) -> int:
    """The number among all ranks of a rank of this group."""
    return rank if group is None else dist.get_global_rank(group, rank)


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks rank 0's values of these tensors, which are of the same shapes and types there. In few messages."""
    for members in _messages(tensors):
        if len(members) == 1 and tensors[members[0]].is_contiguous():
            broadcast(tensors[members[0]].detach(), 0, group)
            continue
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        broadcast(flat, 0, group)
        _copy_back(flat, [tensors[i] for i in members])


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
    all_gather(found, own, group)
    if len(set(found.tolist())) == 1:
        return
    lists = all_gather_objects(mine, group)
    rank = next(rank for rank in range(ranks) if lists[rank] != lists[0])
    first, other = lists[0], lists[rank]
    pairs = enumerate(zip(first, other, strict=False))
    k = next((k for k, (a, b) in pairs if a != b), min(len(first), len(other)))
    there = ["{!r} {}".format(*each[k]) if k < len(each) else "nothing" for each in (first, other)]
    raise ValueError(
        f"ranks differ: {what} number {k} is {there[0]} on rank 0 and {there[1]} on rank {rank} (of {len(first)} and "
        f"{len(other)}): all ranks must have the same, in the same order"
    )


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """The sums over all ranks of these tensors, which are overwritten; in one message for each type."""
    running = []
    for members in _messages(tensors, limit=None):
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        running.append((members, flat, all_reduce(flat, group=group, async_op=True)))
    for members, flat, work in running:
        work.wait()
        _copy_back(flat, [tensors[i] for i in members])
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


def _copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def _run(group: Any, async_op: bool, function: Callable[..., Any], *args: Any) -> Any:
    work = _call(group, function, *args, group=group, async_op=async_op)
    return Work(work, group) if async_op else None


def _call(group: Any, function: Callable[..., Any], /, *args: Any, **settings: Any) -> Any:
    refuse_lost(group)
    try:
        return function(*args, **settings)
    except RuntimeError as error:
        raise RuntimeError(_noticed(group, error)) from error


def _made(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _noticed(group: Any, error: RuntimeError) -> str:
    """What is to be said of a collective that has failed, from now on."""
    ranks, found = dist.get_process_group_ranks(group), _missing(_made(group))
    count = len(ranks)
    if found is None:
        who = f"a rank of {count} is missing, probably rank 0, which keeps the list of all: it has ended, hangs, or makes"
    elif not found:
        who = f"the {count} ranks are not at the same call: one came too late for the others, or makes"
    elif len(found) == 1:
        who = f"rank {ranks[found[0]]} of {count} is missing: it has ended, hangs, or makes"
    else:
        named = ", ".join(str(ranks[place]) for place in found)
        who = f"ranks {named} of {count} are missing: they have ended, hang, or make"
    why = re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". ")[0]
    text = (
        f"{who} other calls than this one ({why}). Nobody can go on, and weights and states may be from the middle of a "
        "step: end all processes, see what the missing ones printed last, and start again with saved weights and "
        "load_states()"
    )
    if (world := _made(group)) is not None:
        _lost[world] = text
    return text


def _missing(group: Any) -> list[int] | None:
    """The numbers in a process group of the ranks that leave no mark while others wait for it; None if nobody can say."""
    own, others = dist.get_rank(group), [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
    get_store = getattr(group, "get_group_store", None)
    if get_store is None:
        return None
    missing: list[int] | None = None
    end = time.monotonic() + _GRACE
    try:
        store = get_store()
        store.set(_MARK.format(own), "")
        while missing is None or (missing and time.monotonic() < end):
            missing = [rank for rank in others if not store.check([_MARK.format(rank)])]
            time.sleep(0.02)
    except RuntimeError:  # the process with the store is gone: rank 0, without torchrun
        pass
    return missing
