"""`rule`: define an elementwise update rule, a few lines of arithmetic on the values of one element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .checks import check_return, check_states_returned, names_read, unchanged_states
from .reduction import ElementwiseFunction, Reduction


def rule(
    fn: Callable[..., Any] | None = None,
    *,
    reduction: Reduction | None = None,
    full_precision: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
) -> Any:
    """Make an elementwise update rule from a function `(w, g, state, hyper) -> (new_w, new_state)`.

    `w` is the weight and `g` the gradient, already multiplied by `rescale_grad`, both in float32, or in float64 for float64
    weights. The function's first lines unpack `state` and `hyper`; the names used there become the names of the state
    tensors and of the hyper-parameters. A rule without state returns `state` unchanged. The body consists of assignments
    and one final `return`. It may use `+ - * /`, comparisons, `& | ~` on the results of comparisons, the functions of `tl`,
    and functions marked with `jit`. Use `tl.where` in place of `if`. `tl` has `abs`, `ceil`, `cos`, `exp`, `exp2`, `floor`,
    `log`, `log2`, `rsqrt`, `sigmoid`, `sin` and `sqrt` of one value, `maximum` and `minimum` of two, `clamp(x, low, high)`,
    `where(condition, a, b)` and `normal(key0, key1, index)`. In arithmetic a comparison counts as 1 or 0.

    `normal` draws a standard normal number for each element. Its keys are hyper-parameters, whole numbers of any size such
    as a seed and the update count; an optimizer makes of them, and of the parameter's index, keys for each tensor, so that
    tensors get different numbers. docs/rules.md writes rules of papers.

    Args:
        fn: the function. It may have two more arguments, recognized by name: `sums`, the reduction's results for this
            tensor, and `index`, the element's index in its tensor, for drawing random numbers.
        reduction: a reduction that runs before the rule, for rules that need norms: `@rule(reduction=norms)`. Default: none.
        full_precision: names of states that are never stored in low precision: weights, sums over all steps, to which a
            single step adds too little, and states that nearly cancel each other.
        nonnegative: names of states that are never negative, such as averages of squares; 8 bits resolve more values then.

    Returns:
        The `Rule`, or, if only keyword arguments are given, a decorator that makes it.

    Raises:
        TypeError: the function has another form or uses a name that backends do not know.

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


class Limit(NamedTuple):
    """What a rule does with the sum of squares of all gradients; see `transforms.limited`.

    Attributes:
        skips: whether it skips steps.
        hyper: the names of its hyper-parameters: the limit of the norm and, if it skips, of the sum.
    """

    skips: bool
    hyper: tuple[str, ...]


class Rule(ElementwiseFunction):
    """An update rule, made by `rule`.

    Attributes:
        state: names of the state tensors, in order.
        kept: names of the per-tensor states, one number for each tensor, and of states of rows, columns or slices, in order.
        slots: names of states and per-tensor states together.
        hyper: names of the hyper-parameters: first those that the rule unpacks, then those that only its reductions need.
        keys: names of the hyper-parameters that are keys of `tl.normal`, in the order of `hyper`.
        reduction: the reduction that runs before it, or None.
        changed: names of the states that it changes; backends do not write the others.
        used: names of the states that it reads or changes; the others have no effect.
        full_precision: names of the states that are never stored in low precision.
        nonnegative: names of the states that are never negative.
        starts_as_weight: names of the states that must start equal to the weight, not from zeros.
        limits: the `Limit` of each of the rule's first reductions that is the sum of squares of all gradients.
        parts: what its means are over: "matrix" for rows and columns, "slice", or None if it has none.
    """

    starts_as_weight: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: Reduction | None = None,
        full_precision: Sequence[str] = (),
        nonnegative: Sequence[str] = (),
    ) -> None:
        self.full_precision, self.nonnegative = tuple(full_precision), tuple(nonnegative)
        self.made_of_it: dict[Any, Any] = {}  # rules made from this one by transforms and metrics.py
        super().__init__(fn, reduction)

    def read(self) -> None:
        """Read the attributes from the source text and check them."""
        super().read()
        for argument, names in {"full_precision": self.full_precision, "nonnegative": self.nonnegative}.items():
            if unknown := [name for name in names if name not in self.state]:
                raise TypeError(f"{argument}={names!r}: rule {self.name!r} has no state {unknown[0]!r}")
        argument = self.tree.args.args[2].arg
        check_return(self.tree, argument, self.state)
        check_states_returned(self.tree, argument, self.state)
        unchanged = unchanged_states(self.tree, argument, self.state)
        read = names_read(self.tree, self.state)
        self.changed = tuple(name for name in self.state if name not in unchanged)
        self.used = tuple(name for name in self.state if name in self.changed or name in read)
        self.kept = tuple(name for stage in self.reductions for name in stage.kept)
        self._kept_scopes = tuple(scope for stage in self.reductions for scope in stage.own_scopes[: len(stage.kept)])
        scopes = set(self.vectors)
        if "slice" in scopes and len(scopes) > 1:
            raise TypeError(f"rule {self.name!r} has means over slices and over rows or columns: it must have either")
        self.parts = ("slice" if "slice" in scopes else "matrix") if scopes else None
        self.slots = self.state + self.kept
        needed = (name for stage in self.reductions for name in (*stage.own_hyper, *stage.finish_hyper))
        self.hyper = tuple(dict.fromkeys((*self.own_hyper, *needed)))
        keys = {name for each in (self, *self.reductions) for name in each.own_keys}
        self.keys = tuple(name for name in self.hyper if name in keys)
        for stage in self.reductions:
            if unknown := [name for name in stage.state if name not in self.state]:
                raise TypeError(
                    f"reduction {stage.name!r} unpacks {unknown[0]!r} from state: rule {self.name!r} has only "
                    f"{', '.join(self.state) or 'none'}"
                )
        if len(set(self.kept)) < len(self.kept) or set(self.kept) & set(self.state):
            raise TypeError(f"rule {self.name!r}: the names of its states and per-tensor states must all differ")

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """Return the shapes of states and per-tensor states for a weight of this shape, in the order of `slots`."""
        return [shape] * len(self.state) + [part_shape(scope, shape) for scope in self._kept_scopes]

    def cost(self, shape: torch.Size) -> float:
        """Return the relative cost of updating a weight of this shape: its number of elements."""
        return float(shape.numel())

    def rule_for(self, shape: torch.Size) -> Rule:
        """Return the rule that updates a weight of this shape: this rule. A `TensorRule` may choose another."""
        return self

    def __repr__(self) -> str:
        return f"<rule {self.name}: state ({', '.join(self.slots)}), hyper ({', '.join(self.hyper)})>"


def part_shape(scope: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a state with a number for each part, of this scope, of a weight of this shape."""
    if scope == "tensor":
        return torch.Size()
    if scope == "slice":
        return torch.Size([*shape[:1], *[1] * len(shape[1:])])
    return torch.Size([*shape[:-1], 1] if scope == "row" else [*shape[:-2], 1, shape[-1]])
