"""Rules made of rules: masked steps, decay apart from the gradient, slow weights. No equation of a rule is repeated.

Each function takes an elementwise rule and gives another one, which calls it. As the compilers read source, and names are
unpacked on lines of their own, the new rule is text, made for the names of the old one. Rules made of one rule in the same
way are one object, found again by pickling, too.
"""

from __future__ import annotations

import itertools
import linecache
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .language import Function, Reduction, Rule, jit, tl

__all__ = ["cautious", "decoupled", "lookahead"]


def cautious(rule: Rule, apart: Iterable[str] = ("decay",)) -> Rule:
    """The rule with its step used only in elements where it goes down the gradient, and made longer for that.

    The steps that are left are divided by their share in the tensor's elements, which counts as 0.001 at least.

    Args:
        rule: an elementwise rule.
        apart: its hyper-parameters that stand for decay apart from the gradient, which stays as it is; names that the rule
            does not have are left out.

    Source: Liang et al. (2024), "Cautious Optimizers", alg. 1, with the share as in the authors' code.
    """
    _check(rule)
    return _made(cautious, _cautious, rule, tuple(name for name in rule.hyper if name in tuple(apart)))


def decoupled(rule: Rule) -> Rule:
    """The rule with one more hyper-parameter, `decoupled_decay`: by how much the weight shrinks besides its step.

    The hyper-parameter `wd` stays, for the decay in the gradient; it is to be 0.

    Args:
        rule: an elementwise rule that has a hyper-parameter `wd`.

    Raises:
        ValueError: the rule has none.

    Source: Loshchilov & Hutter (2019), "Decoupled Weight Decay Regularization", alg. 1 and 2, lines 9 and 12.
    """
    _check(rule)
    if "wd" not in rule.hyper:
        raise ValueError(f"rule {rule.name!r} has no hyper-parameter 'wd': there is no decay in it to be taken out")
    return _made(decoupled, _decoupled, rule)


def lookahead(rule: Rule, sync: bool = True) -> Rule:
    """The rule with a last state `slow`, which must start as the weight, and which the weight returns to from time to time.

    Where the hyper-parameter `sync` is above 0, slow <- slow + lookahead_alpha (w - slow) and w <- slow after the step.

    Args:
        rule: an elementwise rule.
        sync: if False, a rule of the same states that never does so, and has neither of the two hyper-parameters. It reads
            and writes nothing of `slow`.

    Source: Zhang et al. (2019), "Lookahead Optimizer: k steps forward, 1 step back", alg. 1.
    """
    _check(rule)
    return _made(lookahead, _lookahead, rule, bool(sync))


@jit
def agrees(w, stepped, g):
    """1 where the step goes down the gradient, else 0. Their product could be too small to tell."""
    step = w - stepped
    return tl.where(((step > 0.0) & (g > 0.0)) | ((step < 0.0) & (g < 0.0)), 1.0, 0.0)


@jit
def masked(w, stepped, g, agreeing, count):
    """The weight after that part of its step which agrees. A product, since what is NaN is to stay NaN."""
    share = tl.maximum(agreeing / count, 0.001)
    return w - (w - stepped) * (agrees(w, stepped, g) / share)


@jit
def interpolated(slow, w, alpha):
    """The new slow weight."""
    return slow + alpha * (w - slow)


def _cautious(rule: Rule, apart: tuple[str, ...]) -> tuple[Any, Reduction | None]:
    """With decay apart the rule is computed with and without it: what the two differ by is the decay."""
    text = _Text(rule, agrees=agrees, masked=masked)
    agreeing, count, stepped, ignored, nothing = text.new("agreeing", "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if apart:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {apart[0]}"]
        undecayed = dict.fromkeys(apart, nothing)
    found = text.define(
        "agreement",
        text.unpacked(rule.extras, rule.state, rule.own_hyper, text.sums),
        [*lines, f"{stepped}, {ignored} = {text.call(undecayed)}"],
        f"{text['agrees']}({text.w}, {stepped}, {text.g}), 1.0",
    )
    if apart:
        lines += [f"{stepped}, {ignored} = {text.call(undecayed)}"]
    lines += [f"{full}, {text.new_states} = {text.call()}"]
    result = f"{text['masked']}({text.w}, {stepped}, {text.g}, {agreeing}, {count})"
    if apart:
        result += f" + ({full} - {stepped})"
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, rule.own_hyper, (agreeing, count, *text.sums))
    return text.define("cautious", first, lines, f"{result}, {text.returned()}"), _Agreement(found, rule.sums)


def _decoupled(rule: Rule) -> tuple[Any, Reduction | None]:
    text = _Text(rule, "decoupled_decay")
    (stepped,) = text.new("stepped")
    first = text.unpacked(rule.extras, rule.state, (*rule.own_hyper, "decoupled_decay"), text.sums)
    lines = [f"{stepped}, {text.new_states} = {text.call()}"]
    result = f"{stepped} - decoupled_decay * {text.w}, {text.returned()}"
    return text.define("decoupled", first, lines, result), rule.sums


