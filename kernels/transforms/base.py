"""Helpers for transforms: compose a rule or reduction from a given one.

The same transform of the same rule with the same options returns the same object, also after pickling.
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
    """The parts of a transformed rule; a transform's `_make` returns them.

    Attributes:
        fn: the function of the new rule.
        reduction: its reduction, or None.
        knows_total: whether the first reduction is the sum of squares of the gradient over all tensors.
        skips_nonfinite: whether a step is skipped if that sum is not finite.
        skip_above: name of a hyper-parameter: a step is skipped if the sum exceeds it. None for no limit.
        skip_by: name of a per-tensor state that is 0 if the step must be skipped, in place of these tests; or None.
    """

    fn: types.FunctionType
    reduction: Reduction | None
    knows_total: bool = False
    skips_nonfinite: bool = False
    skip_above: str | None = None
    skip_by: str | None = None


class Change(NamedTuple):
    """A change of a rule's gradient by the results of its first reduction.

    Attributes:
        lines: function `(text, numbers) -> (lines, name)`: the lines that compute the new gradient, and its name, given the
            `RuleSource` and the names of the reductions' results.
        hyper: names of the hyper-parameters that the lines use.
        helpers: functions that the lines call, by name.
    """

    lines: Callable[[RuleSource, tuple[str, ...]], tuple[list[str], str]]
    hyper: tuple[str, ...] = ()
    helpers: Mapping[str, Function] = {}


class ComposedReduction(Reduction):
    """A reduction of a composed rule. For pickle, `origin` is the rule and the index of this reduction in it."""

    origin: tuple[Rule, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.origin is not None
        return _reduction, self.origin


def _reduction(rule: Rule, place: int) -> Reduction:
    return rule.reductions[place]


class _ComposedRule(Rule):
    """A rule made from another rule. For pickle, `how` is the function and the arguments that make it again."""

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
            if isinstance(stage, ComposedReduction) and stage.origin is None:
                stage.origin = self, place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class _ReductionAfter(ComposedReduction):
    """A copy of a reduction that runs after the reduction `sums` and passes its results on."""

    _kept_and_sums = True

    def __init__(self, fn: types.FunctionType, sums: Reduction, of: Reduction) -> None:
        super().__init__(fn, sums, of.scope, feeds_next=True, op=of.op)
        self.finished, self.kept, self.finish_hyper = of.finished, of.kept, of.finish_hyper


def check_rule(rule: Any, whole: bool = False) -> None:
    """Raise TypeError or ValueError for a rule that cannot be transformed. `whole`: rules of whole tensors are allowed."""
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
    """Return the cached rule of `transform(rule, *options)`, or make and cache it.

    Args:
        transform: the public function that is called with `rule` and `options`; pickle calls it again.
        make: function `(rule, *options) -> Made` for an elementwise rule.
        rule: the rule to be transformed.
        *options: hashable options of the transform.
        around: for a rule of whole tensors, the function around its step (see `Around`). None: such rules are not allowed.
        **whole: further arguments of `ComposedTensorRule`.

    Raises:
        TypeError, ValueError: the rule cannot be transformed.
    """
    check_rule(rule, around is not None)
    key, how = (transform, options), (transform, (rule, *options))
    if key not in rule.made_of_it:
        if isinstance(rule, TensorRule):
            assert around is not None
            inner = rule.elementwise_rule
            elementwise = None if inner is None else transform(inner, *options)
            rule.made_of_it[key] = ComposedTensorRule(rule, how, around, elementwise, **whole)
        else:
            made: Any = make(rule, *options)
            if not isinstance(made, Made):
                raise TypeError(f"{make.__name__}() of {transform.__name__} returned {made!r}: it must return a Made")
            rule.made_of_it[key] = _ComposedRule(made, rule, how)
    return rule.made_of_it[key]


def after_first(rule: Rule, what: str, first: Reduction, change: Change | None = None) -> Reduction:
    """Return the last reduction of a new chain: `first`, then the rule's reductions, which pass the results of `first` on.

    Args:
        rule: the rule whose reductions follow. If the first of them is the sum of squares of all gradients (`knows_total`),
            `first` replaces it, and must have that sum as its last results.
        what: suffix of the names of the new reductions.
        first: the reduction that runs first.
        change: how the gradient of the rule's reductions is changed. Default: it is not.
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
    """Return the parts of the rule applied to gradients that are changed by the results of a first reduction.

    Args:
        rule: the rule.
        what: suffix of the names of the new rule and reductions.
        first: the reduction that runs first.
        change: how its results change the gradient.
        **made: further fields of `Made`.
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
    """Return the parts of the rule with its step, without decoupled weight decay, changed by a sum over the tensor.

    A rule with such decay is computed with and without it; the difference is the decay.

    Args:
        rule: the rule.
        sums: suffix of the name of the reduction, name of its sum, and function `(w, new_w, g)` of the summed values.
        what: suffix of the name of the new rule, and function `(w, new_w, g, sum, n_elements, *hyper)` that returns the
            changed weight.
        decay: names of the rule's hyper-parameters of decoupled weight decay.
        *hyper: names of hyper-parameters that are added.
    """
    measure, change = sums[2], what[1]
    text = RuleSource(rule, *hyper, **{function.name: function for function in (measure, change)})
    total, count, stepped, ignored, nothing = text.new(sums[1], "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if decay:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {decay[0]}"]
        undecayed = dict.fromkeys(decay, nothing)
    before = f"{text.w}, {stepped}, {text.g}"
    fn = text.define(
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
    reduction = ComposedReduction(fn, rule.reduction, feeds_next=True)
    return Made(text.define(what[0], first, lines, f"{result}, {text.returned()}"), reduction)


def skipping(
    rule: Rule, what: str, proceeds: Function, *hyper: str, first: Reduction | None = None, place: int = -1
) -> Made:
    """Return the parts of the rule with steps that are skipped if `proceeds(sum, *hyper)` is false.

    Args:
        rule: the rule.
        what: suffix of the name of the new rule.
        proceeds: function of the sum of squares over all tensors and of `hyper`.
        *hyper: names of hyper-parameters that are added.
        first: the reduction that runs first. Default: the rule's own sum of squares, or `total_square`.
        place: index of the argument of `proceeds` among the reductions' results. Default: -1, the sum of squares.
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
    """Return how many of the rule's numbers come from its first reduction and must stay last."""
    return rule.reductions[0].n_results if rule.knows_total else 0


@jit
def interpolated(slow, w, alpha):
    """Return slow + alpha (w - slow)."""
    return slow + alpha * (w - slow)
