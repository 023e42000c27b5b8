"""EnsembleRows: the hyper-parameters of trainings that are updated together, and their update counts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...kernels import Rule, Update
from ..optimizer import RuleOptimizer

AHEAD, ROWS_AHEAD = 128, 16384  # steps, and rows of a table, that are formed at once where that can be done
NUMBERS = (float, int)
SAME = ("begin_num_update", "lookahead", "num_update")


class EnsembleCounts:
    """The update counts of optimizers that have equal ones and take the same steps.

    Attributes:
        step: how many steps have been taken.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._counts = [optimizer.step_counts for optimizer in optimizers]
        self._begin, self._largest = self._counts[0].values.copy(), self._counts[0].largest
        # One array for the counts of all, in which each optimizer has a row.
        self._values = np.tile(self._begin, (len(optimizers), 1))
        for counts, values in zip(self._counts, self._values, strict=True):
            counts.values = values
        self.step = self._written = 0

    def coming(self, slots: Iterable[int]) -> list[int]:
        """The numbers of the coming updates of weights in these slots."""
        return [int(self._begin[slot]) + 1 + self.step for slot in slots]

    def largest(self) -> int:
        """`num_update` before that update."""
        return max(self._largest, int(self._begin.max()) + self.step) if self.step else self._largest

    def write_back(self) -> None:
        """Let all optimizers know of the steps that have been taken."""
        self._values += self.step - self._written
        self._written, largest = self.step, self.largest()
        for counts in self._counts:
            counts.largest = largest

    def restart(self) -> None:
        """Begin again."""
        self._values[:], self.step, self._written = self._begin, 0, 0
        for counts in self._counts:
            counts.largest = self._largest


class EnsembleRows:
    """The rows of hyper-parameters that trainings have at each step, of which each updates all of their weights.

    The methods are those of `Rows` of plan.py.

    Args:
        optimizers: of one class, which differ in numbers and schedules only.
        n: how many weights each has.
        stacked: whether rows are those of one weight of all trainings after the other, not of one training after the other.

    Attributes:
        counts: the update counts of all.
        only: the rule of all steps, if it is one.
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
        self._written: tuple[Update | None, Sequence[Sequence[Any]]] = None, []  # which update has rows of the step before
        self.only = None if first.has_options else first.rule_for(self._slots)
        self._steady: Rule | None = None  # whose rows are in the update, and stay as they are
        self._tables: dict[int, tuple[Any, np.ndarray]] = {}  # by the number of the step: the rule, and all rows
        self._keeps_tables = False  # because they will be those after a restart, too
        # Whether rows of coming steps can be formed, as far as is known.
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
        known, table = self._tables.get(step, (None, None))
        if known is rule:
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
        """Whether rows have been formed that are right at every step."""
        return self._steady is not None and self._steady is self.only

    @property
    def can_restart(self) -> bool:
        """Whether nothing but counts is changed by steps."""
        return not (self._scheduled or self._optimizers[0].host_state_names)

    def restart(self) -> None:
        """Begin again."""
        self.counts.restart()
        self._tables = self._tables if self._keeps_tables else {}
        self._keeps_tables = True  # who restarts once will do it again

    def _form_coming(self, hyper: np.ndarray, times: list[int], rule: Any) -> None:
        """The rows of the coming steps at once, if that can be done."""
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
        self._tables.update((self.counts.step + i, (rule, each)) for i, each in enumerate(tables))

    def _form(self, update: Update, times: list[int]) -> None:
        """The rows of the coming step."""
        rule: Any = update.rule
        table = _by_training(update.hyper, len(self._optimizers), self._stacked)
        self._optimizers[0].num_update = self.counts.largest()
        if self._for_all is not None:
            rates = _rates(self._optimizers, times) if self._scheduled else None
            known = self._checked or self._for_all.is_right(times, self._shared, rule, rates)
            rows = self._for_all.rows(times, self._shared, rule, rates) if known else None
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
    """Stands in for a number, to find out whether it is used: it supports no operation, not even a comparison."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("this stands for a number that is not known")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("this stands for a number that is not known")


