"""Replace numeric literals in a function by global names, so that each can have the type of the arithmetic."""

from __future__ import annotations

import ast
import copy
import types
from typing import Any


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def name_literals(tree: ast.FunctionDef, file: str) -> tuple[types.CodeType, dict[str, float]]:
    """Compile a function with a global name in place of each numeric literal, and return the values of these names, too.

    Expressions of literals are folded first, as Python does: 1 / 3 is one number. Defaults of arguments become None.
    """
    tree = copy.deepcopy(tree)
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {each.arg for each in tree.args.args}
    named = _Named(taken)
    module = ast.Module([named.visit(_Folded().visit(tree))], [])
    defined: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), file, "exec"), defined)
    return defined[tree.name].__code__, named.numbers


class _Folded(ast.NodeTransformer):
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _evaluated(node) if isinstance(node.op, ast.USub) and _is_literal(node.operand) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _evaluated(node) if _is_literal(node.left) and _is_literal(node.right) else node


class _Named(ast.NodeTransformer):
    def __init__(self, taken: set[str]) -> None:
        self.numbers: dict[str, float] = {}
        self._taken = taken

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not is_number(node.value):
            return node
        name = f"number{len(self.numbers)}"
        while name in self._taken:
            name = f"_{name}"
        self.numbers[name] = node.value  # type: ignore[assignment]  # is_number has checked it
        return ast.copy_location(ast.Name(name, ast.Load()), node)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and is_number(node.value)


def _evaluated(node: ast.expr) -> ast.expr:
    try:
        value = eval(compile(ast.Expression(node), "", "eval"))
    except (ArithmeticError, TypeError):  # 1 / 0; operators that floats lack
        return node
    return ast.copy_location(ast.Constant(value), node)
