"""The well-known test functions of optimization, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...kernels.messages import there_are
from ...trainer.validation import instance, number
from .functions import Function, Minimum

__all__ = ["function", "ill_conditioned_bowl", "noisy_ravine"]


def function(given: str | Function | Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """Return a test function by name, or make one from an expression or a callable.

    An expression may contain `x`, `y`, numbers, `pi`, `e`, `+ - * / **`, parentheses, the functions `sin cos tan exp log
    sqrt abs tanh` of one value, and `min max` of two. An exponent must be a number from -20 to 20.

    Args:
        given: a name in `FUNCTIONS`, such as "rosenbrock"; an expression of at most 1,000 characters; a differentiable
            callable on tensors, from x and y, such as `lambda x, y: x**2 + 3 * y**2`, or from points [..., 2] to values
            [...]; or a `Function`, which is returned unchanged.

    Raises:
        ValueError: the name is unknown; the expression contains something that is not allowed (the message says what and
            where); or the callable fails, does not return one number per point, or is not differentiable.
        TypeError: `given` has another type.

    Example:
        >>> from tristep.viz import function
        >>> function("rosenbrock").minima
        (Minimum(x=1.0, y=1.0, value=0.0),)
        >>> function("x**2 + sin(3 * y)").name
        'x**2 + sin(3 * y)'
        >>> function("x**2 + open('file')")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: there is no function 'open'. There are 'abs', 'cos', ..., 'tanh'
          x**2 + open('file')
                 ^
    """
    if isinstance(given, Function):
        return given
    if callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        return Function("f(x, y)" if name == "<lambda>" else name, given)
    instance("a function", given, str, "a name, an expression in x and y, or a callable")
    key = given.strip().lower().replace(" ", "_").replace("-", "_").replace("–", "_")
    if key in FUNCTIONS:
        return FUNCTIONS[key]
    if given.strip().isidentifier() and key not in ("x", "y", "e", "pi"):
        raise ValueError(f"{given!r}: no function of that name.{there_are(key, FUNCTIONS)}")
    return Function(given.strip(), given)


def ill_conditioned_bowl(condition: float = 100.0) -> Function:
    """Make the quadratic bowl (x^2 + condition y^2) / 2, with a Hessian of condition number `condition` >= 1."""
    condition = number("condition", condition, low=1)
    return Function(  # Nocedal & Wright (2006), Numerical Optimization, section 3.3
        f"bowl of condition {condition:g}",
        f"(x**2 + {condition!r} * y**2) / 2",
        xlim=(-2.0, 2.0),
        ylim=(-1.0, 1.0),
        start=(-1.8, 0.8),
        minima=(Minimum(0.0, 0.0, 0.0),),
    )


def noisy_ravine(noise: float = 1.0, seed: int = 0) -> Function:
    """Make the long ravine (x^2 + 50 y^2) / 20 with Gaussian noise on its gradients, like the noise of small batches.

    Args:
        noise: the standard deviation of the noise on each element of a gradient, >= 0.
        seed: the seed of the noise, >= 0.
    """
    return Function(  # d2l.ai, chapter 12.4, with other slopes
        "noisy ravine",
        "(x**2 + 50 * y**2) / 20",
        xlim=(-6.0, 6.0),
        ylim=(-2.0, 2.0),
        start=(-5.0, 1.5),
        minima=(Minimum(0.0, 0.0, 0.0),),
        noise=noise,
        seed=seed,
    )


def _catalog() -> dict[str, Function]:
    return {
        "rosenbrock": Function(  # Rosenbrock (1960), An automatic method for finding the greatest or least value
            "Rosenbrock",
            "(1 - x)**2 + 100 * (y - x**2)**2",
            xlim=(-2.0, 2.0),
            ylim=(-1.0, 3.0),
            start=(-1.2, 1.0),
            minima=(Minimum(1.0, 1.0, 0.0),),
        ),
        "beale": Function(  # Beale (1958), On an iterative method for finding a local minimum; Moré et al. (1981), no. 5
            "Beale",
            "(1.5 - x + x*y)**2 + (2.25 - x + x*y**2)**2 + (2.625 - x + x*y**3)**2",
            xlim=(-4.5, 4.5),
            ylim=(-4.5, 4.5),
            start=(1.0, 1.5),
            minima=(Minimum(3.0, 0.5, 0.0),),
        ),
        "himmelblau": Function(  # Himmelblau (1972), Applied Nonlinear Programming
            "Himmelblau",
            "(x**2 + y - 11)**2 + (x + y**2 - 7)**2",
            xlim=(-5.0, 5.0),
            ylim=(-5.0, 5.0),
            start=(-0.5, -1.0),
            minima=(
                Minimum(3.0, 2.0, 0.0),
                Minimum(-2.805118086952745, 3.131312518250573, 0.0),
                Minimum(-3.779310253377747, -3.283185991286170, 0.0),
                Minimum(3.584428340330492, -1.848126526964404, 0.0),
            ),
        ),
        "saddle": Function(  # the saddle x^2 - y^2, closed by a fourth power
            "saddle",
            "x**2 - y**2 + y**4 / 4",
            xlim=(-2.0, 2.0),
            ylim=(-2.2, 2.2),
            start=(1.5, 0.01),
            minima=(Minimum(0.0, math.sqrt(2.0), -1.0), Minimum(0.0, -math.sqrt(2.0), -1.0)),
        ),
        "rastrigin": Function(  # Rastrigin (1974), Systems of extremal control
            "Rastrigin",
            "20 + x**2 - 10 * cos(2 * pi * x) + y**2 - 10 * cos(2 * pi * y)",
            xlim=(-5.12, 5.12),
            ylim=(-5.12, 5.12),
            start=(3.3, -2.7),
            minima=(Minimum(0.0, 0.0, 0.0),),
        ),
        "ill_conditioned_bowl": ill_conditioned_bowl(),
        "noisy_ravine": noisy_ravine(),
        "six_hump_camel": Function(  # Dixon & Szegö (1978), Towards Global Optimisation 2
            "six-hump camel",
            "(4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (-4 + 4 * y**2) * y**2",
            xlim=(-2.0, 2.0),
            ylim=(-1.2, 1.2),
            start=(-1.8, -1.0),
            minima=(
                Minimum(0.08984201368301331, -0.7126564032704135, -1.031628453489877),
                Minimum(-0.08984201368301331, 0.7126564032704135, -1.031628453489877),
                Minimum(1.7036067132900241, -0.7960835748654206, -0.2154638243837212),
                Minimum(-1.7036067132900241, 0.7960835748654206, -0.2154638243837212),
                Minimum(1.6071047579160346, 0.5686514549884259, 2.1042503103111073),
                Minimum(-1.6071047579160346, -0.5686514549884259, 2.1042503103111073),
            ),
        ),
        "ackley": Function(  # Ackley (1987), A Connectionist Machine for Genetic Hillclimbing
            "Ackley",
            "-20 * exp(-0.2 * sqrt((x**2 + y**2) / 2)) - exp((cos(2 * pi * x) + cos(2 * pi * y)) / 2) + e + 20",
            xlim=(-5.0, 5.0),
            ylim=(-5.0, 5.0),
            start=(-3.6, 2.4),
            minima=(Minimum(0.0, 0.0, 0.0),),
        ),
        "styblinski_tang": Function(  # Styblinski & Tang (1990), Experiments in nonconvex optimization
            "Styblinski–Tang",
            "(x**4 - 16 * x**2 + 5 * x + y**4 - 16 * y**2 + 5 * y) / 2",
            xlim=(-5.0, 5.0),
            ylim=(-5.0, 5.0),
            start=(0.2, 3.9),
            minima=(
                Minimum(-2.903534027771177, -2.903534027771177, -78.33233140754282),
                Minimum(2.746802770990837, -2.903534027771177, -64.19561235905536),
                Minimum(-2.903534027771177, 2.746802770990837, -64.19561235905536),
                Minimum(2.746802770990837, 2.746802770990837, -50.05889331056789),
            ),
        ),
    }


FUNCTIONS: dict[str, Function] = _catalog()
