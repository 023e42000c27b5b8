"""torch.distributed's collectives under one set of names, with errors that name the missing ranks.

torch 2.12 renamed some collectives, and warns of the old names. If a rank has ended or hangs, torch tells the other ranks
only which connection broke, or that time is up. So a rank whose collective fails first leaves a mark in the store of its
process group, then looks for the marks of all other ranks: ranks without a mark are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 5.0  # seconds for which ranks with a failed collective wait for each other's marks
_MARK = "tristep/noticed/{}"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BYTES = 25 * 2**20  # the most that several tensors in one message take

# None in a torch that was built without torch.distributed.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # the error of each process group that lacks a rank


class Work:
    """An asynchronous collective; when it is complete, `wait` calls `then`, if that is set."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work, self._group = work, group
        self.then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the collective is complete; on a GPU the current stream waits, not the host."""
        _call(self._group, self._work.wait)
        if self.then is not None:
            self.then()


class Works:
    """Several asynchronous collectives, used as one `Work`."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self.then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for all of them, as `Work.wait` does."""
        for work in self._works:
            work.wait()
        if self.then is not None:
            self.then()


def all_reduce(values: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """Sum `values` over all ranks in place, or reduce them by `op`. Returns a `Work` with `async_op`, else None."""
    return _run(group, async_op, dist.all_reduce, values, dist.ReduceOp.SUM if op is None else op)


def all_gather(output: torch.Tensor, values: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `output` with the tensors `values` of all ranks, in their order. Returns a `Work` with `async_op`, else None."""
    return _run(group, async_op, _all_gather, output, values)


def reduce_scatter(output: torch.Tensor, values: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Sum `values` over all ranks, and fill `output` with this rank's part of the sum. Returns a `Work` with `async_op`."""
    return _run(group, async_op, _reduce_scatter, output, values)


def all_to_all(
    output: torch.Tensor,
    values: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Any:
    """Send part i of `values` to rank i; `output` gets the parts from all ranks, in their order. Returns as `all_reduce`.

    `sizes`: the lengths of the parts in `output`, and in `values`; None: equal parts.
    """
    received, sent = (None, None) if sizes is None else map(list, sizes)
    return _run(group, async_op, dist.all_to_all_single, output, values, received, sent)


def broadcast(values: torch.Tensor, source: int, group: Any = None, async_op: bool = False) -> Any:
    """Overwrite `values` on all ranks by the values of rank `source` of the group. Returns as `all_reduce`."""
    return _run(group, async_op, dist.broadcast, values, _global_rank(group, source))


def reduce(values: torch.Tensor, target: int, group: Any = None, async_op: bool = False) -> Any:
    """Sum `values` over all ranks, in place on rank `target` of the group; elsewhere they are undefined. As `all_reduce`."""
    return _run(group, async_op, dist.reduce, values, _global_rank(group, target))


def all_gather_objects(obj: Any, group: Any = None) -> list[Any]:
    """Return the picklable objects `obj` of all ranks, in their order. Slow."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    _call(group, dist.all_gather_object, objects, obj, group=group)
    return objects


def broadcast_object(obj: Any, group: Any = None) -> Any:
    """Return the picklable object `obj` of rank 0. Slow."""
    objects = [obj]
    _call(group, dist.broadcast_object_list, objects, src=_global_rank(group, 0), group=group)
    return objects[0]


def barrier(group: Any = None) -> None:
    _call(group, dist.barrier, group=group)


def refuse_lost(group: Any) -> None:
    """Raise RuntimeError if an earlier collective of this group found a rank missing: the others cannot go on without it."""
    if _lost and (world := _made(group)) is not None and (text := _lost.get(world)) is not None:
        raise RuntimeError(text)


def process_group(group: Any = None, name: str = "dist_sync") -> Any:
    """Initialize torch.distributed from torchrun's environment if need be, and return the group, None for all ranks.

    The backend is NCCL for CUDA, gloo otherwise. The group of all ranks is returned as None, because a reference to it would
    keep its threads alive after `destroy_process_group`, and these may end a finished program with an error. `name`: the
    store's, for messages.
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
    return rank if group is None else dist.get_global_rank(group, rank)


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Overwrite tensors on all ranks by rank 0's, which have the same shapes and dtypes, in few messages."""
    for members in _messages(tensors):
        if len(members) == 1 and tensors[members[0]].is_contiguous():
            broadcast(tensors[members[0]].detach(), 0, group)
            continue
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        broadcast(flat, 0, group)
        _copy_back(flat, [tensors[i] for i in members])


def check_alike(what: str, named: Mapping[str, torch.Tensor], group: Any, layouts: bool = False) -> None:
    """Raise ValueError on all ranks unless they have tensors with the same names, shapes and dtypes, in the same order.

    `what`: the noun for a tensor in the message, which names the first difference; `layouts`: whether the elements must have
    the same order in memory, too.
    """
    device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
    described = {
        name: f"{tensor.dtype} {tuple(tensor.shape)}{_layout(tensor) if layouts else ''}" for name, tensor in named.items()
    }
    check_same(what, described, group, device)


def _layout(tensor: torch.Tensor) -> str:
    """Describe the memory layout of a tensor; dimensions of one element, whose strides mean nothing, get 0."""
    if tensor.is_contiguous():
        return ""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return f" with strides {strides} in memory"


def check_same(what: str, described: Mapping[str, str], group: Any, device: torch.device) -> None:
    """Raise ValueError on all ranks unless they have the same names and descriptions, in the same order.

    Equal ranks exchange a hash only. `what`: the noun for a name in the message; `device`: one that the backend supports.
    """
    entries = list(described.items())
    digest = hashlib.sha256(json.dumps(entries).encode()).digest()
    number = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device=device)
    ranks = dist.get_world_size(group)
    digests = torch.zeros(ranks, dtype=number.dtype, device=number.device)
    all_gather(digests, number, group)
    if len(set(digests.tolist())) == 1:
        return
    lists = all_gather_objects(entries, group)
    rank = next(rank for rank in range(ranks) if lists[rank] != lists[0])
    first, other = lists[0], lists[rank]
    pairs = enumerate(zip(first, other, strict=False))
    k = next((k for k, (a, b) in pairs if a != b), min(len(first), len(other)))
    texts = ["{!r} {}".format(*entries[k]) if k < len(entries) else "nothing" for entries in (first, other)]
    raise ValueError(
        f"ranks differ: {what} number {k} is {texts[0]} on rank 0 and {texts[1]} on rank {rank} (of {len(first)} and "
        f"{len(other)}): all ranks must have the same, in the same order"
    )


@contextmanager
def all_or_none(group: Any, device: torch.device) -> Iterator[None]:
    """Raise on all ranks if the block fails on one: its own error there, elsewhere ValueError with that rank's message.

    All ranks must enter it, and the block must call no collectives, for which a rank that has failed would be missing.
    Without a failure one number is exchanged. `device`: one that the backend supports.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = torch.tensor([float(failure is not None)], device=device)
    all_reduce(failed, dist.ReduceOp.MAX, group)
    if not failed.item():
        return
    texts = all_gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise ValueError(f"rank {rank} of {len(texts)} cannot load, and nothing has been changed on any rank; it says {text}")


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Sum tensors over all ranks in place, and return them; in one message for each dtype."""
    running = []
    for members in _messages(tensors, limit=None):
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        running.append((members, flat, all_reduce(flat, group=group, async_op=True)))
    for members, flat, work in running:
        work.wait()
        _copy_back(flat, [tensors[i] for i in members])
    return list(tensors)


def _messages(tensors: Sequence[torch.Tensor], limit: int | None = _BYTES) -> list[list[int]]:
    """Return the indices of the tensors of each message: of one device and dtype, up to `limit` bytes."""
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
    """Return the message of a failed collective, and store it for later calls of this group."""
    ranks, missing = dist.get_process_group_ranks(group), _missing(_made(group))
    count = len(ranks)
    if missing is None:
        who = f"a rank of {count} is missing, probably rank 0, which keeps the list of all: it has ended, hangs, or makes"
    elif not missing:
        who = f"the {count} ranks are not at the same call: one came too late for the others, or makes"
    elif len(missing) == 1:
        who = f"rank {ranks[missing[0]]} of {count} is missing: it has ended, hangs, or makes"
    else:
        named = ", ".join(str(ranks[place]) for place in missing)
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
    """Return the ranks of a process group that leave no mark within the grace period; None if the store is unreachable."""
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
