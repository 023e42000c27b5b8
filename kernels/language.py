"""The language of update rules: `rule`, `jit` and the words of `tl`. Imports neither triton nor numba.

A rule is a few lines of arithmetic on values. What the values are is the engine's affair: blocks of a GPU
program (triton), numbers in a compiled loop (numba) or whole tensors (torch). So the same text must be
given another `tl` for each engine; that is all that `Function.bind` does. The `tl` of this file is the
torch one, complete in itself, which also makes every rule runnable where triton and numba are missing.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

__all__ = ["Function", "Rule", "has_numba", "has_triton", "jit", "rule", "tl"]


def rule(fn: Callable[..., Any]) -> Rule:
    """Make an update rule of a function `(w, g, state, hyper) -> (new_w, new_state)`.

    `w` is the weight, `g` the gradient, already multiplied by `rescale_grad`, both in the arithmetic's type
    (float32, or float64 for float64 weights). The function's first lines unpack `state` and `hyper`; the names
    used there become the names of the state tensors and of the hyper-parameters. A rule without state returns
    `state` as it came. The body may use arithmetic, comparisons, the functions of `tl`, and other functions
    marked with `jit`. Write constants as floats (`2.0`, not `2`).

    Raises:
        TypeError: the function is not of that form or uses a name that no engine would know.

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
    return Rule(fn)


def jit(fn: Callable[..., Any]) -> Function:
    """Mark a function that rules may call. It is compiled into each rule that uses it, on every engine."""
    return Function(fn)


def has_triton() -> bool:
    """Whether triton can be imported here (there is none for macOS and Windows). Does not import it."""
    return importlib.util.find_spec("triton") is not None


def has_numba() -> bool:
    """Whether numba can be imported here. Does not import it."""
    return importlib.util.find_spec("numba") is not None


