"""StepPlan: how a list of parameters is stepped, made once, so that a step is little more than a launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...kernels import Rule, Update, storage
from ...kernels.guards import Reference
from ...kernels.metrics import MetricsBuffer
from ...kernels.states import allocate_states, goes_with, slot_shapes
from .base import Optimizer
from .counts import Index
from .hyper_rows import HyperRows
from .rule_optimizer import RuleOptimizer
from .sparse import SparseRows, split

if TYPE_CHECKING:
    from .updater import Updater

__all__ = ["StepPlan", "new_master"]


class StepPlan:
    """How one list of parameters is updated at every step.

    Args:
        updater: holds the states; missing ones are created here.
        indices: of the parameters.
        weights: the parameters, in the same order.
        names: what messages call them; default their names or indices in the optimizer.
        own: gradients will be the weights' own, `weight.grad`.
        zero_grads: fill them with zeros in the same pass.
        rng_offsets, all_reduce_global: as those of `Update`. The offsets' default is the indices, so that random numbers do
            not depend on what is updated together.

    Attributes:
        update: the `Update` of the last step; None where the optimizer updates by hand.
    """

    def __init__(
        self,
        updater: Updater,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        names: Sequence[str] | None = None,
        own: bool = False,
        zero_grads: bool = False,
        rng_offsets: np.ndarray | None = None,
        all_reduce_global: Callable[[torch.Tensor, str], None] | None = None,
    ) -> None:
        self.updater = updater
        self._rng_offsets, self._all_reduce_global = rng_offsets, all_reduce_global
        self._gradients_own, self._zero_grads = own, zero_grads
        idx2name = updater.optimizer.idx2name
        self._names = [str(idx2name.get(index, index)) for index in indices] if names is None else list(names)
        self.indices = list(indices)
        self.weights = list(weights)
        self.update: Update | None = None
        self._updates: dict[Rule, Update] = {}  # by rule: an optimizer may go from one to another and back
        self._grads: Sequence[torch.Tensor | None] = ()  # where the optimizer updates by hand, from `prepare` to `run`
        self._sparse = SparseRows(list(map(repr, self._names)), self._split)
        self._hyper = HyperRows(updater.optimizer, self.indices)
        self._by_rule = isinstance(updater.optimizer, RuleOptimizer)
        if isinstance(updater.optimizer, RuleOptimizer):
            self._make_update(updater.optimizer, updater.optimizer.rule_for(self._hyper.slots))
        else:
            with torch.no_grad():  # a state may be a copy of the weight, but has no history
                for index, weight in zip(self.indices, self.weights, strict=True):
                    if index not in updater.states:
                        updater.states[index] = updater.optimizer.create_state_multi_precision(index, weight)

    @property
    def references(self) -> list[Reference] | None:
        """Weak references to the gradients of the last step; None if only some of them are known."""
        return None if self.update is None or self._sparse.met else self.update.references

    def step(self, grads: Sequence[torch.Tensor | None], into: MetricsBuffer | None = None) -> None:
        """`prepare` and `run`."""
        self.prepare(grads)
        self.run(into)

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take these gradients, one for each weight, for the next step; None leaves a weight alone.

        Finds out whether the step would fail for their sake. No weight changes.
        """
        if self._by_rule:
            self._prepare(self.updater.optimizer, grads)  # type: ignore[arg-type]  # a RuleOptimizer
        else:
            self._grads = grads

    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient, after `prepare`.

        Args:
            into: where to put what the updates, those of a rule, measure, into the rows of the weights' indices.
        """
        if self._by_rule:
            self._step_prepared(self.updater.optimizer, self.update, into)  # type: ignore[arg-type]  # there is an update
        else:
            grads, self._grads = self._grads, ()
            self._step_by_hand(self.updater.optimizer, grads)

    def _step_prepared(self, optimizer: Any, update: Update, into: MetricsBuffer | None = None) -> None:
        """A step with the gradients that are bound to the update."""
        times = self._hyper.times(optimizer)
        if not times:
            return
        # Everything that may fail comes before the counts move.
        before = optimizer.host_state() if optimizer.host_state_names else ()
        try:
            self._hyper.write(optimizer, times, update)
            self._sparse.run(update, into)
        except BaseException:
            optimizer.load_host_state(before)
            raise
        if optimizer.counts_as_step:
            self._hyper.count(optimizer, times)

    def total(self) -> torch.Tensor | None:
        """The sum of squares of all gradients of the last step, if its rule skips steps with non-finite ones."""
        update = self.update
        return update.total() if update is not None and update.rule.skips_nonfinite else None

    def step_with(
        self, grads: Sequence[torch.Tensor | None], rows: Sequence[Sequence[float]], into: MetricsBuffer | None = None
    ) -> None:
        """Update all weights whose gradient is not None, each with a row of hyper-parameters. No count moves."""
        optimizer: Any = self.updater.optimizer
        update = self._prepare(optimizer, grads)
        update.hyper[:] = rows
        self._sparse.run(update, into)

    def host_step(self, update: Update, active: list[bool]) -> None:
        """The host half of a step with this update, whose kernels are replayed by a CUDA graph."""
        if self.update is not update:
            self.update = update
            self._hyper.forget()
        self._hyper.use(active)
        update.host_only = True
        try:
            self._step_prepared(self.updater.optimizer, update)
        finally:
            update.host_only = False

    @property
    def active(self) -> list[bool]:
        """Which weights had a gradient at the last step."""
        return self._hyper.active

    def has_states(self) -> bool:
        """Whether it works on the states and masters that the updater has now."""
        return self.update is not None and self.is_of_states(self.update)

    def is_of_states(self, update: Update) -> bool:
        """Whether this update works on the states and masters that the updater has now."""
        states, masters = self.updater.states, self.updater.masters
        return all(map(is_, map(states.get, self.indices), update.states)) and all(
            map(is_, map(masters.get, self.indices), update.masters)
        )

    def _prepare(self, optimizer: RuleOptimizer, grads: Sequence[torch.Tensor | None]) -> Update:
        """What the step is to be taken with, these gradients bound to it."""
        rule, update = optimizer.rule_for(self._hyper.slots), self.update
        if switched := update is None or update.rule is not rule:
            update = self._use(optimizer, rule)
        if not self._sparse.rebind(update, grads, self._gradients_own):
            if not update.fits(optimizer.master_dtype):
                update = self._make_update(optimizer, rule)
            self._sparse.bind(update, grads, self._gradients_own)
            switched = True
        if switched:
            self._hyper.use([grad is not None for grad in grads])
        return update

    def _split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        optimizer: Any = self.updater.optimizer
        return split(optimizer, self.indices, list(map(repr, self._names)), self.weights, grads)

    def _use(self, optimizer: RuleOptimizer, rule: Rule) -> Update:
        """Go on with another rule, with the `Update` that was made for it before if that still has the right states."""
        update = self._updates.get(rule)
        if update is None or not self.is_of_states(update):
            return self._make_update(optimizer, rule)
        self.update = update
        return update

    def _make_update(self, optimizer: RuleOptimizer, rule: Rule) -> Update:
        """Match states and masters to the weights as they are now, creating, moving and converting where needed."""
        updater = self.updater
        for name, index, weight in zip(self._names, self.indices, self.weights, strict=True):
            optimizer.check_storage(repr(name), weight)
            state = updater.states.get(index, ())
            shapes = slot_shapes(rule, weight.shape, state) if len(state) == len(rule.slots) else []
            for tensor, shape in zip(state, shapes, strict=False):
                if tensor.shape != shape:
                    raise ValueError(
                        f"{name!r} has shape {tuple(weight.shape)}, its state {tuple(tensor.shape)}: a weight may be moved "
                        "or converted between steps, but not change its shape"
                    )
        missing = [i for i, index in enumerate(self.indices) if index not in updater.states]
        if missing:
            weights = [self.weights[i].detach() for i in missing]
            for i, weight, state in zip(missing, weights, optimizer.states_for(weights), strict=True):
                try:
                    optimizer.start_state(weight, state)
                except ValueError as error:
                    raise ValueError(f"{self._names[i]!r}: {error}") from error
                updater.states[self.indices[i]] = state
        for index, weight in zip(self.indices, self.weights, strict=True):
            state = updater.states[index]
            if len(state) != len(rule.slots):
                (state,) = optimizer.states_for([weight])
                optimizer.start_state(weight.detach(), state)
            elif not all(map(goes_with, state, itertools.repeat(weight), optimizer.state_dtypes(weight))):
                (moved,) = optimizer.states_for([weight])
                for slot, new, old in zip(rule.slots, moved, state, strict=True):
                    storage.copy(new, old, weight.shape, _unsigned(rule, slot))
                state = moved
            updater.states[index] = state
            dtype, old = optimizer.master_dtype(weight), updater.masters.get(index)
            if dtype is None:
                updater.masters.pop(index, None)
            elif old is None or not goes_with(old, weight, dtype):
                updater.masters[index] = new_master(weight.detach(), old, dtype)
        self.update = Update(
            rule,
            self.weights,
            [updater.states[index] for index in self.indices],
            [updater.masters.get(index) for index in self.indices],
            updater.engine,
            list(map(repr, self._names)),
            optimizer.rounding,
            updater.control,
            self._zero_grads,
        )
        if self._rng_offsets is None:
            pairs = zip(self.indices, self._hyper.slots, strict=True)
            self._rng_offsets = np.array([index if isinstance(index, int) else slot for index, slot in pairs])
        self.update.rng_offsets, self.update.all_reduce_global = self._rng_offsets, self._all_reduce_global
        self._updates[rule] = self.update
        self._hyper.forget()
        return self.update

    @torch.no_grad()
    def _step_by_hand(self, optimizer: Optimizer, grads: Sequence[torch.Tensor | None]) -> None:
        states, control, rescale_grad = self.updater.states, self.updater.control, optimizer.rescale_grad
        factor, skip = (1.0, 0.0) if control is None else control.tolist()
        if not skip:
            try:
                optimizer.rescale_grad *= factor
                self._update_by_hand(optimizer, grads, states)
            finally:
                optimizer.rescale_grad = rescale_grad
        if self._zero_grads:
            for grad in grads:
                if grad is not None:
                    grad.zero_()

    def _update_by_hand(self, optimizer: Optimizer, grads: Sequence[torch.Tensor | None], states: dict[Index, Any]) -> None:
        active = [index for index, grad in zip(self.indices, grads, strict=True) if grad is not None]
        if optimizer.lr_scheduler is not None and active:  # a rate that is none must be detected before the first update
            counts = optimizer.step_counts.values[optimizer.slots(active)]
            optimizer.rate_at(max(optimizer.num_update, int(counts.max()) + 1))
        self._hyper.check_multipliers(optimizer, active)  # wrong ones must be detected before the first update, too
        together: dict[torch.dtype, list[Any]] = {}
        for index, weight, grad in zip(self.indices, self.weights, grads, strict=True):
            if grad is not None:
                states[index] = optimizer.follow(weight, states[index])
                if optimizer.aggregate_num > 0 and not optimizer.keeps_master(weight):
                    together.setdefault(weight.dtype, []).append((index, weight, grad, states[index]))
                else:
                    optimizer.update_multi_precision(index, weight, grad, states[index])
        for rows in together.values():
            for first in range(0, len(rows), optimizer.aggregate_num):
                optimizer.update(*map(list, zip(*rows[first : first + optimizer.aggregate_num], strict=True)))  # type: ignore[arg-type]


def new_master(weight: torch.Tensor, old: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A master of this type for a weight; `old` is its master so far."""
    if old is not None and storage.kind_of(weight.dtype, old.dtype) is None:  # of the type that the weight was of
        old = None
    ((master,),) = allocate_states([weight], 1, dtype)
    whole = storage.combined(weight, None if old is None else old.to(weight.device))
    if storage.kind_of(weight.dtype, dtype) == storage.MasterKind.FULL:
        return master.copy_(whole)
    return master.copy_(storage.master_for(weight, whole, dtype))


def _unsigned(rule: Rule, slot: str) -> bool:
    return slot in getattr(rule, "nonnegative", ())  # there are none in rules of whole tensors
