"""Source text of rules and reductions that call a given rule.

As the compilers read source, and names are unpacked on lines of their own, a rule made of another one is text, made for the
names of that rule.
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
    """What the texts made of one rule have in common. All names differ from those that the rule unpacks.

    Args:
        rule: the rule that is called; or the reduction.
        added: names that the new rule unpacks in addition to the rule's.
        **helpers: functions to be called, by what they are to be called in the text if the name is free.
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
        """What a state that the rule returns is called."""
        return self._new[name]

    def __getitem__(self, helper: str) -> str:
        return self._called[helper]

    def new(self, *wishes: str) -> tuple[str, ...]:
        """Names like these that are free; they are taken then."""
        names = []
        for wish in wishes:
            candidates = itertools.chain([wish], (f"{wish}{k}" for k in itertools.count(2)))
            names.append(next(name for name in candidates if name not in self._taken))
            self._taken.add(names[-1])
        return tuple(names)

    def arguments(self, states: tuple[str, ...] = (), hyper: tuple[str, ...] = ()) -> tuple[str, list[str]]:
        """The arguments and the lines that unpack them: the rule's, and these states and hyper-parameters after them."""
        rule = self.rule
        return self.unpacked(rule.extras, (*rule.state, *states), (*rule.own_hyper, *hyper), self.sums)

    def unpacked(
        self, extras: tuple[str, ...], states: tuple[str, ...], hyper: tuple[str, ...], sums: tuple[str, ...]
    ) -> tuple[str, list[str]]:
        """The arguments, and the lines that unpack them."""
        arguments = ", ".join((self.w, self.g, self._state, self._hyper, *extras))
        pairs = [(states, self._state), (hyper, self._hyper), (sums, "kept" if "kept" in extras else "sums")]
        return arguments, [f"{tuple_text(names)} = {argument}" for names, argument in pairs if names]

    def behind(
        self, before: Reduction, added: tuple[str, ...] = (), n_last: int = 0
    ) -> tuple[tuple[str, list[str]], tuple[str, ...]]:
        """The arguments and the lines that unpack them after this reduction; the names of the numbers among them.

        What the rule gets by itself are the first of these numbers, but for its last `n_last`, which stay the last; the
        results of the first reduction of all are the last ones in any case.
        """
        rule, numbers = self.rule, "kept" if "kept" in self.rule.extras else "sums"
        n = before.n_results + (len(rule.kept) if numbers == "kept" else 0)
        cut = len(self.sums) - n_last
        names = (*self.sums[:cut], *self.new(*["passed"] * (n - len(self.sums))), *self.sums[cut:])
        extras = (numbers, *(("index",) if "index" in rule.extras else ()))
        return self.unpacked(extras, rule.state, (*rule.own_hyper, *added), names), names

    def call(self, exchanged: dict[str, str] | None = None, g: str | None = None) -> str:
        """The call of the rule, with other values for some of its hyper-parameters, and with another gradient."""
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
        """The lines that unpack a call of the rule into the new weight and the new states by their names."""
        (states,) = self.new("states")
        lines = [f"{stepped}, {states} = {call}"]
        return [*lines, f"{tuple_text(self._new.values())} = {states}"] if self._new else lines

    def returned(self, *more: str) -> str:
        """The new states. Those that the rule leaves as they are go back under their own names, for backends to see it."""
        return tuple_text([*(self._new[name] if name in self.rule.changed else name for name in self.rule.state), *more])

    def define(self, what: str, first: tuple[str, list[str]], lines: list[str], result: str) -> types.FunctionType:
        """A function of this text."""
        name, (arguments, unpacking) = f"{self.rule.name}_{what}", first
        body = "".join(f"    {line}\n" for line in (*unpacking, *lines, f"return {result}"))
        return function_of_text(name, f"def {name}({arguments}):\n{body}", self._names)


def tuple_text(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
