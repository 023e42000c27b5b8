"""A cell with a loop as a generator that yields before each of its steps, for `%%train`."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from IPython.core.error import UsageError

__all__ = ["numbers_of", "split_at_loop", "turns"]

FUNCTION = "training_loop"


def split_at_loop(tree: ast.Module, filename: str) -> tuple[ast.Module, ast.Module]:
    """A cell in two parts: what comes before its first loop, and a generator function of the rest.

    The generator yields before each turn of the loop that is stepped through.

    Raises:
        UsageError: there is no loop, or one that cannot be made a generator.
    """
    at = next((i for i, statement in enumerate(tree.body) if any(_loops(statement))), None)
    if at is None:
        raise UsageError("%%train: the cell has no for or while loop to step through")
    rest = tree.body[at:]
    for statement in rest:
        for node in _own(statement):
            if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)):
                words = {"Await": "await", "AsyncFor": "async for", "AsyncWith": "async with"}
                word = words.get(type(node).__name__, "yield")
                raise UsageError(f"%%train: line {node.lineno} has {word}, which cannot be stepped through")
    names = _names(rest, filename)
    loop = _stepped(rest)
    loop.body.insert(0, ast.copy_location(ast.Expr(ast.Yield(None)), loop.body[0]))
    rest = [_WithoutAnnotations().visit(statement) for statement in rest]
    function = ast.parse(f"def {FUNCTION}():\n    global {', '.join(names)}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body += rest
    module = ast.Module([function], [])
    ast.copy_location(function, rest[0])
    return ast.Module(tree.body[:at], []), ast.fix_missing_locations(module)


def turns(function: Callable[[], Iterator[None]], values: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turns of a loop whose generator yields before each: one for each `next`, and the numbers after it."""
    generator = function()
    try:
        if next(generator, generator) is generator:
            return
        while next(generator, generator) is not generator:
            yield values()
        yield values()
    finally:
        generator.close()  # type: ignore[attr-defined]


def numbers_of(namespace: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        value = namespace.get(name)
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_complex():
            found[name] = value.detach().double().mean()  # of samples, where it is not a mean already
        elif isinstance(value, (int, float)):
            found[name] = value
    return found


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, but for what belongs to functions and classes inside."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _own(child)


def _loops(statement: ast.AST) -> Iterator[ast.For | ast.While]:
    return (node for node in _own(statement) if isinstance(node, (ast.For, ast.While)))


def _stepped(statements: Sequence[ast.stmt]) -> ast.For | ast.While:
    """The innermost loop that calls a method `step` in its own body, else the first one."""
    loops = [loop for statement in statements for loop in _loops(statement)]
    found = None
    for loop in loops:  # outer ones come before those in them
        if any(map(_calls_step, loop.body)) and (found is None or loop in _own(found)):
            found = loop
    return loops[0] if found is None else found


def _calls_step(node: ast.AST) -> bool:
    if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        return True
    return any(map(_calls_step, ast.iter_child_nodes(node)))


def _names(statements: Sequence[ast.stmt], filename: str) -> list[str]:
    """All names that these statements use or set themselves, not in functions inside."""
    table = symtable.symtable(ast.unparse(ast.Module(list(statements), [])), filename, "exec")
    return [symbol.get_name() for symbol in table.get_symbols()]


class _WithoutAnnotations(ast.NodeTransformer):
    """Assignments without the types that global names cannot have."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return node
        plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(plain, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node
