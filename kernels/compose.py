"""Rules made of rules: clipping, masked steps, decay apart from the gradient, slow and averaged weights, steps left out.

No equation of a rule is repeated.

Each function takes an elementwise rule and gives another one, which calls it. As the compilers read source, and names are
unpacked on lines of their own, the new rule is text, made for the names of the old one. Rules made of one rule in the same
way are one object, found again by pickling, too.
"""

from __future__ import annotations

import itertools
import linecache
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .language import Function, Reduction, Rule, jit, rule, tl
from .rules.common import clip_coefficient, total_square

__all__ = [
    "averaging",
    "cautious",
    "clipped_by_global_norm",
    "decoupled",
    "lookahead",
    "moving_average",
    "skipping_nonfinite",
]


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


def clipped_by_global_norm(rule: Rule) -> Rule:
    """The rule with gradients multiplied by min(1, clip_norm / (norm + 1e-6)), of the norm over all tensors of an update.

    It has one more hyper-parameter, `clip_norm`, and one more reduction, before its own, which see the clipped gradient too.
    The gradients themselves stay as they are.

    Args:
        rule: an elementwise rule. To be clipped first, before the gradient is looked at in other ways.

    Source: Pascanu et al. (2013), "On the difficulty of training recurrent neural networks", alg. 1; numbers of torch.
    """
    _check(rule)
    return _made(clipped_by_global_norm, _clipped_by_global_norm, rule)


def skipping_nonfinite(rule: Rule) -> Rule:
    """The rule, but all stays exactly as it was where the sum of squares of the gradients over all tensors is not finite.

    Weights, states and kept numbers, that is; whoever counts steps does not know, since that would mean to wait for the
    device. In float32 the sum of squares is infinite from a norm of 1.8e19, too.

    Args:
        rule: an elementwise rule; what is composed after this is not skipped.
    """
    _check(rule)
    return _made(skipping_nonfinite, _skipping_nonfinite, rule)


def averaging(rule: Rule, moves: bool = True) -> Rule:
    """The rule with a last state `ema`, the moving average of the weight: ema <- ema + (1 - ema_decay) (w - ema).

    It must start as the weight. The hyper-parameter is `one_minus_ema_decay`. `moving_average` shows the average.

    Args:
        rule: an elementwise rule.
        moves: if False, a rule of the same states that leaves the average as it is, and has no such hyper-parameter.

    Source: Polyak & Juditsky (1992); as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """
    _check(rule)
    return _made(averaging, _averaging, rule, bool(moves))


@rule
def moving_average(w, g, state, hyper):
    """w <- ema, whatever the gradient."""
    (ema,) = state
    return ema, (ema,)


@jit
def is_finite(x):
    """Whether a number is neither infinite nor NaN: else its difference from itself is NaN."""
    return x - x == 0.0


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
    lines += text.step(full, text.call())
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
    lines = text.step(stepped, text.call())
    result = f"{stepped} - decoupled_decay * {text.w}, {text.returned()}"
    return text.define("decoupled", first, lines, result), rule.sums


def _lookahead(rule: Rule, sync: bool) -> tuple[Any, Reduction | None]:
    added = ("lookahead_alpha", "sync") if sync else ()
    text = _Text(rule, "slow_weight", *added, interpolated=interpolated)
    stepped, met = text.new("stepped", "met")
    first = text.unpacked(rule.extras, (*rule.state, "slow_weight"), (*rule.own_hyper, *added), text.sums)
    lines = text.step(stepped, text.call())
    if not sync:
        return text.define("between", first, lines, f"{stepped}, {text.returned('slow_weight')}"), rule.sums
    lines += [f"{met} = {text['interpolated']}(slow_weight, {stepped}, lookahead_alpha)"]
    slow = f"{text.tl}.where(sync > 0.0, {met}, slow_weight)"
    result = f"{text.tl}.where(sync > 0.0, {met}, {stepped}), {text.returned(slow)}"
    return text.define("lookahead", first, lines, result), rule.sums


