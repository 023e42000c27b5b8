"""Division of parameters among ranks, and views of tensors in memory order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from ...kernels import Rule
from ...kernels.layouts import is_dense
from ..optimizer import Optimizer, RuleOptimizer
from ..optimizer.multi import part_of


def can_cut(optimizer: Optimizer) -> bool:
    """Return whether parameters can be cut at any element: the rule is elementwise and does not read an element's index."""
    if not isinstance(optimizer, RuleOptimizer) or not isinstance(optimizer.composed_rule, Rule):
        return False
    rule = optimizer.composed_rule
    return not any(stage.scope == "tensor" or "index" in stage.extras for stage in rule.reductions) and (
        "index" not in rule.extras
    )


def costs_of(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[float]:
    """Return the relative cost of each parameter's update, as its optimizer's rule estimates it."""
    costs = []
    for i, param in enumerate(params):
        part = part_of(optimizer, i)
        costs.append(part.cost_of(i, param) if isinstance(part, RuleOptimizer) else float(param.numel()))
    return costs


def owners_of(costs: Sequence[float], ranks: int, loads: Sequence[float] | None = None) -> list[int]:
    """Return the rank that each parameter is assigned to, so that the ranks' total costs are balanced.

    Parameters are assigned in descending order of cost, each to the rank with the least total cost so far, which begins at
    `loads` (default 0). From zero loads, the largest total is at most 4/3 of the smallest possible.

    Source: Graham (1969), "Bounds on Multiprocessing Timing Anomalies", theorem 2.
    """
    queue = [(load, rank) for rank, load in enumerate([0.0] * ranks if loads is None else loads)]
    heapq.heapify(queue)
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = heapq.heappop(queue)
        heapq.heappush(queue, (load + costs[i], owners[i]))
    return owners


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a dense tensor's elements in memory order."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory with the shape of `param` and, if `param` is dense, its strides."""
    if is_dense(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset())
    return flat.view(param.shape)


def in_memory_order(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of a tensor's elements in the memory order of `param`, a dense tensor of the same shape."""
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return memory_of(ordered.copy_(tensor))
