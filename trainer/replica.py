"""Replica: one copy of a model's parameters, with its gradients' freshness and what updates it in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.guards import GradGuard
from ..kernels.metrics import MetricsBuffer
from .optimizer import Optimizer, RuleOptimizer, Updater
from .optimizer.counts import StepCounts
from .optimizer.multi import parts_of
from .optimizer.updater import Plan

__all__ = ["Collected", "Replica", "host_state_of", "load_host_state", "update_together"]


class Collected(NamedTuple):
    """The gradients of a replica before a step.

    Attributes:
        gradients: of each parameter, or None.
        fresh: for each parameter whether its gradient has been written since the last step.
        versions: of all gradients if all are fresh, else None.
    """

    gradients: list[Any]
    fresh: list[bool]
    versions: list[int] | None


class Replica:
    """One copy of a model.

    Args:
        params: its parameters, in the same order in all replicas.
        names: of the parameters.
        updater: has the states of this replica, unless a store updates it; all have one optimizer.
        zero_grads: let updates fill the gradients with zeros.

    Attributes:
        guard: remembers which gradients the last step has used.
        plan: how it is updated; None before the first update, and after anything that a plan cannot follow.
        counts, host_state: update counts and `host_state` of a replica that is not the first; None: as the first one's.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], updater: Updater, zero_grads: bool) -> None:
        self.params, self.names, self.updater = list(params), list(names), updater
        self.guard = GradGuard(self.params, self.names)
        self.plan: Plan | None = None
        self.counts: StepCounts | None = None
        self.host_state: tuple[Any, ...] | None = None
        self._zero_grads = zero_grads

    def collect(self) -> Collected:
        """The gradients, and which of them are fresh."""
        found = self.guard.collect_written()
        if found is not None:
            return Collected(found[0], [True] * len(self.params), found[1])
        gradients = self.guard.collect()
        return Collected(gradients, self.guard.written(gradients), None)

    def gradients(self, chosen: Sequence[bool]) -> list[torch.Tensor | None]:
        """Those of the chosen parameters, None for the others."""
        return [param.grad if wanted else None for param, wanted in zip(self.params, chosen, strict=True)]

    def use(self, collected: Collected | None, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take note that a step has used these gradients: all that were collected, or, if that is None, others."""
        if collected is None or self.plan is None:
            self.guard.use(gradients)
        else:
            self.guard.use(gradients, collected.versions, self.plan.references)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget gradients, or fill them with zeros, which makes none fresh."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        gradients = self.guard.collect()
        fresh = self.guard.written(gradients)
        self.zero(gradients)
        self.guard.use([None if new else gradient for gradient, new in zip(gradients, fresh, strict=True)])

    @torch.no_grad()
    def zero(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fill gradients with zeros."""
        if present := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_zero_(present)

    def marks(self) -> list[tuple[int, int]]:
        """Of each gradient which tensor it is, and how often it has been written to."""
        return [(id(param.grad), -1 if param.grad is None else param.grad._version) for param in self.params]

    def weights(self) -> list[torch.Tensor]:
        """The parameters as plain tensors, that can be written to."""
        return [param.detach() for param in self.params]

    def prepare(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Find out whether `run` would fail for the sake of these gradients. No weight changes.

        Makes states where there are none; `undo` gives what takes them away again.
        """
        if self.plan is None:
            plan = self.updater.make_plan(range(len(self.params)), self.params, self.names, True, self._zero_grads)
            plan.prepare(gradients)
            self.plan = plan
        else:
            self.plan.prepare(gradients)

    def undo(self) -> Callable[[], None] | None:
        """A function that restores the states that there are now, where the next step will make new ones."""
        if self.plan is not None:
            return None
        updater = self.updater
        states, masters = dict(updater.states), dict(updater.masters)

        def restore() -> None:
            updater.states, updater.masters = states, masters
            self.plan = None

        return restore

    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `prepare`."""
        self.plan.run(into)  # type: ignore[union-attr]  # there is one then

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last update, if its rule skips steps with non-finite ones."""
        return None if self.plan is None else self.plan.total()

    def forget_plan(self) -> None:
        """Make the plan again, after states or rules have been replaced."""
        self.plan = None
        self.updater.forget_plan()

    def forget_counts(self) -> None:
        """Count as the first replica does, after that has loaded saved counts."""
        self.counts = self.host_state = None


def update_together(
    optimizer: Optimizer,
    replicas: Sequence[Replica],
    gradients: Sequence[Sequence[torch.Tensor | None]],
    into: MetricsBuffer | None = None,
) -> None:
    """Update all replicas, each as if it were the only one, with counts and host state of its own; after `prepare`.

    The optimizer is left as the first replica's update leaves it. `into` is where that puts what it measures.
    """
    if len(replicas) == 1:
        replicas[0].run(into)
        return
    counts, host_state = optimizer.step_counts.copy(), host_state_of(optimizer)
    replicas[0].run(into)
    first_counts, first_state = optimizer.step_counts, host_state_of(optimizer)
    after = first_counts.largest
    try:
        for replica, own in zip(replicas[1:], gradients[1:], strict=True):
            optimizer.step_counts = counts.copy() if replica.counts is None else replica.counts
            optimizer.step_counts.largest = counts.largest
            load_host_state(optimizer, host_state if replica.host_state is None else replica.host_state)
            replica.prepare(own)  # once more, as the rule may depend on its counts
            replica.run()
            replica.counts, replica.host_state = optimizer.step_counts, host_state_of(optimizer)
            after = max(after, optimizer.num_update)
    finally:
        optimizer.step_counts = first_counts
        optimizer.num_update = after
        load_host_state(optimizer, first_state)


def host_state_of(optimizer: Optimizer) -> tuple[Any, ...]:
    return tuple(part.host_state() if isinstance(part, RuleOptimizer) else () for part in parts_of(optimizer))


def load_host_state(optimizer: Optimizer, state: tuple[Any, ...]) -> None:
    for part, own in zip(parts_of(optimizer), state, strict=True):
        if isinstance(part, RuleOptimizer):
            part.load_host_state(own)
