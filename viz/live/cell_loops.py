"""Cells turned into coroutines that pause before each iteration of their loop, for `%%train`."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from IPython.core.error import UsageError

__all__ = ["numbers_of", "split_at_loop", "turn", "turns"]

_WORDS = {
    ast.Await: "await",
    ast.AsyncFor: "async for",
    ast.AsyncWith: "async with",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}
_TURN = f"await __import__({__name__!r}, fromlist=['turn']).turn()"  # which needs no name in the notebook


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Pause the cell before an iteration of its loop."""
    yield


def split_at_loop(tree: ast.Module) -> tuple[ast.Module, ast.Module]:
    """Split a cell before its first loop, and make the training loop in the second part await `turn` at each iteration.

    IPython can compile the second part like any cell with await: it uses the notebook's names, and evaluates to a
    coroutine. The training loop is the innermost one that calls a method `step`, else the first. The tree is changed.
    UsageError is raised if the cell has no loop, or has await, yield or an async statement from its first loop on.
    """
    at = next((i for i, statement in enumerate(tree.body) if any(_loops(statement))), None)
    if at is None:
        raise UsageError("%%train: the cell has no for or while loop to step through")
    statements = tree.body[at:]
    for statement in statements:
        for node in _own(statement):
            word = "async for" if getattr(node, "is_async", 0) else _WORDS.get(type(node))
            if word is not None:
                line = getattr(node, "lineno", statement.lineno)
                raise UsageError(f"%%train: line {line} has {word}, which cannot be stepped through")
    loop = _stepped(statements)
    waits = ast.parse(_TURN).body[0]
    for node in ast.walk(waits):
        ast.copy_location(node, loop.body[0])
    loop.body.insert(0, waits)
    return ast.Module(tree.body[:at], []), ast.fix_missing_locations(ast.Module(statements, []))


def turns(cell: Callable[[], Any], values: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run one iteration of a cell's loop for each `next`, and yield the values after it.

    `cell` makes the coroutine of the cell, which awaits `turn` before each iteration.
    """
    waits = cell().__await__()
    try:
        if next(waits, waits) is waits:
            return
        while next(waits, waits) is not waits:
            yield values()
        yield values()
    finally:
        waits.close()


def numbers_of(namespace: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return those variables of `names` that are numbers or tensors of real numbers, with the tensors' means."""
    numbers: dict[str, Any] = {}
    for name in names:
        value = namespace.get(name)
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_complex():
            numbers[name] = value.detach().double().mean()  # over samples, if it is not a mean already
        elif isinstance(value, (int, float)):
            numbers[name] = value
    return numbers


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, without the bodies of functions and classes."""
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
    innermost = None
    for loop in loops:  # outer ones come before those in them
        if any(map(_calls_step, loop.body)) and (innermost is None or loop in _own(innermost)):
            innermost = loop
    return loops[0] if innermost is None else innermost


def _calls_step(node: ast.AST) -> bool:
    if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        return True
    return any(map(_calls_step, ast.iter_child_nodes(node)))
