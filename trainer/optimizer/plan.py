"""Plans, which prepare once how a list of parameters is stepped, so that a step is little more than a launch; and rows of
hyper-parameters, each computed once per step for all parameters that share it."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.guards import Reference
from ...kernels.metrics import MetricsBuffer
from ...kernels.norms import global_norm
from ...kernels.reductions import Join
from .base import Optimizer
from .columns import column, table_of
from .counts import Index
from .limits import begin_together, gradient_factor, has_limit, skips_steps
from .multi import MultiOptimizer
from .rule_optimizer import RuleOptimizer
from .sparse import SparseRows, is_sparse

_UNKNOWN = object()
COLUMNS_FROM = 4  # sets of parameters with other multipliers; fewer rows are faster made one by one


class Division(NamedTuple):
    """How the parameters of a step are divided among processes; each counts the updates of all, and updates its own."""

    indices: Sequence[Index]  # of all parameters
    all_reduce: Join  # in place, of a result over all tensors; see `Update.all_reduce_global`
    like: torch.Tensor  # has the device and the dtype of such results


class Plan:
    """Base class of plans: a prepared way to update one list of parameters at every step.

    Attributes:
        update: the `Update` of the last step; None if it does not cover all parameters.
        references: weak references to the gradients of the last step; None if they are not all available.
    """

    update: Any = None
    references: list[Reference] | None = None

    def total(self) -> torch.Tensor | None:
        """Return the sum of squares of all gradients of the last step; None unless its rule skips non-finite steps."""
        return None

    def checksum(self) -> int:
        """Return a CRC-32 of the last step's hyper-parameters, which is equal in all processes that take the same step."""
        raise NotImplementedError

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Yield the last step's hyper-parameters, each with its own and its parameter's name."""
        return iter(())

    def step(self, grads: Sequence[torch.Tensor | None], into: MetricsBuffer | None = None) -> None:
        self.prepare(grads)
        self.run(into)

    def prepare(self, grads: Sequence[torch.Tensor | None], active: list[bool] | None = None) -> None:
        """Bind the gradients of the next step, None for weights to leave alone, and raise if they would make it fail.

        No weight changes. `active`, with a `Division`: for each of all parameters, whether the step updates it.
        """
        raise NotImplementedError

    def run(self, into: MetricsBuffer | None = None) -> None:
        """Update all weights that have a gradient; measurements go to the rows of `into` given by `rng_offsets`."""
        raise NotImplementedError


class StepPlan(Plan):
    """Base class of plans of parameters that share one rule; a subclass provides their states and masters.

    Args:
        names: names of the parameters, for messages.
        rows: the source of their hyper-parameters.
        own: whether gradients will be the weights' own, `weight.grad`.
        elements: whether a sparse gradient that lists single elements updates only these, not their whole rows.
    """

    update: Update

    def __init__(self, names: list[str], rows: Rows, own: bool = False, elements: bool = False) -> None:
        self.names, self.rows, self._own = names, rows, own
        self._updates: dict[Rule | TensorRule, Update] = {}  # several, as an optimizer may change its rule and change back
        self._sparse = SparseRows(names, self.split, elements)
        self._active: list[bool] | None = None  # `Update.active` at the last step
        self._make_update(rows.rule())

    def new_update(self, rule: Rule | TensorRule) -> Update:
        """Return an `Update` of the parameters as they are now; creates, moves and converts states and masters if needed."""
        raise NotImplementedError

    def is_current(self, update: Update) -> bool:
        """Return whether an update works on the states and masters that the parameters have now."""
        raise NotImplementedError

    def fits(self, update: Update) -> bool:
        """Return whether the states and masters of an update still match the parameters in dtype and device."""
        return update.fits()

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        """Return which gradients are used as a whole, and the positions of those used by row; see `SparseRows`."""
        return list(grads), []

    @property
    def references(self) -> list[Reference] | None:  # type: ignore[override]  # it is looked up at every step
        return None if self._sparse.met else self.update.references

    def total(self) -> torch.Tensor | None:
        limits = self.update.rule.limits
        return self.update.total() if limits and limits[0].skips else None

    def checksum(self) -> int:
        return self.rows.checksum()

    def numbers(self) -> Iterator[tuple[str, float]]:
        return self.rows.numbers(("rescale_grad", *self.update.rule.hyper, "t"))

    def prepare(
        self,
        grads: Sequence[torch.Tensor | None],
        active: list[bool] | None = None,
        rule: Rule | TensorRule | None = None,
        in_place: bool = False,
    ) -> None:
        """As `Plan.prepare`, with another rule than `rows` chooses if given, and `in_place` as in `Update.rebind`."""
        rule, update, switched = self.rows.rule() if rule is None else rule, self.update, False
        if update.rule is not rule:
            update, switched, in_place = self._use(rule), True, False
        if self._sparse.met or not update.rebind(grads, own=self._own, in_place=in_place):
            if update.groups and not self.fits(update):  # one without groups has just been made
                update = self._make_update(rule)
            self._sparse.bind(update, grads, self._own)
            switched = True
        if active is not None:
            self.rows.use(active)
        elif switched or update.active is not self._active:
            self._active = update.active
            self.rows.use([grad is not None for grad in grads])

    def run(self, into: MetricsBuffer | None = None) -> None:
        try:
            if self.rows.write(self.update):
                self.launch(into)
        except BaseException:
            self.rows.undo()
            raise

    def launch(self, into: MetricsBuffer | None = None) -> None:
        """Launch the update and count it: the second half of `run`, after `rows.write`, in which nothing can fail."""
        if self._sparse.met:
            self._sparse.run(self.update, into)
        else:
            self.update(into)
        self.rows.count()

    def updates(self) -> list[Update]:
        """Return the updates of the step that `prepare` and `rows.write` have begun."""
        return self._sparse.updates(self.update) if self._sparse.met else [self.update]

    def step_with(
        self,
        grads: Sequence[torch.Tensor | None],
        rule: Rule | TensorRule,
        rows: Sequence[np.ndarray],
        into: MetricsBuffer | None = None,
    ) -> None:
        """Update the weights that have a gradient, by a rule and rows of hyper-parameters formed before; counts stay."""
        self.prepare(grads, rule=rule)
        self.update.hyper[:] = rows
        self._sparse.run(self.update, into)

    def look_ahead(self, update: Update, active: list[bool]) -> None:
        """Write the next step's numbers into the captured `update`, and count nothing, if its graph keeps some of them."""
        if update.keeps_numbers:
            self._replay(update, active)
            self.rows.write(update)
            self.rows.undo()

    def _replay(self, update: Update, active: list[bool]) -> None:
        if self.update is not update:
            self.update = update
            self.rows.forget()
        self.rows.use(active)

    def host_step(self, update: Update, active: list[bool]) -> None:
        """Do the host's part, hyper-parameters and counts, of a step of the captured `update` that a CUDA graph replays."""
        self._replay(update, active)
        update.host_only = True
        try:
            self.run()
        finally:
            update.host_only = False

    def _use(self, rule: Rule | TensorRule) -> Update:
        """Switch to another rule and its `Update`, made before if it still works on the right states."""
        update = self._updates.get(rule)
        if update is None or not self.is_current(update):
            return self._make_update(rule)
        self.update = update
        return update

    def _make_update(self, rule: Rule | TensorRule) -> Update:
        self.update = self._updates[rule] = self.new_update(rule)
        self.rows.forget()
        return self.update


