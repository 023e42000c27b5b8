"""`Updater`, an optimizer together with its parameters' states, MXNet's callable for stores; and its plan of a step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.metrics import MetricsBuffer
from ...kernels.states import slot_shapes
from ..utils.interrupts import uninterrupted
from ..utils.read_only import ReadOnly
from ..validation import instance
from .base import Optimizer
from .counts import Index
from .multi import MultiOptimizer, part_of, parts_of
from .plan import CustomPlan, Division, HyperRows, MultiPlan, Plan, Rows, StepPlan
from .rule_optimizer import RuleOptimizer
from .sparse import split
from .states import MASTER, State, alike, apply_once, has_slots, match_states, put_master, states_and_masters


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an `Updater`: a callable `(index, grad, weight)` that updates weights in place and keeps their states.

    Args:
        optimizer: the optimizer, for instance from `create`.

    Raises:
        TypeError: `optimizer` is not an `Optimizer`, or its class does not define `update`.
    """
    return Updater(optimizer)


class Updater:
    """Optimizer together with the states of the parameters that it updates; a callable, as MXNet's stores use it.

    Args:
        optimizer: the optimizer.
        engine: "triton", "cpu" or "eager"; None chooses by the weights' device (`tristep.kernels.choose_engine`).

    Attributes:
        state: the state of each parameter, by index. For a `RuleOptimizer` it is a dictionary of the rule's states by slot
            name, and the master; for another optimizer what `create_state_multi_precision` returned. To replace a tensor,
            replace the whole dictionary.
        control: float32 tensor [2] or None, a factor of the gradients and whether to skip the step (1.0), read by plans made
            from then on; see `grad_scale_and_skip` of `tristep.kernels.Update`.
        into: the buffer for measurements of the next calls; None means that nothing is measured.

    Raises:
        TypeError: `optimizer` is not an `Optimizer`, or its class does not define `update`.
    """

    def __init__(self, optimizer: Optimizer, engine: str | None = None) -> None:
        instance("optimizer", optimizer, Optimizer, "an Optimizer", "; see optimizer.create(name)")
        optimizer.check_made()
        if not optimizer.can_update:
            raise TypeError(
                f"{type(optimizer).__name__} cannot train: it must define update(index, weight, grad, state), as "
                "subclasses of Optimizer do"
            )
        self.optimizer, self.engine = optimizer, engine
        self.state: dict[Index, Any] = {}
        self.control: torch.Tensor | None = None
        self.into: MetricsBuffer | None = None
        self._plan: tuple[Plan, list[Index], list[torch.Tensor]] | None = None  # with its indices and weights
        self.register_with(optimizer)

    @property
    def states(self) -> Mapping[Index, Any]:
        """The states by parameter index, read-only: for a `RuleOptimizer` a tuple of its rule's state tensors."""
        shown = dict(self.state)
        for index in self.state:
            if isinstance(part_of(self.optimizer, index), RuleOptimizer):
                shown[index] = tuple(tensor for name, tensor in shown[index].items() if name != MASTER)
        return ReadOnly(shown)

    @property
    def masters(self) -> Mapping[Index, torch.Tensor]:
        """The masters of 16-bit weights by parameter index, read-only: float32 copies, or the stored part of split ones."""
        return ReadOnly({i: state[MASTER] for i in self.state if MASTER in (state := self.state_of(i))})

    def register_with(self, optimizer: Optimizer) -> None:
        """Register this updater with an optimizer as the holder of its parameters' states."""
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
        """Update one weight in place, or a list of weights in one launch.

        Args:
            index: the parameter's index, or a list of indices.
            grad: its gradient, or a list of as many gradients.
            weight: the parameter, or a list of as many parameters.

        Raises:
            ValueError: the lists differ in length; or one of several parameters is updated alone, but an option needs the
                gradients of all. Nothing has been changed.
        """
        alone = not isinstance(index, (list, tuple))
        if isinstance(index, (list, tuple)):
            indices, grads, weights = list(index), list(grad), list(weight)
        else:
            self.optimizer.check_alone(index)  # type: ignore[arg-type]
            indices, grads, weights = [index], [grad], [weight]
        if not len(indices) == len(grads) == len(weights):
            raise ValueError(
                f"{len(indices)} indices came with {len(grads)} gradients and {len(weights)} weights: numbers must be equal"
            )
        last = self._plan
        if last is None or last[1] != indices or any(a is not b for a, b in zip(last[2], weights, strict=True)):
            last = self._plan = self.make_plan(indices, weights, alone=alone), indices, weights
        last[0].step(grads, into=self.into)

    def make_plan(
        self,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        names: Sequence[str] | None = None,
        own: bool = False,
        zero_grads: bool = False,
        rng_offsets: np.ndarray | None = None,
        division: Division | None = None,
        alone: bool = False,
    ) -> Plan:
        """Return a plan for stepping a list of parameters together; states that they lack are created.

        Args:
            indices, weights: the parameters and their indices.
            names: names for messages; default: the names or indices in the optimizer.
            own: whether gradients will be the weights' own, `weight.grad`.
            zero_grads: whether a step fills the gradients with zeros.
            rng_offsets: int array, the offset of each parameter's random numbers; default: the indices.
            division: how all parameters of a step are divided among processes, if these are only some; see `Division`.
            alone: whether the parameters of a step are updated by separate calls; see `RuleOptimizer.rows_of_step`.
        """
        optimizer = self.optimizer
        if names is None:
            names = [str(optimizer.idx2name.get(index, index)) for index in indices]
        multi = optimizer if isinstance(optimizer, MultiOptimizer) else None
        whole = None
        if multi is not None:
            whole = MultiPlan(multi, indices, (weights[0] if division is None else division.like).device, division)
        every = indices if division is None else division.indices
        for part in parts_of(optimizer):
            at, of_all = (
                [i for i, index in enumerate(each) if multi is None or part_of(multi, index) is part]
                for each in (indices, every)
            )
            if not of_all and whole is not None:
                continue
            of_part = None if division is None else division._replace(indices=[every[i] for i in of_all])
            part_params = [indices[i] for i in at], [weights[i] for i in at]
            plan: UpdaterPlan | CustomPlan
            if isinstance(part, RuleOptimizer):
                part_names, offsets = [names[i] for i in at], None if rng_offsets is None else rng_offsets[at]
                plan = UpdaterPlan(
                    self, part, *part_params, part_names, self.control, zero_grads, offsets, of_part, alone, own
                )
            else:
                plan = CustomPlan(self.state, part, *part_params, self.control, zero_grads, of_part)
            if whole is None:
                return plan
            whole.parts.append((plan, at, of_all))
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
    ) -> None:
        """Compute averaged weights in place, by a rule that does not use gradients; it does not count as an update.

        Masters are not changed, and weights that lack the rule's states stay.

        Args:
            rule: the rule; its states are looked up by name among the parameters' states.
            hyper: the rule's hyper-parameters by name.
            indices, weights: the parameters and their indices.
        """
        slots, pairs = set(rule.slots), zip(weights, map(self.state_of, indices), strict=True)
        chosen = [(weight, state) for weight, state in pairs if slots <= set(state)]
        apply_once(rule, hyper, [weight for weight, _ in chosen], [state for _, state in chosen], self.engine)

    def state_of(self, index: Index) -> State:
        """Return the states and master of a parameter by name; empty before the first step and for custom optimizers."""
        has_rule = isinstance(part_of(self.optimizer, index), RuleOptimizer)
        state: State = self.state.get(index, {}) if has_rule else {}
        return state

    def put_masters(self, masters: Mapping[Any, torch.Tensor], weights: Mapping[Any, torch.Tensor]) -> None:
        """Set the masters of weights to copies of given ones; the next step creates states that are missing.

        Args:
            masters: masters by parameter index; weights without an entry keep theirs.
            weights: the weights by parameter index.
        """
        for i, weight in weights.items():
            state, master = self.state_of(i), masters.get(i)
            if master is not None:
                state = state | {MASTER: put_master(weight.detach(), state.get(MASTER), master)}
            if isinstance(part_of(self.optimizer, i), RuleOptimizer):
                self.state[i] = state  # also without a master, because a file has the states of all weights or of none
        self.forget_plan()

    def forget_plan(self) -> None:
        """Discard the plan of the last call, so that the next call checks everything; for after states were replaced."""
        self._plan = None

    def total(self) -> torch.Tensor | None:
        """Return the sum of squares of all gradients of the last call; None unless its rule skips non-finite steps."""
        return None if self._plan is None else self._plan[0].total()


