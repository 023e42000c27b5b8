"""`cautious`: step only in elements where the step descends along the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..language import Rule, ShapedRule, jit, tl
from ..language.codegen import RuleSource
from .base import ComposedReduction, Made, check_rule, transformed


def cautious(rule: Rule | ShapedRule, decay: Iterable[str] = ("decay",)) -> Any:
    """Return the rule with its step set to 0 in elements where it does not descend, and scaled up elsewhere.

    The remaining steps are divided by their fraction of the tensor's elements, or by 0.001 if that is more.

    Args:
        rule: an elementwise rule, or one of `rule_by_shape`.
        decay: names of hyper-parameters of decoupled weight decay, which is not masked; names that the rule does not have
            are ignored.

    Source: Liang et al. (2024), "Cautious Optimizers", alg. 1, with the share as in the authors' code.
    """
    check_rule(rule)
    decay = tuple(decay)
    return transformed(cautious, _compose, rule, tuple(name for name in rule.hyper if name in decay))


@jit
def agrees(w, stepped, g):
    """Return 1 if the step descends along the gradient, else 0. The product of both could underflow."""
    step = w - stepped
    return tl.where(((step > 0.0) & (g > 0.0)) | ((step < 0.0) & (g < 0.0)), 1.0, 0.0)


@jit
def masked(w, stepped, g, agreeing, count):
    """Return the weight after the masked and scaled step. The mask is a factor, so that NaN stays NaN."""
    share = tl.maximum(agreeing / count, 0.001)
    return w - (w - stepped) * (agrees(w, stepped, g) / share)


def _compose(rule: Rule, decay: tuple[str, ...]) -> Made:
    """A rule with decoupled decay is computed with and without it; the difference is the decay."""
    text = RuleSource(rule, agrees=agrees, masked=masked)
    agreeing, count, stepped, ignored, nothing = text.new("agreeing", "count", "stepped", "ignored", "nothing")
    full, lines, undecayed = stepped, [], None
    if decay:
        full = text.new("full")[0]
        lines = [f"{nothing} = 0.0 * {decay[0]}"]
        undecayed = dict.fromkeys(decay, nothing)
    before = f"{text.w}, {stepped}, {text.g}"
    agreement = text.define(
        "agreement",
        text.arguments(),
        [*lines, f"{stepped}, {ignored} = {text.call(undecayed)}"],
        f"{text['agrees']}({before}), 1.0",
    )
    if decay:
        lines += [f"{stepped}, {ignored} = {text.call(undecayed)}"]
    lines += text.step(full, text.call())
    result = f"{text['masked']}({before}, {agreeing}, {count})"
    if decay:
        result += f" + ({full} - {stepped})"
    extras = ("sums", *(("index",) if "index" in rule.extras else ()))
    first = text.unpacked(extras, rule.state, rule.own_hyper, (agreeing, count, *text.sums))
    reduction = ComposedReduction(agreement, rule.reduction, feeds_next=True)
    return Made(text.define("cautious", first, lines, f"{result}, {text.returned()}"), reduction)
