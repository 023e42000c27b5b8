"""The tensors of a run as rows of a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..record import Run

__all__ = ["Rows", "row_names"]

MOST_ROWS = 64  # tensors that can be told apart


class Rows:
    """The tensors of a run as rows of a picture: each by itself, or put together by module where they are many.

    Attributes:
        names: of the rows.
        choices: what a control "layer" chooses from: the rows, and behind them the single tensors if these are none.
    """

    def __init__(self, run: Run) -> None:
        keys = row_names(run.parameters)
        self.names = list(dict.fromkeys(keys))
        self._parameters = run.parameters
        numbers = {name: i for i, name in enumerate(self.names)}
        self._row = np.array([numbers[key] for key in keys], dtype=np.int64)
        self._single = len(self.names) == len(keys)
        self.choices = self.names if self._single else [*self.names, *run.parameters]
        self._members = (self._row[:, None] == np.arange(len(self.names))).astype(np.float64)

    def row_of(self, parameter: str) -> int:
        """The row that a parameter is in."""
        return int(self._row[self._parameters.index(parameter)])

    def choice_of(self, parameter: str) -> int:
        """The choice that is this parameter alone."""
        return self._parameters.index(parameter) + (0 if self._single else len(self.names))

    @property
    def rows_of_choices(self) -> list[int]:
        """The row in which each choice is."""
        return [*range(len(self.names)), *([] if self._single else self._row.tolist())]

    def points(self, most: int) -> int:
        """Of how many points each choice's curve may have, `most` where they are few, so that all take the same room."""
        return max(most * MOST_ROWS // max(len(self.choices), MOST_ROWS), most // 8)

    def of_choices(self, quantity: str, values: np.ndarray) -> np.ndarray:
        """As `of`, [n, n_choices, ...]."""
        values = np.asarray(values, dtype=np.float64)
        rows = self.of(quantity, values)
        return rows if self._single else np.concatenate([rows, values], axis=1)

    def of(self, quantity: str, values: np.ndarray) -> np.ndarray:
        """[n, n_parameters, ...] as [n, n_rows, ...]: norms are those of all tensors together, counts sums, others means."""
        values = np.asarray(values, dtype=np.float64)
        if self._single:
            return values
        there = np.isfinite(values)
        if there.all():
            filled, number = values, self._members.sum(axis=0).reshape(-1, *[1] * (values.ndim - 2))
        else:
            filled, number = np.where(there, values, 0.0), self._sums(there)
        if quantity.endswith("_norm"):
            found = np.sqrt(self._sums(filled**2))
        elif quantity.endswith("_absmax") or quantity == "update_ratio":
            order = np.argsort(self._row, kind="stable")
            starts = np.searchsorted(self._row[order], np.arange(len(self.names)))
            found = np.fmax.reduceat(np.where(there, values, -np.inf)[:, order], starts, axis=1)
        else:
            found = self._sums(filled)
            if not quantity.endswith(("_nonfinite", "_histogram")):
                found = found / np.maximum(number, 1)
        return np.where(number > 0, found, np.nan)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.tensordot(values.astype(np.float64, copy=False), self._members, (1, 0)), -1, 1)


def row_names(names: Sequence[str]) -> list[str]:
    """For each name that of its group, such that there are at most 64: its own, its module's, or that of a part of names."""
    if len(names) <= MOST_ROWS:
        return list(names)
    parts = [name.split(".") for name in names]
    deepest = max(map(len, parts))
    for depth in range(deepest - 1, 0, -1):
        keys = [".".join(part[:depth]) if len(part) > depth else ".".join(part[:-1]) or part[0] for part in parts]
        if len(set(keys)) <= MOST_ROWS and len(set(keys)) > 1:
            return keys
    size = -(-len(names) // MOST_ROWS)
    chunks = [names[i : i + size] for i in range(0, len(names), size)]
    return [f"{chunk[0]} ... {chunk[-1]}" if len(chunk) > 1 else chunk[0] for chunk in chunks for _ in chunk]
