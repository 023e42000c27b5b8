"""`clip_by_block_rms`: steps whose root mean square over each tensor is limited."""

from __future__ import annotations

import types
from collections.abc import Iterable

from ..language import Reduction, Rule, jit, tl
from ..language.codegen import RuleSource
from .base import ComposedReduction, Made, check_rule, transformed

__all__ = ["clip_by_block_rms"]


def clip_by_block_rms(rule: Rule, decay: Iterable[str] = ("decay",)) -> Rule:
    """The rule with its step -u divided by max(1, RMS(u) / step_limit), with the root mean square over each tensor.

    `step_limit` is a hyper-parameter: the learning rate times the threshold for an update of rate 1.

    Args:
        rule: an elementwise rule.
        decay: its hyper-parameters of decoupled weight decay, which is not limited; names that the rule does not have are
            ignored.

    Source: Shazeer & Stern (2018), "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", section 6;
    `optax.clip_by_block_rms`.
    """
    check_rule(rule)
    decay = tuple(decay)
    return transformed(clip_by_block_rms, _make, rule, tuple(name for name in rule.hyper if name in decay))


class _Squares(ComposedReduction):
    """The reduction of such a rule."""

    def __init__(self, fn: types.FunctionType, sums: Reduction | None) -> None:
        super().__init__(fn, sums, feeds_next=True)


@jit
def step_square(w, stepped):
    step = w - stepped
    return step * step


@jit
def limited(w, stepped, square, count, limit):
    """The weight after the limited step; comparisons are such that what is NaN stays that."""
    rms = tl.sqrt(square / count)
    return tl.where(rms > limit, w - (w - stepped) * (limit / rms), stepped)


def _make(rule: Rule, decay: tuple[str, ...]) -> Made:
    """With decoupled weight decay the rule is computed with and without it: what the two differ by is the decay."""
    text = RuleSource(rule, "step_limit", step_square=step_square, limited=limited)
    square, count, stepped, ignored, nothing = text.new("square", "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if decay:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {decay[0]}"]
        undecayed = dict.fromkeys(decay, nothing)
    found = text.define(
        "squares",
        text.arguments(),
        [*lines, f"{stepped}, {ignored} = {text.call(undecayed)}"],
        f"{text['step_square']}({text.w}, {stepped}), 1.0",
    )
    if decay:
        lines += [f"{stepped}, {ignored} = {text.call(undecayed)}"]
    lines += text.step(full, text.call())
    result = f"{text['limited']}({text.w}, {stepped}, {square}, {count}, step_limit)"
    if decay:
        result += f" + ({full} - {stepped})"
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, (*rule.own_hyper, "step_limit"), (square, count, *text.sums))
    return Made(text.define("clipped_step", first, lines, f"{result}, {text.returned()}"), _Squares(found, rule.reduction))
