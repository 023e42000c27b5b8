"""`tensor_rule`: an update rule of whole tensors, in torch operations."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .checks import parse_function, unpacked_names
from .reduction import Reduction

__all__ = ["TensorRule", "tensor_rule"]


def tensor_rule(
    fn: Callable[..., Any] | None = None,
    *,
    shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
    batched: bool = False,
) -> Any:
    """Make an update rule of whole tensors, `(w, g, state, hyper) -> (new_w, new_state)`, in plain torch operations.

    For rules that are not elementwise: sums over rows, products of matrices. It runs on every device in plain torch, one
    tensor at a time if it is not `batched`. `w` and `g` are in the arithmetic's type, and nothing may be changed in place.

    Args:
        fn: the function. Its first lines unpack `state` and `hyper` as those of a rule do.
        shapes: from the weight's shape to those of the states, by name; states that it leaves out have the weight's.
        batched: `w`, `g` and the states come as stacks, [n, *shape], of tensors that have shape, type and hyper-parameters
            in common, one or more of them. Each is updated independently, and results are stacks, too.

    Example:
        >>> from tristep.kernels import tensor_rule
        >>> @tensor_rule
        ... def normalized(w, g, state, hyper):
        ...     (lr,) = hyper
        ...     return w - lr * g / g.norm(), state
    """
    if fn is None:
        return lambda fn: TensorRule(fn, shapes, batched)
    return TensorRule(fn, shapes, batched)


class TensorRule:
    """An update rule of whole tensors, made by `tensor_rule`.

    Attributes:
        name: the function's name.
        state: names of the state tensors, in order.
        hyper: names of the hyper-parameters, in order.
        batched: whether its function takes stacks of tensors.
    """

    kept: tuple[str, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    skips_nonfinite = False

    def __init__(
        self,
        fn: Callable[..., Any],
        shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]] | None = None,
        batched: bool = False,
    ) -> None:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@tensor_rule takes a plain Python function, got {type(fn).__name__}")
        self.fn = fn
        self.name = fn.__name__
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__
        tree = parse_function(fn)
        arguments = [argument.arg for argument in tree.args.args]
        if len(arguments) != 4:
            raise TypeError(f"tensor rule {self.name!r} takes ({', '.join(arguments)}): it must be (w, g, state, hyper)")
        self.state = unpacked_names(tree, arguments[2], may_return=True)
        self.hyper = unpacked_names(tree, arguments[3])
        self.batched = batched
        self._shapes = shapes
        self._how: tuple[Any, ...] | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of all that is kept from step to step."""
        return self.state

    def shapes(self, shape: torch.Size) -> list[torch.Size]:
        """The states' shapes for a weight of this shape."""
        own = {} if self._shapes is None else self._shapes(shape)
        return [torch.Size(own.get(name, shape)) for name in self.state]

    def __call__(self, w: torch.Tensor, g: torch.Tensor, state: Any, hyper: Any) -> Any:
        """The new weight and states of one tensor."""
        if not self.batched:
            return self.fn(w, g, state, hyper)
        w, state = self.fn(w[None], g[None], tuple(old[None] for old in state), hyper)
        return w[0], tuple(new[0] for new in state)

    def with_shapes(
        self, shapes: Callable[[torch.Size], Mapping[str, Sequence[int]]], how: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> TensorRule:
        """The same rule with states of other shapes; `how`, a function and arguments, makes it again for pickle."""
        other = TensorRule(self.fn, shapes, self.batched)
        other._how = how
        return other

    def __repr__(self) -> str:
        return f"<tensor rule {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._how or self.fn.__qualname__  # by reference, as functions are
