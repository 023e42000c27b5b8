"""`jit`: functions of values, written once and bound to each backend's `tl`.

The values are blocks of a GPU program (Triton), numbers in a compiled loop (numba) or whole tensors (torch). `Function.bind`
gives the same text another `tl` for each backend.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from ..messages import instance, there_are
from .checks import check_form, parse_function
from .literals import is_number, name_literals
from .ops import OPS, TORCH_OPS, is_tl
from .text import OfText, function_of_text


def jit(fn: Callable[..., Any]) -> Function:
    """Make a `Function` that rules may call; it is compiled into each rule that uses it, on every backend.

    Args:
        fn: function of values, with the form of a `rule`: plain arguments, assignments and one final `return`.

    Raises:
        TypeError: the function has another form or uses a name that backends do not know.
    """
    return Function(fn)


class Function(OfText):
    """A function of values that can be bound to any backend's ops. Immutable; made by `jit`.

    Attributes:
        name: the function's name.
        source: source text of the function and of every function that it calls; equal sources compute the same.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        instance("the function of @jit or @rule", fn, types.FunctionType, "a plain Python function")
        self.fn = fn
        self.name = fn.__name__
        self.__module__ = fn.__module__  # pickle looks there for it
        self._bound: dict[str, Any] = {}
        self._defined()

    def read(self) -> None:
        tree = parse_function(self.fn)
        check_form(tree)
        self.tree, self._callees = tree, _called_functions(self.fn, tree)

    @cached_property
    def source(self) -> str:
        parts = [ast.unparse(self.tree)]
        parts += [callee.source for callee in self._callees.values()]
        return "\n\n".join(parts)

    @cached_property
    def _without_annotations(self) -> types.FunctionType:
        """The function without annotations, in which Triton would look up names that it does not know."""
        if not self.fn.__annotations__:
            return self.fn
        return function_of_text(self.name, ast.unparse(self.tree), self.fn.__globals__)

    def bind(
        self,
        language: str,
        namespace: Any,
        wrap: Callable[[types.FunctionType], Any],
        number: Callable[[float], Any] | None = None,
    ) -> Any:
        """Return this function compiled for a backend: `tl` replaced by `namespace`, it and its callees wrapped by `wrap`.

        Args:
            language: name under which the result is cached.
            namespace: the backend's functions, in place of `tl`.
            wrap: the backend's decorator, such as `triton.jit`.
            number: function that converts each literal, for compilers that would compute in a literal's own type. Default:
                literals stay as they are.
        """
        if language not in self._bound:
            names = dict(self.fn.__globals__)
            names.update({name: callee.bind(language, namespace, wrap, number) for name, callee in self._callees.items()})
            names.update({name: namespace for name, value in names.items() if is_tl(value)})
            code, defaults = self._without_annotations.__code__, self.fn.__defaults__
            if number is not None:
                code, numbers = name_literals(self.tree, code.co_filename)
                names.update({name: number(value) for name, value in numbers.items()})
                defaults = None if defaults is None else tuple(number(v) if is_number(v) else v for v in defaults)
            copy = types.FunctionType(code, names, self.name, defaults)
            # Triton 3.5 tells functions in a kernel apart by module and name alone: another text needs another name.
            digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
            copy.__module__, copy.__qualname__ = self.fn.__module__, f"{self.fn.__qualname__}_{digest}"
            self._bound[language] = wrap(copy)
        return self._bound[language]

    def __call__(self, first: torch.Tensor | tuple[torch.Tensor, ...], *arguments: Any) -> Any:
        """Compute eagerly on torch tensors, in the dtype of the first (float32 or float64)."""
        dtype = (first if isinstance(first, torch.Tensor) else first[0]).dtype
        if dtype not in TORCH_OPS:
            raise TypeError(f"{self.name!r} computes in torch.float32 or torch.float64, its first argument is {dtype}")
        return self.bind(f"torch {dtype}", TORCH_OPS[dtype], lambda fn: fn)(first, *arguments)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.fn.__qualname__  # by reference, like functions: pickle checks that this name leads here


def _called_functions(fn: types.FunctionType, tree: ast.FunctionDef) -> dict[str, Function]:
    """Return the functions that `fn` calls, by name. Raise TypeError for names that backends cannot know."""
    local = {argument.arg for argument in tree.args.args}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    callees: dict[str, Function] = {}
    if fn.__code__.co_freevars:
        raise TypeError(
            f"{fn.__name__!r} uses {', '.join(fn.__code__.co_freevars)} of an enclosing function: "
            "define what it needs at the top level of the module or cell, or pass it as a hyper-parameter"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not isinstance(node.value, ast.Name) or node.value.id in local:
                raise TypeError(f"{fn.__name__!r} uses {ast.unparse(node)}: values have no attributes that all engines know")
            if is_tl(fn.__globals__.get(node.value.id)) and node.attr not in OPS:
                raise TypeError(f"{fn.__name__!r} uses tl.{node.attr}, which rules do not know.{there_are(node.attr, OPS)}")
        if not isinstance(node, ast.Name) or node.id in local:
            continue
        value = fn.__globals__.get(node.id, getattr(builtins, node.id, None))
        if isinstance(value, Function):
            callees[node.id] = value
        elif not is_tl(value):
            hint = f" Did you mean tl.{node.id}?" if node.id in OPS else ""
            what = f"({type(value).__name__}), which engines do not know" if value is not None else "which is not defined"
            raise TypeError(
                f"{fn.__name__!r} uses the name {node.id!r} {what}.{hint} "
                "A rule may use its arguments, tl, and functions marked with @jit; pass numbers as hyper-parameters"
            )
    return callees
