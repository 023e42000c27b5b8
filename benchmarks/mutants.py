"""Small faults to put into the product, for `mutation.py`, and the means to see which of its functions a process calls."""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.machinery
import os
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["GROUPS", "TUNING", "Mutant", "instrumented", "mutants", "record"]

GROUPS = {
    "rules": ("kernels/rules/*.py",),
    "storage": ("kernels/storage/*.py",),
    "engines": (
        "kernels/backends/**/*.py",
        *(f"kernels/{name}.py" for name in ("update", "groups", "reductions", "checks", "layouts", "states", "table")),
    ),
    "optimizers": ("trainer/optimizer/*.py",),
}
# What decides how fast something runs, and not what comes out of it: no test is to fail when it changes.
TUNING = {
    "kernels/backends/eager.py": {
        "TILE": "elements at a time",
        "JOIN_UP_TO": "from where joining small tensors pays",
        "STACKS_ON_CPU": "up to where stacking pays",
        "STACKS_ELSEWHERE": "up to where stacking pays",
    },
    "kernels/backends/cpu/driver.py": {"TILE": "elements at a time"},
    "kernels/backends/cpu/loops.py": {"UNPACKED": "elements at a time"},
    "kernels/backends/cpu/threads.py": {"PARALLEL_FROM": "from where threads pay"},
    "kernels/backends/triton/compile.py": {
        "BLOCK": "elements at a time",
        "BLOCKS_OF_SUMS": "elements of a program",
        "MANY_SUMS": "registers",
        "MOST_BLOCKS": "elements of a program",
        "MOST_PACKED": "elements of a program",
        "ENOUGH": "programs of a launch",
        "threads_for": "threads of a program",
    },
    "kernels/backends/triton/launch.py": {"TOTALS": "tiles at a time"},
    "kernels/backends/triton/upload.py": {"Uploader.RING": "how far the host may be ahead"},
    "kernels/states.py": {"ALIGNMENT": "bytes, for wide accesses"},
}

# A function with one of these among its decorators is read or compiled, and Python need not execute it.
COMPILED = ("jit", "rule", "reduction", "metric", "finish", "intrinsic", "overload", "register_jitable", "kept", "entry")
DRIVERS = ("_drive",)  # compiled, too, without a decorator
ENGINES = ("kernels/update.py:", "kernels/backends/cpu/", "kernels/backends/triton/")  # who calls what was compiled

_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Scope(NamedTuple):
    """Where code stands: its dotted name, in a function or not, compiled or not, in one that returns a bool or not."""

    name: str = ""
    function: bool = False
    compiled: bool = False
    gives_bool: bool = False

    def inside(self, node: ast.AST) -> Scope:
        """The scope of the body of a class or function that stands here."""
        if not isinstance(node, (*_Function, ast.ClassDef)):
            return self
        name = f"{self.name}.{node.name}".lstrip(".")
        if isinstance(node, ast.ClassDef):
            return self._replace(name=name)
        compiled = self.compiled or node.name in DRIVERS or any(map(_compiles, node.decorator_list))
        return Scope(name, True, compiled, node.returns is not None and ast.unparse(node.returns) == "bool")


def _compiles(decorator: ast.expr) -> bool:
    callee = decorator.func if isinstance(decorator, ast.Call) else decorator
    return any(word in ast.unparse(callee) for word in COMPILED) or "numba." in ast.unparse(decorator)