def _lookahead(rule: Rule, sync: bool) -> tuple[Any, Reduction | None]:
    added = ("lookahead_alpha", "sync") if sync else ()
    text = _Text(rule, "slow_weight", *added, interpolated=interpolated)
    stepped, met = text.new("stepped", "met")
    first = text.unpacked(rule.extras, (*rule.state, "slow_weight"), (*rule.own_hyper, *added), text.sums)
    lines = [f"{stepped}, {text.new_states} = {text.call()}"]
    if not sync:
        return text.define("between", first, lines, f"{stepped}, {text.returned('slow_weight')}"), rule.sums
    lines += [f"{met} = {text['interpolated']}(slow_weight, {stepped}, lookahead_alpha)"]
    slow = f"{text.tl}.where(sync > 0.0, {met}, slow_weight)"
    result = f"{text.tl}.where(sync > 0.0, {met}, {stepped}), {text.returned(slow)}"
    return text.define("lookahead", first, lines, result), rule.sums


class _Text:
    """What the texts made of one rule have in common. All names differ from those that the rule unpacks.

    Args:
        rule: the rule that is called.
        added: names that the new rule unpacks besides the rule's.
        **helpers: functions to be called, by what they are to be called in the text if the name is free.
    """

    def __init__(self, rule: Rule, *added: str, **helpers: Function) -> None:
        self.rule = rule
        if twice := [name for name in added if name in (*rule.state, *rule.hyper)]:
            raise ValueError(f"rule {rule.name!r} has a state or hyper-parameter {twice[0]!r} already")
        self._taken = {"sums", "index", *rule.state, *rule.hyper, *added}
        self.w, self.g, self._state, self._hyper, self.tl, self._rule = self.new("w", "g", "state", "hyper", "tl", "rule")
        self._called = dict(zip(helpers, self.new(*helpers), strict=True))
        self._names = {self.tl: tl, self._rule: rule, "__name__": __name__}
        self._names |= {called: helpers[wish] for wish, called in self._called.items()}
        self.sums = self.new(*["found"] * rule.sums.n_results) if rule.sums is not None else ()
        self._new = dict(zip(rule.state, self.new(*(f"new_{name}" for name in rule.state)), strict=True))

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

    def unpacked(
        self, extras: tuple[str, ...], states: tuple[str, ...], hyper: tuple[str, ...], sums: tuple[str, ...]
    ) -> tuple[str, list[str]]:
        """The arguments, and the lines that unpack them."""
        arguments = ", ".join((self.w, self.g, self._state, self._hyper, *extras))
        pairs = [(states, self._state), (hyper, self._hyper), (sums, "sums")]
        return arguments, [f"{_tuple(names)} = {argument}" for names, argument in pairs if names]

    def call(self, exchanged: dict[str, str] | None = None) -> str:
        """The call of the rule, with other values for some of its hyper-parameters."""
        hyper = [(exchanged or {}).get(name, name) for name in self.rule.own_hyper]
        values = {"sums": _tuple(self.sums), "index": "index"}
        arguments = [self.w, self.g, _tuple(self.rule.state), _tuple(hyper), *(values[extra] for extra in self.rule.extras)]
        return f"{self._rule}({', '.join(arguments)})"

    @property
    def new_states(self) -> str:
        """What the call's second value is unpacked into."""
        return _tuple(self._new.values()) if self._new else self.new("ignored")[0]

    def returned(self, *more: str) -> str:
        """The new states. Those that the rule leaves as they are go back under their own names, for engines to see it."""
        return _tuple([*(self._new[name] if name in self.rule.changed else name for name in self.rule.state), *more])

    def define(self, what: str, first: tuple[str, list[str]], lines: list[str], result: str) -> types.FunctionType:
        """A function of this text, which `inspect` finds in the way in which it finds notebook cells."""
        name, (arguments, unpacking) = f"{self.rule.name}_{what}", first
        body = "".join(f"    {line}\n" for line in (*unpacking, *lines, f"return {result}"))
        text = f"def {name}({arguments}):\n{body}"
        file = f"<tristep {name} {next(_numbers)}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        names = dict(self._names)
        exec(compile(text, file, "exec"), names)
        function = names.pop(name)
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function


_numbers = itertools.count()


class _Composed(Rule):
    """A rule made of another one; `how` is the function and its arguments, which make it again."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None, how: tuple[Any, ...]) -> None:
        super().__init__(fn, sums)
        self._how = how
        inner = how[1][0]
        self.exact = tuple(name for name in self.state if name in inner.exact or name not in inner.state)
        if isinstance(sums, _Agreement):
            sums.rule = self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class _Agreement(Reduction):
    """The reduction of a cautious rule."""

    rule: Rule

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, passes_on=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.rule, "sums")


def _check(rule: Any) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be elementwise, made with @rule, got {type(rule).__name__}")
    if taken := [name for name in (*rule.state, *rule.hyper) if name in ("sums", "index")]:
        raise ValueError(f"rule {rule.name!r} has a state or hyper-parameter {taken[0]!r}: composed rules need the name")


def _made(function: Callable[..., Rule], make: Callable[..., Any], rule: Rule, *options: Any) -> Rule:
    """The rule that was made in the same way before, or a new one."""
    key = function, options
    if key not in rule.made_of_it:
        made, sums = make(rule, *options)
        rule.made_of_it[key] = _Composed(made, sums, (function, (rule, *options)))
    return rule.made_of_it[key]


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
