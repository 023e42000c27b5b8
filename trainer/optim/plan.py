"""OptimizerPlan: how the parameters of a `FusedOptimizer` are updated at every step, as long as its groups stay the same."""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...kernels.graphs import Recording
from .groups import Group, GroupOptimizer, name_of
from .owned import OwnedPlan
from .owners import OwnerGroup, stages_of
from .states import GroupPlan

__all__ = ["OptimizerPlan"]


class OptimizerPlan:
    """A plan for all parameters that share a rule and how states are stored, whatever their groups."""

    def __init__(self, optimizer: GroupOptimizer) -> None:
        self._optimizer = optimizer
        members: dict[Any, list[tuple[Group, int]]] = {}
        self._waiting: list[torch.Tensor] = []  # those that have had no gradient yet, and so have no state
        seen: set[int] = set()
        stages = stages_of(optimizer)
        for group in optimizer.param_groups:
            rule = optimizer._rule(group)
            for k, parameter in enumerate(group["params"]):
                if id(parameter) in seen:  # torch only warns of duplicates
                    continue
                seen.add(id(parameter))
                if group.get("fused") and parameter.device.type == "meta" and parameter.grad is not None:
                    raise RuntimeError(
                        f"fused=True: {name_of(group, k)} is on the meta device, where nothing can be computed: move the "
                        "model to another device, or leave fused out to have the states made only"
                    )
                if parameter.grad is None and not optimizer.state.get(parameter):
                    self._waiting.append(parameter)
                else:
                    exchange = (OwnerGroup.of(parameter), stages[parameter]) if parameter in stages else None
                    kind = rule, optimizer._narrow(group), optimizer._rounding(group), exchange
                    members.setdefault(kind, []).append((group, k))
        self._plans: list[GroupPlan | OwnedPlan] = []
        arrays = []
        for (rule, *_, exchange), those in sorted(members.items(), key=lambda each: each[0][-1] is not None):
            groups, parameters = [group for group, _ in those], [group["params"][k] for group, k in those]
            make = GroupPlan if exchange is None else OwnedPlan
            self._plans.append(make(optimizer, rule, parameters, groups, [name_of(*each) for each in those]))
            arrays += [shown.array for shown in self._plans[-1].rows.tensors.values()]
        optimizer._number_arrays, optimizer._is_copy = arrays, False
        self._owned = [plan for plan in self._plans if isinstance(plan, OwnedPlan)]
        self._sharded = [parameter for plan in self._plans for parameter in plan.sharded]
        self._groups = [(group, group["params"], optimizer._rule(group)) for group in optimizer.param_groups]
        self._parameters = [parameter for _, params, _ in self._groups for parameter in params]
        self._state = optimizer.state
        self._rows = [row for row in map(optimizer.state.get, self._parameters) if row is not None]
        self._objects = self._objects_now()

    def holds(self) -> bool:
        """Whether a step needs nothing but new gradients and options."""
        optimizer = self._optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != len(self._groups):
            return False
        for (group, params, rule), now in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not now or group["params"] is not params or optimizer._rule(group) is not rule:
                return False
        objects = self._objects_now()
        if len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            return False
        for plan in self._plans:
            if not plan.is_current(plan.update):
                return False
        return all(parameter.grad is None for parameter in self._waiting)

    def _objects_now(self) -> list[Any]:
        """The parameters in the groups, the rows of `state`, and what is in these."""
        parameters = chain.from_iterable([params for _, params, _ in self._groups])
        return [*parameters, *self._state.values(), *chain.from_iterable(map(dict.values, self._rows))]

    def prepare(self, in_place: bool = False) -> None:
        """All that may fail. Changes nothing that a user sees. `in_place`: that `holds` was asked just now."""
        for plan in self._plans:
            plan.prepare(plan.gradients(), in_place=in_place)
            plan.rows.write(plan.update)

    def run(self) -> None:
        """Update the parameters and, if that went well, their numbers. Exchanges go on during the updates of others."""
        for owned in self._owned:
            owned.start()
        for plan in self._plans:
            if isinstance(plan, OwnedPlan):
                plan.arrive()
                plan.launch()
                plan.send_back()
            else:
                plan.launch()
        for owned in self._owned:
            owned.finish()
        self._count_change()
        if Recording.current is not None:
            active = [list(plan.rows.active) for plan in self._plans]
            Recording.current.owners.append((self._is_in_use, partial(self.host_step, active)))

    def host_step(self, active: list[list[bool]]) -> None:
        """The host half of a step of these parameters, whose kernels are replayed by a CUDA graph."""
        for plan, each in zip(self._plans, active, strict=True):
            plan.host_step(plan.update, each)
        self._count_change()

    def _is_in_use(self) -> bool:
        return self._optimizer._plan is self and self.holds()

    def _count_change(self) -> None:
        if self._sharded:  # autograd looks at the DTensor's version, the updates have counted their shards'
            increment_version([parameter for parameter in self._sharded if parameter.grad is not None])
