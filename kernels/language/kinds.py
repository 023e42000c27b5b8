"""Read which values of a function are numbers and which are comparisons, and write out what engines would do differently.

The results of comparisons, the element's index and whole numbers have types of their own, with which each engine computes
in its own way. In arithmetic a comparison therefore becomes 1 or 0, and the index a number of the arithmetic's type; whole
numbers are written as floats, and a result that is a literal gets the arithmetic's type, too.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Sequence
from typing import Any

from .ops import OPS, TorchOps

NUMBER, LITERAL, COMPARISON, INDEX = "a number", "a literal", "a comparison", "the element's index"
TUPLE, ANY = "a tuple", "an argument"  # of numbers only; of a kind that is known where the function is called
Kind = Any  # one of these, or a tuple of kinds
ENGINE = "tristep_tl"  # the name of the engine's functions in what is written out
_ARGUMENTS = {name: len(inspect.signature(getattr(TorchOps, name)).parameters) - 1 for name in OPS}


class Kinds:
    """The kinds of a function's values, for arguments of these kinds.

    Args:
        function: the `Function`, whose `tree` and `callees` are known.
        arguments: the kind of each argument.
        writes: whether to write out conversions; if not, raise TypeError where some are missing.
        returns: the kinds of results to be converted.

    Attributes:
        tree: the function's tree with all conversions.
        result: the kind of what it returns.
        draws: for each call of `tl.normal` the names of arguments and hyper-parameters that its keys are made of.
    """

    def __init__(self, function: Any, arguments: Sequence[Kind], writes: bool = True, returns: Sequence[Kind] = ()) -> None:
        self.tree = copy.deepcopy(function.tree) if writes else function.tree
        self._function, self._writes = function, writes
        self.draws: list[set[str]] = []
        # Of each assigned name, the arguments and unpacked names that it is made of; only where numbers are drawn.
        self._sources: dict[str, set[str]] = {}
        draws = any(isinstance(node, ast.Attribute) and node.attr == "normal" for node in ast.walk(self.tree))
        self._draws = draws or any(callee.draws for callee in function.callees.values())
        self._known = dict(zip((argument.arg for argument in self.tree.args.args), arguments, strict=True))
        for statement in self.tree.body[:-1]:
            assert isinstance(statement, ast.Assign)
            statement.value, kind = self._read(statement.value)
            self._assign(statement.targets[0], kind, statement)
            unpacks = isinstance(statement.value, ast.Name) and kind == TUPLE
            sources = self._sources_of(statement.value) if self._draws else set()
            for name in (node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)):
                self._sources[name] = {name} if unpacks else sources
        last: Any = self.tree.body[-1]
        last.value, self.result = self._read(last.value)
        last.value = self._returned(last.value, self.result, returns)

    def _assign(self, target: ast.expr, kind: Kind, statement: ast.Assign) -> None:
        if isinstance(target, ast.Name):
            self._known[target.id] = kind
            return
        assert isinstance(target, ast.Tuple)
        if kind in (NUMBER, LITERAL, COMPARISON, INDEX) or (isinstance(kind, tuple) and len(kind) != len(target.elts)):
            came = f"{len(kind)} values" if isinstance(kind, tuple) else kind
            raise self._refused(statement, f"which unpacks {came} into {len(target.elts)} names")
        kinds = kind if isinstance(kind, tuple) else [ANY if kind == ANY else NUMBER] * len(target.elts)
        for element, each in zip(target.elts, kinds, strict=True):
            self._assign(element, each, statement)

    def _read(self, node: ast.expr) -> tuple[ast.expr, Kind]:
        """Return the expression with its conversions, and its kind."""
        if isinstance(node, ast.Constant):
            return self._number_of(node), LITERAL
        if isinstance(node, ast.Name) and node.id in self._known:
            return node, self._known[node.id]
        if isinstance(node, ast.Tuple):
            pairs = [self._read(element) for element in node.elts]
            node.elts = [element for element, _ in pairs]
            return node, tuple(kind for _, kind in pairs)
        if isinstance(node, ast.Compare):
            (node.left, left), (node.comparators[0], right) = (
                self._number(side, node) for side in (node.left, node.comparators[0])
            )
            if left == right == LITERAL:
                raise self._refused(node, "which compares two literals: it must compare values")
            return node, COMPARISON
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            logical = isinstance(node.op, ast.Invert | ast.BitAnd | ast.BitOr)
            kinds = []
            for side in ("operand",) if isinstance(node, ast.UnaryOp) else ("left", "right"):
                value, kind = (self._comparison if logical else self._number)(getattr(node, side), node)
                setattr(node, side, value)
                kinds.append(kind)
            return node, COMPARISON if logical else LITERAL if set(kinds) == {LITERAL} else NUMBER
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node, self._word(node, node.func.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._function.callees:
            return node, self._call(node, self._function.callees[node.func.id])
        why = "which is not assigned before" if isinstance(node, ast.Name) else "which is no value"
        raise self._refused(node, f"{why}: a rule computes with its arguments, and calls functions of tl and of @jit")

    def _word(self, node: ast.Call, name: str) -> Kind:
        """Convert the arguments of a function of `tl`, and return the kind of its result."""
        if (count := _ARGUMENTS.get(name, len(node.args))) != len(node.args):
            raise self._refused(node, f"with {len(node.args)} arguments: tl.{name} takes {count}")
        first = 0
        if name == "where":
            (node.args[0], _), first = self._comparison(node.args[0], node), 1
        elif name == "normal":
            node.args[2], kind = self._read(node.args[2])
            if kind not in (INDEX, ANY):
                raise self._refused(node, "whose third argument must be `index`, an argument of the rule")
            self.draws.append(set().union(*map(self._sources_of, node.args[:2])))
        for k in range(first, 2 if name == "normal" else len(node.args)):
            node.args[k], _ = self._number(node.args[k], node)
        return NUMBER

    def _call(self, node: ast.Call, callee: Any) -> Kind:
        """Write out all arguments, and return the kind of the callee's result."""
        tree, given = callee.tree.args, {keyword.arg: keyword.value for keyword in node.keywords}
        names = [argument.arg for argument in tree.args]
        try:
            values = inspect.signature(callee.fn).bind(*node.args, **given).arguments  # type: ignore[arg-type]  # or refused
        except TypeError as error:
            raise self._refused(node, f"{error}; it takes ({ast.unparse(tree)})") from None
        # An engine would take a default in a type of its own.
        defaults = dict(zip(names[len(names) - len(tree.defaults) :], copy.deepcopy(tree.defaults), strict=True))
        pairs = [self._read(values[name] if name in values else defaults[name]) for name in names]
        node.args, node.keywords = [ast.fix_missing_locations(ast.copy_location(value, node)) for value, _ in pairs], []
        if callee.draws:  # a rule that is called unpacks the names that this one has passed to it
            of = dict(zip(names, map(self._sources_of, node.args), strict=True))
            self.draws += [set().union(*(of.get(name, {name}) for name in drawn)) for drawn in callee.draws]
        return callee.result_for(tuple(kind for _, kind in pairs))

    def _sources_of(self, node: ast.expr) -> set[str]:
        names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in self._known)
        return set().union(*(self._sources.get(name, {name}) for name in names))

    def _number(self, node: ast.expr, within: ast.expr) -> tuple[ast.expr, Kind]:
        """Return an expression as one of a number, and its kind then."""
        node, kind = self._read(node)
        if kind in (COMPARISON, INDEX):
            return self._converted(node, kind, within), NUMBER
        if isinstance(kind, tuple) or kind == TUPLE:
            raise self._refused(within, f"which computes with `{ast.unparse(node)}`, {TUPLE}: unpack it first")
        return node, kind

    def _comparison(self, node: ast.expr, within: ast.expr) -> tuple[ast.expr, Kind]:
        node, kind = self._read(node)
        if kind in (COMPARISON, ANY):
            return node, kind
        what, text = kind if isinstance(kind, str) else TUPLE, ast.unparse(node)
        raise self._refused(within, f"where `{text}` is {what}: it must be a comparison, such as `{text} != 0.0`")

    def _converted(self, node: ast.expr, kind: Kind, within: ast.expr) -> ast.expr:
        """Return a comparison, the index or a literal as a number of the arithmetic's type."""
        if not self._writes:
            remedy = ": pass tl.where(..., 1.0, 0.0) to it" if kind == COMPARISON else ""
            raise self._refused(within, f"which computes with `{ast.unparse(node)}`, {kind}{remedy}")
        word = {COMPARISON: "where", INDEX: "_number", LITERAL: "_literal"}[kind]
        further = [ast.Constant(1.0), ast.Constant(0.0)] if kind == COMPARISON else []
        made = ast.Call(ast.Attribute(ast.Name(ENGINE, ast.Load()), word, ast.Load()), [node, *further], [])
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def _returned(self, node: ast.expr, kind: Kind, converted: Sequence[Kind]) -> ast.expr:
        """Return what is returned, in a tuple perhaps within another, with these kinds converted to numbers."""
        if isinstance(node, ast.Tuple):
            node.elts = [self._returned(*pair, converted) for pair in zip(node.elts, kind, strict=True)]
        elif kind in converted:
            return self._converted(node, kind, node)
        elif isinstance(kind, tuple):  # of a name or a call
            inside = (each for part in kind for each in (part if isinstance(part, tuple) else [part]))
            if wrong := [each for each in inside if each in converted]:
                raise self._refused(node, f"which has {wrong[0]} among what is returned: unpack it, and return a number")
        return node

    def _number_of(self, node: ast.Constant) -> ast.expr:
        if type(node.value) not in (int, float):
            raise self._refused(node, "which is no number")
        try:
            return ast.copy_location(ast.Constant(float(node.value)), node)  # type: ignore[arg-type]  # it is a number
        except OverflowError:
            raise self._refused(node, "which is too large for a float") from None

    def _refused(self, node: ast.AST, why: str) -> TypeError:
        return TypeError(f"{self._function.name!r} contains `{ast.unparse(node)}`, {why}")