class UpdaterPlan(StepPlan):
    """Plan of the parameters of a `RuleOptimizer`, with states held by an `Updater`; missing states are created at once.

    Args:
        control: float32 tensor [2] or None, a factor of the gradients and whether to skip the step (1.0).
        rng_offsets: int array, the offset of each parameter's random numbers; default: the indices, so that random numbers
            do not depend on which parameters are updated together.
        division: how all parameters of this optimizer are divided among processes; None in a single one.
        alone: whether the parameters of a step are updated by separate calls; see `RuleOptimizer.rows_of_step`.
        own: whether gradients will be the weights' own, `weight.grad`.
        rows: the source of hyper-parameters; default: the optimizer's `HyperRows`.
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
        division: Division | None = None,
        alone: bool = False,
        own: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self._updater, self._indices, self._weights = updater, list(indices), list(weights)
        self.optimizer, self._control = optimizer, control
        self._states: dict[Rule | TensorRule, list[State]] = {}  # the states that the `Update` of each rule works on
        if rng_offsets is None:
            pairs = zip(indices, self.optimizer.slots(indices), strict=True)
            rng_offsets = np.array([index if isinstance(index, int) else slot for index, slot in pairs])
        self._zero_grads, self._rng_offsets, self._division = zero_grads, rng_offsets, division
        every, places = indices, None
        if division is not None:
            every, at = division.indices, {index: k for k, index in enumerate(division.indices)}
            places = [at[index] for index in indices]
        rows = HyperRows(optimizer, every, alone, places) if rows is None else rows
        super().__init__(list(map(repr, names)), rows, own)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        updater, optimizer = self._updater, self.optimizer
        states: list[State] = [updater.state.get(index, {}) for index in self._indices]
        of_others = {slots for slots in set(map(tuple, states)) if slots and not has_slots(rule, dict.fromkeys(slots))}
        if of_others:  # states of another rule are discarded
            states = [{k: v for k, v in s.items() if k == MASTER} if tuple(s) in of_others else s for s in states]
        first = alike(rule, self._weights, states)
        kinds = sorted(set(first))
        self._check(rule, states, kinds)
        of_kind = {i: optimizer.master_dtype(self._weights[i]) for i in kinds}
        masters = [of_kind[i] for i in first]
        start = None if optimizer.starts_from_zeros else self._start
        make, on_host = optimizer.states_for, optimizer.state_device is not None
        matched = self._states[rule] = match_states(
            rule, self._weights, states, first, optimizer.narrow, make, start, masters, on_host
        )
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
            None if any(masters) else first,
        )
        update.rng_offsets = self._rng_offsets
        if self._division is not None:
            update.all_reduce_global, update.reduces_like = self._division.all_reduce, self._division.like
        return update

    def is_current(self, update: Update) -> bool:
        states = map(self._updater.state.get, self._indices)
        return self._updates.get(update.rule) is update and all(map(is_, states, self._states[update.rule]))

    def fits(self, update: Update) -> bool:
        return update.fits(self.optimizer.master_dtype)

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        return split(self.optimizer, self._indices, self.names, self._weights, grads)

    def _check(self, rule: Rule | TensorRule, states: Sequence[State], kinds: Sequence[int]) -> None:
        """Raise ValueError if a weight's dtype does not suit the options, or its shape has changed since the last step."""
        for i in kinds:
            name, weight = self.names[i], self._weights[i]
            self.optimizer.check_storage(name, weight)
            tensors = [states[i][slot] for slot in rule.slots if slot in states[i]]  # all, or none
            for tensor, shape in zip(tensors, slot_shapes(rule, weight.shape, tensors) if tensors else (), strict=True):
                if tensor.shape != shape:
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved "
                        "or converted between steps, but not change its shape"
                    )

    def _start(self, i: int, new: State, missing: list[str]) -> None:
        try:
            optimizer, index = self._owner_of(i)
            optimizer.start_state(self._weights[i], new, index)
        except ValueError as error:
            raise ValueError(f"{self.names[i]}: {error}") from error

    def _owner_of(self, i: int) -> tuple[RuleOptimizer, Index]:
        """Return the optimizer of weight `i`, and its index there."""
        return self.optimizer, self._indices[i]
