"""Formulas of update rules, made of their source: a rule is written once, and nobody copies its equations.

`steps` reads a rule as the assignments that it makes, with the functions that it calls written out; `latex` writes one of
them. What a rule does only against overflow is left out of its formula: `PLAIN` says what these functions mean.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import NamedTuple

from tristep.kernels import Reduction, Rule
from tristep.kernels.language.checks import parse_function, unpacked_names
from tristep.kernels.language.derived import derivation
from tristep.kernels.language.function import Function

__all__ = ["Step", "latex", "names", "steps", "symbol"]

PLAIN = {  # functions that do more than they mean, against overflow, masks of infinite weights and sums that overflow
    "weighted": "lambda factor, x: factor * x",
    "norm_of": "lambda square: tl.sqrt(square)",
    "norm_of_both": "lambda square, small: tl.sqrt(square)",
    "squares": "lambda x: (x * x, 0.0)",
    "delay": "lambda w, g, previous, factor: factor * (w - previous) * g * g",
}
KEPT = ("clipped", "sign")  # functions with a notation of their own
SYMBOLS = {
    "lr": r"\eta",
    "wd": r"\lambda",
    "decay": r"\delta",
    "clip": r"\tau",
    "momentum": r"\mu",
    "epsilon": r"\epsilon",
    "mean": "m",
    "mom": "b",
    "var": "v",
    "one_over_scale": "s",
}
GREEK = ("alpha", "beta", "gamma", "epsilon", "rho")
OVER = {
    ("sum", "tensor"): r"\sum",
    ("sum", "global"): r"\sum_{\text{all tensors}}",
    ("max", "tensor"): r"\max",
    ("max", "global"): r"\max_{\text{all tensors}}",
    ("mean", "row"): r"\operatorname{mean}_{\text{row}}",
    ("mean", "column"): r"\operatorname{mean}_{\text{column}}",
    ("mean", "slice"): r"\operatorname{mean}_{\text{slice}}",
    ("mean", "matrix"): r"\operatorname{mean}_{\text{rows}}",
}
COMPARED = {ast.Eq: "=", ast.NotEq: r"\ne", ast.Lt: "<", ast.LtE: r"\le", ast.Gt: ">", ast.GtE: r"\ge"}
CALLED = {"exp": r"\exp", "log": r"\log", "sin": r"\sin", "cos": r"\cos", "maximum": r"\max", "minimum": r"\min"}
SUM, PRODUCT, ATOM = range(3)


class Step(NamedTuple):
    """An assignment.

    Attributes:
        target: the name that gets the value.
        value: an expression of names that were assigned before, or that the rule is given.
        over: what the value is summed, averaged or searched over, such as ("sum", "tensor"); None for no sum.
    """

    target: str
    value: ast.expr
    over: tuple[str, str] | None = None


def steps(rule: Rule) -> list[Step]:
    """The assignments that an elementwise rule makes, in order; the last of each name is its new value.

    Where a name is assigned twice, the old value is not read afterwards: a new value beside it has a name with a prime.
    """
    reader = _Reader()
    sums: list[ast.expr] = []
    outputs: dict[str, ast.expr] = {}
    for stage, consumer in pairwise([*rule.reductions, rule]):
        assert isinstance(stage, Reduction)
        read_by = unpacked_names(parse_function(consumer.fn), "sums") if "sums" in consumer.extras else ()
        values = reader.results(stage, sums)
        scopes = stage.scope if isinstance(stage.scope, tuple) else (stage.scope,) * len(values)
        finish = stage.finished
        named = unpacked_names(parse_function(finish.fn), _arguments(finish)[0]) if finish else read_by
        results = [
            reader.line(name.lstrip("_"), value, (stage.op, scope))
            for name, value, scope in zip(named or [f"sum{k}" for k in range(len(values))], values, scopes, strict=False)
        ]
        if finish is not None:
            finished = reader.call(finish, [ast.Tuple(results), _Named(), _Named()])
            assert isinstance(finished, ast.Tuple)
            wanted = [*stage.kept, *read_by[len(stage.kept) :]]
            results = [reader.line(name.lstrip("_"), each) for name, each in zip(wanted, finished.elts, strict=False)]
            outputs |= dict(zip(stage.kept, results, strict=False))
            places = read_by[len(results) : len(results) + len(stage.means)]
            results += [
                reader.line(name, outputs[of], ("mean", "matrix")) for name, of in zip(places, stage.means, strict=True)
            ]
        sums = results + (sums if stage.feeds_next else [])
    new_w, new_state = reader.results(rule, sums)
    if isinstance(new_state, ast.Tuple):
        outputs |= {name: each for name, each in zip(rule.state, new_state.elts, strict=True) if name in rule.changed}
    return _displayed(reader.lines, {name: reader.line(name, value) for name, value in {"w": new_w, **outputs}.items()})


class _Named(ast.expr):
    """A tuple whose elements are unpacked by their own names, as those of `state` and `hyper` are."""


class _Reader:
    """Reads functions into lines, each of which gives a value a name that no other line has: `mean@1` is a `mean`."""

    def __init__(self) -> None:
        self.lines: dict[str, Step] = {}
        self._known: dict[str, str] = {}

    def results(self, function: Function, sums: Sequence[ast.expr]) -> list[ast.expr]:
        """What a rule or reduction returns."""
        given = {"w": ast.Name("w"), "g": ast.Name("g"), "index": ast.Name("index"), "sums": ast.Tuple(list(sums))}
        names = [*("w", "g", "state", "hyper"), *_arguments(function)[4:]]
        result = self.call(function, [given.get(name, _Named()) for name in names])
        return result.elts if isinstance(result, ast.Tuple) else [result]

    def line(self, base: str, value: ast.expr, over: tuple[str, str] | None = None) -> ast.expr:
        """A name for the value: that of an equal one, if there is one."""
        if over is None and isinstance(value, (ast.Name, ast.Tuple, ast.Constant, _Named)):
            return value
        text = f"{ast.unparse(value)} {over}"
        if text not in self._known:
            self._known[text] = f"{base}@{len(self.lines)}"
            self.lines[self._known[text]] = Step(base, value, over)
        return ast.Name(self._known[text])

    def call(self, function: Function, arguments: Sequence[ast.expr]) -> ast.expr:
        """What the function returns for these arguments; its assignments become lines."""
        tree = parse_function(function.fn)
        uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        scope: dict[str, ast.expr] = {}

        def bind(name: str, value: ast.expr) -> None:
            """Let the name stand for the value, which has a line of its own if it is used more than once."""
            other = name in ("w", "g") and name not in {
                used.split("@")[0] for used in names(value)
            }  # no weight, no gradient
            scope[name] = self.line("x" if other else name, value) if uses[name] > 1 else value

        for argument, value in zip(_arguments(function), arguments, strict=True):
            bind(argument, value)
        for statement in tree.body:
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                return self._value(statement.value, scope, function)
            if not isinstance(statement, ast.Assign):
                continue  # a docstring
            target, value = statement.targets[0], self._value(statement.value, scope, function)
            if isinstance(target, ast.Name):
                scope[target.id] = self.line(target.id, value)
                continue
            assert isinstance(target, ast.Tuple)
            of_function = isinstance(statement.value, (ast.Tuple, ast.Call))
            for place, each in enumerate(target.elts):
                assert isinstance(each, ast.Name)
                if isinstance(value, _Named):
                    scope[each.id] = ast.Name(each.id)
                    continue
                assert isinstance(value, ast.Tuple)
                part = value.elts[place]
                if of_function and not each.id.startswith("_"):
                    scope[each.id] = self.line(each.id, part)
                else:
                    bind(each.id, part)
        raise AssertionError(f"{function.name} returns nothing")

    def _value(self, node: ast.expr, scope: dict[str, ast.expr], function: Function) -> ast.expr:
        """The expression with names replaced by what they stand for, and calls by what they return."""
        value = self._substituted(node, scope, function)
        known = self._known.get(f"{ast.unparse(value)} None") if isinstance(value, (ast.BinOp, ast.Call)) else None
        return ast.Name(known) if known else value

    def _substituted(self, node: ast.expr, scope: dict[str, ast.expr], function: Function) -> ast.expr:
        if isinstance(node, ast.Name):
            return scope.get(node.id, node)
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self._value(each, scope, function) for each in node.elts])
        if isinstance(node, ast.BinOp):
            return _folded(node.op, self._value(node.left, scope, function), self._value(node.right, scope, function))
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, self._value(node.operand, scope, function))
        if isinstance(node, ast.Compare):
            left, right = (self._value(each, scope, function) for each in (node.left, node.comparators[0]))
            return ast.Compare(left, node.ops, [right])
        if not isinstance(node, ast.Call):
            return node
        arguments = [self._value(each, scope, function) for each in node.args]
        if isinstance(node.func, ast.Attribute):
            return _chosen(arguments) if node.func.attr == "where" else ast.Call(node.func, arguments, [])
        assert isinstance(node.func, ast.Name)
        called = function.callees[node.func.id]
        if called.name in KEPT:
            return ast.Call(ast.Name(called.name), arguments, [])
        if called.name in PLAIN:
            meant = ast.parse(PLAIN[called.name], mode="eval").body
            assert isinstance(meant, ast.Lambda)
            return self._value(meant.body, dict(zip((a.arg for a in meant.args.args), arguments, strict=True)), called)
        return self.call(called, arguments)


def _arguments(function: Function) -> list[str]:
    return [argument.arg for argument in parse_function(function.fn).args.args]


def _is(node: ast.expr, number: float) -> bool:
    return isinstance(node, ast.Constant) and node.value == number


def _folded(op: ast.operator, left: ast.expr, right: ast.expr) -> ast.expr:
    """The operation, or its result where that is an operand, or 0."""
    if isinstance(op, ast.Mult):
        if _is(left, 0) or _is(right, 0):
            return ast.Constant(0.0)
        if _is(left, 1):
            return right
    if isinstance(op, ast.Sub) and _is(left, 1) and isinstance(right, ast.Name) and right.id.startswith("one_minus_"):
        return ast.Name(right.id.removeprefix("one_minus_"))
    if isinstance(op, ast.Add) and (_is(left, 0) or _is(right, 0)):
        return right if _is(left, 0) else left
    return ast.BinOp(left, op, right)


def _chosen(arguments: list[ast.expr]) -> ast.expr:
    """`tl.where`; what it does where its condition fails needs no second look at that."""
    condition, chosen, other = arguments
    failed = [ast.unparse(each) for each in _alternatives(condition)]

    class Known(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "where" and ast.unparse(node.args[0]) in failed:
                return node.args[2]
            return node

    other = Known().visit(deepcopy(other))
    return ast.Call(ast.Attribute(ast.Name("tl"), "where"), [condition, chosen, other], [])


def _alternatives(condition: ast.expr) -> list[ast.expr]:
    if isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.BitOr):
        return [*_alternatives(condition.left), *_alternatives(condition.right)]
    return [condition]


def names(node: ast.AST) -> set[str]:
    """The names of values in an expression."""
    called = {id(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in called} - {"tl"}


def _displayed(lines: dict[str, Step], outputs: dict[str, ast.expr]) -> list[Step]:
    """The lines that outputs need, with names that can be read."""
    ends = {name: value.id for name, value in outputs.items() if isinstance(value, ast.Name)}
    needed, queue = set(), list(ends.values())
    while queue:
        if (name := queue.pop()) not in needed:
            needed.add(name)
            queue += names(lines[name].value) if name in lines else []
    order = [name for name in lines if name in needed]
    reads = Counter(name for line in order for name in names(lines[line].value))
    for name in order:  # what is only summed needs no name
        target, value, over = lines[name]
        inner = lines.get(value.id) if over is not None and isinstance(value, ast.Name) else None
        if inner is not None and inner.over is None and reads[value.id] == 1 and value.id not in ends.values():
            needed.remove(value.id)
            lines[name] = Step(target, inner.value, over)
    order = [name for name in order if name in needed]
    given = {name for name in needed if name not in lines} | {"w", "g", *outputs}
    bases = {name: lines[name].target for name in order}
    for name, end in ends.items():  # what becomes a state, or the weight, is called so from the start
        if end in bases and bases[end] not in ("w", "g") and ends.get(bases[end]) != end:
            bases[end] = name
    last_read = {name: at for at, line in enumerate(order) for name in names(lines[line].value)}
    last_read |= dict.fromkeys(ends.values(), len(order))
    shown = {name: name for name in given}
    holders = {name: name for name in given}
    made = []
    for at, name in enumerate(order):
        target, value, over = lines[name]
        target = bases[name]
        while last_read.get(holders.get(target, ""), 0) > at:
            target += "'"
        value = _renamed(value, shown)
        shown[name], holders[target] = target, name
        made.append(Step(target, value, over))
    copies = [Step(name, ast.Name(shown[end])) for name, end in ends.items() if shown[end] != name]
    return made + sorted(copies, key=lambda step: any(step.target in names(other.value) for other in copies))


def _renamed(node: ast.expr, shown: dict[str, str]) -> ast.expr:
    node = deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            each.id = shown.get(each.id, each.id)
    return node


def latex(step: Step) -> str:
    """The assignment in LaTeX."""
    value = _latex(step.value, SUM)
    if step.over is not None:
        value = f"{OVER[step.over]} {_latex(step.value, PRODUCT)}"
    return rf"{symbol(step.target)} \leftarrow {value}"


def symbol(name: str) -> str:
    """A name in LaTeX; a prime says that the value is new, next to the old one."""
    if name.endswith("'"):
        text = symbol(name[:-1])
        return rf"{text}{'^' if '_' in text else '_'}{{\text{{new}}}}"
    base = name.rstrip("0123456789")
    if base in GREEK:
        text = rf"\{base}" + (f"_{{{name[len(base) :]}}}" if base != name else "")
    elif name in SYMBOLS:
        text = SYMBOLS[name]
    elif len(base) == 1:
        text = base + (f"_{{{name[len(base) :]}}}" if base != name else "")
    elif name.startswith(("new_", "old_", "last_", "largest_")):
        first, _, rest = name.partition("_")
        text = rf"{symbol(rest)}_{{\text{{{first}}}}}"
    else:
        text = rf"\text{{{name.replace('_', ' ')}}}"
    return text


def _latex(node: ast.expr, level: int) -> str:
    text, own = _written(node)
    return _in_parentheses(text) if own < level else text


def _in_parentheses(text: str) -> str:
    """Parentheses grow with fractions; around a line they would be too high."""
    return rf"\left( {text} \right)" if re.search(r"\\(?:frac|begin)", text) else f"({text})"


def _written(node: ast.expr) -> tuple[str, int]:
    """An expression in LaTeX, and how tightly it is bound."""
    if isinstance(node, ast.Constant):
        return _number(float(node.value)), ATOM
    if isinstance(node, ast.Name):
        return _named(node.id)
    if isinstance(node, ast.UnaryOp):
        return f"-{_latex(node.operand, PRODUCT)}", SUM
    if isinstance(node, ast.Compare):
        return f"{_latex(node.left, SUM)} {COMPARED[type(node.ops[0])]} {_latex(node.comparators[0], SUM)}", SUM
    if isinstance(node, ast.BinOp):
        return _operation(node)
    assert isinstance(node, ast.Call), ast.dump(node)
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "where":
        condition, chosen, other = node.args
        if _is(chosen, 1) and ast.unparse(condition) == f"{ast.unparse(other)} == 0.0":
            return _written(other)  # a denominator, where 0 / 0 is 0
        return rf"\begin{{cases}} {_cases(node)} \end{{cases}}", ATOM
    arguments = [_latex(each, SUM) for each in node.args]
    if called == "sqrt":
        return rf"\sqrt{{{arguments[0]}}}", ATOM
    if called == "abs":
        return rf"\left| {arguments[0]} \right|", ATOM
    if called == "clipped":
        return rf"\operatorname{{clip}}_{{{arguments[1]}}}{_in_parentheses(arguments[0])}", ATOM
    if called == "normal":
        return r"\operatorname{normal}", ATOM
    name = CALLED.get(called, rf"\operatorname{{{called}}}")
    return f"{name}{_in_parentheses(', '.join(arguments))}", ATOM


def _cases(node: ast.Call) -> str:
    condition, chosen, other = node.args
    first = rf"{_latex(chosen, SUM)} & \text{{if }} {_latex(condition, SUM)}"
    if isinstance(other, ast.Call) and isinstance(other.func, ast.Attribute) and other.func.attr == "where":
        return rf"{first} \\ {_cases(other)}"
    return rf"{first} \\ {_latex(other, SUM)} & \text{{otherwise}}"


def _named(name: str) -> tuple[str, int]:
    if name.startswith("one_minus_"):
        return f"1 - {symbol(name.removeprefix('one_minus_'))}", SUM
    return (rf"\frac{{1}}{{{_corrected(name)}}}" if name.startswith("correction") else symbol(name)), ATOM


def _operation(node: ast.BinOp) -> tuple[str, int]:
    left, right = node.left, node.right
    if isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        word = "and" if isinstance(node.op, ast.BitAnd) else "or"
        return rf"{_latex(left, SUM)} \text{{ {word} }} {_latex(right, SUM)}", SUM
    if isinstance(node.op, (ast.Add, ast.Sub)):
        sign = "+" if isinstance(node.op, ast.Add) else "-"
        return f"{_latex(left, SUM)} {sign} {_latex(right, SUM if sign == '+' else PRODUCT)}", SUM
    if isinstance(node.op, ast.Div):
        return rf"\frac{{{_latex(left, SUM)}}}{{{_latex(right, SUM)}}}", ATOM
    return _product(_factors(node))


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _product(factors: list[ast.expr]) -> tuple[str, int]:
    """A product: equal factors as a power, two roots under one, and what corrects a bias as a denominator."""
    roots = [each for each in factors if isinstance(each, ast.Call) and ast.unparse(each.func) == "tl.sqrt"]
    if len(roots) == 2:
        root = ast.Call(roots[0].func, [ast.BinOp(roots[0].args[0], ast.Mult(), roots[1].args[0])], [])
        rest = [each for each in factors if each not in roots]
        return _product([*rest, root]) if rest else _written(root)
    for each in factors:
        if isinstance(each, ast.Name) and each.id.startswith("correction") and len(factors) > 1:
            above, _ = _product([other for other in factors if other is not each])
            return rf"\frac{{{above}}}{{{_corrected(each.id)}}}", ATOM
    if len(factors) == 1:
        return _written(factors[0])
    powers = Counter(_latex(each, ATOM) for each in factors)
    return r" \, ".join(text if count == 1 else f"{text}^{count}" for text, count in powers.items()), PRODUCT


def _corrected(name: str) -> str:
    """What a bias correction divides by."""
    derived = derivation(name)
    assert derived is not None
    return f"1 - {symbol(derived.source)}^t"


def _number(value: float) -> str:
    text = f"{value:.3g}"
    if "e" not in text:
        return text
    digits, power = text.split("e")
    return f"10^{{{int(power)}}}" if digits == "1" else rf"{digits} \cdot 10^{{{int(power)}}}"
