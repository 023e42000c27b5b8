"""EnsembleRows: the hyper-parameters of models that are updated together, and their update counts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...kernels import Rule, Update
from ..optimizer import RuleOptimizer

AHEAD, ROWS_AHEAD = 128, 16384  # the most steps, and the most rows, that are computed ahead at once
NUMBERS = (float, int)
SAME = ("begin_num_update", "lookahead", "num_update")


class EnsembleCounts:
    """The update counts of optimizers that start with equal counts and take the same steps.

    Attributes:
        step: the number of steps taken.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._counts = [optimizer.step_counts for optimizer in optimizers]
        self._begin, self._largest = self._counts[0].values.copy(), self._counts[0].largest
        # One array for the counts of all optimizers, a row for each.
        self._values = np.tile(self._begin, (len(optimizers), 1))
        for counts, values in zip(self._counts, self._values, strict=True):
            counts.values = values
        self.step = self._written = 0

    def coming(self, slots: Iterable[int]) -> list[int]:
        """Return the number of the next update of the weight in each slot."""
        return [int(self._begin[slot]) + 1 + self.step for slot in slots]

    def largest(self) -> int:
        """Return the optimizers' `num_update` before the next update."""
        return max(self._largest, int(self._begin.max()) + self.step) if self.step else self._largest

    def write_back(self) -> None:
        """Write the steps taken so far into the counts of all optimizers."""
        self._values += self.step - self._written
        self._written, largest = self.step, self.largest()
        for counts in self._counts:
            counts.largest = largest

    def restart(self) -> None:
        """Reset all counts to their start."""
        self._values[:], self.step, self._written = self._begin, 0, 0
        for counts in self._counts:
            counts.largest = self._largest