def _averaging(rule: Rule, moves: bool) -> tuple[Any, Reduction | None]:
    added = ("one_minus_ema_decay",) if moves else ()
    text = _Text(rule, "ema", *added, interpolated=interpolated)
    (stepped,) = text.new("stepped")
    first = text.unpacked(rule.extras, (*rule.state, "ema"), (*rule.own_hyper, *added), text.sums)
    lines = text.step(stepped, text.call())
    ema = f"{text['interpolated']}(ema, {stepped}, one_minus_ema_decay)" if moves else "ema"
    return text.define("averaging", first, lines, f"{stepped}, {text.returned(ema)}"), rule.sums


def _clipped_by_global_norm(rule: Rule) -> tuple[Any, Reduction | None]:
    sums = _behind_total(rule, "clipped", _clip)
    text = _Text(rule, "clip_norm", clip_coefficient=clip_coefficient)
    (stepped,) = text.new("stepped")
    first, total = text.behind(sums, added=("clip_norm",))
    lines, clipped = _clip(text, total)
    lines += text.step(stepped, text.call(g=clipped))
    return text.define("clipped", first, lines, f"{stepped}, {text.returned()}"), sums


def _clip(text: _Text, total: str) -> tuple[list[str], str]:
    """Lines that clip the gradient, and what it is called then."""
    (clipped,) = text.new("clipped")
    coefficient = f"{text['clip_coefficient']}({text.tl}.sqrt({total}), clip_norm, 1e-6)"
    return [f"{clipped} = {text.g} * {coefficient}"], clipped


def _skipping_nonfinite(rule: Rule) -> tuple[Any, Reduction | None]:
    sums: Any = rule.sums if rule.knows_total else _behind_total(rule, "behind")
    text = _Text(rule, is_finite=is_finite)
    stepped, finite = text.new("stepped", "finite")
    first, total = text.behind(sums)
    lines = [*text.step(stepped, text.call()), f"{finite} = {text['is_finite']}({total})"]
    states = _tuple(
        f"{text.tl}.where({finite}, {text.new_state(name)}, {name})" if name in rule.changed else name for name in rule.state
    )
    result = f"{text.tl}.where({finite}, {stepped}, {text.w}), {states}"
    return text.define("skipping", first, lines, result), sums


def _behind_total(rule: Rule, what: str, change: Callable[[_Text, str], tuple[list[str], str]] | None = None) -> Reduction:
    """The rule's last reduction when the sum of squares over all comes first, and is passed on to all others.

    Args:
        change: gives lines and the name of a gradient that is to take the place of theirs.
    """
    before = total_square
    for stage in rule.reductions[1 if rule.knows_total else 0 :]:
        text = _Text(stage, *(("clip_norm",) if change else ()), clip_coefficient=clip_coefficient)
        values = text.new(*["value"] * stage.n_values)
        first, total = text.behind(before, added=("clip_norm",) if change else ())
        lines, g = ([], None) if change is None else change(text, total)
        lines += [f"{_tuple(values)} = {text.call(g=g)}"]
        before = _Behind(text.define(what, first, lines, _tuple(values)), before, stage)
    return before


