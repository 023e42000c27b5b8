"""Replica: one copy of a model's parameters, with the guard of its gradients and the plan that updates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.guards import GradGuard, zero_all
from ...kernels.metrics import MetricsBuffer
from ..optimizer import Optimizer, Updater
from ..optimizer.counts import StepCounts
from ..optimizer.plan import Plan
from ..utils.interrupts import uninterrupted


class Replica:
    """One copy of a model on one device, with its parameters in the same order in all replicas.

    The updater holds the optimizer's states for it, unless a store updates it. All replicas share one optimizer.
    """

    def __init__(self, params: Sequence[torch.Tensor], names: Sequence[str], updater: Updater, zero_grads: bool) -> None:
        self.params, self.names, self.updater = list(params), list(names), updater
        self.guard = GradGuard(self.params, self.names)  # remembers which gradients the last step has used
        # The plan of the next update; None before the first update, and after a change that a plan cannot follow.
        self.plan: Plan | None = None
        # Of a replica that is updated independently; None: the optimizer's.
        self.counts: StepCounts | None = None
        self.host_state: tuple[Any, ...] | None = None
        self.zero_grads = zero_grads  # whether updates fill the gradients with zeros

    def fresh(self) -> list[bool]:
        """Return for each gradient whether it was written since the last step."""
        return self.guard.written(self.guard.collect())

    def gradients(self, chosen: Sequence[bool]) -> list[torch.Tensor | None]:
        return [param.grad if wanted else None for param, wanted in zip(self.params, chosen, strict=True)]

    def zero_grad(self, set_to_none: bool) -> None:
        """Set gradients to None, or fill them with zeros without making used ones fresh."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        gradients = self.guard.collect()
        fresh = self.guard.written(gradients)
        zero(gradients)
        self.guard.use([None if new else gradient for gradient, new in zip(gradients, fresh, strict=True)])

    def marks(self) -> list[tuple[int, int]]:
        return [(id(param.grad), -1 if param.grad is None else param.grad._version) for param in self.params]

    def weights(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.params]

    def make_plan(self) -> Plan:
        """Make and return the plan, and the optimizer states that are missing."""
        self.plan = self.updater.make_plan(range(len(self.params)), self.params, self.names, True, self.zero_grads)
        return self.plan

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present states and drops the plan."""
        updater = self.updater
        state = dict(updater.state)

        def restore() -> None:
            updater.state, self.plan = state, None

        return restore

    def forget_plan(self) -> None:
        """Drop the plan, after states or rules have been replaced."""
        self.plan = None
        self.updater.forget_plan()


@torch.no_grad()
def zero(gradients: Sequence[torch.Tensor | None]) -> None:
    if present := [gradient for gradient in gradients if gradient is not None]:
        zero_all(present)


def update_together(
    optimizer: Optimizer,
    replicas: Sequence[Replica],
    gradients: Sequence[Sequence[torch.Tensor | None]],
    into: MetricsBuffer | None,
) -> None:
    """Update all replicas, each with its own counts and host state if there are several; their plans must be prepared.

    Afterwards the optimizer has the counts and the host state of the first replica. `into` gets the first one's metrics.
    """
    plans: list[Any] = [replica.plan for replica in replicas]
    if len(replicas) == 1:
        plans[0].run(into)
        return
    counts, host_state = optimizer.step_counts.copy(), optimizer.host_state()
    plans[0].run(into)
    first_counts, first_state = optimizer.step_counts, optimizer.host_state()
    after = first_counts.largest
    try:
        for replica, plan, grads in zip(replicas[1:], plans[1:], gradients[1:], strict=True):
            optimizer.step_counts = counts.copy() if replica.counts is None else replica.counts
            optimizer.step_counts.largest = counts.largest
            optimizer.load_host_state(host_state if replica.host_state is None else replica.host_state)
            plan.prepare(grads)  # once more, because the rule may depend on the counts
            plan.run()
            replica.counts, replica.host_state = optimizer.step_counts, optimizer.host_state()
            after = max(after, optimizer.num_update)
    finally:
        optimizer.step_counts = first_counts
        optimizer.num_update = after
        optimizer.load_host_state(first_state)


class DisplacedWeights:
    """A copy of the weights of replicas, to restore them after a temporary move, with a check for writes in between."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._before = [[weight.clone() for weight in replica.weights()] for replica in replicas]
        self._marks = self._present_marks()

    def mark(self) -> None:
        """Note that the move is complete: `written` reports writes from now on."""
        self._marks = self._present_marks()

    def written(self) -> list[str]:
        """Return the names, in quotes, of parameters that were written to, or got other memory, since `mark`."""
        changed = [now != then for now, then in zip(self._present_marks(), self._marks, strict=True)]
        names = self._replicas[0].names
        return [repr(name) for i, name in enumerate(names) if any(changed[i :: len(names)])]

    @uninterrupted
    @torch.no_grad()
    def restore(self) -> None:
        """Give the replicas' parameters their weights from before the move."""
        for replica, weights in zip(self._replicas, self._before, strict=True):
            for parameter, weight in zip(replica.params, weights, strict=True):
                parameter.copy_(weight)

    def _present_marks(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for replica in self._replicas for parameter in replica.params]
