"""How parameters are divided among ranks, and their elements in the order of memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels import Rule
from ...kernels.layouts import is_dense
from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer
from ..optimizer.multi import part_of

if TYPE_CHECKING:
    from .buckets import Bucket


def can_cut(optimizer: Optimizer) -> bool:
    """Whether an optimizer's parameters can be cut anywhere: its rule looks at single elements, wherever they are."""
    if not isinstance(optimizer, RuleOptimizer) or not isinstance(optimizer.composed_rule, Rule):
        return False
    rule = optimizer.composed_rule
    return not any(stage.scope == "tensor" or "index" in stage.extras for stage in rule.reductions) and (
        "index" not in rule.extras
    )


def check_parts(optimizer: Optimizer) -> None:
    """Refuse several optimizers of which one needs to know, at each step, of parameters that other ranks have."""
    if not isinstance(optimizer, MultiOptimizer):
        return
    for part in optimizer.optimizers:
        if isinstance(part, RuleOptimizer):
            sums = [stage.name for stage in part.composed_rule.reductions if stage.scope == "global"]
            if sums or part.host_state_names or part.reads_rate_first:
                why = f"a sum over all its parameters ({', '.join(sums)})" if sums else "numbers of all its parameters"
                hint = "give clip_norm and skip_nonfinite in optimizer_params, for all together" if sums else "take another"
                raise ValueError(
                    f"{type(part).__name__} as one of several optimizers with update_on_kvstore=True: it needs {why}, which "
                    f"are on several ranks; {hint}, or use update_on_kvstore=False"
                )


def costs_of(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[float]:
    """What the update of each parameter costs, relative to the others, by the rule of its optimizer."""
    costs = []
    for i, param in enumerate(params):
        part = part_of(optimizer, i)
        by_rule = isinstance(part, RuleOptimizer)
        costs.append(part.composed_rule.cost(param.shape) if by_rule else float(param.numel()))  # type: ignore[attr-defined]
    return costs


def owners_of(costs: Sequence[float], ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Which rank each parameter belongs to: the most expensive first, each to the rank that has the least to do so far.

    Args:
        costs: those of the parameters.
        ranks: how many there are.
        loads: what each of them has to do already; default: nothing.

    From nothing, the largest load is at most 4/3 of the smallest possible.

    Source: Graham (1969), "Bounds on Multiprocessing Timing Anomalies", theorem 2.
    """
    queue = [(load, rank) for rank, load in enumerate([0.0] * ranks if loads is None else loads)]
    heapq.heapify(queue)
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = heapq.heappop(queue)
        heapq.heappush(queue, (load + costs[i], owners[i]))
    return owners


class Piece(NamedTuple):
    """What a rank has of a parameter.

    Attributes:
        param: the parameter's number.
        bucket: the number of its bucket.
        start: its first element in the parameter, in the order in which these lie in memory.
        stop: the element after its last one.
        at: its first element in the bucket.
    """

    param: int
    bucket: int
    start: int
    stop: int
    at: int


def pieces_of(buckets: Sequence[Bucket], rank: int) -> list[Piece]:
    """What a rank has of all parameters, by parameter."""
    pieces = []
    for k, bucket in enumerate(buckets):
        low, high = bucket.bounds[rank], bucket.bounds[rank + 1]
        for member in bucket.members:
            start, stop = max(low - member.start, 0), min(high - member.start, member.size)
            # One without elements has none to be cut: it is where it begins.
            if start < stop or (member.size == 0 and _owner_of(bucket, member.start) == rank):
                pieces.append(Piece(member.param, k, start, stop, member.start + start))
    return sorted(pieces)


def _owner_of(bucket: Bucket, element: int) -> int:
    """The lowest rank whose part ends behind this element."""
    ends = bucket.bounds[1:]
    return next((rank for rank, end in enumerate(ends) if end > element), len(ends) - 1)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory: a view of one dimension."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A stretch of memory as a tensor of this one's shape, and, if it is dense, order of elements."""
    if is_dense(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset())
    return flat.view(param.shape)


def in_memory_order(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor of one's shape in the order in which those of a dense parameter lie in memory."""
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return memory_of(ordered.copy_(tensor))


def weight_of(piece: Piece, param: torch.Tensor, cuts: bool) -> torch.Tensor:
    """The elements of a piece: a flat view of the parameter's memory if parameters are cut, else the parameter."""
    return memory_of(param)[piece.start : piece.stop] if cuts else param
