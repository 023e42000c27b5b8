"""The reductions of a rule, run over the launches of an update and over processes, and what they keep of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .language import Reduction
from .launch import Launch
from .layouts import widest

Join = Callable[[torch.Tensor, str], None]


def run_reductions(
    launches: Sequence[Launch],
    reductions: Sequence[Reduction],
    n_weights: int,
    all_reduce_global: Join | None,
    all_reduce_per_tensor: Join | None,
) -> None:
    """Run all reductions, each over all launches, and put what the rule gets of them where the launches read it.

    Args:
        launches: those of an update, in which hyper-parameters and gradients are.
        reductions: those of its rule, in order.
        n_weights: of all launches together.
        all_reduce_global, all_reduce_per_tensor: as those of `Update`.
    """
    for k, reduction in enumerate(reductions):
        for launch in launches:
            if "kept" in reduction.extras:
                _load(launch, k)
            launch.run_reduction(k)
        if reduction.scope == "global" and (len(launches) > 1 or all_reduce_global is not None):
            join_totals([launch.totals[k] for launch in launches], reduction.op, all_reduce_global)
        if k == 0 and any(launch.rule.skips_nonfinite and launch.rule.skip_by is None for launch in launches):
            found = next((proceeds for launch in launches if (proceeds := _decide(launch)) is not None), None)
            for launch in launches:  # what one finds holds for all
                launch.proceeds = None if found is None else found.to(launch.device)
        if reduction.scope == "tensor" and all_reduce_per_tensor is not None:
            _all_reduce_each(launches, k, reduction, n_weights, all_reduce_per_tensor)
        if reduction.finished is not None:
            _finish(launches, k, reduction)
        if reduction.feeds_next:
            for launch in launches:
                _append_previous(launch, k)


def join_totals(totals: Sequence[torch.Tensor], by: str, all_reduce_global: Join | None = None) -> None:
    """Reduce the totals of all launches to one sum, or maximum, and write it into every row of each launch's totals.

    `all_reduce_global` then adds up in place what several processes have found.
    """
    first = totals[0].device
    rows = torch.stack([total[0].to(widest(total.device)).to(first) for total in totals])
    together = rows.sum(dim=0) if by == "sum" else rows.amax(dim=0)
    if all_reduce_global is not None:
        all_reduce_global(together, by)
    if torch.float32 in {total.dtype for total in totals}:  # what is infinite for one of them is so for all
        narrow = together.float()
        together = torch.where(narrow.isfinite(), together, narrow.to(together))
    for total in totals:
        total.copy_(together)


def _all_reduce_each(
    launches: Sequence[Launch], stage: int, reduction: Reduction, n_weights: int, all_reduce_per_tensor: Join
) -> None:
    """Add up what processes have found of their parts of each tensor, with one tensor for all launches."""
    device = launches[0].device
    found = torch.zeros(n_weights, reduction.n_values, dtype=widest(device), device=device)
    for launch in launches:
        found[launch.rows_on_device] = launch.totals[stage].to(found)
    all_reduce_per_tensor(found, reduction.op)
    for launch in launches:
        launch.totals[stage].copy_(found[launch.rows_on_device])


def _load(launch: Launch, stage: int) -> None:
    """Hand a reduction its per-tensor states, and the results of the reduction before it."""
    reduction, sums = launch.rule.reductions[stage], launch.sums
    sums[stage][:, : len(reduction.kept)] = _states(launch, stage)
    if reduction.feeds_next:
        sums[stage][:, len(reduction.kept) :] = sums[stage - 1]


def _decide(launch: Launch) -> torch.Tensor | None:
    """Whether a step is not skipped, by the sum of squares over all tensors; None if none of these has a gradient."""
    if (i := _first_active(launch)) is None:
        return None
    rule, total = launch.rule, launch.totals[0][i, 0]
    if rule.skip_above is None:
        return total.isfinite()
    return total.isfinite() & (total <= launch.hyper_on_device()[i, 1 + rule.hyper.index(rule.skip_above)])


def _finish(launches: Sequence[Launch], stage: int, reduction: Reduction) -> None:
    """Compute the per-tensor states of a reduction from its sums."""
    if reduction.scope == "tensor":
        for launch in launches:  # of all tensors that have a gradient, each from its own sums
            new, active = _finished(launch, stage, slice(None)), launch.active_on_device()[:, None]
            _store(launch, stage, torch.where(active, new, _states(launch, stage)))
        return
    for one in launches:  # any tensor's that has a gradient will do: all have the same sums and have the same states
        if (i := _first_active(one)) is not None:
            new = _finished(one, stage, slice(i, i + 1))
            for launch in launches:
                _store(launch, stage, new)
            return


def _store(launch: Launch, stage: int, new: torch.Tensor) -> None:
    """Store these per-tensor states, and hand them to what comes after the reduction."""
    control, numbers = launch.grad_scale_and_skip, launch.numbers[stage]
    room = launch.sums[stage][:, : new.shape[1]]
    room[:] = new  # of a skipped step, too: the rule finds there why it is one
    kept, decides = room, launch.rule.skip_by if stage == 0 else None
    if decides is not None:
        launch.proceeds = room[0, launch.rule.reductions[0].kept.index(decides)] != 0.0
    elif launch.proceeds is not None:
        kept = torch.where(launch.proceeds, kept, _states(launch, stage))
    if control is not None:
        kept = torch.where(control[1] != 0, _states(launch, stage), kept)
    assert numbers is not None
    numbers.write(kept)


def _append_previous(launch: Launch, stage: int) -> None:
    """Append the results of the reduction before this one to its own."""
    reduction = launch.rule.reductions[stage]
    own = reduction.n_own_results
    if reduction.finished is None:
        launch.sums[stage][:, :own] = launch.totals[stage]
    launch.sums[stage][:, own:] = launch.sums[stage - 1]


def _finished(launch: Launch, stage: int, rows: slice) -> torch.Tensor:
    """The new per-tensor states of these tensors, computed from their sums, [n_rows, n]."""
    reduction, before = launch.rule.reductions[stage], _states(launch, stage, rows)
    assert reduction.finished is not None
    columns = [1 + launch.rule.hyper.index(name) for name in reduction.finish_hyper]
    hyper = launch.hyper_on_device()[rows]
    totals, own = launch.totals[stage][rows], tuple(hyper[:, column] for column in columns)
    new = reduction.finished(totals.unbind(1), before.unbind(1), own)
    new = [torch.as_tensor(value, dtype=before.dtype, device=before.device).expand(len(before)) for value in new]
    return torch.stack(new, dim=1)


def _states(launch: Launch, stage: int, rows: slice = slice(None)) -> torch.Tensor:
    """The per-tensor states of a reduction, [n_tensors, n]."""
    numbers = launch.numbers[stage]
    assert numbers is not None
    return numbers.read(rows)


def _first_active(launch: Launch) -> int | None:
    """The first tensor that has a gradient."""
    return next((i for i, gradient in enumerate(launch.gradients) if gradient is not None), None)
