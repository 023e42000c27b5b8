"""Copy: one of several copies of a model that a trainer keeps equal, with what is used to update it in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.guards import GradGuard
from ..kernels.measures import Measurements
from .optimizer import Optimizer, RuleOptimizer, Updater
from .optimizer.counts import StepCounts
from .optimizer.updater import Plan

__all__ = ["Copy", "update_together"]


class Copy:
    """One copy of a model.

    Args:
        params: its parameters, in the same order in all copies.
        names: of the parameters.
        updater: has the states of this copy, unless a store updates it; all have one optimizer.
        zero_grads: let updates fill the gradients with zeros.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], updater: Updater, zero_grads: bool) -> None:
        self.params = list(params)
        self.updater = updater
        # Of a copy that is not the first: counts of updates by parameter, and what its steps carry on; None: as the first.
        self.counts: StepCounts | None = None
        self.carried: tuple[Any, ...] | None = None
        self._names, self._zero_grads = list(names), zero_grads
        self._plan: Plan | None = None
        self.guard = GradGuard(self.params, self._names)

    def fresh(self) -> list[bool]:
        """Of each parameter whether it has a gradient that was written to since it was used."""
        return self.guard.written(self.guard.collect())

    def gradients(self, chosen: Sequence[bool]) -> list[torch.Tensor | None]:
        """Those of the chosen parameters, None for the others."""
        return [param.grad if wanted else None for param, wanted in zip(self.params, chosen, strict=True)]

    def note(self, chosen: Sequence[bool]) -> None:
        """The gradients of these parameters are used up as they are now."""
        self.guard.use(self.gradients(chosen))

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget gradients, or fill them with zeros, which makes none fresh."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        stale = [not fresh for fresh in self.fresh()]
        self.zero(self.gradients([True] * len(self.params)))
        self.note(stale)

    @torch.no_grad()
    def zero(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fill gradients with zeros."""
        if there := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_zero_(there)

    def marks(self) -> list[tuple[int, int]]:
        """Of each gradient which tensor it is, and how often it has been written to."""
        return [(id(param.grad), -1 if param.grad is None else param.grad._version) for param in self.params]

    def weights(self) -> list[torch.Tensor]:
        """The parameters as plain tensors, that can be written to."""
        return [param.detach() for param in self.params]

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Find out whether `update` with gradients like these would fail for their sake. No weight changes.

        Makes states where there are none; `before` gives what takes them away again.
        """
        if self._plan is None:
            plan = Plan(self.updater, range(len(self.params)), self.params, self._names, True, self._zero_grads)
            plan.check(gradients)
            self._plan = plan
        else:
            self._plan.check(gradients)

    def before(self) -> Callable[[], None]:
        """A function that puts states back that were there when it was made, if they were new to the next step."""
        if self._plan is not None:
            return lambda: None
        updater = self.updater
        states, masters = dict(updater.states), dict(updater.masters)

        def put_back() -> None:
            updater.states, updater.masters = states, masters
            self._plan = None

        return put_back

    def update(self, gradients: Sequence[torch.Tensor | None], into: Measurements | None = None) -> None:
        """Update all weights whose gradient is not None; after `check`."""
        plan: Any = self._plan
        plan.step(gradients, into=into)

    def total(self) -> torch.Tensor | None:
        """Of the last update the sum of squares of all gradients, where its rule leaves out those that are not finite."""
        return None if self._plan is None else self._plan.total()

    def forget_plan(self) -> None:
        """Look at everything anew, after states have been replaced, or rules."""
        self._plan = None
        self.updater.forget_plan()

    def forget_counts(self) -> None:
        """Count as the first copy does, after that has taken over saved counts."""
        self.counts = self.carried = None


def update_together(
    optimizer: Optimizer,
    copies: Sequence[Copy],
    gradients: Sequence[Sequence[torch.Tensor | None]],
    into: Measurements | None = None,
) -> None:
    """Update all copies, each as if it were the only one, with counts of its own, and what the optimizer carries on, too.

    The optimizer is left as the first copy's update leaves it. `into` is where that puts what it measures.
    """
    counts, carried = optimizer.step_counts.copy(), _carried(optimizer)
    copies[0].update(gradients[0], into)
    first_counts, first_carried = optimizer.step_counts, _carried(optimizer)
    after = first_counts.largest
    try:
        for copy, own in zip(copies[1:], gradients[1:], strict=True):
            optimizer.step_counts = counts.copy() if copy.counts is None else copy.counts
            optimizer.step_counts.largest = counts.largest
            _put_back(optimizer, carried if copy.carried is None else copy.carried)
            copy.update(own)
            copy.counts, copy.carried = optimizer.step_counts, _carried(optimizer)
            after = max(after, optimizer.num_update)
    finally:
        optimizer.step_counts = first_counts
        optimizer.num_update = after
        _put_back(optimizer, first_carried)


def _carried(optimizer: Optimizer) -> tuple[Any, ...]:
    return optimizer.host_state() if isinstance(optimizer, RuleOptimizer) else ()


def _put_back(optimizer: Optimizer, carried: tuple[Any, ...]) -> None:
    if isinstance(optimizer, RuleOptimizer):
        optimizer.load_host_state(carried)
