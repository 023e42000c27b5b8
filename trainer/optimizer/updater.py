"""Updater: an optimizer with the states of its parameters, and the callable of MXNet's stores; and how it steps them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.metrics import MetricsBuffer
from ...kernels.states import slot_shapes
from ..interrupts import uninterrupted
from .base import Optimizer
from .counts import Index
from .multi import MultiOptimizer, part_of, parts_of
from .plan import CustomPlan, HyperRows, MultiPlan, Plan, StepPlan
from .rule_optimizer import RuleOptimizer
from .sparse import split
from .states import MASTER, State, has_slots, match_states, put_master, states_and_masters


def get_updater(optimizer: Optimizer) -> Updater:
    """A callable `(index, grad, weight)` that updates weights in place and keeps their states; also for lists of each."""
    return Updater(optimizer)


class Updater:
    """An optimizer together with the states of the parameters that it updates.

    Args:
        optimizer: the optimizer.
        engine: as for `tristep.kernels.choose_engine`.

    Attributes:
        state: by parameter index; of a `RuleOptimizer` a dictionary of the states of its rule by slot, and of the master, of
            another optimizer what `create_state_multi_precision` returned. Who replaces a tensor replaces the dictionary.
        control: as the `grad_scale_and_skip` of `tristep.kernels.Update`; plans that are made from then on follow it.
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
        self.optimizer, self.engine = optimizer, engine
        self.state: dict[Index, Any] = {}
        self.control: torch.Tensor | None = None
        self.into: MetricsBuffer | None = None
        self._plan: tuple[Plan, list[Index], list[torch.Tensor]] | None = None  # of which indices and weights
        self.be_that_of(optimizer)

    @property
    def states(self) -> Mapping[Index, Any]:
        """By parameter index, to read: of a `RuleOptimizer` a tuple with one tensor for each state of its rule."""
        shown = dict(self.state)
        for index in self.state:
            if isinstance(part_of(self.optimizer, index), RuleOptimizer):
                shown[index] = tuple(tensor for name, tensor in shown[index].items() if name != MASTER)
        return MappingProxyType(shown)

    @property
    def masters(self) -> Mapping[Index, torch.Tensor]:
        """By parameter index, to read: the float32 copies of 16-bit weights, or what stands for them."""
        return MappingProxyType({i: state[MASTER] for i in self.state if MASTER in (state := self.state_of(i))})

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
        whole = None if multi is None else MultiPlan(multi, indices, self.control, weights[0].device, all_reduce_global)
        control = self.control if whole is None else whole.control
        for part in parts_of(optimizer):
            at = [i for i, index in enumerate(indices) if part_of(optimizer, index) is part]
            if not at and whole is not None:
                continue
            theirs = [indices[i] for i in at], [weights[i] for i in at]
            plan: UpdaterPlan | CustomPlan
            if isinstance(part, RuleOptimizer):
                called, offsets = [names[i] for i in at], None if rng_offsets is None else rng_offsets[at]
                plan = UpdaterPlan(self, part, *theirs, called, control, zero_grads, offsets, all_reduce_global, alone, own)
            else:
                plan = CustomPlan(self.state, part, *theirs, control, zero_grads)
            if whole is None:
                return plan
            whole.parts.append((plan, at))
        assert whole is not None
        return whole

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
                torch.zeros_like(weight) if set(rule.slots) <= set(self.state_of(i)) else None
                for i, weight in zip(indices, weights, strict=True)
            ]
        chosen = [i for i, grad in enumerate(grads) if grad is not None]
        states = [self.state_of(indices[i]) for i in chosen]
        run = Update(
            rule,
            [weights[i] for i in chosen],
            [tuple(state[name] for name in rule.slots) for state in states],
            [state[MASTER].clone() if MASTER in state else None for state in states],
            self.engine,
        )
        run.hyper[:] = [1.0, *(hyper[name] for name in rule.hyper)]
        run.bind([grads[i] for i in chosen])
        run()

    def state_of(self, index: Index) -> State:
        """The states and the master of a parameter; empty before they are made, and with an optimizer that is no rule."""
        has_rule = isinstance(part_of(self.optimizer, index), RuleOptimizer)
        state: State = self.state.get(index, {}) if has_rule else {}
        return state

    def put_masters(self, masters: Mapping[Any, torch.Tensor], weights: Mapping[Any, torch.Tensor]) -> None:
        """Take copies of the masters of some of these weights, by index. The next step makes states that are missing."""
        for i, weight in weights.items():
            state, master = self.state_of(i), masters.get(i)
            if master is not None:
                state = state | {MASTER: put_master(weight.detach(), state.get(MASTER), master)}
            if isinstance(part_of(self.optimizer, i), RuleOptimizer):
                self.state[i] = state  # also without a master: a file has the states of all weights or of none
        self.forget_plan()

    def forget_plan(self) -> None:
        """Make the next call check everything again, after states have been replaced."""
        self._plan = None

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last call, if its rule skips steps with non-finite ones."""
        return None if self._plan is None else self._plan[0].total()


class UpdaterPlan(StepPlan):
    """The plan of parameters of a `RuleOptimizer`.

    Args:
        updater: has the states; missing ones are created here.
        optimizer: the optimizer of these parameters.
        indices: of the parameters.
        weights: the parameters, in the same order.
        names: what messages call them.
        control: as `grad_scale_and_skip` of `Update`.
        zero_grads, rng_offsets, all_reduce_global: as for `Update`. The default of the offsets are the indices, so that
            random numbers do not depend on what is updated together.
        alone: as for `RuleOptimizer.rows_of_step`.
        own: as for `StepPlan`.
    """

    def __init__(
        self,
        updater: Updater,
        optimizer: RuleOptimizer,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        names: Sequence[str],
        control: torch.Tensor | None = None,
        zero_grads: bool = False,
        rng_offsets: np.ndarray | None = None,
        all_reduce_global: Callable[[torch.Tensor, str], None] | None = None,
        alone: bool = False,
        own: bool = False,
    ) -> None:
        self._updater, self._indices, self._weights = updater, list(indices), list(weights)
        self.optimizer, self._control = optimizer, control
        self._states: dict[Rule | TensorRule, list[State]] = {}  # those of the updates
        if rng_offsets is None:
            pairs = zip(indices, self.optimizer.slots(indices), strict=True)
            rng_offsets = np.array([index if isinstance(index, int) else slot for index, slot in pairs])
        self._zero_grads, self._rng_offsets, self._all_reduce_global = zero_grads, rng_offsets, all_reduce_global
        super().__init__(list(map(repr, names)), HyperRows(optimizer, indices, alone), own)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        updater, optimizer = self._updater, self.optimizer
        kept = [updater.state.get(index, {}) for index in self._indices]
        # States of another rule are made anew.
        kept = [state if has_slots(rule, state) else {k: v for k, v in state.items() if k == MASTER} for state in kept]
        self._check(rule, kept)
        make, narrow = optimizer.states_for, optimizer.narrow
        masters = list(map(optimizer.master_dtype, self._weights))
        matched = self._states[rule] = match_states(rule, self._weights, kept, narrow, make, self._start, masters)
        updater.state.update(zip(self._indices, matched, strict=True))
        update = Update(
            rule,
            self._weights,
            *states_and_masters(rule, matched),
            updater.engine,
            self.names,
            optimizer.rounding,
            self._control,
            self._zero_grads,
        )
        update.rng_offsets, update.all_reduce_global = self._rng_offsets, self._all_reduce_global
        return update

    def is_current(self, update: Update) -> bool:
        states = map(self._updater.state.get, self._indices)
        return self._updates.get(update.rule) is update and all(map(is_, states, self._states[update.rule]))

    def fits(self, update: Update) -> bool:
        return update.fits(self.optimizer.master_dtype)

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        return split(self.optimizer, self._indices, self.names, self._weights, grads)

    def _check(self, rule: Rule | TensorRule, states: Sequence[State]) -> None:
        """Refuse weights that cannot be stored as asked for, or whose shape has changed."""
        known: dict[Any, list[torch.Size]] = {}  # many weights are alike
        for name, weight, state in zip(self.names, self._weights, states, strict=True):
            self.optimizer.check_storage(name, weight)
            tensors = [state[slot] for slot in rule.slots if slot in state]  # all, or none
            kind = weight.shape, *(tensor.dtype for tensor in tensors)
            if tensors and kind not in known:
                known[kind] = slot_shapes(rule, weight.shape, tensors)
            for tensor, shape in zip(tensors, known.get(kind, ()), strict=True):
                if tensor.shape != shape:
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved "
                        "or converted between steps, but not change its shape"
                    )

    def _start(self, i: int, new: State, missing: list[str]) -> None:
        try:
            self.optimizer.start_state(self._weights[i].detach(), new)
        except ValueError as error:
            raise ValueError(f"{self.names[i]}: {error}") from error
