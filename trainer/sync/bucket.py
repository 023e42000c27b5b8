"""Buckets: which parameters are in each, and where their gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.layouts import is_dense
from ...kernels.states import PACK_FROM

__all__ = ["Bucket", "Member", "check_gradient", "gaps_of", "make_buckets"]

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
        members: its parameters, by their starts.
        extra: elements behind the members that are summed with them; None if there are none.
        own: in buckets that are scattered this rank's part of the sum.
    """

    def __init__(self, flat: torch.Tensor, bounds: Sequence[int], weight_dtype: torch.dtype | None) -> None:
        self.flat, self.bounds, self.weight_dtype = flat, list(bounds), weight_dtype
        self.members: list[Member] = []
        self.extra: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.handle: Any = None
        self.waiting = 0  # members whose gradient has not come yet
        self.idle = False  # nothing in it requires a gradient, so that it is left out
        self.started = False
        self.versions: list[int] = []  # of the members' views when it was started
        self.gaps: list[torch.Tensor] = []  # what lies between the members, where a reducer may leave something
        self.reducer: Any = None

    @property
    def parts(self) -> list[int]:
        """The sizes of the ranks' parts."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


def make_buckets(
    params: Sequence[torch.nn.Parameter],
    order: Sequence[int],
    trained: Sequence[int],
    limits: tuple[int, int],
    ranks: int,
    owners: Sequence[int] | None = None,
    *,
    extra: int = 0,
    exact: bool = True,
) -> list[Bucket]:
    """Buckets for the gradients of these parameters, in the order in which they will be full.

    Parameters that require no gradient come first, in buckets of their own: these need not be waited for.

    Args:
        params: all parameters.
        order: their indices in the order in which their gradients come.
        trained: for each whether it requires a gradient.
        limits: the bytes from which a bucket is full, and those for the first one of its kind.
        ranks: over how many a bucket is divided.
        owners: for each parameter the rank in whose part it is as a whole; None to divide buckets into equal parts.
        extra: elements of the last bucket behind its members, of float32 or float64.
        exact: whether sums of such types are exact and go to all ranks, so that the extra ones need no bucket of their own.
    """
    groups = _groups(params, order, trained, *limits)
    wide = [k for k, (kind, _) in enumerate(groups) if kind[3] and kind[1] in (torch.float32, torch.float64)]
    carrier = groups.pop(wide[-1]) if wide and exact else ((params[0].device, torch.float32, None, False), [])
    buckets = [_bucket(params, members, kind[:3], ranks, owners) for kind, members in groups]
    return [*buckets, _bucket(params, carrier[1], carrier[0][:3], ranks, owners, extra)]


def _groups(
    params: Sequence[torch.Tensor], order: Sequence[int], trained: Sequence[int], limit: int, first_limit: int
) -> list[tuple[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]]]:
    """The parameters of each bucket, and of what kind they are."""
    groups: list[tuple[int, Any, list[int]]] = []  # with the place of the last member
    filling: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    begun: set[Any] = set()
    places: dict[int, int] = {}
    for place, i in enumerate(sorted(order, key=lambda i: bool(trained[i]))):
        dtype = getattr(params[i], "grad_dtype", None) or params[i].dtype
        kind = params[i].device, dtype, params[i].dtype, bool(trained[i])
        places[i] = place
        filling.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + params[i].numel() * dtype.itemsize
        if filled[kind] >= (limit if kind in begun else min(limit, first_limit)):
            groups.append((place, kind, filling.pop(kind)))
            filled[kind] = 0
            begun.add(kind)
    groups += [(places[members[-1]], kind, members) for kind, members in filling.items()]
    return [(kind, members) for _, kind, members in sorted(groups, key=lambda group: group[0])]


def _bucket(
    params: Sequence[torch.nn.Parameter],
    members: Sequence[int],
    kind: tuple[torch.device, torch.dtype, torch.dtype | None],
    ranks: int,
    owners: Sequence[int] | None,
    extra: int = 0,
) -> Bucket:
    """A bucket for the gradients of these parameters; its kind is the device and type of the buffer, and their own type."""
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
    last = max((starts[i] + params[i].numel() for i in members), default=0)
    if owners is None or extra:
        length = -(-(last + extra) // (ranks * BLOCK)) * BLOCK
        bounds = [rank * length for rank in range(ranks + 1)]
    flat = torch.zeros(bounds[-1], dtype=dtype, device=device)
    bucket = Bucket(flat, bounds, weight_dtype)
    bucket.extra = flat[last : last + extra] if extra else None
    for i in (i for part in parts for i in part):
        param, start = params[i], starts[i]
        size = param.numel()
        view = flat.data[start : start + size]  # what `data` gives has a version counter of its own, a view has not
        view = view.as_strided(param.shape, param.stride(), start) if is_dense(param) else view.view(param.shape)
        bucket.members.append(Member(i, start, size, view, flat[start : start + size]))
    return bucket


def gaps_of(bucket: Bucket) -> list[torch.Tensor]:
    """The stretches of a bucket before, between and behind its members; some may be empty."""
    gaps, end = [], 0
    for member in bucket.members:
        gaps.append(bucket.flat[end : member.start])
        end = member.start + member.size
    return [*gaps, bucket.flat[end:]]


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
