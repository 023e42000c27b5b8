"""Steps inside backward: each parameter is updated once its gradient is complete, and the gradient is then freed.

The hyper-parameters of the step are computed before the backward pass, in the order of the parameters, because with some
optimizers they depend on that order. During the backward pass, gradients arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...kernels import Rule
from ...kernels.messages import listed
from ...kernels.metrics import MetricsBuffer
from ..optimizer import Optimizer, RuleOptimizer
from ..optimizer.multi import LIMITS, part_of, parts_of
from ..optimizer.plan import HyperRows
from ..optimizer.updater import UpdaterPlan
from ..utils.errors import StaleGradientError
from ..utils.interrupts import interrupts_wait
from .replica import Replica
from .telemetry import Telemetry

GROUP_BYTES = 2**20  # small gradients are collected up to this many bytes, for few launches


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise if a step of this optimizer needs several parameters at a time: it is no rule, or sums over all gradients."""
    for part in parts_of(optimizer):
        name = type(part).__name__
        if not isinstance(part, RuleOptimizer):
            raise TypeError(
                f"step_in_backward() needs an optimizer that is a rule, such as tristep's own: {name} updates by hand, and "
                "may depend on the order of parameters; use step()"
            )
        together = [stage.name for stage in part.composed_rule.reductions if stage.scope == "global"]
        if together:
            options = {**part.options_in_use, **({} if part._joint is None else part._joint.limits())}
            given = [f"{each.name}={options[each.name]!r}" for each in LIMITS if options.get(each.name)] or together
            raise ValueError(
                f"step_in_backward() with {name}: its rule sums over all gradients together ({', '.join(given)}), which "
                "are never in memory at once; use step()"
            )