class Mutant(NamedTuple):
    """One fault: bytes `start` to `end` of a file, `old`, become `new`."""

    group: str
    file: str
    line: int
    scope: Scope
    kind: str
    start: int
    end: int
    old: str
    new: str
    key: str  # a hash of the mutated file

    def applied(self, source: bytes) -> bytes:
        """The text of the file with the fault in it."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def is_met(self, called: Collection[str]) -> bool:
        """Whether a test that calls these functions may execute it."""
        if self.scope.compiled:
            return any(name.startswith(ENGINES) for name in called)
        return not self.scope.function or f"{self.file}:{self.scope.name}" in called


def mutants(tree: Path, seed: int = 0, count: int = 208) -> list[Mutant]:
    """That many mutants of the product in this folder, as many of each group and, in it, of each kind."""
    found: list[Mutant] = []
    for group, patterns in GROUPS.items():
        kinds: dict[str, list[Any]] = defaultdict(list)
        for path in sorted(path for pattern in patterns for path in tree.glob(pattern)):
            file, source = path.relative_to(tree).as_posix(), path.read_bytes()
            module = ast.parse(source)
            for node, scope in _walk(module, set(TUNING.get(file, ()))):
                for kind, old, new in _changes(node, scope):
                    kinds[kind].append((group, file, source, module, scope, kind, old, new))
        draw = random.Random(f"{seed} {group}")
        left = [_by_turns(candidates, draw) for _, candidates in sorted(kinds.items())]
        mine: dict[str, Mutant] = {}
        while len(mine) < count // len(GROUPS) and any(left):
            for candidates in filter(None, left):
                mutant = _mutant(*candidates.pop(0))
                if mutant is not None and len(mine) < count // len(GROUPS):
                    mine.setdefault(mutant.key, mutant)
        found += mine.values()
    return found


def _by_turns(candidates: list[Any], draw: random.Random) -> list[Any]:
    """The candidates of a kind in a random order, but one of each file before the second one of any."""
    draw.shuffle(candidates)
    turns: Counter[str] = Counter()
    ranked = []
    for candidate in candidates:
        turns[candidate[1]] += 1
        ranked.append((turns[candidate[1]], candidate))
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])]


def _walk(node: ast.AST, excluded: set[str], scope: Scope = Scope()) -> Iterator[tuple[ast.AST, Scope]]:  # noqa: B008
    """The nodes whose change is a fault: nothing of annotations, decorators, messages and tuning."""
    yield node, scope
    for field, value in ast.iter_fields(node):
        inner = scope.inside(node) if field == "body" else scope
        if field not in ("annotation", "returns", "decorator_list", "msg"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_left_out(child, excluded, inner):
                    yield from _walk(child, excluded, inner)


def _is_left_out(node: ast.AST, excluded: set[str], scope: Scope) -> bool:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):  # before Python 3.12, parts of an f-string have no places
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, _Function):
        return node.name == "__repr__" or scope.inside(node).name in excluded
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return not scope.function and any(f"{scope.name}.{name}".lstrip(".") in excluded for name in names)


def _changes(node: ast.AST, scope: Scope) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """What may replace what, with the kind of change."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node.left, node.right):
        yield "arithmetic", node, ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        yield "arithmetic", node, ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
    if isinstance(node, ast.Compare):
        for kind, others in (("comparison", _OPPOSITE), ("boundary", _BOUNDARY)):
            for i, op in enumerate(node.ops):
                if type(op) in others:
                    ops = [*node.ops[:i], others[type(op)](), *node.ops[i + 1 :]]  # type: ignore[index]
                    yield kind, node, ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BoolOp):
        yield "and/or", node, ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    if isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, ast.Compare):
        yield "condition", node.test, _negated(node.test)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number: Any = node.value
        value = number + 1 if type(number) is int or number == 0 else 2 * number
        yield "constant", node, ast.Constant(value)
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        for part in (node.value, *node.value.elts):
            if isinstance(part, ast.Tuple):
                yield from (("swapped", part, swapped) for swapped in _swapped(part.elts))
    elif isinstance(node, ast.Return) and scope.gives_bool and not isinstance(node.value, (ast.Compare, type(None))):
        yield "condition", node.value, _negated(node.value)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    deletable = targets and all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)  # many write in place
    if isinstance(node, ast.AugAssign) or deletable or called:
        yield "deleted", node, ast.Pass()


def _swapped(elements: list[ast.expr]) -> Iterator[ast.Tuple]:
    """Each with two neighbours exchanged that are of a kind: a weight for a tuple of states would fail anywhere."""
    for i, pair in enumerate(pairwise(elements)):
        nested = [isinstance(each, (ast.Tuple, ast.Starred)) or ast.unparse(each) == "state" for each in pair]
        if nested[0] == nested[1]:
            yield ast.Tuple([*elements[:i], *reversed(pair), *elements[i + 2 :]], ast.Load())


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_string(node) for node in nodes)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _negated(test: ast.expr) -> ast.expr:
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return test.operand if negated else ast.UnaryOp(ast.Not(), test)  # type: ignore[attr-defined]


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _mutant(
    group: str, file: str, source: bytes, module: ast.Module, scope: Scope, kind: str, old: Any, new: ast.AST
) -> Mutant | None:
    """The change as one of the text, of which Python makes just that; None where there is no such text."""
    if ast.dump(old) == ast.dump(new):
        return None
    wanted = ast.dump(_Exchange(old, new).visit(module))
    _Exchange(new, old).visit(module)
    lines = source.splitlines(keepends=True)
    start, end = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in ((old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset))
    )
    for form in ("{}", "({})"):
        text = form.format(ast.unparse(new))
        mutated = source[:start] + text.encode() + source[end:]
        try:
            found = ast.parse(mutated)
            compile(found, file, "exec")
        except (SyntaxError, ValueError):
            continue
        if ast.dump(found) == wanted:
            key = hashlib.sha256(file.encode() + b"\0" + mutated).hexdigest()[:16]
            return Mutant(group, file, old.lineno, scope, kind, start, end, source[start:end].decode(), text, key)
    return None


def instrumented(source: bytes, file: str) -> ast.Module:
    """The module, each of whose functions calls `__seen__` with its name first; but for those that are compiled."""
    module = ast.parse(source)

    def visit(node: ast.AST, scope: Scope) -> None:
        inner = scope.inside(node)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)
        if isinstance(node, _Function) and not inner.compiled:
            place = 0 if ast.get_docstring(node) is None else 1
            node.body[place:place] = ast.parse(f"__seen__({f'{file}:{inner.name}'!r})").body

    visit(module, Scope())
    return ast.fix_missing_locations(module)


def record(tree: str, out: str) -> None:
    """From now on, append each function of the product that is called in this process to the file `out`, once."""
    known: set[str] = set()
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def seen(name: str) -> None:
        if name not in known:
            known.add(name)
            os.write(file, f"{name}\n".encode())  # at once: some processes end without further ado

    builtins.__seen__ = seen  # type: ignore[attr-defined]
    ours = tuple(os.path.join(tree, folder, "") for folder in ("kernels", "trainer"))
    plain = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> Any:
        real = os.path.realpath(os.fsdecode(path))
        if real.startswith(ours) and isinstance(data, bytes):
            data = instrumented(data, os.path.relpath(real, tree))
        return plain(self, data, path, **options)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