class EnsembleRows:
    """Writes the hyper-parameters of several models into an update, at each step a row for each weight of each model.

    It implements the interface `Rows` of optimizer/plan.py.

    Args:
        optimizers: optimizers of one class, which differ in numbers and schedules only.
        n: the number of weights of each model.
        stacked: the order of rows: True: the first weight of all models, then the second; False: all weights of the first
            model, then of the second.

    Attributes:
        counts: the update counts of all optimizers.
        only: the rule of all steps; None if the rule may change from step to step.
    """

    def __init__(self, optimizers: Sequence[Any], n: int, stacked: bool) -> None:
        first = optimizers[0]
        self._optimizers, self._stacked, self._slots = optimizers, stacked, np.arange(n)
        self._shared = _shared_rows(first)
        self.counts = EnsembleCounts(optimizers)
        self._scheduled = any(optimizer.lr_scheduler is not None for optimizer in optimizers)
        self._for_all: SharedRows | None = SharedRows(optimizers) if len(optimizers) > 1 else None
        self._checked = False
        self._before: list[tuple[Any, ...]] = []
        self._written: tuple[Update | None, Sequence[Sequence[Any]]] = None, []  # the update with the last rows, and these
        self.only = None if first.has_options else first.rule_for(self._slots)
        self._steady: Rule | None = None  # the rule whose rows are in the update, and never change
        self._tables: dict[int, tuple[Any, np.ndarray]] = {}  # by number of the step: the rule, and all rows
        self._keeps_tables = False  # whether tables are kept for steps after a restart
        # Whether to compute the rows of coming steps; False after that has failed.
        self._looks_ahead = not self._scheduled and self.only is not None

    def rule(self) -> Rule:
        return self.only or self._optimizers[0].rule_for(self._slots)

    def write(self, update: Update, number: int | None = None) -> bool:
        rule: Any = update.rule
        if self._steady is rule:
            return True
        names = self._optimizers[0].host_state_names
        self._before = [optimizer.host_state() for optimizer in self._optimizers] if names else []
        step, times = self.counts.step, self.counts.coming(slot for _, slot, *_ in self._shared)
        if step not in self._tables and self._checked and self._looks_ahead:
            self._form_coming(update.hyper, times, rule)
        rule_of_table, table = self._tables.get(step, (None, None))
        if rule_of_table is rule:
            update.hyper[:] = table
            self._written = None, []
        else:
            self._form(update, times)
            if self._keeps_tables and self._steady is not rule:
                self._tables[step] = rule, update.hyper.copy()
        return True

    def undo(self) -> None:
        for optimizer, before in zip(self._optimizers, self._before, strict=False):
            optimizer.load_host_state(before)
        if self._for_all is not None and self._before:
            self._for_all = SharedRows(self._optimizers)

    def count(self) -> None:
        self.counts.step += 1
        self.counts.write_back()

    @property
    def is_steady(self) -> bool:
        """Whether the rows in the update are right for all later steps."""
        return self._steady is not None and self._steady is self.only

    @property
    def can_restart(self) -> bool:
        """Whether steps change nothing but counts: no schedule, and no state on the host."""
        return not (self._scheduled or self._optimizers[0].host_state_names)

    def restart(self) -> None:
        """Reset the counts."""
        self.counts.restart()
        self._tables = self._tables if self._keeps_tables else {}
        self._keeps_tables = True  # a program that restarts once restarts again

    def _form_coming(self, hyper: np.ndarray, times: list[int], rule: Any) -> None:
        """Compute the tables of the coming steps at once, if possible."""
        rows, count = None, min(AHEAD, ROWS_AHEAD // len(hyper))
        if self._for_all is not None and count > 1:
            rows = self._for_all.coming_rows(times, count, self._shared, rule)
        if rows is None:
            self._looks_ahead = False
            return
        tables = np.empty((count, *hyper.shape))
        table = _by_training(tables, len(self._optimizers), self._stacked)
        for (where, *_), row in zip(self._shared, rows, strict=True):
            for k, value in enumerate(row):
                table[:, :, where, k] = value[..., None] if isinstance(value, np.ndarray) else value
        if not self._keeps_tables:
            self._tables.clear()
        self._tables.update((self.counts.step + i, (rule, of_step)) for i, of_step in enumerate(tables))

    def _form(self, update: Update, times: list[int]) -> None:
        """Write the rows of the coming step into the update."""
        rule: Any = update.rule
        table = _by_training(update.hyper, len(self._optimizers), self._stacked)
        self._optimizers[0].num_update = self.counts.largest()
        if self._for_all is not None:
            rates = _rates(self._optimizers, times) if self._scheduled else None
            right = self._checked or self._for_all.is_right(times, self._shared, rule, rates)
            rows = self._for_all.rows(times, self._shared, rule, rates) if right else None
            if rows is not None:
                _write_columns(table, self._shared, rows, self._written[1] if self._written[0] is update else None)
                self._written = update, rows
                if not self._checked:
                    self._steady = None if self._scheduled or not self._for_all.is_steady(self._shared, rule) else rule
                self._checked = True
                return
            self._for_all = None
        self.counts.write_back()
        for i, optimizer in enumerate(self._optimizers):
            for (where, *_), row in zip(self._shared, optimizer.rows_of_step(times, self._shared, rule), strict=True):
                table[i, where] = row


class _NoNumber:
    """A placeholder for a number that raises TypeError in every operation, to detect whether the number is used."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("this stands for a number that is not known")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("this stands for a number that is not known")


class SharedRows:
    """Computes the hyper-parameters of several optimizers at once, with one optimizer whose settings are arrays.

    A setting is an array if the optimizers' numbers differ. `+ - * /` of float64 arrays have the same bits as with Python's
    numbers; powers do not. So learning rates and decays, which are only multiplied, are float64 arrays, and other settings
    object arrays of Python's numbers. If a computation does not work with arrays it raises an error, and `is_right` detects
    different numbers.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        first = optimizers[0]
        self._one = _copied(first)
        self._one.lr_scheduler = None
        for name, value in vars(first).items():
            if type(value) in NUMBERS and name not in SAME:
                values = [getattr(optimizer, name) for optimizer in optimizers]
                vars(self._one)[name] = _joined(values, float if name in ("lr", "wd") else object)

    def rows(
        self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None = None
    ) -> list[list[Any]] | None:
        """Return the rows of the coming step: `rows_of_step`, with arrays of one number for each optimizer if they differ.

        Returns None if the optimizer's code does not work with arrays.
        """
        one = self._one
        one.step_counts.largest = self._optimizers[0].num_update
        if rates is not None:
            vars(one)["lr"] = _joined(rates, float)
        for name in one.host_state_names:
            if isinstance(carried := getattr(one, name), np.ndarray):
                setattr(one, name, carried.copy())  # it may be changed in place
        try:
            rows = one.rows_of_step(times, parameters, rule)
        except Exception:  # any kind: code that was not written for arrays may raise any error
            return None
        for name in one.host_state_names:
            value = getattr(one, name)
            values = value.tolist() if isinstance(value, np.ndarray) else [value] * len(self._optimizers)
            for optimizer, value_of_one in zip(self._optimizers, values, strict=True):
                setattr(optimizer, name, value_of_one)
        return rows

    def is_steady(self, parameters: Sequence[Any], rule: Rule) -> bool:
        """Return whether rows are the same at every step: they can be computed without the update count."""
        number: Any = _NoNumber()
        rows = self._rows_at([number] * len(parameters), parameters, rule)
        return rows is not None and not any(value is number for row in rows for value in row)

    def coming_rows(self, times: Sequence[int], count: int, parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """Return the rows of the next `count` >= 2 steps; numbers may be arrays [count, n_optimizers] or [count, 1], too.

        Returns None if the optimizer's code does not work with arrays, or gives other numbers than step by step.
        """
        coming = [np.array(range(t, t + count), dtype=object)[:, None] for t in times]
        rows = self._rows_at(coming, parameters, rule)
        if rows is None:
            return None
        for i in (0, count // 2, count - 1):
            single = self._rows_at([t + i for t in times], parameters, rule)
            for row, expected_row in zip(rows, single or (), strict=True):
                for value, expected in zip(row, expected_row, strict=True):
                    if value is expected:
                        continue
                    value = value[i] if isinstance(value, np.ndarray) and value.ndim == 2 else value
                    a, b = np.broadcast_arrays(np.array(value, dtype=float), np.array(expected, dtype=float))
                    if a.tobytes() != b.tobytes():
                        return None
        return rows

    def _rows_at(self, times: Sequence[Any], parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """Return the rows at these update counts; None if they depend on anything else, or change the optimizer."""
        methods = ("begin_step", "rows_of_step")
        overridden = any(getattr(type(self._one), name) is not getattr(RuleOptimizer, name) for name in methods)
        if self._one.host_state_names or overridden:
            return None
        one: Any = _copied(self._one)
        one.step_counts.largest = _NoNumber()
        before = dict(vars(one))
        try:
            rows = one.rows_of_step(times, parameters, rule, lr=one.lr)
        except Exception:  # any kind, from arithmetic with `_NoNumber` or arrays
            return None
        same = vars(one).keys() == before.keys() and all(map(operator.is_, vars(one).values(), before.values()))
        return rows if same else None

    def is_right(self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None) -> bool:
        """Return whether `rows` has the same bits as up to 8 single optimizers. No optimizer is changed."""
        sample = sorted({i * (len(self._optimizers) - 1) // 7 for i in range(8)})
        copies = SharedRows([_copied(optimizer) for optimizer in self._optimizers]) if self._one.host_state_names else self
        rows = copies.rows(times, parameters, rule, rates)
        if rows is None:
            return False
        for i in sample:
            expected_rows = _copied(self._optimizers[i]).rows_of_step(times, parameters, rule)
            for shared_row, expected in zip(rows, expected_rows, strict=True):
                row = [value[i] if isinstance(value, np.ndarray) else value for value in shared_row]
                if np.array(row, dtype=float).tobytes() != np.array(expected, dtype=float).tobytes():
                    return False
        return True


def _shared_rows(optimizer: Any) -> list[tuple[Any, int, float, float, int]]:
    """Return for each set of weights with equal count and multipliers, which share rows: their indices, the slot of the
    count, the two multipliers, and the first index."""
    kinds: dict[Any, list[int]] = {}
    for k, count in enumerate(optimizer.step_counts.values.tolist()):
        kind = (count, *optimizer.multipliers(k))
        kinds.setdefault(kind if optimizer.uniform_hyper else k, []).append(k)
    return [
        (slice(None) if len(kinds) == 1 else np.array(members), members[0], *optimizer.multipliers(members[0]), members[0])
        for members in kinds.values()
    ]


def _rates(optimizers: Sequence[Any], times: Sequence[int]) -> list[float]:
    """Return the learning rates of all optimizers; a schedule that several share is called once."""
    count = optimizers[0].count_for_rate(times)
    scheduled: dict[int, float] = {}
    rates = []
    for optimizer in optimizers:
        schedule = optimizer.lr_scheduler
        if schedule is None:
            rates.append(optimizer.lr)
        else:
            if id(schedule) not in scheduled:
                scheduled[id(schedule)] = optimizer.rate_at(count)
            rates.append(scheduled[id(schedule)])
    return rates


def _by_training(hyper: np.ndarray, n_trainings: int, stacked: bool) -> np.ndarray:
    """Return a view [..., n_trainings, n_weights, n] of an update's hyper-parameters [..., n_trainings * n_weights, n]."""
    *leading, rows, width = hyper.shape
    if stacked:
        return hyper.reshape(*leading, rows // n_trainings, n_trainings, width).swapaxes(-3, -2)
    return hyper.reshape(*leading, n_trainings, rows // n_trainings, width)


def _write_columns(
    table: np.ndarray, parameters: Sequence[Any], rows: Sequence[Sequence[Any]], written: Sequence[Sequence[Any]] | None
) -> None:
    """Write rows of `SharedRows` to a table [n_trainings, n_weights, n], except numbers that equal the `written` rows."""
    written = [[None] * len(row) for row in rows] if written is None else written
    for (where, *_), row, before in zip(parameters, rows, written, strict=True):
        for k, (value, old) in enumerate(zip(row, before, strict=True)):
            if isinstance(value, np.ndarray):
                if value is not old:
                    table[:, where, k] = value[:, None]
            elif isinstance(old, np.ndarray) or value != old:
                table[:, where, k] = value


def _copied(optimizer: Any) -> Any:
    copied = object.__new__(type(optimizer))  # copy.copy takes ten times as long
    vars(copied).update(vars(optimizer), step_counts=optimizer.step_counts.copy())
    return copied


def _joined(values: Sequence[Any], dtype: type) -> Any:
    """Return one number if all are equal, else an array."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.array(values, dtype=dtype)
