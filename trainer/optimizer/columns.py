"""`Column`: one number for each of several parameters, in arithmetic that has the bits of Python's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

# IEEE 754 prescribes their results, so they are those of Python's float64 numbers. It does not prescribe those of powers,
# and a comparison would decide for all parameters together.
_EXACT = (np.add, np.subtract, np.multiply, np.true_divide, np.negative, np.positive, np.absolute)


class Column(np.ndarray):
    """A float64 array [n] with exact arithmetic only: other operations might differ from those of n numbers, and raise.

    Allowed are `+ - * /`, signs and `abs`. Division by 0 raises FloatingPointError; single numbers raise ZeroDivisionError.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc not in _EXACT or method != "__call__" or kwargs:
            raise TypeError(f"{ufunc.__name__} of the numbers of several parameters")
        values = [each.view(np.ndarray) if isinstance(each, Column) else each for each in inputs]
        with np.errstate(all="ignore"):
            if ufunc is np.true_divide and not np.all(values[1]):
                raise FloatingPointError("division by zero")
            return ufunc(*values).view(Column)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"{function.__name__} of the numbers of several parameters")


def column(values: list[float]) -> Any:
    """Return the numbers as a `Column`, or the number if all are equal."""
    first = values[0]
    return first if all(value == first for value in values) else np.array(values, dtype=np.float64).view(Column)


def table_of(row: list[Any], n: int) -> Any:
    """Return a row of numbers and columns of `n` parameters as a float64 array [n, len(row)], or itself without columns."""
    if not any(isinstance(value, Column) for value in row):
        return row
    table = np.empty((n, len(row)))
    for k, value in enumerate(row):
        table[:, k] = value.view(np.ndarray) if isinstance(value, Column) else value
    return table
