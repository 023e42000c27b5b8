"""Helpers for transforms: compose a rule or reduction from a given one.

The same transform of the same rule with the same options returns the same object, also after pickling.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..language import Function, Limit, Reduction, Rule, ShapedRule, StagedRule, TensorRule, jit
from ..language.codegen import RuleSource, tuple_text
from ..messages import instance
from .whole import Around, ComposedStagedRule, ComposedTensorRule


class Made(NamedTuple):
    """The parts of a transformed rule; a transform's `_compose` returns them.

    Attributes:
        fn: the function of the new rule.
        reduction: its reduction, or None.
        starts_as_weight: names of added states that must start equal to the weight.
        limit: what its first reduction, the sum of squares of all gradients, does; None for another reduction.
    """

    fn: types.FunctionType
    reduction: Reduction | None
    starts_as_weight: tuple[str, ...] = ()
    limit: Limit | None = None


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
        self.starts_as_weight = (*of.starts_as_weight, *made.starts_as_weight)
        self.limits = of.limits if made.limit is None else (made.limit, *of.limits)
        for place, stage in enumerate(self.reductions):
            if isinstance(stage, ComposedReduction) and stage.origin is None:
                stage.origin = self, place

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class _ReductionAfter(ComposedReduction):
    """A copy of a reduction that runs after the reduction `sums` and passes its results on."""

    _kept_and_sums = True

    def __init__(self, fn: types.FunctionType, sums: Reduction, of: Reduction) -> None:
        super().__init__(fn, sums, of.scope, feeds_next=True, op=of.op, means=of.means)
        self.finished, self.kept, self.finish_hyper, self.own_scopes = of.finished, of.kept, of.finish_hyper, of.own_scopes


def check_rule(rule: Any, whole: bool = False) -> None:
    """Raise TypeError or ValueError for a rule that cannot be transformed. `whole`: rules of whole tensors are allowed."""
    instance("rule", rule, (Rule, TensorRule if whole else ShapedRule), "elementwise, made with @rule or @rule_by_shape")
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
        if isinstance(rule, ShapedRule):
            rule.made_of_it[key] = rule.transformed(lambda chosen: transform(chosen, *options), how)
        elif isinstance(rule, StagedRule) and "limit" in whole and not rule.limits:
            assert around is not None
            rule.made_of_it[key] = ComposedStagedRule(rule, lambda each: transform(each, *options), how, around, **whole)
        elif isinstance(rule, TensorRule):
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


def after_first(rule: Rule, what: str, first: Reduction, change: Change) -> Reduction:
    """Return the last reduction of a new chain: `first`, then the rule's reductions, which pass the results of `first` on.

    `what` is a suffix of the names of the new reductions, which see the gradient as `change` has it.
    """
    before = first
    for stage in rule.reductions:
        text = RuleSource(stage, *change.hyper, **change.helpers)
        values = text.new(*["value"] * stage.n_values)
        unpacked, numbers = text.arguments_after(before, change.hyper)
        lines, g = change.lines(text, numbers)
        lines += [f"{tuple_text(values)} = {text.call(g=g)}"]
        before = _ReductionAfter(text.define(what, unpacked, lines, tuple_text(values)), before, stage)
    return before


def changed_gradient(rule: Rule, what: str, first: Reduction, change: Change) -> Made:
    """Return the parts of the rule applied to gradients that are changed by the results of a first reduction.

    `what` is a suffix of the names of the new rule and reductions.
    """
    sums = after_first(rule, what, first, change)
    text = RuleSource(rule, *change.hyper, **change.helpers)
    (stepped,) = text.new("stepped")
    unpacked, numbers = text.arguments_after(sums, change.hyper)
    lines, g = change.lines(text, numbers)
    lines += text.step(stepped, text.call(g=g))
    return Made(text.define(what, unpacked, lines, f"{stepped}, {text.returned()}"), sums)


@jit
def interpolated(slow, w, alpha):
    return slow + alpha * (w - slow)