class SharedRows:
    """One optimizer instead of several: its numbers are arrays of theirs where they differ.

    `+ - * /` of arrays are those of Python's numbers, to the bit. That is not so of powers, so that settings are arrays of
    Python's own numbers; rates and decays, which are multiplied, are float64. What cannot be computed with arrays raises an
    error, and what came out otherwise would be found by `is_right`.
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
        """As `rows_of_step` of each, with arrays of one number for each where they differ; None where it cannot be done."""
        one = self._one
        one.step_counts.largest = self._optimizers[0].num_update
        if rates is not None:
            vars(one)["lr"] = _joined(rates, float)
        for name in one.host_state_names:
            if isinstance(carried := getattr(one, name), np.ndarray):
                setattr(one, name, carried.copy())  # it may be changed in place
        try:
            rows = one.rows_of_step(times, parameters, rule)
        except Exception:  # of whatever kind: their own code says what it is, where it was not written for arrays
            return None
        for name in one.host_state_names:
            value = getattr(one, name)
            values = value.tolist() if isinstance(value, np.ndarray) else [value] * len(self._optimizers)
            for optimizer, each in zip(self._optimizers, values, strict=True):
                setattr(optimizer, name, each)
        return rows

    def is_steady(self, parameters: Sequence[Any], rule: Rule) -> bool:
        """Whether rows are the same at every step: they are if they can be computed without the update count."""
        number: Any = _NoNumber()
        rows = self._rows_at([number] * len(parameters), parameters, rule)
        return rows is not None and not any(value is number for row in rows for value in row)

    def coming_rows(self, times: Sequence[int], count: int, parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """As `rows`, of that many steps, >= 2: numbers may be arrays [count, n_optimizers] or [count, 1], too.

        None where they cannot be formed so, or would be others than those formed step by step.
        """
        coming = [np.array(range(t, t + count), dtype=object)[:, None] for t in times]
        found = self._rows_at(coming, parameters, rule)
        if found is None:
            return None
        for i in (0, count // 2, count - 1):
            single = self._rows_at([t + i for t in times], parameters, rule)
            for row, expected in zip(found, single or (), strict=True):
                for value, own in zip(row, expected, strict=True):
                    if value is own:
                        continue
                    value = value[i] if isinstance(value, np.ndarray) and value.ndim == 2 else value
                    one, other = np.broadcast_arrays(np.array(value, dtype=float), np.array(own, dtype=float))
                    if one.tobytes() != other.tobytes():
                        return None
        return found

    def _rows_at(self, times: Sequence[Any], parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """As `rows`, if nothing else than these times is asked for, and nothing is changed by asking."""
        kept = ("begin_step", "rows_of_step")
        overridden = any(getattr(type(self._one), name) is not getattr(RuleOptimizer, name) for name in kept)
        if self._one.host_state_names or overridden:
            return None
        one: Any = _copied(self._one)
        one.step_counts.largest = _NoNumber()
        before = dict(vars(one))
        try:
            rows = one.rows_of_step(times, parameters, rule, lr=one.lr)
        except Exception:  # whatever comes of counting with what is no number
            return None
        same = vars(one).keys() == before.keys() and all(map(operator.is_, vars(one).values(), before.values()))
        return rows if same else None

    def is_right(self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None) -> bool:
        """Whether these rows are those of optimizers by themselves, up to 8 of them. Nothing is carried on."""
        chosen = sorted({i * (len(self._optimizers) - 1) // 7 for i in range(8)})
        tried = SharedRows([_copied(optimizer) for optimizer in self._optimizers]) if self._one.host_state_names else self
        rows = tried.rows(times, parameters, rule, rates)
        if rows is None:
            return False
        for i in chosen:
            own_rows = _copied(self._optimizers[i]).rows_of_step(times, parameters, rule)
            for found, expected in zip(rows, own_rows, strict=True):
                own = [value[i] if isinstance(value, np.ndarray) else value for value in found]
                if np.array(own, dtype=float).tobytes() != np.array(expected, dtype=float).tobytes():
                    return False
        return True


def _shared_rows(optimizer: Any) -> list[tuple[Any, int, float, float, int]]:
    """Weights of equal count and multipliers, which share rows: which, the count's slot, multipliers, and the first."""
    kinds: dict[Any, list[int]] = {}
    for k, count in enumerate(optimizer.step_counts.values.tolist()):
        kind = (count, *optimizer.multipliers(k))
        kinds.setdefault(kind if optimizer.uniform_hyper else k, []).append(k)
    return [
        (slice(None) if len(kinds) == 1 else np.array(members), members[0], *optimizer.multipliers(members[0]), members[0])
        for members in kinds.values()
    ]


def _rates(optimizers: Sequence[Any], times: Sequence[int]) -> list[float]:
    """The rates of all trainings, each schedule asked once."""
    first = optimizers[0]
    asked = first.count_for_rate(times)
    found: dict[int, float] = {}
    rates = []
    for optimizer in optimizers:
        schedule = optimizer.lr_scheduler
        if schedule is None:
            rates.append(optimizer.lr)
        else:
            if id(schedule) not in found:
                found[id(schedule)] = optimizer.rate_at(asked)
            rates.append(found[id(schedule)])
    return rates


def _by_training(hyper: np.ndarray, n_trainings: int, stacked: bool) -> np.ndarray:
    """An update's hyper-parameters [..., n_trainings, n_weights, n], as a view of [..., n_trainings * n_weights, n]."""
    *others, rows, width = hyper.shape
    if stacked:
        return hyper.reshape(*others, rows // n_trainings, n_trainings, width).swapaxes(-3, -2)
    return hyper.reshape(*others, n_trainings, rows // n_trainings, width)


def _write_columns(
    table: np.ndarray, parameters: Sequence[Any], rows: Sequence[Sequence[Any]], written: Sequence[Sequence[Any]] | None
) -> None:
    """Write rows as those of `SharedRows` to a table [n_trainings, n_weights, n], where they differ from those in it."""
    written = [[None] * len(row) for row in rows] if written is None else written
    for (where, *_), row, before in zip(parameters, rows, written, strict=True):
        for k, (value, old) in enumerate(zip(row, before, strict=True)):
            if isinstance(value, np.ndarray):
                if value is not old:
                    table[:, where, k] = value[:, None]
            elif isinstance(old, np.ndarray) or value != old:
                table[:, where, k] = value


def _copied(optimizer: Any) -> Any:
    other = object.__new__(type(optimizer))  # copy.copy takes ten times as long
    vars(other).update(vars(optimizer), step_counts=optimizer.step_counts.copy())
    return other


def _joined(values: Sequence[Any], dtype: type) -> Any:
    """One number where all are equal, else an array of them."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.array(values, dtype=dtype)
