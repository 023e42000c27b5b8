"""`rule`: an update rule, a few lines of arithmetic on the values of one element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .checks import check_return, names_read, unchanged_states
from .reduction import ElementwiseFunction, Reduction


def rule(
    fn: Callable[..., Any] | None = None,
    *,
    reduction: Reduction | None = None,
    full_precision: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
) -> Any:
    """Make an update rule of a function `(w, g, state, hyper) -> (new_w, new_state)`.

    `w` is the weight, `g` the gradient, already multiplied by `rescale_grad`, both in the arithmetic's type
    (float32, or float64 for float64 weights). The function's first lines unpack `state` and `hyper`; the names
    used there become the names of the state tensors and of the hyper-parameters. A rule without state returns
    `state` as it came. The body is assignments and, last, one `return`. It may use `+ - * /`, comparisons, `& | ~` on
    what these give, the functions of `tl`, and other functions marked with `jit`; for `if` there is `tl.where`.

    Args:
        fn: the function. It may have two more arguments, known by their names: `sums`, what the reduction gave for
            this tensor, and `index`, the element's number in its tensor, which random numbers are drawn by.
        reduction: the reduction that runs before the rule, for rules that need norms: `@rule(reduction=norms)`.
        full_precision: names of states that are never stored in low precision: those that are weights, or sums over all
            steps, to which a single step adds too little, or that nearly cancel each other.
        nonnegative: names of states that are never negative, such as averages of squares: 8 bits then resolve more values.

    Raises:
        TypeError: the function is not of that form or uses a name that backends do not know.

    Example:
        >>> import tristep
        >>> from tristep.kernels import tl
        >>> @tristep.rule
        ... def sign_descent(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * tl.where(g > 0.0, 1.0, -1.0), state
        >>> sign_descent.state, sign_descent.hyper
        ((), ('lr',))
    """
    make = partial(Rule, reduction=reduction, full_precision=full_precision, nonnegative=nonnegative)
    return make if fn is None else make(fn)


class Rule(ElementwiseFunction):
    """An update rule, made by `rule`.

    Attributes:
        state: names of the state tensors, in order.
        kept: names of the per-tensor states, one number for each tensor, in order.
        slots: names of all that is kept from step to step, states and per-tensor states.
        hyper: names of the hyper-parameters: those that it unpacks, then those that only its reductions need.
        reduction: the reduction that runs before it, or None.
        changed: names of the states that it changes; backends do not write the others.
        used: names of the states that it reads or changes; the others may as well not be there.
        full_precision: names of the states that are never stored in low precision.
        nonnegative: names of the states that are never negative.
        knows_total: whether its first reduction is the sum of squares of the gradient over all tensors, which it gets last.
        skips_nonfinite: whether nothing is to be kept either of a step for which that sum is not finite.
        skip_above: the hyper-parameter above which that sum counts as not finite, if there is one.
        skip_by: the per-tensor state of its first reduction, the same for all tensors, that is 0 where nothing is to be
            kept, if that tells instead. What the first reduction itself keeps of such a step is up to its `finish`.
    """

    knows_total = skips_nonfinite = False
    skip_above: str | None = None
    skip_by: str | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: Reduction | None = None,
        full_precision: Sequence[str] = (),
        nonnegative: Sequence[str] = (),
    ) -> None:
        self.full_precision, self.nonnegative = tuple(full_precision), tuple(nonnegative)
        self.made_of_it: dict[Any, Any] = {}  # by transforms and metrics.py
        super().__init__(fn, reduction)

    def read(self) -> None:
        super().read()
        for argument, names in {"full_precision": self.full_precision, "nonnegative": self.nonnegative}.items():
            if unknown := [name for name in names if name not in self.state]:
                raise TypeError(f"{argument}={names!r}: rule {self.name!r} has no state {unknown[0]!r}")
        argument = self.tree.args.args[2].arg
        check_return(self.tree, argument, self.state)
        as_they_came = unchanged_states(self.tree, argument, self.state)
        read = names_read(self.tree, self.state)
        self.changed = tuple(name for name in self.state if name not in as_they_came)
        self.used = tuple(name for name in self.state if name in self.changed or name in read)
        self.kept = tuple(name for stage in self.reductions for name in stage.kept)
        self.slots = self.state + self.kept
        needed = (name for stage in self.reductions for name in (*stage.own_hyper, *stage.finish_hyper))
        self.hyper = tuple(dict.fromkeys((*self.own_hyper, *needed)))
        for stage in self.reductions:
            if unknown := [name for name in stage.state if name not in self.state]:
                raise TypeError(
                    f"reduction {stage.name!r} unpacks {unknown[0]!r} from state: rule {self.name!r} has only "
                    f"{', '.join(self.state) or 'none'}"
                )
        if len(set(self.kept)) < len(self.kept) or set(self.kept) & set(self.state):
            raise TypeError(f"rule {self.name!r}: the names of its states and per-tensor states must all differ")

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The shapes of all that is kept of a weight of this shape."""
        return [shape] * len(self.state) + [torch.Size()] * len(self.kept)

    def cost(self, shape: torch.Size) -> float:
        """About how much the update of a weight of this shape costs, relative to other weights: its number of elements."""
        return float(shape.numel())

    def rule_for(self, shape: torch.Size) -> Rule:
        """The rule that updates a weight of this shape: itself; others than `TensorRule` have no choice."""
        return self

    def __repr__(self) -> str:
        return f"<rule {self.name}: state ({', '.join(self.slots)}), hyper ({', '.join(self.hyper)})>"
