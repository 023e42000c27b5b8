"""The reductions of a rule, run over the groups of an update and over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .groups import Group
from .language import Reduction
from .layouts import widest

__all__ = ["join_totals", "run_reductions"]

Join = Callable[[torch.Tensor, str], None]


def run_reductions(
    groups: Sequence[Group],
    reductions: Sequence[Reduction],
    n_weights: int,
    all_reduce_global: Join | None,
    all_reduce_per_tensor: Join | None,
) -> None:
    """Run all reductions, each over all groups, and put what the rule gets of them where the groups' launches read it.

    Args:
        groups: those of an update, in which hyper-parameters and gradients are.
        reductions: those of its rule, in order.
        n_weights: of all groups together.
        all_reduce_global, all_reduce_per_tensor: as those of `Update`.
    """
    for k, reduction in enumerate(reductions):
        for group in groups:
            if "kept" in reduction.extras:
                group.reduction_states.load(k)
            group.execute.run_reduction(k)
        if reduction.scope == "global" and (len(groups) > 1 or all_reduce_global is not None):
            join_totals([group.execute.totals[k] for group in groups], reduction.op, all_reduce_global)
        if k == 0 and any(rule.skips_nonfinite and rule.skip_by is None for rule in (group.table.rule for group in groups)):
            _decide(groups)
        if reduction.scope == "tensor" and all_reduce_per_tensor is not None:
            _all_reduce_each(groups, k, reduction, n_weights, all_reduce_per_tensor)
        if reduction.finished is not None:
            _finish(groups, k, reduction)
        if reduction.feeds_next:
            for group in groups:
                group.reduction_states.append_previous(k)


def _all_reduce_each(
    groups: Sequence[Group], stage: int, reduction: Reduction, n_weights: int, all_reduce_per_tensor: Join
) -> None:
    """Add up what processes have found of their parts of each tensor, with one tensor for all groups."""
    device = groups[0].table.device
    found = torch.zeros(n_weights, reduction.n_values, dtype=widest(device.type), device=device)
    for group in groups:
        found[group.rows_on_device] = group.execute.totals[stage].to(found)
    all_reduce_per_tensor(found, reduction.op)
    for group in groups:
        group.execute.totals[stage].copy_(found[group.rows_on_device])


def _decide(groups: Sequence[Group]) -> None:
    """Tell all groups whether per-tensor states of this step are kept: what one finds holds for all."""
    found = None
    for group in groups:
        if found is None:
            found = group.reduction_states.decide()
    for group in groups:
        group.reduction_states.proceeds = None if found is None else found.to(group.table.device)


def _finish(groups: Sequence[Group], stage: int, reduction: Reduction) -> None:
    """Compute the per-tensor states of a reduction from its sums."""
    states = [group.reduction_states for group in groups]
    if reduction.scope == "tensor":
        for each in states:
            each.finish_each(stage)
        return
    for one in states:  # any tensor's will do: all have the same sums and have the same states
        if (found := one.finish_first(stage)) is not None:
            for each in states:
                each.store(stage, found)
            return


def join_totals(
    totals: Sequence[torch.Tensor], by: str, all_reduce_global: Callable[[torch.Tensor, str], None] | None = None
) -> None:
    """Put the sum, or maximum, over all groups into each row of each group's totals, whose rows are that of the group.

    `all_reduce_global` then adds up in place what several processes have found.
    """
    first = totals[0].device
    rows = torch.stack([total[0].to(widest(total.device.type)).to(first) for total in totals])
    together = rows.sum(dim=0) if by == "sum" else rows.amax(dim=0)
    if all_reduce_global is not None:
        all_reduce_global(together, by)
    if torch.float32 in {total.dtype for total in totals}:  # what is infinite for one of them is so for all
        narrow = together.float()
        together = torch.where(narrow.isfinite(), together, narrow.to(together))
    for total in totals:
        total.copy_(together)