class CustomPlan(Plan):
    """Plan of a user-defined optimizer, whose `update` in plain torch is called for one parameter after the other.

    Missing states are created in `state` at once. `control` is as in `UpdaterPlan`.
    """

    def __init__(
        self,
        state: dict[Index, Any],
        optimizer: Optimizer,
        indices: Sequence[Index],
        weights: Sequence[torch.Tensor],
        control: torch.Tensor | None = None,
        zero_grads: bool = False,
        division: Division | None = None,
    ) -> None:
        self._state, self.optimizer, self._control, self._zero_grads = state, optimizer, control, zero_grads
        self._indices, self._weights = list(indices), list(weights)
        self._division, self._all = division, self._indices if division is None else list(division.indices)
        self._grads: Sequence[torch.Tensor | None] = ()  # from `prepare` to `run`
        self._active: Sequence[bool] = ()  # by `_all`, from `prepare` to `run`
        self.optimizer.slots(self._all)  # start the counts of all parameters, with or without a gradient
        with torch.no_grad():  # a state may be a copy of the weight, without its autograd history
            for index, weight in zip(self._indices, self._weights, strict=True):
                if index not in state:
                    state[index] = self.optimizer.create_state_multi_precision(index, weight)

    def prepare(self, grads: Sequence[torch.Tensor | None], active: list[bool] | None = None) -> None:
        self._grads = grads
        self._active = [grad is not None for grad in grads] if active is None else active

    @torch.no_grad()
    def run(self, into: MetricsBuffer | None = None, limit: torch.Tensor | None = None) -> None:
        """As `Plan.run`, without measurements; `limit` is another factor of the gradients, negative to skip the step."""
        grads, self._grads = self._grads, ()
        optimizer, control = self.optimizer, self._control
        rescale_grad, (factor, skip) = optimizer.rescale_grad, (1.0, 0.0) if control is None else control.tolist()
        further = 1.0 if limit is None else float(limit)
        if not skip and not further < 0:
            try:
                optimizer.rescale_grad *= factor * further
                self._update(grads)
            finally:
                optimizer.rescale_grad = rescale_grad
        if self._zero_grads:
            for grad in grads:
                if grad is not None:
                    grad.zero_()

    def square(self, device: torch.device) -> torch.Tensor:
        """Return the sum of squares of the gradients that `prepare` was given, [1, 1], as rules would get them."""
        values = [grad.coalesce().values() if is_sparse(grad) else grad for grad in self._grads if grad is not None]
        if not values and self._division is not None:
            return self._division.like.new_zeros(1, 1)
        factor = 1.0 if self._control is None else self._control[0].to(device)
        norm = global_norm(values).to(device) * (factor * abs(self.optimizer.rescale_grad))
        return norm.square().view(1, 1)

    def _update(self, grads: Sequence[torch.Tensor | None]) -> None:
        optimizer, states = self.optimizer, self._state
        active = list(compress(self._all, self._active))
        self._check_numbers(active)
        if self._division is not None:
            mine = {*self._indices}
            optimizer._update_count([index for index in active if index not in mine])
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

    def checksum(self) -> int:
        optimizer, active = self.optimizer, list(compress(self._all, self._active))
        has_multipliers = optimizer.lr_mult or optimizer.wd_mult or self._have_attributes(active)
        of_each = list(map(optimizer.multipliers, active)) if has_multipliers else ()
        return zlib.crc32(repr((optimizer.learning_rate, of_each)).encode())

    def _have_attributes(self, active: list[Index]) -> bool:
        return any(getattr(self.optimizer.param_dict.get(index), "__dict__", {}) for index in active)

    def _check_numbers(self, active: list[Index]) -> None:
        """Raise before the first update if a schedule or a multiplier returns an invalid number."""
        optimizer = self.optimizer
        if active and (optimizer.lr_scheduler is not None or optimizer._schedules):
            count = optimizer.step_counts.largest_after(optimizer.slots(active))
            optimizer.rate_at(count)
            optimizer.follow_schedules(count)
        if self._have_attributes(active):  # other multipliers have been checked
            for index in active:
                optimizer.multipliers(index)


