"""One bucket: which parameters are in it, where their gradients are, and the sum that is scattered over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.layouts import is_dense
from ...kernels.states import PACK_FROM
from .. import dist_utils

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "Bucket",
    "Member",
    "Pool",
    "ScatteredSum",
    "check_gradient",
    "gaps_of",
    "group_params",
    "make_bucket",
]

ALIGNMENT = 8  # elements between the starts of two gradients: 16 bytes of the narrowest type
BLOCK = 128  # elements of which a rank's part is a multiple, and at which large parameters start: packed states have blocks


class Member(NamedTuple):
    """A parameter's place in a bucket.

    Attributes:
        param: the parameter's number.
        start: its first element in the bucket.
        size: its elements.
        view: its gradient, in the parameter's own order of elements and with a version counter of its own.
        room: the same memory, flat, with the bucket's version counter.
    """

    param: int
    start: int
    size: int
    view: torch.Tensor
    room: torch.Tensor


class Bucket:
    """One flat buffer and what is in it.

    Attributes:
        flat: the buffer.
        bounds: where each rank's part begins, and the end.
        weight_dtype: the type of the parameters; None if there are none.
        members: its parameters.
        own: in buckets that are scattered this rank's part of the sum.
    """

    def __init__(self, flat: torch.Tensor, bounds: Sequence[int], weight_dtype: torch.dtype | None) -> None:
        self.flat, self.bounds, self.weight_dtype = flat, list(bounds), weight_dtype
        self.members: list[Member] = []
        self.own: torch.Tensor | None = None
        self.handle: Any = None
        self.waiting = 0  # members whose gradient has not come yet
        self.idle = False  # nothing in it requires a gradient, so that it is left out
        self.started = False
        self.versions: list[int] = []  # of the members' views when it was started
        self.gaps: list[torch.Tensor] = []  # what lies between the members, where a reducer may leave something
        self.reducer: Any = None

    @property
    def even(self) -> bool:
        """Whether all ranks' parts are of one size."""
        return len({end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)}) == 1

    @property
    def parts(self) -> list[int]:
        """The sizes of the ranks' parts."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


class Pool:
    """Buffers that are used again and again, as messages in flight are never many."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer of so many elements, of undefined contents, of this type and on this device."""
        free = self._free.get((like.device, like.dtype), [])
        fitting = [k for k, buffer in enumerate(free) if buffer.numel() >= size]
        if fitting:
            return free.pop(min(fitting, key=lambda k: free[k].numel()))[:size]
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, when all that uses it is queued."""
        root = buffer if buffer._base is None else buffer._base
        self._free.setdefault((root.device, root.dtype), []).append(root)


class ScatteredSum:
    """A sum that is scattered: every rank gets its part of all ranks' buckets and adds these up, in the ranks' order.

    It is for parts of different sizes, and for gloo, whose own way sends as much as an all-reduce.
    """

    def __init__(self, bucket: Bucket, rank: int, group: Any, pool: Pool) -> None:
        own = bucket.own
        assert own is not None
        self._own, self._parts, self._pool = own, bucket.parts, pool
        self._got = pool.take(own.numel() * len(self._parts), own)
        sizes = [own.numel()] * len(self._parts), self._parts
        self._work = dist_utils.all_to_all(self._got, bucket.flat, group, async_op=True, sizes=sizes)

    def wait(self) -> None:
        self._work.wait()
        parts = self._got.view(len(self._parts), self._own.numel())
        if len(self._parts) == 1:
            self._own.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=self._own)
        for part in parts[2:]:
            self._own.add_(part)
        self._pool.give(self._got)


def group_params(
    params: Sequence[torch.Tensor], order: Sequence[int], trained: Sequence[int], limit: int, first_limit: int
) -> list[tuple[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]]]:
    """The parameters of each bucket, and of what kind they are, in the order in which buckets will be full.

    Parameters that require no gradient come first, in buckets of their own: these need not be waited for.
    """
    buckets: list[tuple[int, Any, list[int]]] = []  # with the place of the last member
    filling: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    begun: set[Any] = set()
    for place, i in enumerate(sorted(order, key=lambda i: bool(trained[i]))):
        dtype = getattr(params[i], "grad_dtype", None) or params[i].dtype
        kind = params[i].device, dtype, params[i].dtype, bool(trained[i])
        filling.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + params[i].numel() * dtype.itemsize
        if filled[kind] >= (limit if kind in begun else min(limit, first_limit)):
            buckets.append((place, kind, filling.pop(kind)))
            filled[kind] = 0
            begun.add(kind)
    places = {i: place for place, i in enumerate(sorted(order, key=lambda i: bool(trained[i])))}
    buckets += [(places[members[-1]], kind, members) for kind, members in filling.items()]
    return [(kind, members) for _, kind, members in sorted(buckets, key=lambda bucket: bucket[0])]


def make_bucket(
    params: Sequence[torch.nn.Parameter],
    members: Sequence[int],
    kind: tuple[torch.device, torch.dtype, torch.dtype | None],
    ranks: int,
    owners: Sequence[int] | None = None,
    counts: int = 0,
) -> Bucket:
    """A bucket for the gradients of these parameters.

    Args:
        params: all parameters.
        members: the indices of those in the bucket, in their order.
        kind: the device and type of the buffer, and the type of the parameters.
        ranks: over how many the buffer is divided.
        owners: for each parameter the rank in whose part it is as a whole; None to divide the buffer into equal parts.
        counts: elements that are kept free behind the last member.
    """
    device, dtype, weight_dtype = kind
    parts = [members] if owners is None else [[i for i in members if owners[i] == r] for r in range(ranks)]
    starts, bounds, end = {}, [0], 0
    for part in parts:
        for i in part:
            step = BLOCK if params[i].numel() >= PACK_FROM else ALIGNMENT
            starts[i] = end = -(-end // step) * step
            end += params[i].numel()
        end = -(-end // BLOCK) * BLOCK
        bounds.append(end)
    if owners is None or counts:
        last = max((starts[i] + params[i].numel() for i in members), default=0) + counts
        length = -(-last // (ranks * BLOCK)) * BLOCK
        bounds = [rank * length for rank in range(ranks + 1)]
    flat = torch.zeros(bounds[-1], dtype=dtype, device=device)
    bucket = Bucket(flat, bounds, weight_dtype)
    for i in (i for part in parts for i in part):
        param, start = params[i], starts[i]
        size = param.numel()
        view = flat.data[start : start + size]  # what `data` gives has a version counter of its own, a view has not
        view = view.as_strided(param.shape, param.stride(), start) if is_dense(param) else view.view(param.shape)
        bucket.members.append(Member(i, start, size, view, flat[start : start + size]))
    return bucket


def gaps_of(bucket: Bucket) -> list[torch.Tensor]:
    """The stretches of a bucket that belong to no member."""
    gaps, end = [], 0
    for member in sorted(bucket.members, key=lambda member: member.start):
        gaps.append(bucket.flat[end : member.start])
        end = member.start + member.size
    gaps.append(bucket.flat[end:])
    return [gap for gap in gaps if gap.numel()]


def check_gradient(name: str, view: torch.Tensor, gradient: Any) -> None:
    """Refuse a gradient that cannot be copied to `view`, its range of a bucket.

    Raises:
        TypeError, ValueError: there is none, or it is sparse, of another type or device, or has a graph.
    """
    if gradient is None:
        raise ValueError(f"{name!r} has no gradient any more: let it be until the step is over")
    if gradient.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is sparse ({gradient.layout}), which cannot be summed up in a bucket: use "
            "sparse=False in the layer, or gradient.to_dense()"
        )
    if gradient.dtype != view.dtype or gradient.device != view.device:
        raise TypeError(
            f"the gradient of {name!r} is {gradient.dtype} on {gradient.device}, its bucket is {view.dtype} on "
            f"{view.device}: move or convert the model, and set grad_dtype, before the first step"
        )
    if gradient.requires_grad:
        raise ValueError(
            f"the gradient of {name!r} has a graph (create_graph=True), which would be lost in a bucket: use "
            "torch.autograd.grad() for gradients of gradients"
        )
