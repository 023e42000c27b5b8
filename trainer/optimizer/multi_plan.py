"""MultiPlan: how a list of parameters is stepped that several optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...kernels.guards import Reference
from ...kernels.layouts import widest
from ...kernels.metrics import MetricsBuffer
from ...kernels.norms import global_norm
from .base import Optimizer
from .counts import Index
from .plan import Plan, StepPlan
from .rule_optimizer import RuleOptimizer
from .sparse import is_sparse
from .states import CustomPlan

if TYPE_CHECKING:
    from .multi import MultiOptimizer

__all__ = ["GlobalLimit", "MultiPlan", "Part", "reads_rate_first"]


class Part(NamedTuple):
    """What one optimizer steps.

    Attributes:
        optimizer: that one.
        plan: of its parameters.
        at: the places of these in the list of all.
    """

    optimizer: Optimizer
    plan: StepPlan | CustomPlan
    at: list[int]


class MultiPlan(Plan):
    """That of parameters of several optimizers: one plan for each, whose steps count together.

    Args:
        optimizer: the optimizers together.
        indices: of the parameters.
        parts: the plan of each optimizer that has some of these.
        limit: what is done for the sake of all gradients together.
    """

    def __init__(
        self, optimizer: MultiOptimizer, indices: Sequence[Index], parts: Sequence[Part], limit: GlobalLimit
    ) -> None:
        self.parts = list(parts)
        self._optimizer, self._slots, self._limit = optimizer, optimizer.slots(indices), limit
        self._grads: Sequence[torch.Tensor | None] = ()  # from `prepare` to `run`

    @property
    def references(self) -> list[Reference] | None:  # type: ignore[override]
        found: list[Any] = [None] * len(self._slots)
        for _, plan, at in self.parts:
            if plan.references is None:
                return None
            for i, reference in zip(at, plan.references, strict=True):
                found[i] = reference
        return found

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        for _, plan, at in self.parts:
            plan.prepare([grads[i] for i in at])
        self._grads = grads

    def run(self, into: MetricsBuffer | None = None, number: int | None = None) -> None:
        """As that of `Plan`. Optimizers that update by hand come first, since their steps may fail.

        Args:
            into: as for `Plan.run`.
            number: the largest update count after the step, where other ranks have other parameters.
        """
        grads, self._grads = self._grads, ()
        counts, active = self._optimizer.step_counts, np.array([grad is not None for grad in grads], dtype=bool)
        if number is None:
            number = max(counts.largest, int(counts.values[self._slots[active]].max(initial=-1)) + 1)
        begun: list[StepPlan] = []
        launched: list[StepPlan] = []
        try:
            for _, plan, _ in self.parts:
                if isinstance(plan, StepPlan):
                    begun.append(plan)
                    if plan.rows.write(plan.update, number):
                        launched.append(plan)
            self._limit.compute(grads)
            for _, plan, _ in self.parts:
                if isinstance(plan, CustomPlan):
                    plan.run(into)
        except BaseException:
            for plan in begun:
                plan.rows.undo()
            raise
        for plan in launched:
            plan.launch(into)


class GlobalLimit:
    """`clip_norm` and `skip_nonfinite` of several optimizers together, and a loss scaler's control.

    Args:
        optimizer: whose options these are; they may change from step to step.
        given: a loss scaler's control, or None; see `LossScaler`.
        device: of the parameters.
        all_reduce_global: as that of `Update`.

    Attributes:
        control: float32 [2], what gradients are multiplied by, and whether the step is skipped; updates read it.
    """

    def __init__(
        self,
        optimizer: MultiOptimizer,
        given: torch.Tensor | None,
        device: torch.device,
        all_reduce_global: Callable[[torch.Tensor, str], None] | None = None,
    ) -> None:
        self._optimizer, self._given, self._all_reduce_global = optimizer, given, all_reduce_global
        self.control = torch.tensor([1.0, 0.0], dtype=torch.float32, device=device)
        self._is_neutral = True

    @torch.no_grad()
    def compute(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Find `control` for a step with these gradients, without waiting for the device."""
        optimizer, control = self._optimizer, self.control
        plain = optimizer.clip_norm is None and not optimizer.skip_nonfinite
        if plain and self._given is None and self._is_neutral:
            return
        self._is_neutral = plain and self._given is None
        if self._given is None:
            control.zero_()
            control[:1].fill_(1.0)
        else:
            control.copy_(self._given, non_blocking=True)
        if plain:
            return
        norm = self._norm(grads) * (control[0] * abs(optimizer.rescale_grad))
        if optimizer.clip_norm is not None:
            control[0] *= (optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if optimizer.skip_nonfinite:
            control[1] = torch.where(norm.isfinite(), control[1], 1.0)

    def _norm(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        dense = [grad.coalesce().values() if is_sparse(grad) else grad for grad in grads if grad is not None]
        norm = global_norm(dense).to(self.control.device)
        if self._all_reduce_global is None:
            return norm
        square = norm.to(widest(norm.device.type)).square().view(1)
        self._all_reduce_global(square, "sum")
        return square[0].sqrt()


def reads_rate_first(optimizer: Optimizer) -> bool:
    """Whether its schedule is asked for the count before the update."""
    return isinstance(optimizer, RuleOptimizer) and optimizer.reads_rate_first