class _Text:
    """What the texts made of one rule have in common. All names differ from those that the rule unpacks.

    Args:
        rule: the rule that is called; or the reduction.
        added: names that the new rule unpacks besides the rule's.
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

    def unpacked(
        self, extras: tuple[str, ...], states: tuple[str, ...], hyper: tuple[str, ...], sums: tuple[str, ...]
    ) -> tuple[str, list[str]]:
        """The arguments, and the lines that unpack them."""
        arguments = ", ".join((self.w, self.g, self._state, self._hyper, *extras))
        pairs = [(states, self._state), (hyper, self._hyper), (sums, "kept" if "kept" in extras else "sums")]
        return arguments, [f"{_tuple(names)} = {argument}" for names, argument in pairs if names]

    def behind(self, before: Reduction, added: tuple[str, ...] = ()) -> tuple[tuple[str, list[str]], str]:
        """The arguments and the lines that unpack them after this reduction, whose last result is the total; its name.

        What the rule gets by itself are the first of these numbers.
        """
        rule, numbers = self.rule, "kept" if "kept" in self.rule.extras else "sums"
        n = before.n_results + (len(rule.kept) if numbers == "kept" else 0)
        names = (*self.sums, *self.new(*["passed"] * (n - len(self.sums))))
        extras = (numbers, *(("index",) if "index" in rule.extras else ()))
        return self.unpacked(extras, rule.state, (*rule.own_hyper, *added), names), names[-1]

    def call(self, exchanged: dict[str, str] | None = None, g: str | None = None) -> str:
        """The call of the rule, with other values for some of its hyper-parameters, and with another gradient."""
        hyper = [(exchanged or {}).get(name, name) for name in self.rule.own_hyper]
        values = {"sums": _tuple(self.sums), "kept": _tuple(self.sums), "index": "index"}
        arguments = [
            self.w,
            g or self.g,
            _tuple(self.rule.state),
            _tuple(hyper),
            *(values[extra] for extra in self.rule.extras),
        ]
        return f"{self._rule}({', '.join(arguments)})"

    def step(self, stepped: str, call: str) -> list[str]:
        """The lines that take a call of the rule apart, into the new weight and the new states by their names."""
        (states,) = self.new("states")
        lines = [f"{stepped}, {states} = {call}"]
        return [*lines, f"{_tuple(self._new.values())} = {states}"] if self._new else lines

    def returned(self, *more: str) -> str:
        """The new states. Those that the rule leaves as they are go back under their own names, for engines to see it."""
        return _tuple([*(self._new[name] if name in self.rule.changed else name for name in self.rule.state), *more])

    def define(self, what: str, first: tuple[str, list[str]], lines: list[str], result: str) -> types.FunctionType:
        """A function of this text."""
        name, (arguments, unpacking) = f"{self.rule.name}_{what}", first
        body = "".join(f"    {line}\n" for line in (*unpacking, *lines, f"return {result}"))
        return function_of_text(name, f"def {name}({arguments}):\n{body}", self._names)


_numbers = itertools.count()


def function_of_text(name: str, text: str, names: Mapping[str, Any]) -> types.FunctionType:
    """The function of this name that the text defines, where these names are known; `inspect` finds the text."""
    file = f"<tristep {name} {next(_numbers)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known = dict(names)
    exec(compile(text, file, "exec"), known)
    function = known.pop(name)
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function


class _Composed(Rule):
    """A rule made of another one; `how` is the function and its arguments, which make it again."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None, of: Rule, how: tuple[Any, ...]) -> None:
        super().__init__(fn, sums)
        self._how = how
        self.exact = tuple(name for name in self.state if name in of.exact or name not in of.state)
        self.unsigned = tuple(name for name in self.state if name in of.unsigned)
        self.knows_total = of.knows_total or how[0] in (clipped_by_global_norm, skipping_nonfinite)
        self.skips_nonfinite = of.skips_nonfinite or how[0] is skipping_nonfinite
        for place, stage in enumerate(self.reductions):
            if isinstance(stage, _OfComposed) and stage.found is None:
                stage.found = self, place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class _OfComposed(Reduction):
    """A reduction of a composed rule; `found` says of which rule, and which one of its."""

    found: tuple[Rule, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.found is not None
        return _reduction, self.found


def _reduction(rule: Rule, place: int) -> Reduction:
    return rule.reductions[place]


class _Agreement(_OfComposed):
    """The reduction of a cautious rule."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, passes_on=True)


class _Behind(_OfComposed):
    """A reduction made of another one, to come after `sums` and pass its results on."""

    _kept_and_sums = True

    def __init__(self, fn: types.FunctionType, sums: Reduction, of: Reduction) -> None:
        super().__init__(fn, sums, of.over, passes_on=True, by=of.by)
        self.finished, self.kept, self.finish_hyper = of.finished, of.kept, of.finish_hyper


def _check(rule: Any) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be elementwise, made with @rule, got {type(rule).__name__}")
    if taken := [name for name in (*rule.state, *rule.hyper) if name in ("sums", "kept", "index")]:
        raise ValueError(f"rule {rule.name!r} has a state or hyper-parameter {taken[0]!r}: composed rules need the name")


def _made(function: Callable[..., Rule], make: Callable[..., Any], rule: Rule, *options: Any) -> Rule:
    """The rule that was made in the same way before, or a new one."""
    key = function, options
    if key not in rule.made_of_it:
        made, sums = make(rule, *options)
        rule.made_of_it[key] = _Composed(made, sums, rule, (function, (rule, *options)))
    return rule.made_of_it[key]


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
