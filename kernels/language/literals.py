"""Compile functions from their trees, and give numeric literals the type of the arithmetic."""

from __future__ import annotations

import ast
import copy
import types
from typing import Any


def compiled(tree: ast.FunctionDef, file: str) -> types.CodeType:
    """Return the code of a function."""
    defined: dict[str, Any] = {}
    bare = copy.copy(tree)
    bare.args = copy.copy(tree.args)
    bare.args.defaults = [ast.copy_location(ast.Constant(None), tree) for _ in tree.args.defaults]
    exec(compile(ast.Module([bare], []), file, "exec"), defined)
    return defined[tree.name].__code__


def name_literals(tree: ast.FunctionDef) -> tuple[ast.FunctionDef, dict[str, float]]:
    """Return the tree with a global name in place of each numeric literal, and the values of these names.

    Expressions of literals are folded first, as Python does: 1 / 3 is one number.
    """
    tree = copy.deepcopy(tree)
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {each.arg for each in tree.args.args}
    tree.args.defaults = []
    named = _Named(taken)
    return named.visit(_Folded().visit(tree)), named.numbers


def wrap_literals(tree: ast.FunctionDef, namespace: str) -> ast.FunctionDef:
    """Return the tree with a call of the function `_literal` of a namespace around each numeric literal, folded first."""
    return ast.fix_missing_locations(_Wrapped(namespace).visit(_Folded().visit(copy.deepcopy(tree))))


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
        name = f"number{len(self.numbers)}"
        while name in self._taken:
            name = f"_{name}"
        self.numbers[name] = node.value  # type: ignore[assignment]  # `Kinds` has checked it
        return ast.copy_location(ast.Name(name, ast.Load()), node)


class _Wrapped(ast.NodeTransformer):
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        return node  # calls have all arguments

    def visit_Call(self, node: ast.Call) -> ast.expr:
        wrapped = isinstance(node.func, ast.Attribute) and node.func.attr == "_literal"
        return node if wrapped else self.generic_visit(node)  # type: ignore[return-value]  # a call again

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Call(ast.Attribute(ast.Name(self._namespace, ast.Load()), "_literal", ast.Load()), [node], [])


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _evaluated(node: ast.expr) -> ast.expr:
    try:
        value = eval(compile(ast.Expression(node), "", "eval"))
    except (ArithmeticError, TypeError):  # 1 / 0; operators that floats lack
        return node
    return ast.copy_location(ast.Constant(value), node)
