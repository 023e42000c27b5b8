"""HyperRows: the hyper-parameters of a step, computed once for all parameters that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels import Rule, TensorRule, Update
from .counts import Index
from .rule_optimizer import RuleOptimizer

_UNKNOWN = object()


class Rows:
    """The rows of hyper-parameters that the parameters of a plan have at each step, and their update counts.

    Attributes:
        active: for each parameter whether the next step updates it.
    """

    active: list[bool]

    def rule(self) -> Rule | TensorRule:
        """The rule of the next step."""
        raise NotImplementedError

    def use(self, active: list[bool]) -> None:
        """Update these parameters from now on."""
        if active != self.active:
            self.active = active
            self.forget()

    def forget(self) -> None:
        """Find again which parameters share hyper-parameters."""
        raise NotImplementedError

    def write(self, update: Update, number: int | None = None) -> bool:
        """Give an update the hyper-parameters of the next step. Returns whether there is anything to update.

        Args:
            update: the update.
            number: the update count after the step, where that updates parameters of other plans, too.
        """
        raise NotImplementedError

    def undo(self) -> None:
        """Restore what `write` has changed, after a step that failed."""

    def count(self) -> None:
        """Count the step whose hyper-parameters have been written."""
        raise NotImplementedError


class HyperRows(Rows):
    """Those of a list of an optimizer's parameters.

    Args:
        optimizer: whose parameters they are.
        indices: of the parameters.
        alone: as for `RuleOptimizer.rows_of_step`.
    """

    def __init__(self, optimizer: RuleOptimizer, indices: Sequence[Index], alone: bool = False) -> None:
        self._optimizer, self._indices, self._alone = optimizer, list(indices), alone
        self._slots = optimizer.slots(self._indices)
        self.active = [True] * len(self._indices)
        # A parameter's attributes; the dictionaries are live, so that looking whether they are empty is enough.
        self._own = [getattr(optimizer.param_dict.get(index), "__dict__", {}) for index in self._indices]
        # Active parameters that share hyper-parameters: rows, the count's slot, lr_mult, wd_mult, the first's
        # index. Rows are None where they are all.
        self._shared: list[tuple[Any, int, float, float, Index]] = []
        self._counted: Any = self._slots
        self._multipliers: Any = _UNKNOWN  # by which `_shared` was found
        self._times: list[int] = []  # the coming update numbers, of those that share a row
        self._before: tuple[Any, ...] = ()  # the host state before the step, and which step had begun

    def rule(self) -> Rule:
        return self._optimizer.rule_for(self._slots)

    def forget(self) -> None:
        self._multipliers = _UNKNOWN

    def write(self, update: Update, number: int | None = None) -> bool:
        rows = self.form(update.rule, number)
        for where, row in rows:
            if where is None:
                update.broadcast_hyper(row)
            else:
                update.hyper[where] = row
        return bool(rows)

    def form(self, rule: Any, number: int | None = None) -> list[tuple[Any, list[float]]]:
        """The rows of the next step, each with the places of the parameters that share it; None stands for all places."""
        optimizer = self._optimizer
        self._before = (optimizer.host_state(), optimizer._begun) if optimizer.host_state_names else ()
        multipliers = self._read_multipliers()
        if multipliers != self._multipliers:
            self._share(multipliers)
        counts = optimizer.step_counts.values
        self._times = times = [int(counts[slot]) + 1 for _, slot, _, _, _ in self._shared]
        rows = optimizer.rows_of_step(times, self._shared, rule, number, alone=self._alone) if times else []
        return [(where, row) for (where, *_), row in zip(self._shared, rows, strict=True)]

    def form_all(self, number: int | None = None) -> tuple[Rule, list[list[float] | None]]:
        """The rule of the next step and the row of each parameter, None of those that the step leaves alone.

        For updates that have some of these parameters each.
        """
        rule = self.rule()
        rows: list[list[float] | None] = [None] * len(self._indices)
        for where, row in self.form(rule, number):
            for place in range(len(rows)) if where is None else where:
                rows[place] = row
        return rule, rows

    def undo(self) -> None:
        if self._before:
            carried, self._optimizer._begun = self._before
            self._optimizer.load_host_state(carried)

    def count(self) -> None:
        if self._optimizer.counts_as_step:
            self._optimizer.step_counts.advance(self._counted, max(self._times))

    def _read_multipliers(self) -> Any:
        """All that multipliers depend on, to be compared with the last step's; None as long as nobody has set any."""
        optimizer = self._optimizer
        if not any(self._own) and not (optimizer.lr_mult or optimizer.wd_mult):
            return None
        own = [tuple(map(attributes.get, ("lr_mult", "wd_mult", "grad_req"))) for attributes in self._own]
        return own, dict(optimizer.lr_mult), dict(optimizer.wd_mult)

    def _share(self, multipliers: Any) -> None:
        """Find the active parameters with equal counts and multipliers, which share one row of hyper-parameters."""
        optimizer, places = self._optimizer, np.flatnonzero(self.active)
        counts = optimizer.step_counts.values[self._slots[places]]
        if not optimizer.uniform_hyper:
            kinds: Any = range(len(places))
        elif multipliers is None:
            kinds = counts.tolist()
        else:
            pairs = [optimizer.multipliers(self._indices[i]) for i in places]
            kinds = [(count, *pair) for count, pair in zip(counts.tolist(), pairs, strict=True)]
        self._shared = []
        for rows in equal_places(kinds):
            first = int(places[rows[0]])
            index = self._indices[first]
            lr_mult, wd_mult = (1.0, 1.0) if multipliers is None else optimizer.multipliers(index)
            where = None if len(rows) == len(self._indices) else places[rows]
            self._shared.append((where, int(self._slots[first]), lr_mult, wd_mult, index))
        counted = self._slots[places]
        in_a_row = counted.size > 0 and bool((np.diff(counted) == 1).all())
        self._counted = slice(int(counted[0]), int(counted[-1]) + 1) if in_a_row else counted
        self._multipliers = multipliers


def write_rows(update: Update, rows: Sequence[list[float] | None]) -> None:
    """Give an update the row of each of its weights."""
    first = rows[0]
    if first is not None and all(row is first for row in rows):
        update.broadcast_hyper(first)
    else:
        for i, row in enumerate(rows):
            if row is not None:
                update.hyper[i] = row


def equal_places(kinds: Sequence[Any]) -> list[list[int]]:
    """The places of equal ones, in the order of the first of each."""
    if len(set(kinds)) == 1:
        return [list(range(len(kinds)))]
    members: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        members.setdefault(kind, []).append(place)
    return list(members.values())
