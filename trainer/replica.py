"""Replica: one copy of a model's parameters, which of its gradients have been used, and what updates it in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.guards import GradGuard, zero_all
from ..kernels.metrics import MetricsBuffer
from .interrupts import uninterrupted
from .optimizer import Optimizer, Updater
from .optimizer.counts import StepCounts
from .optimizer.plan import Plan


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

    def fresh(self, written: tuple[list[Any], list[int]] | None = None) -> list[bool]:
        """For each gradient whether it has been written since the last step; `written` if the guard knows that of all."""
        return self.guard.written(self.guard.collect()) if written is None else [True] * len(self.params)

    def gradients(self, chosen: Sequence[bool]) -> list[torch.Tensor | None]:
        """Those of the chosen parameters, None for the others."""
        return [param.grad if wanted else None for param, wanted in zip(self.params, chosen, strict=True)]

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget gradients, or fill them with zeros, which makes none fresh."""
        if set_to_none:
            for param in self.params:
                param.grad = None
            return
        gradients = self.guard.collect()
        fresh = self.guard.written(gradients)
        zero(gradients)
        self.guard.use([None if new else gradient for gradient, new in zip(gradients, fresh, strict=True)])

    def marks(self) -> list[tuple[int, int]]:
        """Of each gradient which tensor it is, and how often it has been written to."""
        return [(id(param.grad), -1 if param.grad is None else param.grad._version) for param in self.params]

    def weights(self) -> list[torch.Tensor]:
        """The parameters as plain tensors, that can be written to."""
        return [param.detach() for param in self.params]

    def make_plan(self) -> Plan:
        """Make the plan, and states where there are none; `undo` gives what takes them away again."""
        self.plan = self.updater.make_plan(range(len(self.params)), self.params, self.names, True, self._zero_grads)
        return self.plan

    def undo(self) -> Callable[[], None]:
        """A function that restores the states that there are now, before a plan is made."""
        updater = self.updater
        state = dict(updater.state)

        def restore() -> None:
            updater.state, self.plan = state, None

        return restore

    def forget_plan(self) -> None:
        """Make the plan again, after states or rules have been replaced."""
        self.plan = None
        self.updater.forget_plan()

    def forget_counts(self) -> None:
        """Count as the first replica does, after that has loaded saved counts."""
        self.counts = self.host_state = None


@torch.no_grad()
def zero(gradients: Sequence[torch.Tensor | None]) -> None:
    """Fill gradients with zeros."""
    if present := [gradient for gradient in gradients if gradient is not None]:
        zero_all(present)


def update_together(
    optimizer: Optimizer,
    replicas: Sequence[Replica],
    gradients: Sequence[Sequence[torch.Tensor | None]],
    into: MetricsBuffer | None,
) -> None:
    """Update all replicas, each as if it were the only one, with counts and host state of its own; after `prepare`.

    The optimizer is left as the first replica's update leaves it. `into` is where that puts what it measures.
    """
    counts, host_state = optimizer.step_counts.copy(), optimizer.host_state()
    plans: list[Any] = [replica.plan for replica in replicas]
    plans[0].run(into)
    first_counts, first_state = optimizer.step_counts, optimizer.host_state()
    after = first_counts.largest
    try:
        for replica, plan, own in zip(replicas[1:], plans[1:], gradients[1:], strict=True):
            optimizer.step_counts = counts.copy() if replica.counts is None else replica.counts
            optimizer.step_counts.largest = counts.largest
            optimizer.load_host_state(host_state if replica.host_state is None else replica.host_state)
            plan.prepare(own)  # once more, as the rule may depend on its counts
            plan.run()
            replica.counts, replica.host_state = optimizer.step_counts, optimizer.host_state()
            after = max(after, optimizer.num_update)
    finally:
        optimizer.step_counts = first_counts
        optimizer.num_update = after
        optimizer.load_host_state(first_state)


class DisplacedWeights:
    """What the weights of replicas were before they were moved, and whether they have been written to since.

    Args:
        replicas: whose weights are about to be moved; they are copied.
        before: the weights to restore, of each replica, where they have been moved already.

    Attributes:
        before: the weights to restore.
    """

    def __init__(self, replicas: Sequence[Replica], before: list[list[torch.Tensor]] | None = None) -> None:
        self._replicas = replicas
        if before is None:
            before = [[weight.clone() for weight in replica.weights()] for replica in replicas]
        self.before = before
        self._marks = self._present_marks()

    def mark(self) -> None:
        """The weights are now where they are to stay until `restore`."""
        self._marks = self._present_marks()

    def written(self) -> list[str]:
        """Names, in quotes, of the parameters that have been written to, or given other memory, since `mark`."""
        changed = [now != then for now, then in zip(self._present_marks(), self._marks, strict=True)]
        names = self._replicas[0].names
        return [repr(name) for i, name in enumerate(names) if any(changed[i :: len(names)])]

    @uninterrupted
    @torch.no_grad()
    def restore(self) -> None:
        """Give the weights their values from before."""
        for replica, weights in zip(self._replicas, self.before, strict=True):
            for parameter, weight in zip(replica.params, weights, strict=True):
                parameter.copy_(weight)

    def _present_marks(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for replica in self._replicas for parameter in replica.params]