class MultiPlan(Plan):
    """Plan of the parameters of a `MultiOptimizer`: one plan for each of its optimizers, whose steps count together."""

    def __init__(
        self,
        optimizer: MultiOptimizer,
        indices: Sequence[Index],
        device: torch.device,
        division: Division | None = None,
    ) -> None:
        # For each optimizer its plan, and its parameters' positions in `indices` and in `division.indices`; the caller's.
        self.parts: list[tuple[StepPlan | CustomPlan, list[int], list[int]]] = []
        self._optimizer, self._n = optimizer, len(indices)
        self._total: torch.Tensor | None = None  # of the last step that had a limit
        self._slots = optimizer.slots(indices if division is None else division.indices)
        self._device, self._division = device, division

    @property
    def references(self) -> list[Reference] | None:  # type: ignore[override]
        references: list[Any] = [None] * self._n
        for plan, at, _ in self.parts:
            if plan.references is None:
                return None
            for i, reference in zip(at, plan.references, strict=True):
                references[i] = reference
        return references

    def total(self) -> torch.Tensor | None:
        return self._total if skips_steps(self._optimizer) else None

    def checksum(self) -> int:
        return zlib.crc32(repr([plan.checksum() for plan, *_ in self.parts]).encode())

    def numbers(self) -> Iterator[tuple[str, float]]:
        return (pair for plan, *_ in self.parts for pair in plan.numbers())

    def prepare(self, grads: Sequence[torch.Tensor | None], active: list[bool] | None = None) -> None:
        for plan, at, of_all in self.parts:
            plan.prepare([grads[i] for i in at], None if active is None else [active[i] for i in of_all])
        self._active_slots = self._slots[[grad is not None for grad in grads] if active is None else active]

    def run(self, into: MetricsBuffer | None = None) -> None:
        """As `Plan.run`; user-defined optimizers come first, since their steps may fail."""
        number = self._optimizer.step_counts.largest_after(self._active_slots)
        begun: list[StepPlan] = []
        launched: list[StepPlan] = []
        plans = [plan for plan, *_ in self.parts]
        try:
            for plan in plans:
                if isinstance(plan, StepPlan):
                    begun.append(plan)
                    if plan.rows.write(plan.update, number):
                        launched.append(plan)
            factor = self._begin(launched) if has_limit(self._optimizer) else None
            for plan in launched:
                plan.update.compute_ahead()
            for plan in plans:
                if isinstance(plan, CustomPlan):
                    plan.run(into, factor)
        except BaseException:
            for plan in begun:
                plan.rows.undo()
            raise
        for plan in launched:
            plan.launch(into)

    @torch.no_grad()
    def _begin(self, plans: Sequence[StepPlan]) -> torch.Tensor | None:
        """Begin the step of these plans; return the factor of the gradients of user-defined optimizers, if there are any."""
        customs = [plan for plan, *_ in self.parts if isinstance(plan, CustomPlan)]
        squares = [plan.square(self._device) for plan in customs]
        updates = [update for plan in plans for update in plan.updates()]
        if updates or squares:
            self._total = begin_together(updates, squares, None if self._division is None else self._division.all_reduce)
        return gradient_factor(self._optimizer, squares[0][0, 0]) if customs else None