class _TorchLanguage:
    """What a rule may call, on torch tensors. Triton's names and meanings; each engine brings all of them.

    Args:
        dtype: the arithmetic's type, which numbers take where torch could not tell.
    """

    abs = staticmethod(torch.abs)
    ceil = staticmethod(torch.ceil)
    cos = staticmethod(torch.cos)
    exp = staticmethod(torch.exp)
    exp2 = staticmethod(torch.exp2)
    floor = staticmethod(torch.floor)
    log = staticmethod(torch.log)
    log2 = staticmethod(torch.log2)
    rsqrt = staticmethod(torch.rsqrt)
    sigmoid = staticmethod(torch.sigmoid)
    sin = staticmethod(torch.sin)
    sqrt = staticmethod(torch.sqrt)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`, element by element."""
        return torch.where(condition, self._tensor(a), self._tensor(b))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of two values."""
        return torch.maximum(self._tensor(a), self._tensor(b))

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller of two values."""
        return torch.minimum(self._tensor(a), self._tensor(b))

    def _tensor(self, value: Any) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self._dtype)


_TORCH = {dtype: _TorchLanguage(dtype) for dtype in (torch.float32, torch.float64)}
tl: Any = _TORCH[torch.float32]
WORDS = tuple(name for name in vars(_TorchLanguage) if not name.startswith("_"))


class Function:
    """A function of values that can be bound to any engine's language. Immutable; made by `jit`.

    Attributes:
        name: the function's name.
        source: its text with that of every function it calls; two functions with equal sources compute the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not isinstance(fn, types.FunctionType):
            raise TypeError(f"@jit and @rule take a plain Python function, got {type(fn).__name__}")
        self.fn = fn
        self.name = fn.__name__
        self._bound: dict[str, Any] = {}
        self._tree = _parse(fn)
        self._callees = _resolve(fn, self._tree)

    @cached_property
    def source(self) -> str:
        parts = [ast.unparse(self._tree)]
        parts += [callee.source for callee in self._callees.values()]
        return "\n\n".join(parts)

    def bind(self, language: str, namespace: Any, wrap: Callable[[types.FunctionType], Any]) -> Any:
        """This function with `tl` replaced by `namespace`, it and its callees wrapped by `wrap`; kept under `language`."""
        if language not in self._bound:
            names = dict(self.fn.__globals__)
            names.update({name: callee.bind(language, namespace, wrap) for name, callee in self._callees.items()})
            names.update({name: namespace for name, value in names.items() if _is_language(value)})
            copy = types.FunctionType(self.fn.__code__, names, self.name, self.fn.__defaults__)
            copy.__module__, copy.__qualname__ = self.fn.__module__, self.fn.__qualname__
            self._bound[language] = wrap(copy)
        return self._bound[language]

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """Compute on torch tensors, at once, in the first one's type (float32 or float64)."""
        return self.bind(f"torch {first.dtype}", _TORCH[first.dtype], lambda fn: fn)(first, *others)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"

    def __reduce__(self) -> Any:
        # By reference, as functions are: the name in the module leads to this object.
        return _find, (self.fn.__module__, self.fn.__qualname__)


class Rule(Function):
    """An update rule, made by `rule`.

    Attributes:
        state: names of the state tensors, in order.
        hyper: names of the hyper-parameters, in order.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        arguments = [argument.arg for argument in self._tree.args.args]
        if len(arguments) != 4:
            raise TypeError(
                f"rule {self.name!r} takes ({', '.join(arguments)}): a rule has four arguments, (w, g, state, hyper)"
            )
        self.state = _unpacked_names(self._tree, arguments[2])
        self.hyper = _unpacked_names(self._tree, arguments[3])

    def __repr__(self) -> str:
        return f"<rule {self.name}: state ({', '.join(self.state)}), hyper ({', '.join(self.hyper)})>"


def _parse(fn: types.FunctionType) -> ast.FunctionDef:
    try:
        text = textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError) as error:
        raise TypeError(
            f"the source of {fn.__name__!r} cannot be found, and the GPU compiler reads it: "
            "define it in a file or in a notebook cell, not through exec or python -c"
        ) from error
    tree = ast.parse(text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{fn.__name__!r} must be written with def")
    tree.decorator_list = []
    return tree


def _is_language(value: Any) -> bool:
    # A notebook may say `import triton.language as tl`, which means the same.
    return value is tl or (value is not None and value is sys.modules.get("triton.language"))


def _resolve(fn: types.FunctionType, tree: ast.FunctionDef) -> dict[str, Function]:
    """The functions that `fn` calls, by the names it knows them by; an error for names that engines cannot know."""
    local = {argument.arg for argument in tree.args.args}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    callees: dict[str, Function] = {}
    if fn.__code__.co_freevars:
        raise TypeError(
            f"{fn.__name__!r} uses {', '.join(fn.__code__.co_freevars)} of an enclosing function: "
            "define what it needs at the top level of the module or cell, or pass it as a hyper-parameter"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if _is_language(fn.__globals__.get(node.value.id)) and node.attr not in WORDS:
                close = difflib.get_close_matches(node.attr, WORDS, n=2)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise TypeError(f"{fn.__name__!r} uses tl.{node.attr}; rules know {', '.join(WORDS)}.{hint}")
        if not isinstance(node, ast.Name) or node.id in local:
            continue
        value = fn.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(value, Function):
            callees[node.id] = value
        elif not _is_language(value) and value is not abs:
            raise TypeError(
                f"{fn.__name__!r} uses the name {node.id!r} ({type(value).__name__}), which engines do not know: "
                "a rule may use its arguments, tl, and functions marked with @jit; pass numbers as hyper-parameters"
            )
    return callees


def _unpacked_names(tree: ast.FunctionDef, argument: str) -> tuple[str, ...]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            target = statement.targets[0]
            if statement.value.id == argument and isinstance(target, ast.Tuple):
                return tuple(ast.unparse(element) for element in target.elts)
    if argument == tree.args.args[3].arg or _uses_beyond_return(tree, argument):
        if any(isinstance(node, ast.Name) and node.id == argument for node in ast.walk(tree)):
            raise TypeError(
                f"rule {tree.name!r} must unpack {argument} into names on a line of its own, "
                f"such as `first, second = {argument}` or `(only,) = {argument}`"
            )
    return ()


def _uses_beyond_return(tree: ast.FunctionDef, argument: str) -> bool:
    """Whether `argument` is used other than as the second value of a return."""
    returned = {
        id(node.value.elts[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
    }
    return any(isinstance(node, ast.Name) and node.id == argument and id(node) not in returned for node in ast.walk(tree))


def _find(module: str, qualname: str) -> Any:
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value
