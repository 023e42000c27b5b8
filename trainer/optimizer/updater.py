"""Updater: an optimizer with the states of its parameters, and the callable of MXNet's stores."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, Update
from ...kernels.metrics import MetricsBuffer
from ..interrupts import uninterrupted
from .base import Optimizer
from .counts import Index
from .multi import MultiOptimizer, part_of, parts_of
from .multi_plan import GlobalLimit, MultiPlan, Part
from .plan import Plan
from .rule_optimizer import RuleOptimizer
from .states import CustomPlan, States, UpdaterPlan

__all__ = ["Plan", "Updater", "get_updater"]


def get_updater(optimizer: Optimizer) -> Updater:
    """A callable `(index, grad, weight)` that updates weights in place and keeps their states; also for lists of each."""
    return Updater(optimizer)


class Updater(States):
    """An optimizer together with the states of the parameters that it updates.

    Args:
        optimizer: the optimizer.
        engine: as for `tristep.kernels.choose_engine`.

    Attributes:
        states, masters: as those of `States`.
        control: as that of `tristep.kernels.Update`; plans that are made from then on follow it.
        into: where the next calls are to put what updates measure; None: nowhere.
    """

    def __init__(self, optimizer: Optimizer, engine: str | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}; see optimizer.create(name)")
        if not optimizer.can_update:
            raise TypeError(
                f"{type(optimizer).__name__} cannot train: it must define update(index, weight, grad, state), as "
                "subclasses of Optimizer do"
            )
        super().__init__(engine)
        self.optimizer = optimizer
        self.control: torch.Tensor | None = None
        self.into: MetricsBuffer | None = None
        self._plan: tuple[Plan, list[Index], list[torch.Tensor]] | None = None  # of which indices and weights
        self.be_that_of(optimizer)

    def be_that_of(self, optimizer: Optimizer) -> None:
        """Let the optimizer know that its parameters' states are here."""
        for part in parts_of(optimizer):
            if isinstance(part, RuleOptimizer):
                part._updater = weakref.ref(self)

    @uninterrupted
    def __call__(
        self,
        index: Index | Sequence[Index],
        grad: torch.Tensor | Sequence[torch.Tensor],
        weight: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        """Update one weight, or a list of them in one go.

        Raises:
            ValueError: one of several weights, by an optimizer that needs the gradients of all; nothing has been changed.
        """
        alone = not isinstance(index, (list, tuple))
        if isinstance(index, (list, tuple)):
            indices, grads, weights = list(index), list(grad), list(weight)
        else:
            self.optimizer.check_alone(index)  # type: ignore[arg-type]
            indices, grads, weights = [index], [grad], [weight]
        if not len(indices) == len(grads) == len(weights):
            raise ValueError(
                f"{len(indices)} indices came with {len(grads)} gradients and {len(weights)} weights: there must be as many"
            )
        known = self._plan
        if known is None or known[1] != indices or any(a is not b for a, b in zip(known[2], weights, strict=True)):
            known = self._plan = self.make_plan(indices, weights, alone=alone), indices, weights
        known[0].step(grads, into=self.into)

    def make_plan(
        self,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        names: Sequence[str] | None = None,
        own: bool = False,
        zero_grads: bool = False,
        rng_offsets: np.ndarray | None = None,
        all_reduce_global: Callable[[torch.Tensor, str], None] | None = None,
        alone: bool = False,
    ) -> Plan:
        """A plan for stepping these weights, the parameters of these indices; states that they lack are created.

        Args:
            names: what messages call them; default their names or indices in the optimizer.
            own: as for `StepPlan`.
            zero_grads, rng_offsets, all_reduce_global: as for `UpdaterPlan`.
            alone: as for `RuleOptimizer.rows_of_step`.
        """
        optimizer = self.optimizer
        if names is None:
            names = [str(optimizer.idx2name.get(index, index)) for index in indices]
        multi = optimizer if isinstance(optimizer, MultiOptimizer) else None
        limit = None if multi is None else GlobalLimit(multi, self.control, weights[0].device, all_reduce_global)
        control = self.control if limit is None else limit.control
        parts = []
        for part in parts_of(optimizer):
            at = [i for i, index in enumerate(indices) if part_of(optimizer, index) is part]
            if not at and multi is not None:
                continue
            theirs = [indices[i] for i in at], [weights[i] for i in at]
            made: UpdaterPlan | CustomPlan
            if isinstance(part, RuleOptimizer):
                called, offsets = [names[i] for i in at], None if rng_offsets is None else rng_offsets[at]
                made = UpdaterPlan(self, part, *theirs, called, control, zero_grads, offsets, all_reduce_global, alone, own)
            else:
                made = CustomPlan(self, part, *theirs, control, zero_grads)
            parts.append(Part(part, made, at))
        return parts[0].plan if multi is None or limit is None else MultiPlan(multi, indices, parts, limit)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_plan": None}

    def apply(
        self,
        rule: Rule,
        hyper: Mapping[str, float],
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Apply another rule than the optimizer's to weights, not to their masters, with the states that it names.

        It counts as no update. Weights stay as they are that have no gradient, or, without `grads`, no state yet.
        """
        if grads is None:
            grads = [
                torch.zeros_like(weight) if i in self.states else None for i, weight in zip(indices, weights, strict=True)
            ]
        chosen = [i for i, grad in enumerate(grads) if grad is not None]
        states = [dict(zip(self._slots(i), self.states.get(i, ()), strict=False)) for i in map(indices.__getitem__, chosen)]
        masters = [self.masters[index].clone() if (index := indices[i]) in self.masters else None for i in chosen]
        run = Update(
            rule,
            [weights[i] for i in chosen],
            [tuple(row[name] for name in rule.slots) for row in states],
            masters,
            self.engine,
        )
        run.hyper[:] = [1.0, *(hyper[name] for name in rule.hyper)]
        run.bind([grads[i] for i in chosen])
        run()

    def _slots(self, index: Index) -> tuple[str, ...]:
        """The names of a parameter's states."""
        part = part_of(self.optimizer, index)
        return part.composed_rule.slots if isinstance(part, RuleOptimizer) else ()

    def forget_plan(self) -> None:
        """Make the next call check everything again, after states have been replaced."""
        self._plan = None

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last call, if its rule skips steps with non-finite ones."""
        return None if self._plan is None else self._plan[0].total()
