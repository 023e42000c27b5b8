"""`metric`: define values that are reduced over each tensor during its update, such as norms."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from .function import Function
from .kinds import COMPARISON, NUMBER


def metric(**by: str) -> Callable[[Callable[..., Any]], Metric]:
    """Return a decorator that makes a metric from a function `(w, g, new_w) -> (a, b, ...)` of one element.

    The function is written like a rule. It gets the weight before the update, the gradient, already multiplied by
    `rescale_grad`, and the new weight, in the arithmetic's type. So it sees the gradient before the rule changes it, by
    clipping for example, and the new weight before it is rounded for storage. Its values are reduced over each tensor.

    Args:
        **by: for each value that the function returns, in order, its name and how it is reduced over a tensor: "sum", or
            "max", the largest of 0 and the values, which is NaN if any value is NaN.

    Raises:
        TypeError: the function has another form or uses a name that backends do not know.
        ValueError: a reduction is neither "sum" nor "max".

    Example:
        >>> from tristep.kernels import metric, tl
        >>> @metric(grown="sum", longest_step="max")
        ... def growth(w, g, new_w):
        ...     return tl.where(tl.abs(new_w) > tl.abs(w), 1.0, 0.0), tl.abs(new_w - w)
        >>> growth.names
        ('grown', 'longest_step')
    """
    return lambda fn: Metric(fn, by)


class Metric(Function):
    """Values of each tensor's update, made by `metric`.

    Attributes:
        names: names of its values, in order.
        by: how each value is reduced, "sum" or "max".
        counts_unchanged: whether a last value, which the function does not return, is the number of elements whose stored
            value did not change; backends count them. See `tristep.kernels.metrics.weight_unchanged`.
    """

    def __init__(self, fn: Callable[..., Any], by: Mapping[str, str], counts_unchanged: bool = False) -> None:
        self.counts_unchanged, self.names, self.by = counts_unchanged, tuple(by), tuple(by.values())
        super().__init__(fn)

    def read(self) -> None:
        super().read()
        arguments = [argument.arg for argument in self.tree.args.args]
        if len(arguments) != 3:
            raise TypeError(f"metric {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, new_w)")
        returned = self.tree.body[-1].value  # type: ignore[attr-defined]
        if not isinstance(returned, ast.Tuple) or not self.by or len(returned.elts) != len(self.by) - self.counts_unchanged:
            raise TypeError(
                f"metric {self.name!r} returns {ast.unparse(returned)!r}: it must end by returning a tuple of as many "
                f'values as @metric({", ".join(self.names)}) names, as in `return (g * g,)` after @metric(square="sum")'
            )
        for name, how in zip(self.names, self.by, strict=True):
            if how not in ("sum", "max"):
                raise ValueError(f"{name}={how!r} of metric {self.name!r}: must be 'sum' or 'max'")
        self.read_kinds([NUMBER] * 3, (COMPARISON,))
