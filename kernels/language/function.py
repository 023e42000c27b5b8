"""`jit`: functions of values, written once and bound to each backend's `tl`.

The values are blocks of a GPU program (Triton), numbers in a compiled loop (numba) or whole tensors (torch). `Function.bind`
gives the same text another `tl` for each backend.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import types
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ..messages import instance, there_are
from .checks import check_form, check_is_loaded, parse_function
from .kinds import ANY, ENGINE, Kind, Kinds
from .literals import compiled, name_literals, wrap_literals
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
        check_is_loaded(self.fn, tree)
        check_form(tree)
        self.tree, self.callees = tree, _called_functions(self.fn, tree)
        self._results: dict[tuple[Kind, ...], Kind] = {}
        if type(self) is Function:
            self.read_kinds([ANY] * len(tree.args.args))

    def read_kinds(self, arguments: Sequence[Kind], returns: Sequence[Kind] = ()) -> None:
        """Write conversions into `tree`, for arguments and results of these kinds; raise TypeError for what has none."""
        kinds = Kinds(self, arguments, returns=returns)
        self.tree, self.draws = kinds.tree, kinds.draws

    def result_for(self, arguments: tuple[Kind, ...]) -> Kind:
        """Return the kind of the result for arguments of these kinds; raise TypeError where it computes with others."""
        if arguments not in self._results:
            self._results[arguments] = Kinds(self, arguments, writes=False).result
        return self._results[arguments]

    @cached_property
    def source(self) -> str:
        parts = [ast.unparse(self.tree)]
        parts += [callee.source for callee in self.callees.values()]
        return "\n\n".join(parts)

    def bind(
        self,
        language: str,
        namespace: Any,
        wrap: Callable[[types.FunctionType], Any],
        number: Callable[[float], Any] | None = None,
        reads_source: bool = False,
        typed: bool = False,
    ) -> Any:
        """Return this function compiled for a backend: `tl` replaced by `namespace`, it and its callees wrapped by `wrap`.

        All backends compile `tree`, which was read when the function was defined: the file may have changed since.

        Args:
            language: name under which the result is cached.
            namespace: the backend's functions, in place of `tl`.
            wrap: the backend's decorator, such as `triton.jit`.
            number: function that converts each literal, for compilers that would compute in a literal's own type. Default:
                literals stay as they are.
            reads_source: whether the decorator reads the function's source text.
            typed: with `reads_source`, whether each literal is given to the namespace's function `_literal`.
        """
        if language not in self._bound:
            names = dict(self.fn.__globals__)
            for name, callee in self.callees.items():
                names[name] = callee.bind(language, namespace, wrap, number, reads_source, typed)
            names.update({name: namespace for name, value in names.items() if is_tl(value)})
            names[ENGINE] = namespace
            if reads_source:
                tree = wrap_literals(self.tree, ENGINE) if typed else self.tree
                copy = function_of_text(self.name, ast.unparse(tree), names)
            else:
                tree, numbers = (self.tree, {}) if number is None else name_literals(self.tree)
                names.update({name: number(value) for name, value in numbers.items() if number is not None})
                copy = types.FunctionType(
                    compiled(tree, self.fn.__code__.co_filename), names, self.name, self.fn.__defaults__
                )
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
