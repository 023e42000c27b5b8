"""States and masters of parameters by index, and the plans that step parameters with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.metrics import MetricsBuffer
from ...kernels.states import goes_with, master_like, slot_shapes
from .base import Optimizer
from .counts import Index
from .hyper_rows import HyperRows
from .plan import Plan, StepPlan
from .rule_optimizer import RuleOptimizer
from .sparse import split

__all__ = ["CustomPlan", "States", "UpdaterPlan", "new_master", "put_masters"]


class States:
    """The states and masters of parameters, as an `Updater` has them.

    Args:
        engine: as for `tristep.kernels.choose_engine`.

    Attributes:
        states: by parameter index. Of a `RuleOptimizer` a tuple with one tensor for each state of its rule, of another
            optimizer what its `create_state_multi_precision` returned.
        masters: by parameter index, the float32 copy of a 16-bit weight, or what stands for it; only with a `RuleOptimizer`
            and `multi_precision` or `kahan`.
    """

    def __init__(self, engine: str | None = None) -> None:
        self.engine = engine
        self.states: dict[Index, Any] = {}
        self.masters: dict[Index, torch.Tensor] = {}


class UpdaterPlan(StepPlan):
    """That of parameters of a `RuleOptimizer`.

    Args:
        updater: has the states; missing ones are created here.
        optimizer: that of these parameters.
        indices: of the parameters.
        weights: the parameters, in the same order.
        names: what messages call them.
        control: as `grad_scale_and_skip` of `Update`.
        zero_grads, rng_offsets, all_reduce_global: as those of `Update`. The offsets' default is the indices, so that random
            numbers do not depend on what is updated together.
        alone: as for `RuleOptimizer.rows_of_step`.
        own: as for `StepPlan`.
    """

    def __init__(
        self,
        updater: States,
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
        self._optimizer, self._control = optimizer, control
        if rng_offsets is None:
            pairs = zip(indices, self._optimizer.slots(indices), strict=True)
            rng_offsets = np.array([index if isinstance(index, int) else slot for index, slot in pairs])
        self._zero_grads, self._rng_offsets, self._all_reduce_global = zero_grads, rng_offsets, all_reduce_global
        super().__init__(list(map(repr, names)), HyperRows(optimizer, indices, alone), own)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        """Match states and masters to the weights as they are now, creating, moving and converting where needed."""
        updater, optimizer = self._updater, self._optimizer
        self._check(rule)
        self._create_missing(rule)
        self._convert(rule)
        for index, weight in zip(self._indices, self._weights, strict=True):
            dtype, old = optimizer.master_dtype(weight), updater.masters.get(index)
            if dtype is None:
                updater.masters.pop(index, None)
            elif old is None or not goes_with(old, weight, dtype):
                updater.masters[index] = new_master(weight.detach(), old, dtype)
        update = Update(
            rule,
            self._weights,
            [updater.states[index] for index in self._indices],
            [updater.masters.get(index) for index in self._indices],
            updater.engine,
            self.names,
            optimizer.rounding,
            self._control,
            self._zero_grads,
        )
        update.rng_offsets, update.all_reduce_global = self._rng_offsets, self._all_reduce_global
        return update

    def is_current(self, update: Update) -> bool:
        states, masters = self._updater.states, self._updater.masters
        return all(map(is_, map(states.get, self._indices), update.states)) and all(
            map(is_, map(masters.get, self._indices), update.masters)
        )

    def fits(self, update: Update) -> bool:
        return update.fits(self._optimizer.master_dtype)

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        return split(self._optimizer, self._indices, self.names, self._weights, grads)

    def _check(self, rule: Rule | TensorRule) -> None:
        """Refuse weights that cannot be stored as asked for, or whose shape has changed."""
        known: dict[Any, list[torch.Size]] = {}  # many weights are alike
        for name, index, weight in zip(self.names, self._indices, self._weights, strict=True):
            self._optimizer.check_storage(name, weight)
            state = self._updater.states.get(index, ())
            if len(state) != len(rule.slots):
                continue
            kind = weight.shape, *(tensor.dtype for tensor in state)
            if kind not in known:
                known[kind] = slot_shapes(rule, weight.shape, state)
            for tensor, shape in zip(state, known[kind], strict=False):
                if tensor.shape != shape:
                    raise ValueError(
                        f"{name} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved "
                        "or converted between steps, but not change its shape"
                    )

    def _create_missing(self, rule: Rule | TensorRule) -> None:
        """Make the states of all weights that have none, or those of another rule, in few pieces of memory."""
        states = self._updater.states
        rows = zip(self._indices, self.names, self._weights, strict=True)
        missing = [row for row in rows if len(states.get(row[0], ())) != len(rule.slots) or row[0] not in states]
        made = self._optimizer.states_for([weight.detach() for _, _, weight in missing])
        for (index, name, weight), state in zip(missing, made, strict=True):
            try:
                self._optimizer.start_state(weight.detach(), state)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            states[index] = state

    def _convert(self, rule: Rule | TensorRule) -> None:
        """Convert states that do not go with their weights, as those on another device, into few pieces of memory."""
        states, optimizer = self._updater.states, self._optimizer
        known: dict[Any, tuple[torch.dtype, ...]] = {}  # many weights are alike
        unfit = []
        for index, weight in zip(self._indices, self._weights, strict=True):
            kind = weight.dtype, weight.shape, weight.is_contiguous()
            if kind not in known:
                known[kind] = optimizer.state_dtypes(weight)
            if not all(map(goes_with, states[index], itertools.repeat(weight), known[kind])):
                unfit.append((index, weight.detach()))
        made = optimizer.states_for([weight for _, weight in unfit])
        for (index, weight), state in zip(unfit, made, strict=True):
            for slot, new, old in zip(rule.slots, state, states[index], strict=True):
                storage.copy(new, old, weight.shape, _unsigned(rule, slot))
            states[index] = state


class CustomPlan(Plan):
    """That of an optimizer with an `update` of its own, in plain torch: it is called for one parameter after the other.

    Args:
        updater: has the states; missing ones are created here.
        optimizer: that of these parameters.
        indices: of the parameters.
        weights: the parameters, in the same order.
        control: as `grad_scale_and_skip` of `Update`.
        zero_grads: fill the gradients with zeros after the step.
    """

    def __init__(
        self,
        updater: States,
        optimizer: Optimizer,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        control: torch.Tensor | None = None,
        zero_grads: bool = False,
    ) -> None:
        self._updater, self._optimizer, self._control, self._zero_grads = updater, optimizer, control, zero_grads
        self._indices, self._weights = list(indices), list(weights)
        self._grads: Sequence[torch.Tensor | None] = ()  # from `prepare` to `run`
        self._optimizer.slots(self._indices)  # counts begin, also of those that have no gradient yet
        with torch.no_grad():  # a state may be a copy of the weight, but has no history
            for index, weight in zip(self._indices, self._weights, strict=True):
                if index not in updater.states:
                    updater.states[index] = self._optimizer.create_state_multi_precision(index, weight)

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        self._grads = grads

    @torch.no_grad()
    def run(self, into: MetricsBuffer | None = None) -> None:
        grads, self._grads = self._grads, ()
        optimizer, control = self._optimizer, self._control
        rescale_grad, (factor, skip) = optimizer.rescale_grad, (1.0, 0.0) if control is None else control.tolist()
        if not skip:
            try:
                optimizer.rescale_grad *= factor
                self._update(grads)
            finally:
                optimizer.rescale_grad = rescale_grad
        if self._zero_grads:
            for grad in grads:
                if grad is not None:
                    grad.zero_()

    def _update(self, grads: Sequence[torch.Tensor | None]) -> None:
        optimizer, states = self._optimizer, self._updater.states
        self._check_numbers([index for index, grad in zip(self._indices, grads, strict=True) if grad is not None])
        together: dict[torch.dtype, list[Any]] = {}
        for index, weight, grad in zip(self._indices, self._weights, grads, strict=True):
            if grad is not None:
                states[index] = optimizer.follow(weight, states[index])
                if optimizer.aggregate_num > 0 and not optimizer.keeps_master(weight):
                    together.setdefault(weight.dtype, []).append((index, weight, grad, states[index]))
                else:
                    optimizer.update_multi_precision(index, weight, grad, states[index])
        for rows in together.values():
            for first in range(0, len(rows), optimizer.aggregate_num):
                optimizer.update(*map(list, zip(*rows[first : first + optimizer.aggregate_num], strict=True)))  # type: ignore[arg-type]

    def _check_numbers(self, active: list[Index]) -> None:
        """Detect a rate or a multiplier that is not valid before the first update."""
        optimizer = self._optimizer
        if optimizer.lr_scheduler is not None and active:
            counts = optimizer.step_counts.values[optimizer.slots(active)]
            optimizer.rate_at(max(optimizer.num_update, int(counts.max()) + 1))
        if any(getattr(optimizer.param_dict.get(index), "__dict__", {}) for index in active):  # others have been checked
            for index in active:
                optimizer.multipliers(index)


def new_master(weight: torch.Tensor, old: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A master of this type for a weight; `old` is its master so far."""
    if old is not None and storage.kind_of(weight.dtype, old.dtype) is None:  # of the type that the weight was of
        old = None
    master = master_like(weight, dtype)
    whole = storage.combined(weight, None if old is None else old.to(weight.device))
    if storage.kind_of(weight.dtype, dtype) == storage.MasterKind.FULL:
        return master.copy_(whole)
    return master.copy_(storage.master_for(weight, whole, dtype))


def put_masters(
    updater: States, masters: Mapping[Any, torch.Tensor], weights: Sequence[torch.Tensor] | Mapping[Any, torch.Tensor]
) -> None:
    """Give an updater these masters of weights, by index, in the tensors that there are or, where none fits, in new ones."""
    for i, master in masters.items():
        weight, old = weights[i].detach(), updater.masters.get(i)
        if old is None or not goes_with(old, weight, master.dtype):
            old = master_like(weight, master.dtype)
            updater.masters[i] = old
        old.copy_(master)


def _unsigned(rule: Rule | TensorRule, slot: str) -> bool:
    return slot in rule.nonnegative