class Rows:
    """Base class of what computes the hyper-parameters of a list of parameters at each step.

    Parameters with equal counts and multipliers are a set, whose row of numbers is computed once. A subclass finds the sets,
    computes the rows and counts the step. `rule` returns the rule of the next step.
    """

    def __init__(self, n: int, rule: Callable[[], Any]) -> None:
        self.active, self.rule = [True] * n, rule  # which parameters the next step updates
        # For each set of parameters that share a row: their positions, None for all, and what the subclass needs.
        self._sets: list[tuple[Any, ...]] = []
        self._basis: Any = _UNKNOWN  # `_sets` is right for a step if this is equal: multipliers, or counts
        self.formed: list[tuple[Any, Any]] = []  # the rows of the last step, as `form` returned them
        self._sharing: int | None = None  # checksum of which parameters share a row, once it is needed

    def form(self, rule: Any, number: int | None = None) -> list[tuple[Any, Any]]:
        """Return the rows of the next step as pairs (positions of the parameters that share it, None for all; row).

        In place of the row there may be an array, with a row for each of these parameters. Sets are found again if they may
        have changed. `number`: the update count after the step, if the step also updates parameters of other plans.
        """
        raise NotImplementedError

    def undo(self) -> None:
        """Restore what `form` has changed, after a step that failed."""

    def count(self) -> None:
        """Count the step whose rows have been formed."""
        raise NotImplementedError

    def use(self, active: list[bool]) -> None:
        """Choose which parameters are updated from the next step on."""
        if active != self.active:
            self.active = active
            self.forget()

    def forget(self) -> None:
        """Discard which parameters share a row; the next step finds it again."""
        self._basis = _UNKNOWN

    def checksum(self) -> int:
        """Return a CRC-32 of the rows of the last step, and of which parameters share them."""
        if self._sharing is None:
            self._sharing = zlib.crc32(repr([None if each[0] is None else each[0].tolist() for each in self._sets]).encode())
        total = self._sharing
        for _, row in self.formed:
            numbers: Any = row if isinstance(row, np.ndarray) else array("d", row)
            total = zlib.crc32(numbers, total)
        return total

    def numbers(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yield the numbers of the last step's rows, whose columns have these names, as `Plan.numbers`."""
        return iter(())

    def write(self, update: Update, number: int | None = None) -> bool:
        """Write the rows of the next step into an update; return whether there are any. It takes `number` of `form`."""
        self.formed = rows = self.form(update.rule, number)
        for where, row in rows:
            if where is None and isinstance(row, list):
                update.broadcast_hyper(row)
            else:
                update.hyper[... if where is None else where] = row
        return bool(rows)

    def _share(self, kinds: Sequence[Any], facts: Callable[[list[int]], tuple[Any, ...]]) -> None:
        """Find the sets of active parameters of equal `kinds`; `facts` has what the subclass needs of a set's members."""
        places = np.flatnonzero(self.active)
        members = _equal_places(kinds)
        whole = len(members) == 1 and len(places) == len(self.active)
        self._sharing = None
        self._sets = [(None if whole else places[at], *facts(at)) for at in members]


class HyperRows(Rows):
    """Rows of parameters of a `RuleOptimizer`, from its counts, multipliers and schedule.

    Args:
        alone: whether the parameters of a step are updated by separate calls; see `RuleOptimizer.rows_of_step`.
        places: the positions in `indices` of an update's weights, if it has others than all of them in this order.
    """

    def __init__(
        self, optimizer: RuleOptimizer, indices: Sequence[Index], alone: bool = False, places: list[int] | None = None
    ) -> None:
        self._optimizer, self._indices, self._alone, self._places = optimizer, list(indices), alone, places
        self._slots = optimizer.slots(self._indices)
        super().__init__(len(indices), partial(optimizer.rule_for, self._slots))
        # The parameters' attributes. The dictionaries are live, so it is enough to check whether they are empty.
        self._attributes = [getattr(optimizer.param_dict.get(index), "__dict__", {}) for index in self._indices]
        self._counted: Any = self._slots
        self._times: list[int] = []  # the coming update number of each set
        self._before: tuple[Any, ...] = ()  # the host state before the step, and the count of the step begun before
        # Whether one row may have columns of numbers for parameters with other multipliers, and whether rows have some.
        begins = type(optimizer).begin_step is not RuleOptimizer.begin_step
        self._takes_columns = optimizer.shares_rows and not (optimizer.host_state_names or begins)
        self._has_columns = False

    def form(self, rule: Any, number: int | None = None) -> list[tuple[Any, Any]]:
        optimizer = self._optimizer
        self._before = (optimizer.host_state(), optimizer._begun) if optimizer.host_state_names else ()
        has_multipliers = any(self._attributes) or optimizer.lr_mult or optimizer.wd_mult
        multipliers = self._read_multipliers() if has_multipliers else None
        if multipliers != self._basis:
            self._compare(multipliers)
        counts = optimizer.step_counts.values
        self._times = times = [int(counts[slot]) + 1 for _, slot, _, _, _ in self._sets]
        if self._has_columns:
            return self._form_columns(rule, number)
        rows = optimizer.rows_of_step(times, self._sets, rule, number, alone=self._alone) if times else []
        return [(where, row) for (where, *_), row in zip(self._sets, rows, strict=True)]

    def table(self, rule: Any, number: int | None = None) -> np.ndarray:
        """Return `form`'s rows as one array [n, n_numbers], 0 for inactive parameters; some parameter must be active."""
        self.formed = rows = self.form(rule, number)
        table = np.zeros((len(self._indices), np.shape(rows[0][1])[-1]))
        for where, row in rows:
            table[... if where is None else where] = row
        return table

    def write(self, update: Update, number: int | None = None) -> bool:
        if self._places is None:
            return super().write(update, number)
        self.formed = []
        if any(self.active):
            update.hyper[:] = self.table(update.rule, number)[self._places]
        return any(self.active)

    def numbers(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        titles = [self._optimizer.param_names.get(index, index) for index in self._indices]
        for where, row in self.formed:
            members = range(len(titles)) if where is None else where
            for i, values in zip(members, np.broadcast_to(row, (len(members), np.shape(row)[-1])), strict=True):
                yield from ((f"{name} of {titles[i]}", float(value)) for name, value in zip(names, values, strict=False))

    def _form_columns(self, rule: Any, number: int | None) -> list[tuple[Any, Any]]:
        """Return what `form` does, and compute rows that differ in multipliers only together, if that is possible."""
        n, optimizer = len(self._indices), self._optimizer
        try:
            rows = optimizer.rows_of_step(self._times, self._sets, rule, number, alone=self._alone)
            tables = [
                table_of(row, n if where is None else len(where)) for (where, *_), row in zip(self._sets, rows, strict=True)
            ]
        except Exception:  # any kind: code that takes numbers may raise any error for columns
            self._takes_columns = False
            self.forget()
            return self.form(rule, number)
        return [(where, table) for (where, *_), table in zip(self._sets, tables, strict=True)]

    def undo(self) -> None:
        if self._before:
            host_state, self._optimizer._begun = self._before
            self._optimizer.load_host_state(host_state)

    def count(self) -> None:
        self._optimizer.step_counts.advance(self._counted, max(self._times))

    def _read_multipliers(self) -> Any:
        """Return everything that multipliers depend on, to compare it with the last step."""
        optimizer = self._optimizer
        by_parameter = [tuple(map(each.get, ("lr_mult", "wd_mult", "grad_req"))) for each in self._attributes]
        return by_parameter, dict(optimizer.lr_mult), dict(optimizer.wd_mult)

    def _compare(self, multipliers: Any) -> None:
        """Find the sets of active parameters with equal counts and multipliers."""
        optimizer, slots = self._optimizer, self._slots[self.active]
        indices = list(compress(self._indices, self.active))
        pairs = [(1.0, 1.0)] * len(indices) if multipliers is None else list(map(optimizer.multipliers, indices))
        kinds: Any = range(len(indices))
        if optimizer.shares_rows:
            counts = optimizer.step_counts.values[slots].tolist()
            kinds = counts if multipliers is None else list(zip(counts, pairs, strict=True))
        self._has_columns = self._takes_columns and multipliers is not None and len(set(kinds)) >= COLUMNS_FROM
        if self._has_columns:
            kinds = counts

        def facts(members: list[int]) -> tuple[Any, ...]:
            """The count's slot, multipliers, and the first index."""
            lr_mult, wd_mult = (column([pairs[i][k] for i in members]) for k in (0, 1))
            return int(slots[members[0]]), lr_mult, wd_mult, indices[members[0]]

        self._share(kinds, facts)
        in_a_row = slots.size > 0 and bool((np.diff(slots) == 1).all())
        self._counted = slice(int(slots[0]), int(slots[-1]) + 1) if in_a_row else slots
        self._basis = multipliers


def _equal_places(kinds: Sequence[Any]) -> list[list[int]]:
    """Return the positions of equal items, one list for each distinct item, ordered by first occurrence."""
    if len(set(kinds)) == 1:
        return [list(range(len(kinds)))]
    positions: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        positions.setdefault(kind, []).append(i)
    return list(positions.values())
