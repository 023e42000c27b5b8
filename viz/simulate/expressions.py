"""Expressions in x and y that a user has typed, with their gradients.

An expression is parsed by Python's `ast` and checked, but never run as Python. It becomes a list of NumPy calls, to which
reverse-mode differentiation appends the calls for the gradient.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.messages import there_are

__all__ = ["Expression"]

LONGEST = 1000  # characters of an expression
DEEPEST = 50  # operations within operations
LARGEST_POWER = 20
# A tape is a list of operations. Values 0 and 1 are x and y; each operation adds a value.
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
    """A constant operand; other operands are indices of values."""

    value: float


class Expression:
    """An expression in x and y as a list of operations (name, operands), followed by the operations of its gradient.

    See `catalog.function` for what the text may contain; a ValueError says what is wrong and where.
    """

    def __init__(self, text: str) -> None:
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self._places: dict[Any, int] = {}
        self.value = self._read(text)
        self._n_forward = len(self._steps)
        self.gradient = self._backward()

    def on_tensors(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the values at x and y, tensors of one shape; differentiable by torch."""
        values = [x, y]
        for name, operands in self._steps[: self._n_forward]:
            tensors = [values[each] if isinstance(each, int) else _constant(each, x) for each in operands]
            if name == "power":
                tensors[1] = operands[1].value
            values.append(_TORCH[name](*tensors))
        return values[self.value] if isinstance(self.value, int) else _constant(self.value, x).expand_as(x).clone()

    def evaluator(self, shape: tuple[int, ...], dtype: np.dtype) -> Callable[..., Any]:
        """Return a function from arrays x and y of this shape and dtype (float32 or float64) to the value, df/dx and df/dy.

        Buffers are preallocated. Values that are not needed at the same time share one. The next call overwrites results.
        """
        results = (self.value, *self.gradient)
        outputs = {i for i in results if isinstance(i, int)}
        needed = set(outputs)
        for k in range(len(self._steps) - 1, -1, -1):
            if k + 2 in needed:
                needed |= {i for i in self._steps[k][1] if isinstance(i, int)}
        used = [(k, name, operands) for k, (name, operands) in enumerate(self._steps) if k + 2 in needed]
        last = {i: k for k, _, operands in used for i in operands if isinstance(i, int)}
        free: list[np.ndarray] = []
        room: dict[int, Any] = {0: None, 1: None}  # the buffer of each value
        calls: list[Any] = []
        for k, name, operands in used:
            out = free.pop() if free else np.empty(shape, dtype)
            room[k + 2] = out
            calls.append((_NUMPY.get(name) or getattr(np, name), operands, out))
            done = {i for i in operands if isinstance(i, int) and last[i] == k and i > 1 and i not in outputs}
            free += [room[i] for i in done]

        def find(operand: Any, x: np.ndarray, y: np.ndarray) -> Any:
            if not isinstance(operand, int):
                with np.errstate(over="ignore"):
                    return np.float64(operand.value).astype(dtype)
            return (x, y)[operand] if operand < 2 else room[operand]

        bound: list[Any] = []
        found: tuple[np.ndarray, ...] = ()
        inputs: list[np.ndarray | None] = [None, None]

        def evaluate(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
            nonlocal found
            if x is not inputs[0] or y is not inputs[1]:  # usually the same arrays with new contents
                inputs[:] = x, y
                bound[:] = [(call, tuple(find(each, x, y) for each in operands), out) for call, operands, out in calls]
                values = [find(each, x, y) for each in results]
                found = tuple(each if isinstance(each, np.ndarray) else np.full(shape, each, dtype) for each in values)
            with np.errstate(all="ignore"):
                for call, arrays, out in bound:
                    call(*arrays, out=out)
            return found

        return evaluate

    def _add(self, name: str, *operands: Any) -> Any:
        """Return the value of an operation: a constant if all operands are, and an existing value if one is equal."""
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
        if key not in self._places:
            self._steps.append(key)
            self._places[key] = len(self._steps) + 1
        return self._places[key]

    def _product(self, factor: Any, n: int) -> Any:
        """Return a power with an integer exponent by repeated squaring, which is much faster than NumPy's power."""
        if n == 1:
            return factor
        if n < 0:
            return self._add("divide", _Number(1.0), self._product(factor, -n))
        half = self._product(factor, n // 2)
        square = self._add("multiply", half, half)
        return self._add("multiply", square, factor) if n % 2 else square

    def _backward(self) -> tuple[Any, Any]:
        """Append the operations of df/dx and df/dy by reverse-mode differentiation, and return the two values."""
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
        """Return `slope` times the derivative of the operation by each operand; None for a constant operand."""
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
            tree = ast.parse(text, mode="eval")  # this only parses
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
        if isinstance(node, ast.Attribute) and node.attr in _CONSTANTS:
            raise _refusal(text, at, f"write {node.attr} instead of {ast.unparse(node)}")
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
        if isinstance(node.op, ast.BitXor):
            raise _refusal(text, text.index("^", at), "^ is no power here; write **, such as x**2")
        if name is None:
            raise _refusal(text, at, "this operation is not allowed; there are + - * / and **")
        return self._add(name, left, right)

    def _call(self, text: str, node: ast.Call, depth: int, at: int) -> Any:
        if not isinstance(node.func, ast.Name) or node.func.id not in {*_OF_ONE, *_OF_TWO}:
            what = f"there is no function {node.func.id!r}" if isinstance(node.func, ast.Name) else "this cannot be called"
            if isinstance(node.func, ast.Attribute) and node.func.attr in {*_OF_ONE, *_OF_TWO}:
                inner = "x, y" if node.func.attr in _OF_TWO else "x"
                what = f"write {node.func.attr}({inner}) instead of {ast.unparse(node.func)}({inner})"
            raise _refusal(text, at, f"{what}.{there_are(ast.unparse(node.func), sorted({*_OF_ONE, *_OF_TWO}))}")
        name, needed = node.func.id, 1 if node.func.id in _OF_ONE else 2
        if node.keywords or len(node.args) != needed or any(isinstance(each, ast.Starred) for each in node.args):
            raise _refusal(text, at, f"{name} takes {'one value' if needed == 1 else 'two values'}")
        operands = [self._node(text, each, depth + 1) for each in node.args]
        return self._add((_OF_ONE | _OF_TWO)[name], *operands)


def _constant(number: _Number, like: torch.Tensor) -> torch.Tensor:
    """Return a constant in the dtype of a tensor; a number too large for the dtype becomes infinite."""
    return torch.tensor(number.value, dtype=torch.float64).to(like)


def _refusal(text: str, at: int, why: str) -> ValueError:
    start = max(0, at - 60)
    return ValueError(f"{why}\n  {text[start : at + 40]}\n  {' ' * (at - start)}^")


def _simplified(name: str, operands: tuple[Any, ...]) -> Any:
    """Return the operand or constant that an operation is equal to; None if it must be computed."""
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
    """Return a / b, or 0 where b is 0, so that the gradient of sqrt at 0 does not become NaN."""
    quotient = np.divide(a, b, out=out) if out is not None else np.divide(a, b)
    if out is None:
        return np.where(b == 0, 0.0, quotient)
    out[b == 0] = 0
    return out


_NUMPY: dict[str, Callable[..., Any]] = {"divide_or_zero": _divide_or_zero}
