"""`tensor_rule`: define an update rule of whole tensors, in torch operations."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..messages import instance, there_are
from .checks import check_names, check_states_returned, parse_function, unpacked_names
from .reduction import Reduction
from .rule import Limit, Rule
from .text import OfText


def tensor_rule(
    fn: Callable[..., Any] | None = None,
    *,
    shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
    batched: bool = False,
    cost: Callable[..., float] | None = None,
    elementwise: Callable[[torch.Size], bool] | None = None,
    elementwise_rule: Rule | None = None,
    full_precision: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
    never_raises: bool = False,
) -> Any:
    """Make an update rule of whole tensors from a function `(w, g, state, hyper) -> (new_w, new_state)` in torch operations.

    Use it for rules that are not elementwise, with sums over rows or products of matrices. It runs on every device in plain
    torch, one tensor at a time unless it is `batched`. `w` and `g` are float64 for float64 weights, else float32. The
    function must return new tensors: one that changes a weight or a state in place is refused at its first step.

    A step computes the new values of all tensors before it writes the first, so that a function that raises, such as
    `torch.linalg.svd` for NaN, changes nothing. docs/rules.md has an example.

    Args:
        fn: the function. Its first lines unpack `state` and `hyper` into names. Keyword-only arguments, which must have
            defaults, are options: `TensorRule.variant` makes a rule with other values.
        shapes: function from the weight's shape to a mapping from names of states to their shapes. States that are not in
            the mapping have the weight's shape. Default: all have it.
        batched: if True, `w`, `g` and the states are stacks [n, *shape], n >= 1, of tensors with equal shape, dtype and
            hyper-parameters. The function updates each independently and returns stacks.
        cost: function from a weight's shape to the approximate number of operations of its update, used to divide tensors
            among ranks. Default: the number of elements.
        elementwise: function from a weight's shape to whether it is updated element by element, so that shards can be
            updated separately. Default: no weight is.
        elementwise_rule: elementwise rule for such weights, which runs on every engine; default: this rule. Its states must
            be the first ones of this rule; its hyper-parameters are added to this rule's.
        full_precision: names of states that are never stored in low precision; nor are states of another shape than the
            weight's.
        nonnegative: names of states that are never negative, so that 8 bits can resolve more values.
        never_raises: whether the function raises for no values of the tensors. Its results are then written at once, and
            a step needs less memory: room for the new values of one tensor, or stack, instead of all. Default: False.

    Returns:
        The `TensorRule`, or, if only keyword arguments are given, a decorator that makes it.

    Raises:
        TypeError: the function has other arguments, or a name in `full_precision` or `nonnegative` is no state.

    Example:
        >>> from tristep.kernels import tensor_rule
        >>> @tensor_rule
        ... def normalized(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * g / g.norm(), state
    """
    how = shapes, batched, cost, elementwise, elementwise_rule, full_precision, nonnegative, None, never_raises
    return TensorRule(fn, *how) if fn is not None else lambda fn: TensorRule(fn, *how)


class TensorRule(OfText):
    """An update rule of whole tensors, made by `tensor_rule`.

    Attributes:
        name: the function's name.
        state: names of the state tensors, in order.
        hyper: names of the hyper-parameters, in order.
        own_hyper: names of the hyper-parameters that its function takes; the others are for the elementwise rule.
        keys: names of the hyper-parameters that are keys of `tl.normal` in its elementwise rule.
        batched: whether its function takes stacks of tensors.
        full_precision: names of the states that are never stored in low precision.
        nonnegative: names of the states that are never negative.
        never_raises: whether its function raises for no values of the tensors.
    """

    never_raises = False
    kept: tuple[str, ...] = ()
    parts: str | None = None
    reductions: tuple[Reduction, ...] = ()
    starts_as_weight: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()

    def __init__(
        self,
        fn: Callable[..., Any],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        batched: bool = False,
        cost: Callable[..., float] | None = None,
        elementwise: Callable[[torch.Size], bool] | None = None,
        elementwise_rule: Rule | None = None,
        full_precision: Sequence[str] = (),
        nonnegative: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        never_raises: bool = False,
    ) -> None:
        instance("the function of @tensor_rule", fn, types.FunctionType, "a plain Python function")
        self.fn = fn
        self.name = fn.__name__
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        self.batched = batched
        self.full_precision, self.nonnegative = tuple(full_precision), tuple(nonnegative)
        self._shapes, self._cost, self._elementwise = shapes, cost, (elementwise, elementwise_rule)
        self._options, self.never_raises = dict(options or {}), never_raises
        self._made_by: tuple[Any, ...] | None = None
        self.made_of_it: dict[Any, Any] = {}  # rules made from this one by transforms
        self._defined()

    def read(self) -> None:
        """Read the attributes from the source text and check them."""
        tree, elementwise_rule = parse_function(self.fn), self.elementwise_rule
        self._read_arguments(tree)
        self.hyper = tuple(dict.fromkeys((*self.own_hyper, *(elementwise_rule.hyper if elementwise_rule else ()))))
        for argument in ("full_precision", "nonnegative"):
            if unknown := [name for name in getattr(self, argument) if name not in self.state]:
                raise TypeError(
                    f"{argument}={getattr(self, argument)!r}: tensor rule {self.name!r} has no state {unknown[0]!r}"
                )
        self.keys = elementwise_rule.keys if elementwise_rule else ()
        options = [argument.arg for argument in tree.args.kwonlyargs]
        if unknown := [name for name in self._options if name not in options]:
            raise TypeError(f"rule {self.name!r} has no option {unknown[0]!r}.{there_are(unknown[0], options)}")
        self._function, self._n_hyper = partial(self.fn, **self._options), len(self.own_hyper)
        states = () if elementwise_rule is None else elementwise_rule.state
        if states != self.state[: len(states)] or (elementwise_rule is not None and elementwise_rule.reductions):
            raise TypeError(
                f"elementwise_rule={elementwise_rule!r} of {self.name!r}: its states must be the first ones of "
                f"({', '.join(self.state)}), and it must have no reductions"
            )

    def _read_arguments(self, tree: ast.FunctionDef) -> None:
        """Read the names of the states and of the function's hyper-parameters."""
        arguments = [argument.arg for argument in tree.args.args]
        if len(arguments) != 4:
            raise TypeError(f"tensor rule {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, state, hyper)")
        self.state = unpacked_names(tree, arguments[2], may_return=True)
        self.own_hyper = unpacked_names(tree, arguments[3])
        check_names(tree, *self.state, *self.own_hyper)
        check_states_returned(tree, arguments[2], self.state)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors; a rule of whole tensors has no per-tensor states."""
        return self.state

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """Return the shapes of the states for a weight of this shape."""
        special = {} if self._shapes is None else self._shapes(shape)
        return [torch.Size(special.get(name, shape)) for name in self.state]

    def narrows(self, shape: torch.Size) -> list[bool]:
        """Return for each state whether it may be stored in low precision, for a weight of this shape."""
        pairs = zip(self.state, self.shapes(shape), strict=True)
        return [state_shape == shape and name not in self.full_precision for name, state_shape in pairs]

    def cost(self, shape: torch.Size, **hyper: float) -> float:
        """Return the approximate number of operations that the update of a weight of this shape takes.

        Args:
            shape: the weight's shape.
            **hyper: hyper-parameters on which it depends, if the rule's function `cost` takes them.
        """
        return float(shape.numel() if self._cost is None else self._cost(shape, **hyper))

    def elementwise(self, shape: torch.Size) -> bool:
        """Return whether a weight of this shape is updated element by element, so that shards can be updated separately."""
        decides, _ = self._elementwise
        return decides is not None and decides(shape)

    @property
    def elementwise_rule(self) -> Rule | None:
        """The rule for weights that are updated element by element, or None."""
        return self._elementwise[1]

    def rule_for(self, shape: torch.Size) -> Rule | TensorRule:
        """Return the rule that updates a weight of this shape: this rule or its elementwise rule."""
        elementwise = self.elementwise_rule
        return elementwise if elementwise is not None and self.elementwise(shape) else self

    def __call__(self, w: torch.Tensor, g: torch.Tensor, state: Any, hyper: Any, *sums: Any) -> Any:
        """Return the new weight and states of one tensor; `sums` are the results of the rule's reductions, if it has any."""
        if (other := self.rule_for(w.shape)) is not self:
            values, n = dict(zip(self.hyper, hyper, strict=True)), len(other.state)
            w, new = other(w, g, state[:n], tuple(values[name] for name in other.hyper), *sums)
            return w, (*new, *state[n:])
        if not self.batched:
            return self.compute(w, g, state, hyper, *sums)
        w, state = self.compute(w[None], g[None], tuple(old[None] for old in state), hyper, *sums)
        return w[0], tuple(new[0] for new in state)

    def compute(
        self, w: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], hyper: Sequence[Any], *sums: Any
    ) -> Any:
        """Call the function, with this rule's options, on a tensor or, if the rule is batched, on a stack.

        Raises:
            ValueError: the number of returned states, or the shape of a returned tensor, is wrong.
        """
        new_weight, new_states = self._computed(w, g, state, hyper[: self._n_hyper])
        new_states = tuple(new_states)
        if len(new_states) != len(state):
            raise ValueError(f"tensor rule {self.name!r} has returned {len(new_states)} states: it has {len(state)}")
        for name, value, before in zip(("w", *self.state), (new_weight, *new_states), (w, *state), strict=False):
            if getattr(value, "shape", ()) != before.shape:
                raise ValueError(
                    f"tensor rule {self.name!r} has returned {name} with shape {tuple(getattr(value, 'shape', ()))}: its "
                    f"shape is {tuple(before.shape)}"
                )
        return new_weight, new_states

    def _computed(self, w: torch.Tensor, g: torch.Tensor, state: Sequence[torch.Tensor], hyper: Sequence[Any]) -> Any:
        return self._function(w, g, state, hyper)

    def variant(
        self,
        made_by: tuple[Callable[..., Any], tuple[Any, ...]],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        cost: Callable[..., float] | None = None,
        elementwise: Callable[[torch.Size], bool] | None = None,
        **options: Any,
    ) -> TensorRule:
        """Return a copy of this rule with other options, shapes of states or cost.

        Args:
            made_by: function and its arguments that make the same rule again, for pickle. As rules are compared by identity,
                the function must return the same object for the same arguments.
            shapes: function from the weight's shape to the states' shapes, as for `tensor_rule`; default: this rule's.
            cost: function from the weight's shape to the cost of its update; default: this rule's.
            elementwise: function from the weight's shape to whether it is updated elementwise; default: this rule's.
            **options: values for the keyword-only arguments of the rule's function.

        Raises:
            TypeError: the function has no such keyword-only argument.
        """
        variant = object.__new__(type(self))
        vars(variant).update(vars(self))
        variant._shapes, variant._cost = shapes or self._shapes, cost or self._cost
        variant._elementwise = elementwise or self._elementwise[0], self.elementwise_rule
        variant._options, variant._made_by, variant.made_of_it = options, made_by, {}
        variant.read()
        return variant

    def __repr__(self) -> str:
        return f"<tensor rule {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._made_by or self.fn.__qualname__  # by reference, as functions are
