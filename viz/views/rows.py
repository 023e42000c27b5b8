"""Rows: aggregates the quantities of a run's tensors into at most 64 rows of a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..record import Run

__all__ = ["Rows", "row_names"]

MOST_ROWS = 64  # more rows could not be told apart


class Rows:
    """The rows of a picture of a run's tensors: a row per tensor, or per module if there are more than 64 tensors.

    `choices` are the choices of a control "layer": the rows, followed by the single tensors if the rows are modules.
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
        """Return the number of the row that contains the parameter."""
        return int(self._row[self._parameters.index(parameter)])

    def choice_of(self, parameter: str) -> int:
        """Return the index in `choices` of this parameter alone."""
        return self._parameters.index(parameter) + (0 if self._single else len(self.names))

    @property
    def rows_of_choices(self) -> list[int]:
        """The number of the row that contains each choice."""
        return [*range(len(self.names)), *([] if self._single else self._row.tolist())]

    def points(self, most: int) -> int:
        """Return the largest number of points for each choice's curve: `most` for up to 64 choices, fewer for more."""
        return max(most * MOST_ROWS // max(len(self.choices), MOST_ROWS), most // 8)

    def of_choices(self, quantity: str, values: np.ndarray) -> np.ndarray:
        """Aggregate values [n, n_parameters, ...] of a quantity for each choice: [n, n_choices, ...]; see `of`."""
        values = np.asarray(values, dtype=np.float64)
        rows = self.of(quantity, values)
        return rows if self._single else np.concatenate([rows, values], axis=1)

    def of(self, quantity: str, values: np.ndarray) -> np.ndarray:
        """Aggregate values [n, n_parameters, ...] of a quantity for each row: [n, n_rows, ...].

        Norms become the norm over all tensors of the row; largest values and update ratios the maximum; counts and
        histograms the sum; other quantities the mean. Values that are not finite are left out; NaN where all are.
        """
        values = np.asarray(values, dtype=np.float64)
        if self._single:
            return values
        finite = np.isfinite(values)
        if finite.all():
            filled, number = values, self._members.sum(axis=0).reshape(-1, *[1] * (values.ndim - 2))
        else:
            filled, number = np.where(finite, values, 0.0), self._sums(finite)
        if quantity.endswith("_norm"):
            aggregates = np.sqrt(self._sums(filled**2))
        elif quantity.endswith("_absmax") or quantity == "update_ratio":
            order = np.argsort(self._row, kind="stable")
            starts = np.searchsorted(self._row[order], np.arange(len(self.names)))
            aggregates = np.fmax.reduceat(np.where(finite, values, -np.inf)[:, order], starts, axis=1)
        else:
            aggregates = self._sums(filled)
            if not quantity.endswith(("_nonfinite", "_histogram")):
                aggregates = aggregates / np.maximum(number, 1)
        return np.where(number > 0, aggregates, np.nan)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.tensordot(values.astype(np.float64, copy=False), self._members, (1, 0)), -1, 1)


def row_names(names: Sequence[str]) -> list[str]:
    """Return the row name of each parameter, with at most 64 different ones.

    Up to 64 parameters keep their names. More are grouped by module, or else by their order: "first ... last".
    """
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
