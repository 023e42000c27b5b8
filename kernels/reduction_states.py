"""ReductionStates: what the reductions of a launch keep of each tensor from step to step, and what they have found."""

from __future__ import annotations

from typing import Any

import torch

from . import streams
from .states import PerTensorStates
from .table import TensorTable

__all__ = ["ReductionStates"]


class ReductionStates:
    """The per-tensor states of a rule's reductions, and the rows that pass results on to what comes after.

    Args:
        table: the tensors.
        execute: what a backend's executor has made of it, with `totals`, `sums` and `hyper`.
    """

    def __init__(self, table: TensorTable, execute: Any) -> None:
        self._table, self._execute, self._rule = table, execute, table.rule
        self.proceeds: torch.Tensor | None = None  # whether the step is not skipped, where the rule decides about that
        self._active: tuple[list[bool], torch.Tensor] | None = None
        start = len(self._rule.state)
        self._numbers: list[PerTensorStates | None] = []  # of each reduction
        for reduction in self._rule.reductions:
            rows = [row[start : start + len(reduction.kept)] for row in table.states]
            self._numbers.append(PerTensorStates(rows) if reduction.kept else None)
            start += len(reduction.kept)

    def load(self, stage: int) -> None:
        """Hand a reduction its per-tensor states, and the results of the reduction before it."""
        reduction, sums = self._rule.reductions[stage], self._execute.sums
        sums[stage][:, : len(reduction.kept)] = self._states(stage)
        if reduction.feeds_next:
            sums[stage][:, len(reduction.kept) :] = sums[stage - 1]

    def finish_each(self, stage: int) -> None:
        """Compute the new states of all tensors that have a gradient, each from its own sums."""
        found = self._finished(stage, slice(None))
        self.store(stage, torch.where(self._active_on_device()[:, None], found, self._states(stage)))

    def finish_first(self, stage: int) -> torch.Tensor | None:
        """The new states of the first tensor that has a gradient, [1, n]; None if there is none."""
        for i, gradient in enumerate(self._table.gradients):
            if gradient is not None:
                return self._finished(stage, slice(i, i + 1))
        return None

    def store(self, stage: int, new: torch.Tensor) -> None:
        """Store these per-tensor states, and hand them to what comes after the reduction."""
        control, numbers = self._table.grad_scale_and_skip, self._numbers[stage]
        room = self._execute.sums[stage][:, : new.shape[1]]
        room[:] = new  # of a skipped step, too: the rule finds there why it is one
        kept, decides = room, self._rule.skip_by if stage == 0 else None
        if decides is not None:
            self.proceeds = room[0, self._rule.reductions[0].kept.index(decides)] != 0.0
        elif self.proceeds is not None:
            kept = torch.where(self.proceeds, kept, self._states(stage))
        if control is not None:
            kept = torch.where(control[1] != 0, self._states(stage), kept)
        assert numbers is not None
        numbers.write(kept)

    def decide(self) -> torch.Tensor | None:
        """Whether a step is not skipped, by the sum of squares over all tensors; None if none of these has a gradient."""
        rule, execute = self._rule, self._execute
        for i, gradient in enumerate(self._table.gradients):
            if gradient is not None:
                total = execute.totals[0][i, 0]
                if rule.skip_above is None:
                    return total.isfinite()
                return total.isfinite() & (total <= execute.hyper[i, 1 + rule.hyper.index(rule.skip_above)])
        return None

    def append_previous(self, stage: int) -> None:
        """Append the results of the reduction before this one to its own."""
        reduction, execute = self._rule.reductions[stage], self._execute
        own = reduction.n_own_results
        if reduction.finished is None:
            execute.sums[stage][:, :own] = execute.totals[stage]
        execute.sums[stage][:, own:] = execute.sums[stage - 1]

    def _states(self, stage: int, rows: slice = slice(None)) -> torch.Tensor:
        """The per-tensor states of a reduction, [n_tensors, n]."""
        numbers = self._numbers[stage]
        assert numbers is not None
        return numbers.read(rows)

    def _finished(self, stage: int, rows: slice) -> torch.Tensor:
        """The new per-tensor states of these tensors, computed from their sums, [n_rows, n]."""
        reduction, before = self._rule.reductions[stage], self._states(stage, rows)
        assert reduction.finished is not None
        columns = [1 + self._rule.hyper.index(name) for name in reduction.finish_hyper]
        hyper = self._execute.hyper[rows]
        totals, own = self._execute.totals[stage][rows], tuple(hyper[:, column] for column in columns)
        new = reduction.finished(totals.unbind(1), before.unbind(1), own)
        new = [torch.as_tensor(value, dtype=before.dtype, device=before.device).expand(len(before)) for value in new]
        return torch.stack(new, dim=1)

    def _active_on_device(self) -> torch.Tensor:
        """Which tensors have a gradient."""
        found = [gradient is not None for gradient in self._table.gradients]
        if self._active is None or found != self._active[0]:
            device = self._table.device
            self._active = found, streams.staged(torch.tensor(found, device="cpu"), device).to(device, non_blocking=True)
        return self._active[1]
