"""`metric`: values that are reduced over each tensor during its update."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from .function import Function


def metric(**by: str) -> Callable[[Callable[..., Any]], Metric]:
    """Make a metric of a function `(w, g, new_w) -> (a, b, ...)`, whose values are reduced over each tensor.

    It is written like a rule, and changes nothing. It is called for each element with the weight from before the update,
    the gradient, already multiplied by `rescale_grad`, and the new weight, all three as the rule has them, in the
    arithmetic's type: what a rule does to the gradient, such as clipping, and what storing does to the weight, comes after.

    Args:
        **by: the names of the values that the function returns, in order, each with "sum", for its sum over the tensor, or
            "max", for the largest of values that are 0 or more, NaN if one of them is that.

    Raises:
        TypeError: the function is not of that form or uses a name that backends do not know.
        ValueError: neither "sum" nor "max".

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
        names: of its values, in order.
        by: how each is gathered, "sum" or "max".
        counts_unchanged: whether the last value is not the function's, but how many elements are stored as they were, which
            backends count as they store; see `tristep.kernels.metrics.weight_unchanged`.
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
