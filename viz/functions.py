"""Functions of two variables to race optimizers on: the well-known ones, and expressions that a user has typed.

An expression is read by a grammar of its own and never run as Python. It becomes a list of NumPy calls, of which the
gradient is another such list, made by going through the first one backwards; so a function, too, is written only once.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..trainer.arguments import did_you_mean, real, whole

__all__ = ["FUNCTIONS", "Function", "Minimum", "function", "ill_conditioned_bowl", "noisy_ravine"]

LONGEST = 1000  # characters of an expression
DEEPEST = 50  # operations within operations
LARGEST_POWER = 20


class Minimum(NamedTuple):
    """A known minimum: where it is, and the function's value there."""

    x: float
    y: float
    value: float


@dataclass(frozen=True, eq=False)
class Function:
    """A function of two variables with what is needed to draw it and to race on it.

    Args:
        name: in words.
        expression: in `x` and `y`, see `function`; or a callable from a tensor [..., 2] to [...], through which torch can
            go backwards.
        xlim, ylim: the part of the plane to draw, each (lowest, highest).
        start: a point from which it is worth starting, (x, y).
        minima: the known minima that have the smallest value, and others where optimizers end; () if none is known.
        about: one line on what it teaches.
        source: where it comes from.
        noise: standard deviation of what is added to each element of every gradient, >= 0.
        seed: of the noise, >= 0.

    Raises:
        TypeError, ValueError: what does not fit, or an expression with something in it that is not allowed.

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
    expression: str | Callable[[torch.Tensor], torch.Tensor]
    xlim: tuple[float, float] = (-2.0, 2.0)
    ylim: tuple[float, float] = (-2.0, 2.0)
    start: tuple[float, float] = (1.0, 1.0)
    minima: tuple[Minimum, ...] = ()
    about: str = ""
    source: str = ""
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("xlim", "ylim", "start"):
            try:
                first, second = getattr(self, name)
            except (TypeError, ValueError):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be a pair of numbers") from None
            pair = real(f"{name}[0]", first), real(f"{name}[1]", second)
            if name != "start" and not pair[0] < pair[1]:
                raise ValueError(f"{name}={pair}: the first must be less than the second")
            object.__setattr__(self, name, pair)
        object.__setattr__(self, "noise", real("noise", self.noise, low=0))
        object.__setattr__(self, "seed", whole("seed", self.seed, low=0))
        object.__setattr__(self, "minima", tuple(Minimum(*each) for each in self.minima))
        tape = _Tape(self.expression) if isinstance(self.expression, str) else None
        if tape is None:
            if not callable(self.expression):
                raise TypeError(
                    f"expression must be a string in x and y, or a callable on tensors, got {type(self.expression).__name__}"
                )
            _try(self.expression, self.start)
        object.__setattr__(self, "_tape", tape)

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        """Values [...] at points [..., 2]; torch can go backwards through it."""
        _check_points(points)
        if isinstance(self.expression, str):
            return self._tape.on_tensors(points[..., 0], points[..., 1])  # type: ignore[attr-defined]
        return self.expression(points)

    def value_and_gradient(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [...] and gradients [..., 2] at points [..., 2], without noise."""
        _check_points(points)
        evaluate = self.evaluator(points.shape[:-1], points.detach().numpy().dtype)
        where = points.detach().numpy()
        value, dx, dy = evaluate(where[..., 0], where[..., 1])
        return torch.from_numpy(value.copy()), torch.from_numpy(np.stack([dx, dy], axis=-1))

    def evaluator(
        self, shape: Sequence[int], dtype: Any = np.float32
    ) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What finds values and gradients at as many points, again and again, with room that is made once.

        Args:
            shape: of the arrays of coordinates.
            dtype: of these, float32 or float64.

        Returns:
            A function from arrays x and y to the arrays value, df/dx and df/dy, which the next call overwrites.
        """
        if self._tape is not None:  # type: ignore[attr-defined]
            return self._tape.evaluator(tuple(shape), np.dtype(dtype))  # type: ignore[attr-defined]
        return self._by_torch

    def _by_torch(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        points = torch.from_numpy(np.stack([x, y], axis=-1)).requires_grad_()
        value = self(points)
        (gradient,) = torch.autograd.grad(value.sum(), points)
        return value.detach().numpy(), gradient[..., 0].numpy(), gradient[..., 1].numpy()


def function(given: str | Function | Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """A function by its name, or made of an expression or of a callable.

    In an expression may stand `x`, `y`, numbers, `pi` and `e`, `+ - * / **`, parentheses, the functions `sin cos tan exp log
    sqrt abs tanh` of one value, and `min max` of two. An exponent is a number from -20 to 20.

    Args:
        given: a name of `FUNCTIONS`, such as "rosenbrock"; an expression, at most 1,000 characters; a callable from a tensor
            [..., 2] to [...], through which torch can go backwards; or a `Function`, which is returned as it is.

    Raises:
        ValueError: something is not allowed in an expression; the message says what and where. Or a callable does not give
            one number for each point.
        TypeError: `given` is none of these.

    Example:
        >>> from tristep.viz import function
        >>> function("rosenbrock").minima
        (Minimum(x=1.0, y=1.0, value=0.0),)
        >>> function("x**2 + sin(3 * y)").name
        'x**2 + sin(3 * y)'
        >>> function("x**2 + open('file')")
        Traceback (most recent call last):
        ...
        ValueError: there is no function 'open'; there are abs, cos, exp, log, max, min, sin, sqrt, tan, tanh
          x**2 + open('file')
                 ^
    """
    if isinstance(given, Function):
        return given
    if callable(given):
        return Function(getattr(given, "__name__", type(given).__name__), given)
    if not isinstance(given, str):
        raise TypeError(f"a function is a name, an expression in x and y, or a callable, not {type(given).__name__}")
    key = given.strip().lower().replace(" ", "_").replace("-", "_").replace("–", "_")
    if key in FUNCTIONS:
        return FUNCTIONS[key]
    if given.strip().isidentifier() and key not in ("x", "y", "e", "pi"):
        raise ValueError(
            f"{given!r}: no function of that name; there are {', '.join(FUNCTIONS)}.{did_you_mean(key, FUNCTIONS)}"
        )
    return Function(given.strip(), given)


def ill_conditioned_bowl(condition: float = 100.0) -> Function:
    """(x^2 + condition y^2) / 2, a bowl that is `condition` times as steep in one direction as in the other, >= 1."""
    condition = real("condition", condition, low=1)
    return Function(
        f"bowl of condition {condition:g}",
        f"(x**2 + {condition!r} * y**2) / 2",
        xlim=(-2.0, 2.0),
        ylim=(-1.0, 1.0),
        start=(-1.8, 0.8),
        minima=(Minimum(0.0, 0.0, 0.0),),
        about="The steep direction limits the rate, and the flat one then takes long: what momentum and scaling are for.",
        source="Nocedal & Wright (2006), Numerical Optimization, section 3.3",
    )


def noisy_ravine(noise: float = 1.0, seed: int = 0) -> Function:
    """A long ravine, (x^2 + 50 y^2) / 20, whose gradients come with Gaussian noise, as those of small batches do.

    Args:
        noise: standard deviation of what is added to each element of a gradient, >= 0.
        seed: the same seed gives the same noise, >= 0.
    """
    return Function(
        "noisy ravine",
        "(x**2 + 50 * y**2) / 20",
        xlim=(-6.0, 6.0),
        ylim=(-2.0, 2.0),
        start=(-5.0, 1.5),
        minima=(Minimum(0.0, 0.0, 0.0),),
        about="Averages of gradients damp the noise; at a constant rate no optimizer comes to rest.",
        source="d2l.ai, chapter 12.4, with other slopes",
        noise=noise,
        seed=seed,
    )


def _try(call: Callable[[torch.Tensor], torch.Tensor], start: tuple[float, float]) -> None:
    """Refuse a callable that does not work on batches of points, or not backwards."""
    points = torch.tensor([start, (start[0] + 0.5, start[1] + 0.25), (start[0] - 0.25, start[1])], requires_grad=True)
    value = call(points)
    what = f"the function gave {tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
    if not isinstance(value, torch.Tensor) or value.shape != (3,):
        raise ValueError(f"{what} for points of shape (3, 2): it must give a tensor of one number for each, shape (3,)")
    if not value.requires_grad:
        raise ValueError(f"{what} that torch cannot go backwards through: it must compute with tensors, without .detach()")


def _check_points(points: Any) -> None:
    if not isinstance(points, torch.Tensor) or points.shape[-1:] != (2,) or not points.is_floating_point():
        what = f"{points.dtype} {tuple(points.shape)}" if isinstance(points, torch.Tensor) else type(points).__name__
        raise TypeError(f"points must be a tensor of floating-point numbers of shape [..., 2], got {what}")


# Expressions. A tape is a list of operations; the first two values are x and y, and each operation adds one.
_ARITHMETIC = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_OF_ONE = {name: name for name in ("sin", "cos", "tan", "exp", "log", "sqrt", "tanh")} | {"abs": "absolute"}
_OF_TWO = {"min": "minimum", "max": "maximum"}
_CONSTANTS = {"pi": math.pi, "e": math.e}

_TORCH: Mapping[str, Callable[..., torch.Tensor]] = {
    "power": torch.pow,
    **{name: getattr(torch, name) for name in ("add", "subtract", "multiply", "divide", "absolute", "square", "negative")},
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "exp", "log", "sqrt", "tanh", "minimum", "maximum")},
}


class _Number(NamedTuple):
    """A constant among operands, which are otherwise numbers of values."""

    value: float


class _Tape:
    """An expression as a list of operations, (name, operands), and its two derivatives as more of them."""

    def __init__(self, text: str) -> None:
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self._known: dict[Any, int] = {}
        self.value = self._read(text)
        self._n_forward = len(self._steps)
        self.gradient = self._backward()

    def on_tensors(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = [x, y]
        for name, operands in self._steps[: self._n_forward]:
            tensors = [values[each] if isinstance(each, int) else x.new_tensor(each.value) for each in operands]
            if name == "power":
                tensors[1] = operands[1].value
            values.append(_TORCH[name](*tensors))
        return values[self.value] if isinstance(self.value, int) else torch.full_like(x, self.value.value)

    def evaluator(self, shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
        """A function from x and y to value and gradient. It reuses one array for what is not needed at the same time."""
        results = (self.value, *self.gradient)
        kept = {i for i in results if isinstance(i, int)}
        needed = set(kept)
        for k in range(len(self._steps) - 1, -1, -1):
            if k + 2 in needed:
                needed |= {i for i in self._steps[k][1] if isinstance(i, int)}
        used = [(k, name, operands) for k, (name, operands) in enumerate(self._steps) if k + 2 in needed]
        last = {i: k for k, _, operands in used for i in operands if isinstance(i, int)}
        free: list[np.ndarray] = []
        room: dict[int, Any] = {0: None, 1: None}  # by value
        calls: list[Any] = []
        for k, name, operands in used:
            out = free.pop() if free else np.empty(shape, dtype)
            room[k + 2] = out
            calls.append((_NUMPY.get(name) or getattr(np, name), operands, out))
            done = {i for i in operands if isinstance(i, int) and last[i] == k and i > 1 and i not in kept}
            free += [room[i] for i in done]

        def find(operand: Any, x: np.ndarray, y: np.ndarray) -> Any:
            if not isinstance(operand, int):
                return dtype.type(operand.value)
            return (x, y)[operand] if operand < 2 else room[operand]

        bound: list[Any] = []
        own: list[np.ndarray | None] = [None, None]

        def evaluate(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            if x is not own[0] or y is not own[1]:  # mostly they are the same arrays with other numbers in them
                own[:] = x, y
                bound[:] = [(call, tuple(find(each, x, y) for each in operands), out) for call, operands, out in calls]
            with np.errstate(all="ignore"):
                for call, arrays, out in bound:
                    call(*arrays, out=out)
            found = [find(each, x, y) for each in results]
            return tuple(each if isinstance(each, np.ndarray) else np.full(shape, each, dtype) for each in found)  # type: ignore[return-value]

        return evaluate

    def _add(self, name: str, *operands: Any) -> Any:
        """The value of an operation: a constant where all operands are, and one that is there already if it is."""
        if all(isinstance(each, _Number) for each in operands):
            with np.errstate(all="ignore"):
                call: Any = _NUMPY.get(name) or getattr(np, name)
                return _Number(float(call(*(np.float64(each.value) for each in operands))))
        simple = _simplified(name, operands)
        if simple is not None:
            return simple
        if name == "multiply" and operands[0] == operands[1]:
            name, operands = "square", operands[:1]
        if name == "power" and operands[1].value.is_integer():
            return self._product(operands[0], int(operands[1].value))
        key = (name, operands)
        if key not in self._known:
            self._steps.append(key)
            self._known[key] = len(self._steps) + 1
        return self._known[key]

    def _product(self, factor: Any, n: int) -> Any:
        """A power with a whole exponent, by squares: much quicker than NumPy's own."""
        if n == 1:
            return factor
        if n < 0:
            return self._add("divide", _Number(1.0), self._product(factor, -n))
        half = self._product(factor, n // 2)
        square = self._add("multiply", half, half)
        return self._add("multiply", square, factor) if n % 2 else square

    def _backward(self) -> tuple[Any, Any]:
        """df/dx and df/dy, by going through the operations from the last to the first."""
        slopes: dict[int, Any] = {self.value: _Number(1.0)} if isinstance(self.value, int) else {}
        for k in range(self._n_forward - 1, -1, -1):
            if (slope := slopes.get(k + 2)) is None:
                continue
            name, operands = self._steps[k]
            for operand, factor in zip(operands, self._factors(name, operands, k + 2, slope), strict=False):
                if isinstance(operand, int) and factor is not None:
                    slopes[operand] = self._add("add", slopes[operand], factor) if operand in slopes else factor
        return slopes.get(0, _Number(0.0)), slopes.get(1, _Number(0.0))

    def _factors(self, name: str, operands: tuple[Any, ...], result: int, slope: Any) -> tuple[Any, ...]:
        """For each operand what it contributes to the slope: `slope` times the derivative by it."""
        add, a, b = self._add, operands[0], operands[-1]
        if name == "add":
            return slope, slope
        if name == "subtract":
            return slope, add("negative", slope)
        if name == "multiply":
            return add("multiply", slope, b), add("multiply", slope, a)
        if name == "divide":
            over = add("divide", slope, b)
            return over, add("negative", add("multiply", over, result)) if isinstance(b, int) else None
        if name == "square":
            return (add("multiply", slope, add("multiply", _Number(2.0), a)),)
        if name == "power":
            return add("multiply", slope, add("multiply", b, add("power", a, _Number(b.value - 1.0)))), None
        if name in ("minimum", "maximum"):
            chosen = add("less_equal" if name == "minimum" else "greater_equal", a, b)
            return add("multiply", slope, chosen), add("multiply", slope, add("subtract", _Number(1.0), chosen))
        if name == "negative":
            return (add("negative", slope),)
        if name == "sqrt":
            return (add("divide_or_zero", slope, add("multiply", _Number(2.0), result)),)
        if name == "exp":
            return (add("multiply", slope, result),)
        if name == "log":
            return (add("divide", slope, a),)
        if name == "sin":
            return (add("multiply", slope, add("cos", a)),)
        if name == "cos":
            return (add("negative", add("multiply", slope, add("sin", a))),)
        if name == "tan":
            return (add("multiply", slope, add("add", _Number(1.0), add("square", result))),)
        if name == "tanh":
            return (add("multiply", slope, add("subtract", _Number(1.0), add("square", result))),)
        return (add("multiply", slope, add("sign", a)),)  # absolute

    def _read(self, text: str) -> Any:
        if len(text) > LONGEST:
            raise ValueError(f"an expression of {len(text)} characters: at most {LONGEST} are allowed")
        text = text.strip()
        if "\n" in text or "\r" in text:
            raise ValueError(f"an expression of several lines, {text!r}: it must be one")
        try:
            tree = ast.parse(text, mode="eval")  # which reads and runs nothing
        except SyntaxError as error:
            raise _refusal(text, (error.offset or 1) - 1, "this cannot be read") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text[:50]!r}: this cannot be read: {error}") from None
        return self._node(text, tree.body, 0)

    def _node(self, text: str, node: ast.expr, depth: int) -> Any:
        at = len(text.encode()[: node.col_offset].decode())
        if depth > DEEPEST:
            raise _refusal(text, at, f"operations lie more than {DEEPEST} deep in each other")
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
                raise _refusal(text, at, f"{node.value!r} is no number")
            try:
                value = float(node.value)
            except OverflowError:
                value = math.inf
            if not math.isfinite(value):
                raise _refusal(text, at, "this number is too large")
            return _Number(value)
        if isinstance(node, ast.Name):
            if node.id in ("x", "y"):
                return ("x", "y").index(node.id)
            if node.id in _CONSTANTS:
                return _Number(_CONSTANTS[node.id])
            raise _refusal(text, at, f"there is no {node.id!r}; there are x, y, pi and e")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            inner = self._node(text, node.operand, depth + 1)
            return self._add("negative", inner) if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp):
            return self._binary(text, node, depth, at)
        if isinstance(node, ast.Call):
            return self._call(text, node, depth, at)
        raise _refusal(text, at, "this is not allowed; there are numbers, x, y, + - * / **, parentheses and functions")

    def _binary(self, text: str, node: ast.BinOp, depth: int, at: int) -> Any:
        left, right = (self._node(text, each, depth + 1) for each in (node.left, node.right))
        if isinstance(node.op, ast.Pow):
            place = len(text.encode()[: node.right.col_offset].decode())
            if not isinstance(right, _Number):
                raise _refusal(text, place, "an exponent must be a number; exp(... * log(...)) does the same for others")
            if not abs(right.value) <= LARGEST_POWER:
                raise _refusal(text, place, f"an exponent must be from -{LARGEST_POWER} to {LARGEST_POWER}")
            return self._add("power", left, right)
        name = _ARITHMETIC.get(type(node.op))
        if name is None:
            raise _refusal(text, at, "this operation is not allowed; there are + - * / and **")
        return self._add(name, left, right)

    def _call(self, text: str, node: ast.Call, depth: int, at: int) -> Any:
        if not isinstance(node.func, ast.Name) or node.func.id not in {*_OF_ONE, *_OF_TWO}:
            what = f"there is no function {node.func.id!r}" if isinstance(node.func, ast.Name) else "this cannot be called"
            raise _refusal(text, at, f"{what}; there are {', '.join(sorted({*_OF_ONE, *_OF_TWO}))}")
        name, needed = node.func.id, 1 if node.func.id in _OF_ONE else 2
        if node.keywords or len(node.args) != needed or any(isinstance(each, ast.Starred) for each in node.args):
            raise _refusal(text, at, f"{name} takes {'one value' if needed == 1 else 'two values'}")
        operands = [self._node(text, each, depth + 1) for each in node.args]
        return self._add((_OF_ONE | _OF_TWO)[name], *operands)


