"""What transforms have in common.

The same transform of the same rule with the same options is the same object, also after pickling.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from ..language import Reduction, Rule, jit
from ..language.codegen import RuleSource, tuple_text
from ..rules.common import clip_coefficient, total_square

__all__ = ["ComposedReduction", "Made", "after_total", "check_rule", "interpolated", "transformed"]


class Made(NamedTuple):
    """What a transform makes of a rule.

    Attributes:
        fn: the function of the new rule.
        reduction: its reduction.
        knows_total, skips_nonfinite: as those of `Rule`; they stay true in rules made of this one.
    """

    fn: types.FunctionType
    reduction: Reduction | None
    knows_total: bool = False
    skips_nonfinite: bool = False


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


def check_rule(rule: Any) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be elementwise, made with @rule, got {type(rule).__name__}")
    if taken := [name for name in (*rule.state, *rule.hyper) if name in ("sums", "kept", "index")]:
        raise ValueError(f"rule {rule.name!r} has a state or hyper-parameter {taken[0]!r}: composed rules need the name")


def transformed(transform: Callable[..., Rule], make: Callable[..., Made], rule: Rule, *options: Any) -> Rule:
    """The rule that `transform(rule, *options)` gave before, or a new one, of what `make(rule, *options)` makes.

    Raises:
        TypeError, ValueError: not a rule that can be transformed.
    """
    check_rule(rule)
    key = transform, options
    if key not in rule.made_of_it:
        rule.made_of_it[key] = _ComposedRule(make(rule, *options), rule, (transform, (rule, *options)))
    return rule.made_of_it[key]


def after_total(
    rule: Rule, what: str, change: Callable[[RuleSource, str], tuple[list[str], str]] | None = None
) -> Reduction:
    """The rule's last reduction when the sum of squares over all comes first, and is passed on to all others.

    Args:
        change: gives lines and the name of a gradient that is to replace theirs.
    """
    before = total_square
    for stage in rule.reductions[1 if rule.knows_total else 0 :]:
        text = RuleSource(stage, *(("clip_norm",) if change else ()), clip_coefficient=clip_coefficient)
        values = text.new(*["value"] * stage.n_values)
        first, total = text.behind(before, added=("clip_norm",) if change else ())
        lines, g = ([], None) if change is None else change(text, total)
        lines += [f"{tuple_text(values)} = {text.call(g=g)}"]
        before = _ReductionAfter(text.define(what, first, lines, tuple_text(values)), before, stage)
    return before


@jit
def interpolated(slow, w, alpha):
    """The new slow weight."""
    return slow + alpha * (w - slow)
