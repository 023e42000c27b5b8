"""Run the reductions of a rule over the launches of an update and over processes, and update the per-tensor states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .language import Reduction, Rule, TensorRule
from .launch import Launch
from .layouts import widest
from .transforms.limited import factor_of

Join = Callable[[torch.Tensor, str], None]


def run_reductions(
    launches: Sequence[Launch],
    n_weights: int,
    all_reduce_global: Join | None,
    all_reduce_per_tensor: Join | None,
    begun: bool = False,
) -> None:
    """Run all reductions of a rule and write the results into `totals` and `sums` of the launches.

    The launches have bound gradients and hyper-parameters. `begun` means the caller has run the first reduction and joined
    its results. `all_reduce_global` and `all_reduce_per_tensor` are those of `Update`.
    """
    for k in range(max(len(launch.rule.reductions) for launch in launches)):
        # Rules chosen by shape may have more or fewer reductions; those over all tensors come first, and all have them.
        launches = [launch for launch in launches if len(launch.rule.reductions) > k]
        reduction = launches[0].rule.reductions[k]
        is_global = reduction.scope == "global"
        joins = len(launches) > 1 or all_reduce_global is not None if is_global else all_reduce_per_tensor is not None
        at_once = not joins and (k > 0 or not begun)
        finished = [each for each in launches if at_once and each.finishes_sums and each.numbers[k]]
        if k or not begun:
            run_reduction(launches, k, finished)
            if is_global and joins:
                join_totals([launch.totals[k] for launch in launches], reduction.op, all_reduce_global)
        if reduction.scope == "tensor" and all_reduce_per_tensor is not None:
            _all_reduce_each(launches, k, reduction, n_weights, all_reduce_per_tensor)
        _finish([each for each in launches if each.numbers[k] and each not in finished], k)
        for launch in launches:  # of those for a rule of whole tensors, only the elementwise ones pass results on
            if launch.rule.reductions[k].feeds_next:
                _append_previous(launch, k)


def reduce_nothing(
    rule: Rule | TensorRule,
    like: torch.Tensor,
    all_reduce_global: Join,
    begun: bool = False,
) -> None:
    """Take part in the sums over all tensors of all processes, in one that has no tensors; the others wait for it.

    `like` has the device of the other processes' tensors and the dtype of their results.
    """
    for k, reduction in enumerate(rule.reductions):
        if reduction.scope == "global" and (k or not begun):
            join_totals([like.new_zeros(1, reduction.n_values)], reduction.op, all_reduce_global)


def run_reduction(launches: Sequence[Launch], stage: int, finished: Sequence[Launch] = ()) -> None:
    """Run one reduction; launches that are `finished` also compute and store its states, as `_finish` does for others."""
    for launch in launches:
        reduction = launch.rule.reductions[stage]
        if "kept" in reduction.extras:
            _load(launch, stage)
        if launch in finished or (reduction.op == "mean" and reduction.kept):
            _tell_skipped(launch, launches)
        (launch.run_finished if launch in finished else launch.run_reduction)(stage)


def _tell_skipped(launch: Launch, launches: Sequence[Launch]) -> None:
    """Let a launch, one of `launches`, know whether what its reductions keep stays as it is, because a step is skipped."""
    proceeds, control, skipped = _proceeds(launches), launch.grad_scale_and_skip, launch.skipped
    if control is not None:
        skipped.copy_(control[1:])
    if proceeds is not None:
        stops = ~proceeds.to(launch.device)
        skipped.copy_(stops if control is None else stops | (skipped != 0.0))


def join_totals(totals: Sequence[torch.Tensor], by: str, all_reduce_global: Join | None = None) -> None:
    """Reduce all totals, [n_tensors, n_values] with equal rows, by "sum" or "max", and write the result into every row."""
    first = totals[0].device
    rows = torch.stack([total[0].to(widest(total.device)).to(first) for total in totals])
    together = rows.sum(dim=0) if by == "sum" else rows.amax(dim=0)
    if all_reduce_global is not None:
        all_reduce_global(together, by)
    if torch.float32 in {total.dtype for total in totals}:  # an overflow in one launch must be seen by all
        narrow = together.float()
        together = torch.where(narrow.isfinite(), together, narrow.to(together))
    for total in totals:
        total.copy_(together)


def _all_reduce_each(
    launches: Sequence[Launch], stage: int, reduction: Reduction, n_weights: int, all_reduce_per_tensor: Join
) -> None:
    """Reduce results per tensor across processes that hold shards of the tensors, with one call for all launches."""
    device = launches[0].device
    totals = torch.zeros(n_weights, reduction.n_values, dtype=widest(device), device=device)
    for launch in launches:
        totals[launch.rows_on_device] = launch.totals[stage].to(totals)
    all_reduce_per_tensor(totals, reduction.op)
    for launch in launches:
        launch.totals[stage].copy_(totals[launch.rows_on_device])


def _load(launch: Launch, stage: int) -> None:
    """Write the inputs of a reduction into `sums`: its per-tensor states, then the results of the reduction before it."""
    sums, n = launch.sums, len(launch.rule.reductions[stage].kept)
    sums[stage][:, :n] = _states(launch, stage)
    if launch.rule.reductions[stage].feeds_next:
        sums[stage][:, n : n + sums[stage - 1].shape[1]] = sums[stage - 1]


def limit_factor(launch: Launch, stage: int) -> torch.Tensor | None:
    """Return the factor of the gradients by limit number `stage` of the rule, [1], negative if it skips the step.

    None if no tensor of the launch has a gradient.
    """
    if (i := _first_active(launch)) is None:
        return None
    hyper, limit = launch.hyper_on_device()[i : i + 1, 1:], launch.rule.limits[stage]
    numbers = {name: hyper[:, launch.rule.hyper.index(name)] for name in limit.hyper}
    return factor_of(limit, launch.totals[stage][i : i + 1, 0], numbers)  # not a scalar, of which the host would choose


def _proceeds(launches: Sequence[Launch]) -> torch.Tensor | None:
    """Return whether the step is taken; None if the rule never skips steps."""
    proceeds = None
    for k, limit in enumerate(launches[0].rule.limits):
        if limit.skips:
            found = (limit_factor(launch, k) for launch in launches)
            factor = next((factor for factor in found if factor is not None), None)
            if factor is not None:  # the sum is the same for all launches
                proceeds = factor >= 0.0 if proceeds is None else proceeds & (factor >= 0.0)
    return proceeds


def _finish(launches: Sequence[Launch], stage: int) -> None:
    """Compute and store the per-tensor states of a reduction from its sums, by torch operations.

    For engines without compiled code, and where other launches or processes had a part in the sums.
    """
    if not launches:
        return
    proceeds = _proceeds(launches)
    if launches[0].rule.reductions[stage].scope == "tensor":
        for launch in launches:  # a tensor without gradient keeps its states
            _store(launch, stage, _finished(launch, stage, slice(None)), proceeds, launch.active_on_device()[:, None])
        return
    for one in launches:  # sums and states are equal for all tensors, so any tensor with a gradient will do
        if (i := _first_active(one)) is not None:
            new = _finished(one, stage, slice(i, i + 1))
            for launch in launches:
                _store(launch, stage, new, proceeds)
            return


def _store(
    launch: Launch, stage: int, new: torch.Tensor, proceeds: torch.Tensor | None, active: torch.Tensor | None = None
) -> None:
    """Write new results to `sums`, for the rule, and to the states of `active` tensors, unless the step is skipped."""
    control, numbers = launch.grad_scale_and_skip, launch.numbers[stage]
    room = launch.sums[stage][:, : new.shape[1]]
    room[:] = new
    stored = room[:, : len(launch.rule.reductions[stage].kept)]
    if active is not None:
        stored = torch.where(active, stored, _states(launch, stage))
    if proceeds is not None:
        stored = torch.where(proceeds.to(launch.device), stored, _states(launch, stage))
    if control is not None:
        stored = torch.where(control[1] != 0, _states(launch, stage), stored)
    assert numbers is not None
    numbers.write(stored)


def _append_previous(launch: Launch, stage: int) -> None:
    reduction = launch.rule.reductions[stage]
    n = reduction.own_scopes.count("tensor")
    if reduction.finished is None and reduction.op != "mean":
        launch.sums[stage][:, :n] = launch.totals[stage]
    launch.sums[stage][:, n:] = launch.sums[stage - 1]


def _finished(launch: Launch, stage: int, rows: slice) -> torch.Tensor:
    """Return the results of `finish` for these tensors, [n_rows, n]."""
    reduction, before = launch.rule.reductions[stage], _states(launch, stage, rows)
    assert reduction.finished is not None
    columns = [1 + launch.rule.hyper.index(name) for name in reduction.finish_hyper]
    hyper = launch.hyper_on_device()[rows]
    totals, values = launch.totals[stage][rows], tuple(hyper[:, column] for column in columns)
    new = reduction.finished(totals.unbind(1), before.unbind(1), values)
    new = [torch.as_tensor(value, dtype=before.dtype, device=before.device).expand(len(before)) for value in new]
    return torch.stack(new, dim=1)


def _states(launch: Launch, stage: int, rows: slice = slice(None)) -> torch.Tensor:
    """Return the per-tensor states, [n_tensors, n]."""
    numbers = launch.numbers[stage]
    assert numbers is not None
    return numbers.read(rows)


def _first_active(launch: Launch) -> int | None:
    return next((i for i, gradient in enumerate(launch.gradients) if gradient is not None), None)