class BackwardStep:
    """Updates the parameters of a trainer's only replica inside backward passes, each when its gradient is complete."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self._updater = replica, replica.updater
        self._params, self._names = list(replica.params), list(replica.names)
        self._plans: dict[tuple[int, ...], UpdaterPlan] = {}  # by the parameters that are updated together
        self._hooks: list[Any] = []
        self._slots = np.zeros(0, dtype=np.int64)
        # By parameter: the index of its optimizer, and the rule and the hyper-parameters of the step.
        self._formed: dict[int, tuple[int, Rule, np.ndarray]] = {}
        self._number = 0  # the number of the step
        self._host_state: tuple[Any, ...] = ()  # the optimizer's before the step
        self._into: MetricsBuffer | None = None
        self._waiting: list[int] = []  # parameters with a small gradient, which wait to be updated together
        self._waiting_bytes = 0
        self.updated = [False] * len(self._params)  # by the present step

    @property
    def is_open(self) -> bool:
        """Whether it waits for gradients: a `take` context is open."""
        return bool(self._hooks)

    @contextmanager
    def take(self, rescale_grad: float, ignore_stale_grad: bool, telemetry: Telemetry | None) -> Iterator[None]:
        """Take a step inside the one backward pass of this context.

        If parameters got no gradient, raise StaleGradientError on leaving, unless `ignore_stale_grad`; the others have been
        updated.
        """
        updater, optimizer = self._updater, self._updater.optimizer
        before = dict(updater.state), optimizer.rescale_grad
        optimizer.rescale_grad = rescale_grad
        into = None if telemetry is None else telemetry._begin()
        with interrupts_wait():
            try:
                self._begin(ignore_stale_grad, into)
            except BaseException:
                updater.state, optimizer.rescale_grad = before
                raise
            try:
                yield
            finally:
                self._end()
                if any(self.updated):
                    self._replica.plan = None  # counts have moved, and perhaps not all of them
                    if telemetry is not None:
                        telemetry._end(into, optimizer.num_update)
                else:
                    updater.state, optimizer.rescale_grad = before
        pairs = zip(self._params, self._names, self.updated, strict=True)
        missing = [repr(name) for param, name, updated in pairs if param.requires_grad and not updated]
        if missing and not ignore_stale_grad:
            done = "the other parameters have been updated" if any(self.updated) else "nothing has been changed"
            raise StaleGradientError(
                f"step_in_backward() ended with no gradient for {listed(missing)}; {done}: call backward() inside it, on a "
                "loss that depends on them, or use step_in_backward(batch_size, ignore_stale_grad=True) to leave such "
                "parameters as they are"
            )

    def _begin(self, ignore_stale_grad: bool, into: MetricsBuffer | None = None) -> None:
        """Compute rules and hyper-parameters, then register the hooks. If it fails, no count has moved."""
        optimizer: Any = self._updater.optimizer
        self._into = into
        params = self._params
        if any(i not in self._updater.state for i in range(len(params))):
            self._updater.make_plan(range(len(params)), params, self._names)  # makes all states in few allocations
        wanted = [param.requires_grad for param in params]
        self.updated = [False] * len(params)
        self._slots = optimizer.slots(range(len(params)))
        self._number = optimizer.step_counts.largest_after(self._slots[wanted])
        self._host_state = optimizer.host_state()
        try:
            for k, part in enumerate(parts_of(optimizer)):
                members = [i for i in range(len(params)) if part_of(optimizer, i) is part]
                if any(wanted[i] for i in members):
                    self._form(k, part, members, [wanted[i] for i in members], ignore_stale_grad)
        except BaseException:
            optimizer.load_host_state(self._host_state)
            raise
        hooks = [(i, param) for i, param in enumerate(params) if wanted[i]]
        self._hooks = [param.register_post_accumulate_grad_hook(partial(self._arrived, i)) for i, param in hooks]

    def _form(self, k: int, optimizer: Any, members: list[int], active: list[bool], ignore_stale_grad: bool) -> None:
        """Compute the rule and the hyper-parameters with which the hooks of optimizer `k`'s parameters will update them."""
        rows = HyperRows(optimizer, members)
        rows.use(active)
        rule = rows.rule()
        self._formed |= {i: (k, rule, row) for i, row in zip(members, rows.table(rule, self._number), strict=True)}
        if ignore_stale_grad and optimizer.host_state_names:
            before = optimizer.host_state()
            optimizer.hyper_of(members[0], 1, optimizer.lr, optimizer.wd)
            if optimizer.host_state() != before:
                raise ValueError(
                    f"ignore_stale_grad=True in step_in_backward() with {type(optimizer).__name__}: must be False, because "
                    "its hyper-parameters depend on which parameters get a gradient; or use step()"
                )

    def _end(self) -> None:
        """Remove the hooks; if no gradient came, restore the optimizer's host state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._waiting, self._waiting_bytes = [], [], 0
        if not any(self.updated):
            self._updater.optimizer.load_host_state(self._host_state)

    def _arrived(self, i: int, param: torch.Tensor) -> None:
        """Update parameter `i`, whose gradient is complete; or let it wait for more small ones."""
        gradient: Any = param.grad
        if self.updated[i] or i in self._waiting:
            raise RuntimeError(
                f"a second gradient for {self._names[i]!r} inside step_in_backward(), which was updated with the first: "
                "there can be one backward() in it, without reentrant checkpoints; to accumulate gradients, run all "
                "backward passes but the last before it"
            )
        if gradient.requires_grad:
            raise ValueError(
                f"the gradient of {self._names[i]!r} has a graph (create_graph=True), which needs the weights as they were: "
                "use step() instead of step_in_backward()"
            )
        size = gradient.numel() * gradient.element_size()
        if size >= GROUP_BYTES:
            self._update([i])
            return
        if self._waiting and self._formed[self._waiting[0]][0] != self._formed[i][0]:  # another optimizer's
            self._update_waiting()
        if not self._waiting:  # at the end of this backward pass those that wait are updated
            torch.autograd.Variable._execution_engine.queue_callback(self._update_waiting)
        self._waiting.append(i)
        self._waiting_bytes += size
        if self._waiting_bytes >= GROUP_BYTES:
            self._update_waiting()

    def _update_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            self._update(waiting)

    @torch.no_grad()
    def _update(self, members: list[int]) -> None:
        optimizer: Any = part_of(self._updater.optimizer, members[0])
        params = [self._params[i] for i in members]
        plan = self._plans.get(tuple(members))
        if plan is None or not plan.is_current(plan.update):
            if len(self._plans) > 2 * len(self._params):  # gradients keep coming in new orders
                self._plans.clear()
            names = [self._names[i] for i in members]
            plan = self._plans[tuple(members)] = UpdaterPlan(self._updater, optimizer, members, params, names, own=True)
        rule, rows = self._formed[members[0]][1], [self._formed[i][2] for i in members]
        plan.step_with([param.grad for param in params], rule, rows, self._into)
        for i, param in zip(members, params, strict=True):
            param.grad = None
            self.updated[i] = True
        optimizer.step_counts.advance(self._slots[members], self._number)