def _refusal(text: str, at: int, why: str) -> ValueError:
    start = max(0, at - 60)
    return ValueError(f"{why}\n  {text[start : at + 40]}\n  {' ' * (at - start)}^")


def _simplified(name: str, operands: tuple[Any, ...]) -> Any:
    """An operand, or a constant, to which an operation comes down; None where it must be computed."""
    a, b = operands[0], operands[-1]
    zero, one = _Number(0.0), _Number(1.0)
    if name == "multiply":
        return zero if zero in operands else b if a == one else a if b == one else None
    if name == "add":
        return b if a == zero else a if b == zero else None
    if name in ("subtract", "divide", "power"):
        if name == "power" and b == zero:
            return one
        return a if b == (zero if name == "subtract" else one) else None
    return None


def _divide_or_zero(a: Any, b: Any, out: Any = None) -> Any:
    """a / b, and 0 where b is 0: the slope of a root at its tip, which is none, must not become NaN."""
    quotient = np.divide(a, b, out=out) if out is not None else np.divide(a, b)
    if out is None:
        return np.where(b == 0, 0.0, quotient)
    out[b == 0] = 0
    return out


_NUMPY: dict[str, Callable[..., Any]] = {"divide_or_zero": _divide_or_zero}


def _named() -> dict[str, Function]:
    return {
        "rosenbrock": Function(
            "Rosenbrock",
            "(1 - x)**2 + 100 * (y - x**2)**2",
            xlim=(-2.0, 2.0),
            ylim=(-1.0, 3.0),
            start=(-1.2, 1.0),
            minima=(Minimum(1.0, 1.0, 0.0),),
            about="A bent valley: its floor is found at once, and then followed slowly.",
            source="Rosenbrock (1960), An automatic method for finding the greatest or least value of a function",
        ),
        "beale": Function(
            "Beale",
            "(1.5 - x + x*y)**2 + (2.25 - x + x*y**2)**2 + (2.625 - x + x*y**3)**2",
            xlim=(-4.5, 4.5),
            ylim=(-4.5, 4.5),
            start=(1.0, 1.5),
            minima=(Minimum(3.0, 0.5, 0.0),),
            about="Steep walls and a flat plain: one rate does not fit both.",
            source="Beale (1958), On an iterative method for finding a local minimum; Moré et al. (1981), no. 5",
        ),
        "himmelblau": Function(
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
            about="Four minima of equal depth: which one is found depends on start, rate and momentum.",
            source="Himmelblau (1972), Applied Nonlinear Programming",
        ),
        "saddle": Function(
            "saddle",
            "x**2 - y**2 + y**4 / 4",
            xlim=(-2.0, 2.0),
            ylim=(-2.2, 2.2),
            start=(1.5, 0.01),
            minima=(Minimum(0.0, math.sqrt(2.0), -1.0), Minimum(0.0, -math.sqrt(2.0), -1.0)),
            about="At the saddle the gradient vanishes; who scales gradients leaves it soonest.",
            source="the saddle x^2 - y^2, closed by a fourth power",
        ),
        "rastrigin": Function(
            "Rastrigin",
            "20 + x**2 - 10 * cos(2 * pi * x) + y**2 - 10 * cos(2 * pi * y)",
            xlim=(-5.12, 5.12),
            ylim=(-5.12, 5.12),
            start=(3.3, -2.7),
            minima=(Minimum(0.0, 0.0, 0.0),),
            about="A bowl full of dents: small steps end in the next one, large ones or momentum may pass it.",
            source="Rastrigin (1974), Systems of extremal control",
        ),
        "ill_conditioned_bowl": ill_conditioned_bowl(),
        "noisy_ravine": noisy_ravine(),
        "six_hump_camel": Function(
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
            about="Two best minima and four others: a lower loss here may still be the wrong basin.",
            source="Dixon & Szegö (1978), Towards Global Optimisation 2",
        ),
        "ackley": Function(
            "Ackley",
            "-20 * exp(-0.2 * sqrt((x**2 + y**2) / 2)) - exp((cos(2 * pi * x) + cos(2 * pi * y)) / 2) + e + 20",
            xlim=(-5.0, 5.0),
            ylim=(-5.0, 5.0),
            start=(-3.6, 2.4),
            minima=(Minimum(0.0, 0.0, 0.0),),
            about="A funnel with dents whose tip is sharp: the gradient is as long at the minimum as beside it.",
            source="Ackley (1987), A Connectionist Machine for Genetic Hillclimbing",
        ),
        "styblinski_tang": Function(
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
            about="Four basins, one of them the best: plain gradients end in the nearest.",
            source="Styblinski & Tang (1990), Experiments in nonconvex optimization",
        ),
    }


FUNCTIONS: dict[str, Function] = _named()
