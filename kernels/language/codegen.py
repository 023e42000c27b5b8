"""Source text of rules and reductions that call a given rule.

A transformed rule is generated as source text, because the compilers read source.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable
from typing import Any

from .function import Function
from .ops import tl
from .reduction import Reduction
from .rule import Rule
from .text import function_of_text


class RuleSource:
    """Builds the source of a function that calls a rule. Generated names never clash with names that the rule unpacks.

    Args:
        rule: the rule, or reduction, to be called.
        added: names that the new rule unpacks in addition to the rule's.
        **helpers: functions that the text calls, by the name that they get in the text if it is free.

    Attributes:
        w, g, tl: names of the weight, the gradient and the functions of rules in the text.
        sums: names of the numbers that the rule gets from its reductions.

    Raises:
        ValueError: the rule has a state or hyper-parameter of a name in `added`.
    """

    def __init__(self, rule: Rule | Reduction, *added: str, **helpers: Function) -> None:
        self.rule: Any = rule
        unpacked = rule.hyper if isinstance(rule, Rule) else rule.own_hyper
        if twice := [name for name in added if name in (*rule.state, *unpacked)]:
            raise ValueError(f"{rule.kind} {rule.name!r} has a state or hyper-parameter {twice[0]!r} already")
        self._taken = {"sums", "kept", "index", *rule.state, *unpacked, *added}
        self.w, self.g, self._state, self._hyper, self.tl, self._rule = self.new("w", "g", "state", "hyper", "tl", "rule")
        self._called = dict(zip(helpers, self.new(*helpers), strict=True))
        self._names = {self.tl: tl, self._rule: rule, "__name__": __name__}
        self._names |= {called: helpers[wish] for wish, called in self._called.items()}
        self.sums = self.new(*["found"] * rule.n_numbers)
        self._new = dict(zip(rule.state, self.new(*(f"new_{name}" for name in rule.state)), strict=True))

    def new_state(self, name: str) -> str:
        """Return the text's name for the new value of a state."""
        return self._new[name]

    def __getitem__(self, helper: str) -> str:
        """Return the text's name for a helper function."""
        return self._called[helper]

    def new(self, *wishes: str) -> tuple[str, ...]:
        """Reserve and return unused names similar to `wishes`."""
        names = []
        for wish in wishes:
            candidates = itertools.chain([wish], (f"{wish}{k}" for k in itertools.count(2)))
            names.append(next(name for name in candidates if name not in self._taken))
            self._taken.add(names[-1])
        return tuple(names)

    def arguments(self, states: tuple[str, ...] = (), hyper: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        """Return the arguments and the lines that unpack the rule's names, then these states and hyper-parameters.

        Raises:
            ValueError: `RuleSource` has not been given a name.
        """
        rule = self.rule
        if unknown := [name for name in (*states, *hyper) if name not in self._taken]:
            raise ValueError(f"arguments() got {unknown[0]!r}: give added names to RuleSource(rule, {unknown[0]!r}), too")
        return self.unpacked(rule.extras, (*rule.state, *states), (*rule.own_hyper, *hyper), self.sums)

    def unpacked(
        self, extras: tuple[str, ...], states: tuple[str, ...], hyper: tuple[str, ...], sums: tuple[str, ...]
    ) -> tuple[str, list[str]]:
        """Return the arguments as text, and the lines that unpack them into these names."""
        arguments = ", ".join((self.w, self.g, self._state, self._hyper, *extras))
        pairs = [(states, self._state), (hyper, self._hyper), (sums, "kept" if "kept" in extras else "sums")]
        return arguments, [f"{tuple_text(names)} = {argument}" for names, argument in pairs if names]

    def arguments_after(
        self, before: Reduction, added: tuple[str, ...] = ()
    ) -> tuple[tuple[str, list[str]], tuple[str, ...]]:
        """Return arguments and unpacking lines of a rule that runs after reduction `before`, and the names of its numbers.

        Order of the numbers: the rule's own, then what earlier reductions pass on.

        Args:
            before: the reduction that runs before the new rule.
            added: hyper-parameters that the new rule unpacks in addition.
        """
        rule, numbers = self.rule, "kept" if "kept" in self.rule.extras else "sums"
        n = before.n_results + (len(rule.kept) if numbers == "kept" else 0)
        names = (*self.sums, *self.new(*["passed"] * (n - len(self.sums))))
        extras = (numbers, *(("index",) if "index" in rule.extras else ()))
        return self.unpacked(extras, rule.state, (*rule.own_hyper, *added), names), names

    def call(self, exchanged: dict[str, str] | None = None, g: str | None = None) -> str:
        """Return the text of a call of the rule, optionally with other hyper-parameters or another gradient."""
        hyper = [(exchanged or {}).get(name, name) for name in self.rule.own_hyper]
        values = {"sums": tuple_text(self.sums), "kept": tuple_text(self.sums), "index": "index"}
        arguments = [
            self.w,
            g or self.g,
            tuple_text(self.rule.state),
            tuple_text(hyper),
            *(values[extra] for extra in self.rule.extras),
        ]
        return f"{self._rule}({', '.join(arguments)})"

    def step(self, stepped: str, call: str) -> list[str]:
        """Return the lines that assign a call's results to `stepped`, the new weight, and to the names of the new states."""
        (states,) = self.new("states")
        lines = [f"{stepped}, {states} = {call}"]
        return [*lines, f"{tuple_text(self._new.values())} = {states}"] if self._new else lines

    def returned(self, *more: str) -> str:
        """Return the text of the tuple of new states, then `more`. Unchanged states keep their names, as backends expect."""
        return tuple_text([*(self._new[name] if name in self.rule.changed else name for name in self.rule.state), *more])

    def define(self, what: str, first: tuple[str, list[str]], lines: list[str], result: str) -> types.FunctionType:
        """Define a function with these arguments and unpacking lines, further lines, and the returned expression.

        Raises:
            ValueError: `what`, a part of the function's name, is no identifier.
        """
        if not what.isidentifier():
            raise ValueError(f"define() got what={what!r}: it must be an identifier, as it becomes part of the rule's name")
        name, (arguments, unpacking) = f"{self.rule.name}_{what}", first
        body = "".join(f"    {line}\n" for line in (*unpacking, *lines, f"return {result}"))
        return function_of_text(name, f"def {name}({arguments}):\n{body}", self._names)


def tuple_text(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
