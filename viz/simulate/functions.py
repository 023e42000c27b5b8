"""Functions of two variables that optimizers minimize."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...trainer.validation import instance, integer, number
from .expressions import Expression

__all__ = ["Function", "Minimum"]


class Minimum(NamedTuple):
    """A known minimum of a function: its coordinates, and the function's value there."""

    x: float
    y: float
    value: float


@dataclass(frozen=True, eq=False)
class Function:
    """A function of two variables, with the data to draw it and to run optimizers on it.

    Args:
        name: the name to show.
        expression: a formula in `x` and `y`, see `function`; or a differentiable callable on tensors, from x and y [...] or
            from points [..., 2] to values [...].
        xlim, ylim: the part of the plane to draw, each (lowest, highest).
        start: the default starting point (x, y) of optimizers.
        minima: the known global minima, and other minima where optimizers end; () if none is known.
        noise: the standard deviation of the normal noise on each element of every gradient, >= 0.
        seed: the seed of the noise, >= 0.

    Raises:
        TypeError, ValueError: an argument is invalid, or the expression uses a name or syntax that is not allowed.

    Example:
        >>> import torch
        >>> from tristep.viz import Function
        >>> bowl = Function("bowl", "x**2 + 3 * y**2", xlim=(-2, 2), ylim=(-2, 2), start=(1.5, 1.0))
        >>> bowl(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor([ 4., 12.])
        >>> values, gradients = bowl.value_and_gradient(torch.tensor([1.0, 1.0]))
        >>> gradients
        tensor([2., 6.])
    """

    name: str
    expression: str | Callable[..., torch.Tensor]
    xlim: tuple[float, float] = (-2.0, 2.0)
    ylim: tuple[float, float] = (-2.0, 2.0)
    start: tuple[float, float] = (1.0, 1.0)
    minima: tuple[Minimum, ...] = ()
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("xlim", "ylim", "start"):
            try:
                first, second = getattr(self, name)
            except (TypeError, ValueError):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be a pair of numbers") from None
            pair = number(f"{name}[0]", first), number(f"{name}[1]", second)
            if name != "start" and not pair[0] < pair[1]:
                raise ValueError(f"{name}={pair}: the first must be less than the second")
            object.__setattr__(self, name, pair)
        object.__setattr__(self, "noise", number("noise", self.noise, low=0))
        object.__setattr__(self, "seed", integer("seed", self.seed, low=0))
        object.__setattr__(self, "minima", tuple(Minimum(*each) for each in self.minima))
        tape = Expression(self.expression) if isinstance(self.expression, str) else None
        if tape is None:
            instance("expression", self.expression, Callable, "a string in x and y, or a callable on tensors")
            given: Any = self.expression
            call = (lambda points: given(points[..., 0], points[..., 1])) if _takes_two(given) else given
            object.__setattr__(self, "expression", call)
            _try(call, self.start)
        object.__setattr__(self, "_tape", tape)

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        """Return the values [...] at points [..., 2], differentiable by torch."""
        _check_points(points)
        if isinstance(self.expression, str):
            return self._tape.on_tensors(points[..., 0], points[..., 1])  # type: ignore[attr-defined]
        return self.expression(points)

    def value_and_gradient(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values [...] and gradients [..., 2] at points [..., 2], without noise."""
        _check_points(points)
        evaluate = self.evaluator(points.shape[:-1], points.detach().numpy().dtype)
        where = points.detach().numpy()
        value, dx, dy = evaluate(where[..., 0], where[..., 1])
        return torch.from_numpy(value.copy()), torch.from_numpy(np.stack([dx, dy], axis=-1))

    def evaluator(
        self, shape: Sequence[int], dtype: Any = np.float32
    ) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return a fast function from arrays x and y to the arrays value, df/dx and df/dy, which its next call overwrites.

        `shape` and `dtype`, float32 or float64, are those of x and y.
        """
        if self._tape is not None:  # type: ignore[attr-defined]
            return self._tape.evaluator(tuple(shape), np.dtype(dtype))  # type: ignore[attr-defined]
        return self._by_torch

    def _by_torch(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        points = torch.from_numpy(np.stack([x, y], axis=-1)).requires_grad_()
        value = self(points)
        (gradient,) = torch.autograd.grad(value.sum(), points)
        return value.detach().numpy(), gradient[..., 0].numpy(), gradient[..., 1].numpy()


def _takes_two(call: Callable[..., Any]) -> bool:
    """Return whether the callable takes x and y rather than points."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # callables written in C may have no signature
        return False
    return sum(each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in parameters) == 2


def _try(call: Callable[[torch.Tensor], torch.Tensor], start: tuple[float, float]) -> None:
    """Raise ValueError if the callable fails on a batch of points, or is not differentiable."""
    points = torch.tensor([start, (start[0] + 0.5, start[1] + 0.25), (start[0] - 0.25, start[1])], requires_grad=True)
    try:
        value = call(points)
    except Exception as error:
        raise ValueError(
            f"the function raised {type(error).__name__}: {error}\nIt gets tensors of many points at once, so it must use "
            "operators, torch.sin and so on, not math or numpy; or give it as text, such as 'x**2 + sin(3 * y)'"
        ) from error
    what = f"the function gave {tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
    if not isinstance(value, torch.Tensor) or value.shape != (3,):
        raise ValueError(f"{what} for points of shape (3, 2): it must give a tensor of one number for each, shape (3,)")
    if not value.requires_grad:
        raise ValueError(f"{what} that torch cannot go backwards through: it must compute with tensors, without .detach()")


def _check_points(points: Any) -> None:
    if not isinstance(points, torch.Tensor) or points.shape[-1:] != (2,) or not points.is_floating_point():
        what = f"{points.dtype} {tuple(points.shape)}" if isinstance(points, torch.Tensor) else type(points).__name__
        raise TypeError(f"points must be a tensor of floating-point numbers of shape [..., 2], got {what}")
