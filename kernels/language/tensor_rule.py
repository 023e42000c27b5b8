"""`tensor_rule`: an update rule of whole tensors, in torch operations."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .checks import parse_function, unpacked_names
from .reduction import Reduction
from .rule import Rule
from .text import OfText


def tensor_rule(
    fn: Callable[..., Any] | None = None,
    *,
    shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
    batched: bool = False,
    cost: Callable[[torch.Size], float] | None = None,
    elementwise: Callable[[torch.Size], bool] | None = None,
    elementwise_rule: Rule | None = None,
    full_precision: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
) -> Any:
    """Make an update rule of whole tensors, `(w, g, state, hyper) -> (new_w, new_state)`, in plain torch operations.

    For rules that are not elementwise: sums over rows, products of matrices. It runs on every device in plain torch, one
    tensor at a time if it is not `batched`. `w` and `g` are in the arithmetic's type, and nothing may be changed in place.

    Args:
        fn: the function. Its first lines unpack `state` and `hyper` as those of a rule do. Keyword-only arguments, which
            must have defaults, are options: `TensorRule.variant` makes a rule with other values of them.
        shapes: from the weight's shape to those of the states, by name; states that it leaves out have the weight's.
        batched: `w`, `g` and the states come as stacks, [n, *shape], of tensors that have shape, type and hyper-parameters
            in common, one or more of them. Each is updated independently, and results are stacks, too.
        cost: about how many operations the update of a tensor of this shape takes, by which tensors are divided among
            ranks; default: as many as it has elements.
        elementwise: whether a tensor of this shape is updated element by element, so that parts of it can be updated apart;
            default: none is.
        elementwise_rule: the rule of these tensors, which runs on every engine; default: this rule itself. Its states are
            the first ones of this rule, and its hyper-parameters are added to those of this one.
        full_precision, nonnegative: as those of `rule`. Only states of the weight's shape are stored in low precision.

    Example:
        >>> from tristep.kernels import tensor_rule
        >>> @tensor_rule
        ... def normalized(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * g / g.norm(), state
    """
    if fn is None:
        return lambda fn: TensorRule(fn, shapes, batched, cost, elementwise, elementwise_rule, full_precision, nonnegative)
    return TensorRule(fn, shapes, batched, cost, elementwise, elementwise_rule, full_precision, nonnegative)


class TensorRule(OfText):
    """An update rule of whole tensors, made by `tensor_rule`.

    Attributes:
        name: the function's name.
        state: names of the state tensors, in order.
        hyper: names of the hyper-parameters, in order.
        own_hyper: those among them that its function takes.
        batched: whether its function takes stacks of tensors.
        full_precision: names of the states that are never stored in low precision.
        nonnegative: names of the states that are never negative.
    """

    kept: tuple[str, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    knows_total = skips_nonfinite = False
    skip_above: str | None = None
    skip_by: str | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        batched: bool = False,
        cost: Callable[[torch.Size], float] | None = None,
        elementwise: Callable[[torch.Size], bool] | None = None,
        elementwise_rule: Rule | None = None,
        full_precision: Sequence[str] = (),
        nonnegative: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@tensor_rule takes a plain Python function, got {type(fn).__name__}")
        self.fn = fn
        self.name = fn.__name__
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        self.batched = batched
        self.full_precision, self.nonnegative = tuple(full_precision), tuple(nonnegative)
        self._shapes, self._cost, self._elementwise = shapes, cost, (elementwise, elementwise_rule)
        self._options = dict(options or {})
        self._made_by: tuple[Any, ...] | None = None
        self.made_of_it: dict[Any, Any] = {}  # what transforms have made of it
        self._defined()

    def read(self) -> None:
        tree, elementwise_rule = parse_function(self.fn), self.elementwise_rule
        arguments = [argument.arg for argument in tree.args.args]
        if len(arguments) != 4:
            raise TypeError(f"tensor rule {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, state, hyper)")
        self.state = unpacked_names(tree, arguments[2], may_return=True)
        self.own_hyper = unpacked_names(tree, arguments[3])
        self.hyper = tuple(dict.fromkeys((*self.own_hyper, *(elementwise_rule.hyper if elementwise_rule else ()))))
        for argument in ("full_precision", "nonnegative"):
            if unknown := [name for name in getattr(self, argument) if name not in self.state]:
                raise TypeError(
                    f"{argument}={getattr(self, argument)!r}: tensor rule {self.name!r} has no state {unknown[0]!r}"
                )
        known = [argument.arg for argument in tree.args.kwonlyargs]
        if unknown := [name for name in self._options if name not in known]:
            raise TypeError(f"rule {self.name!r} has no option {unknown[0]!r}: it has {', '.join(known) or 'none'}")
        self._function, self._n_hyper = partial(self.fn, **self._options), len(self.own_hyper)
        states = () if elementwise_rule is None else elementwise_rule.state
        if states != self.state[: len(states)] or (elementwise_rule is not None and elementwise_rule.reductions):
            raise TypeError(
                f"elementwise_rule={elementwise_rule!r} of {self.name!r}: its states must be the first ones of "
                f"({', '.join(self.state)}), and it must have no reductions"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of all that is kept from step to step."""
        return self.state

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The states' shapes for a weight of this shape."""
        own = {} if self._shapes is None else self._shapes(shape)
        return [torch.Size(own.get(name, shape)) for name in self.state]

    def narrows(self, shape: torch.Size) -> list[bool]:
        """Which states of a weight of this shape may be stored in low precision."""
        pairs = zip(self.state, self.shapes(shape), strict=True)
        return [own == shape and name not in self.full_precision for name, own in pairs]

    def cost(self, shape: torch.Size) -> float:
        """About how many operations the update of a weight of this shape takes."""
        return float(shape.numel() if self._cost is None else self._cost(shape))

    def elementwise(self, shape: torch.Size) -> bool:
        """Whether parts of a weight of this shape can be updated apart."""
        decides, _ = self._elementwise
        return decides is not None and decides(shape)

    @property
    def elementwise_rule(self) -> Rule | None:
        """The rule of the tensors that are updated element by element."""
        return self._elementwise[1]

    def rule_for(self, shape: torch.Size) -> Rule | TensorRule:
        """The rule that updates a weight of this shape: itself, or its elementwise one."""
        own = self.elementwise_rule
        return own if own is not None and self.elementwise(shape) else self

    def __call__(self, w: torch.Tensor, g: torch.Tensor, state: Any, hyper: Any, *sums: Any) -> Any:
        """The new weight and states of one tensor; `sums` is what its reductions have found, if it has any."""
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
        """What the function gives, with the values of its options, of a tensor or, if it is batched, of a stack.

        Raises:
            ValueError: it has not the shape of the weight and its states.
        """
        new, kept = self._function(w, g, state, hyper[: self._n_hyper])
        kept = tuple(kept)
        if len(kept) != len(state):
            raise ValueError(f"tensor rule {self.name!r} has returned {len(kept)} states: it has {len(state)}")
        for name, value, before in zip(("w", *self.state), (new, *kept), (w, *state), strict=False):
            if getattr(value, "shape", ()) != before.shape:
                raise ValueError(
                    f"tensor rule {self.name!r} has returned {name} with shape {tuple(getattr(value, 'shape', ()))}: its "
                    f"shape is {tuple(before.shape)}"
                )
        return new, kept

    def variant(
        self,
        made_by: tuple[Callable[..., Any], tuple[Any, ...]],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        cost: Callable[[torch.Size], float] | None = None,
        elementwise: Callable[[torch.Size], bool] | None = None,
        **options: Any,
    ) -> TensorRule:
        """The same rule with states of other shapes, or with these options.

        Args:
            made_by: a function and arguments, which make it again for pickle. As rules are compared by identity, the
                function must return the same rule for the same arguments.
            shapes, cost, elementwise: as those of `tensor_rule`; None means this rule's.
            **options: values of its function's keyword-only arguments.
        """
        decides, own = self._elementwise
        how = shapes or self._shapes, self.batched, cost or self._cost, elementwise or decides, own
        other = TensorRule(self.fn, *how, self.full_precision, self.nonnegative, options)
        other._made_by = made_by
        other.read()
        return other

    def __repr__(self) -> str:
        return f"<tensor rule {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._made_by or self.fn.__qualname__  # by reference, as functions are
