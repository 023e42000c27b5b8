"""SharedRows: hyper-parameters of several optimizers, computed as arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels import Rule
from ..optimizer import RuleOptimizer

__all__ = ["NUMBERS", "SharedRows"]

NUMBERS = (float, int)
SAME = ("begin_num_update", "lookahead", "num_update")


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
                setattr(self._one, name, _joined(values, float if name in ("lr", "wd") else object))

    def rows(
        self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None = None
    ) -> list[list[Any]] | None:
        """As `rows_of_step` of each, with arrays of one number for each where they differ; None where it cannot be done."""
        one = self._one
        one.num_update = self._optimizers[0].num_update
        if rates is not None:
            one.lr = _joined(rates, float)
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
        one.num_update = _NoNumber()
        before = dict(vars(one))
        try:
            rows = [
                one.row(t, one.lr * lr_mult, one.wd * wd_mult, index, rule)
                for t, (*_, lr_mult, wd_mult, index) in zip(times, parameters, strict=True)
            ]
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


def _copied(optimizer: Any) -> Any:
    other = object.__new__(type(optimizer))  # copy.copy takes ten times as long
    vars(other).update(vars(optimizer), step_counts=optimizer.step_counts.copy())
    return other


def _joined(values: Sequence[Any], dtype: type) -> Any:
    """One number where all are equal, else an array of them."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.array(values, dtype=dtype)
