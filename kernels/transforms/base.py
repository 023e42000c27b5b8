"""What transforms have in common.

The same transform of the same rule with the same options is the same object, also after pickling.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..language import Function, Reduction, Rule, TensorRule, jit
from ..language.codegen import RuleSource, tuple_text
from ..rules.common import total_square
from .whole import Around, ComposedTensorRule


class Made(NamedTuple):
    """What a transform makes of a rule.

    Attributes:
        fn: the function of the new rule.
        reduction: its reduction.
        knows_total, skips_nonfinite, skip_above, skip_by: as those of `Rule`; they stay so in rules made of this one.
    """

    fn: types.FunctionType
    reduction: Reduction | None
    knows_total: bool = False
    skips_nonfinite: bool = False
    skip_above: str | None = None
    skip_by: str | None = None


class Change(NamedTuple):
    """How a gradient is changed by the results of the reduction that comes first.

    Attributes:
        lines: gives the lines that do so, and what it is called then, of a text and the names of all its numbers.
        hyper: hyper-parameters that they use.
        helpers: functions that they call.
    """

    lines: Callable[[RuleSource, tuple[str, ...]], tuple[list[str], str]]
    hyper: tuple[str, ...] = ()
    helpers: Mapping[str, Function] = {}


class ComposedReduction(Reduction):
    """A reduction of a composed rule; `found` says of which rule, and which one of its."""

    found: tuple[Rule, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.found is not None
        return _reduction, self.found


def _reduction(rule: Rule, place: int) -> Reduction:
    return rule.reductions[place]


class _ComposedRule(Rule):
    """A rule made of another one; `how` is the function and its arguments, which make it again."""

    def __init__(self, made: Made, of: Rule, how: tuple[Any, ...]) -> None:
        super().__init__(made.fn, made.reduction)
        self._how = how
        self.full_precision = tuple(name for name in self.state if name in of.full_precision or name not in of.state)
        self.nonnegative = tuple(name for name in self.state if name in of.nonnegative)
        self.knows_total = of.knows_total or made.knows_total
        self.skips_nonfinite = of.skips_nonfinite or made.skips_nonfinite
        self.skip_above = made.skip_above or of.skip_above
        self.skip_by = made.skip_by or of.skip_by
        for place, stage in enumerate(self.reductions):
            if isinstance(stage, ComposedReduction) and stage.found is None:
                stage.found = self, place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class _ReductionAfter(ComposedReduction):
    """A reduction made of another one, to come after `sums` and pass its results on."""

    _kept_and_sums = True

    def __init__(self, fn: types.FunctionType, sums: Reduction, of: Reduction) -> None:
        super().__init__(fn, sums, of.scope, feeds_next=True, op=of.op)
        self.finished, self.kept, self.finish_hyper = of.finished, of.kept, of.finish_hyper


def check_rule(rule: Any, whole: bool = False) -> None:
    """Refuse what cannot be transformed; `whole` is whether rules of whole tensors can."""
    if not isinstance(rule, (Rule, TensorRule) if whole else Rule):
        raise TypeError(f"rule must be elementwise, made with @rule, got {type(rule).__name__}")
    if taken := [name for name in (*rule.state, *rule.hyper) if name in ("sums", "kept", "index")]:
        raise ValueError(f"rule {rule.name!r} has a state or hyper-parameter {taken[0]!r}: composed rules need the name")


def transformed(
    transform: Callable[..., Any],
    make: Callable[..., Made],
    rule: Any,
    *options: Any,
    around: Around | None = None,
    **whole: Any,
) -> Any:
    """The rule that `transform(rule, *options)` gave before, or a new one, of what `make(rule, *options)` makes.

    Args:
        around: of a rule of whole tensors, what is done around its step; None for transforms that take none.
        **whole: what `ComposedTensorRule` takes in addition.

    Raises:
        TypeError, ValueError: not a rule that can be transformed.
    """
    check_rule(rule, around is not None)
    key, how = (transform, options), (transform, (rule, *options))
    if key not in rule.made_of_it:
        if isinstance(rule, TensorRule):
            assert around is not None
            own = rule.elementwise_rule
            elementwise = None if own is None else transform(own, *options)
            rule.made_of_it[key] = ComposedTensorRule(rule, how, around, elementwise, **whole)
        else:
            rule.made_of_it[key] = _ComposedRule(make(rule, *options), rule, how)
    return rule.made_of_it[key]


def after_first(rule: Rule, what: str, first: Reduction, change: Change | None = None) -> Reduction:
    """The rule's last reduction when this one comes first, whose results are passed on to all others.

    Args:
        rule: if it knows the total, `first` replaces its first reduction, whose results are the last of `first`'s.
        change: what replaces their gradient.
    """
    before = first
    for stage in rule.reductions[1 if rule.knows_total else 0 :]:
        text = RuleSource(stage, *(change.hyper if change else ()), **(change.helpers if change else {}))
        values = text.new(*["value"] * stage.n_values)
        unpacked, numbers = text.arguments_after(before, change.hyper if change else (), n_last=_n_last(rule))
        lines, g = ([], None) if change is None else change.lines(text, numbers)
        lines += [f"{tuple_text(values)} = {text.call(g=g)}"]
        before = _ReductionAfter(text.define(what, unpacked, lines, tuple_text(values)), before, stage)
    return before


def changed_gradient(rule: Rule, what: str, first: Reduction, change: Change, **made: Any) -> Made:
    """The rule on gradients that are changed by the results of this reduction, which comes first.

    Args:
        what: how rule and reductions are called then.
        **made: what `Made` takes in addition.
    """
    sums = after_first(rule, what, first, change)
    text = RuleSource(rule, *change.hyper, **change.helpers)
    (stepped,) = text.new("stepped")
    unpacked, numbers = text.arguments_after(sums, change.hyper, n_last=_n_last(rule))
    lines, g = change.lines(text, numbers)
    lines += text.step(stepped, text.call(g=g))
    return Made(text.define(what, unpacked, lines, f"{stepped}, {text.returned()}"), sums, **made)


def changed_step(
    rule: Rule, sums: tuple[str, str, Function], what: tuple[str, Function], decay: tuple[str, ...], *hyper: str
) -> Made:
    """The rule with its step changed by a sum over the tensor; decoupled weight decay has no part in that.

    With such decay the rule is computed with and without it: what the two differ by is the decay.

    Args:
        sums: how the reduction and its sum are called, and what is summed up, of w, the new weight and g.
        what: how the rule is called then, and the changed weight, of these three, the sum, the number of elements and
            `hyper`.
        decay: the rule's hyper-parameters of decoupled weight decay.
        *hyper: hyper-parameters that are added.
    """
    measure, change = sums[2], what[1]
    text = RuleSource(rule, *hyper, **{each.name: each for each in (measure, change)})
    total, count, stepped, ignored, nothing = text.new(sums[1], "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if decay:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {decay[0]}"]
        undecayed = dict.fromkeys(decay, nothing)
    before = f"{text.w}, {stepped}, {text.g}"
    found = text.define(
        sums[0],
        text.arguments(),
        [*lines, f"{stepped}, {ignored} = {text.call(undecayed)}"],
        f"{text[measure.name]}({before}), 1.0",
    )
    if decay:
        lines += [f"{stepped}, {ignored} = {text.call(undecayed)}"]
    lines += text.step(full, text.call())
    result = f"{text[change.name]}({', '.join((before, total, count, *hyper))})"
    if decay:
        result += f" + ({full} - {stepped})"
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, (*rule.own_hyper, *hyper), (total, count, *text.sums))
    reduction = ComposedReduction(found, rule.reduction, feeds_next=True)
    return Made(text.define(what[0], first, lines, f"{result}, {text.returned()}"), reduction)


def skipping(
    rule: Rule, what: str, proceeds: Function, *hyper: str, first: Reduction | None = None, place: int = -1
) -> Made:
    """The rule, but nothing changes where `proceeds` says no of the sum of squares over all, and these hyper-parameters.

    Args:
        first: the reduction that comes first then, as of `after_first`; None for the rule's own, or `total_square`.
        place: of another one among the numbers which that gives, instead of the sum.
    """
    sums: Any = rule.reduction if rule.knows_total and first is None else after_first(rule, "behind", first or total_square)
    text = RuleSource(rule, *hyper, proceeds=proceeds)
    stepped, going = text.new("stepped", "going")
    unpacked, numbers = text.arguments_after(sums, hyper, n_last=_n_last(rule))
    arguments = ", ".join((numbers[place], *hyper))
    lines = [*text.step(stepped, text.call()), f"{going} = {text['proceeds']}({arguments})"]
    states = tuple_text(
        f"{text.tl}.where({going}, {text.new_state(name)}, {name})" if name in rule.changed else name for name in rule.state
    )
    result = f"{text.tl}.where({going}, {stepped}, {text.w}), {states}"
    return Made(text.define(what, unpacked, lines, result), sums, True, True, hyper[0] if hyper else None)


def _n_last(rule: Rule) -> int:
    """How many of the numbers that a rule gets are results of the first reduction of all, and stay the last ones."""
    return rule.reductions[0].n_results if rule.knows_total else 0


@jit
def interpolated(slow, w, alpha):
    """The new slow weight."""
    return slow + alpha * (w - slow)
