"""Updater: an optimizer with its states. Applies it to many parameters at once, in one launch where it is a rule.

`Trainer` keeps a `Plan` and steps it; `get_updater` gives the callable that MXNet's stores use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Update
from ...kernels.table import allocate_states, compute_dtype
from .base import Index, Optimizer, RuleOptimizer

__all__ = ["Plan", "Updater", "get_updater"]


def get_updater(optimizer: Optimizer) -> Updater:
    """A callable `(index, grad, weight)` that updates weights in place and keeps their states; also for lists of each."""
    return Updater(optimizer)


class Updater:
    """An optimizer together with the states of the parameters that it updates.

    Args:
        optimizer: the optimizer.
        engine: as for `tristep.kernels.choose_engine`.

    Attributes:
        states: by parameter index. Of a `RuleOptimizer` a tuple with one tensor for each state of its rule, of another
            optimizer what its `create_state_multi_precision` returned.
        masters: by parameter index, the float32 copy of a 16-bit weight; only with a `RuleOptimizer` and `multi_precision`.
    """

    def __init__(self, optimizer: Optimizer, engine: str | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}; see optimizer.create(name)")
        self.optimizer = optimizer
        self.engine = engine
        self.states: dict[Index, Any] = {}
        self.masters: dict[Index, torch.Tensor] = {}
        self._plan: Plan | None = None

    def __call__(
        self,
        index: Index | Sequence[Index],
        grad: torch.Tensor | Sequence[torch.Tensor],
        weight: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        """Update one weight, or a list of them in one go."""
        if isinstance(index, (list, tuple)):
            indices, grads, weights = list(index), list(grad), list(weight)
        else:
            indices, grads, weights = [index], [grad], [weight]
        if not len(indices) == len(grads) == len(weights):
            raise ValueError(
                f"{len(indices)} indices came with {len(grads)} gradients and {len(weights)} weights: there must be as many"
            )
        plan = self._plan
        if plan is None or plan.indices != indices or any(a is not b for a, b in zip(plan.weights, weights, strict=True)):
            plan = self._plan = Plan(self, indices, weights)
        plan.step(grads)

    def forget_plan(self) -> None:
        """Make the next call look at everything anew, after states have been replaced."""
        self._plan = None


class Plan:
    """How one list of parameters is updated at every step: made once, so that a step is little more than a launch.

    Args:
        updater: holds the states; missing ones are created here.
        indices: of the parameters.
        weights: the parameters, in the same order.
    """

    def __init__(self, updater: Updater, indices: Sequence[Index], weights: Sequence[torch.Tensor]) -> None:
        self.updater = updater
        self.indices = list(indices)
        self.weights = list(weights)
        self.update: Update | None = None
        self._slots = np.array(updater.optimizer.slots(self.indices), dtype=np.int64)
        self._active = np.ones(len(self.indices), dtype=bool)
        self._shared: list[tuple[Any, int, float, float]] | None = None  # rows, slot, lr_mult, wd_mult
        self._multipliers: Any = None
        # A parameter's attributes; the dictionaries are live, so that looking whether they are empty is enough.
        self._own = [getattr(updater.optimizer.param_dict.get(index), "__dict__", None) for index in self.indices]
        if isinstance(updater.optimizer, RuleOptimizer):
            self._make_update(updater.optimizer)
        else:
            for index, weight in zip(self.indices, self.weights, strict=True):
                if index not in updater.states:
                    updater.states[index] = updater.optimizer.create_state_multi_precision(index, weight)

    def holds(self, grads: Sequence[Any]) -> bool:
        """Whether nothing has changed since the last step but the contents of the tensors."""
        return self.update is not None and self.update.holds(grads)

    def step(self, grads: Sequence[torch.Tensor | None], held: bool = False) -> None:
        """Update all weights whose gradient is not None. `held` says that `holds(grads)` was true just now."""
        optimizer = self.updater.optimizer
        if not isinstance(optimizer, RuleOptimizer):
            self._step_by_hand(optimizer, grads)
            return
        update = self.update
        if update is None or update.rule is not optimizer.rule:
            update, held = self._make_update(optimizer), False
        if not (held or update.holds(grads)):
            if not update.fits():
                update = self._make_update(optimizer)
            update.bind(grads)
            self._active = np.array([grad is not None for grad in grads], dtype=bool)
            self._shared = None
        if not self._active.any():
            return
        multipliers = self._read_multipliers(optimizer)
        if self._shared is None or multipliers != self._multipliers:
            self._multipliers = multipliers
            self._shared = self._share(optimizer)
        # Everything that may fail comes before the counts move.
        counts = optimizer._counts
        number = max(optimizer.num_update, *(int(counts[slot]) + 1 for _, slot, _, _ in self._shared))
        lr = optimizer.lr if optimizer.lr_scheduler is None else float(optimizer.lr_scheduler(number))
        for rows, slot, lr_mult, wd_mult in self._shared:
            update.hyper[rows] = optimizer.row(int(counts[slot]) + 1, lr * lr_mult, optimizer.wd * wd_mult)
        update()
        counts[self._slots if self._active.all() else self._slots[self._active]] += 1
        optimizer.num_update = number

    def _make_update(self, optimizer: RuleOptimizer) -> Update:
        """Match states and masters to the weights as they are now, creating, moving and converting where needed."""
        updater, rule = self.updater, optimizer.rule
        missing = [i for i, index in enumerate(self.indices) if index not in updater.states]
        if missing:
            weights = [self.weights[i].detach() for i in missing]
            for i, weight, state in zip(missing, weights, allocate_states(weights, len(rule.state)), strict=True):
                optimizer.init_state(weight, state)
                updater.states[self.indices[i]] = state
        for index, weight in zip(self.indices, self.weights, strict=True):
            dtype = compute_dtype(weight.dtype)
            state = updater.states[index]
            if len(state) != len(rule.state):
                (state,) = allocate_states([weight], len(rule.state))
                optimizer.init_state(weight.detach(), state)
            elif any(tensor.device != weight.device or tensor.dtype != dtype for tensor in state):
                (moved,) = allocate_states([weight], len(rule.state))
                for new, old in zip(moved, state, strict=True):
                    new.copy_(old)
                state = moved
            updater.states[index] = state
            if not optimizer.keeps_master(weight):
                updater.masters.pop(index, None)
            elif index not in updater.masters or updater.masters[index].device != weight.device:
                (master,) = allocate_states([weight], 1)
                master[0].copy_(updater.masters.get(index, weight).detach())
                updater.masters[index] = master[0]
        self.update = Update(
            rule,
            self.weights,
            [updater.states[index] for index in self.indices],
            [updater.masters.get(index) for index in self.indices],
            updater.engine,
        )
        self._shared = None
        return self.update

    def _read_multipliers(self, optimizer: RuleOptimizer) -> Any:
        """The multipliers of all parameters, or None as long as nobody has set any."""
        if not any(self._own) and not optimizer.lr_mult and not optimizer.wd_mult:
            return None
        return [optimizer.multipliers(index) for index in self.indices]

    def _share(self, optimizer: RuleOptimizer) -> list[tuple[Any, int, float, float]]:
        """Parameters with equal counts and multipliers, which share one row of hyper-parameters."""
        counts = optimizer._counts[self._slots]
        members: dict[Any, list[int]] = {}
        for i in np.flatnonzero(self._active).tolist():
            lr_mult, wd_mult = (1.0, 1.0) if self._multipliers is None else self._multipliers[i]
            members.setdefault((int(counts[i]), lr_mult, wd_mult), []).append(i)
        shared = []
        for (_, lr_mult, wd_mult), rows in members.items():
            where = slice(None) if len(rows) == len(self.indices) else np.array(rows)
            shared.append((where, int(self._slots[rows[0]]), lr_mult, wd_mult))
        return shared

    @torch.no_grad()
    def _step_by_hand(self, optimizer: Optimizer, grads: Sequence[torch.Tensor | None]) -> None:
        states = self.updater.states
        for index, weight, grad in zip(self.indices, self.weights, grads, strict=True):
            if grad is not None:
                optimizer.update_multi_precision(index, weight, grad, states[index])
