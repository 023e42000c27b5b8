"""CustomPlan: how an optimizer with an `update` of its own, in plain torch, steps a list of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.metrics import MetricsBuffer
from .base import Optimizer
from .counts import Index

if TYPE_CHECKING:
    from .updater import Updater

__all__ = ["CustomPlan"]


class CustomPlan:
    """As `StepPlan`, for an optimizer that is no `RuleOptimizer`: it is called for one parameter after the other.

    Args:
        updater: has the states; missing ones are created here.
        optimizer: that of these parameters.
        indices: of the parameters.
        weights: the parameters, in the same order.
        control: as `grad_scale_and_skip` of `Update`.
        zero_grads: fill the gradients with zeros after the step.
    """

    update = references = None  # there is no `Update`

    def __init__(
        self,
        updater: Updater,
        optimizer: Optimizer,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        control: torch.Tensor | None = None,
        zero_grads: bool = False,
    ) -> None:
        self._updater, self._optimizer, self._control, self._zero_grads = updater, optimizer, control, zero_grads
        self._indices, self._weights = list(indices), list(weights)
        self._grads: Sequence[torch.Tensor | None] = ()  # from `prepare` to `run`
        self._optimizer.slots(self._indices)  # counts begin, also of those that have no gradient yet
        with torch.no_grad():  # a state may be a copy of the weight, but has no history
            for index, weight in zip(self._indices, self._weights, strict=True):
                if index not in updater.states:
                    updater.states[index] = self._optimizer.create_state_multi_precision(index, weight)

    def total(self) -> None:
        """It is not known."""

    def step(self, grads: Sequence[torch.Tensor | None], into: MetricsBuffer | None = None) -> None:
        """`prepare` and `run`."""
        self.prepare(grads)
        self.run(into)

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take these gradients, one for each weight, for the next step; None leaves a weight alone."""
        self._grads = grads

    @torch.no_grad()
    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `prepare`. Nothing is measured."""
        grads, self._grads = self._grads, ()
        optimizer, control = self._optimizer, self._control
        rescale_grad, (factor, skip) = optimizer.rescale_grad, (1.0, 0.0) if control is None else control.tolist()
        if not skip:
            try:
                optimizer.rescale_grad *= factor
                self._update(grads)
            finally:
                optimizer.rescale_grad = rescale_grad
        if self._zero_grads:
            for grad in grads:
                if grad is not None:
                    grad.zero_()

    def _update(self, grads: Sequence[torch.Tensor | None]) -> None:
        optimizer, states = self._optimizer, self._updater.states
        self._check_numbers([index for index, grad in zip(self._indices, grads, strict=True) if grad is not None])
        together: dict[torch.dtype, list[Any]] = {}
        for index, weight, grad in zip(self._indices, self._weights, grads, strict=True):
            if grad is not None:
                states[index] = optimizer.follow(weight, states[index])
                if optimizer.aggregate_num > 0 and not optimizer.keeps_master(weight):
                    together.setdefault(weight.dtype, []).append((index, weight, grad, states[index]))
                else:
                    optimizer.update_multi_precision(index, weight, grad, states[index])
        for rows in together.values():
            for first in range(0, len(rows), optimizer.aggregate_num):
                optimizer.update(*map(list, zip(*rows[first : first + optimizer.aggregate_num], strict=True)))  # type: ignore[arg-type]

    def _check_numbers(self, active: list[Index]) -> None:
        """Detect a rate or a multiplier that is not valid before the first update."""
        optimizer = self._optimizer
        if optimizer.lr_scheduler is not None and active:
            counts = optimizer.step_counts.values[optimizer.slots(active)]
            optimizer.rate_at(max(optimizer.num_update, int(counts.max()) + 1))
        if any(getattr(optimizer.param_dict.get(index), "__dict__", {}) for index in active):  # others have been checked
            for index in active:
                optimizer.multipliers(index)
