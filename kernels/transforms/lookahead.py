"""`lookahead`: keep slow weights, to which the weights are reset every few steps."""

from __future__ import annotations

from typing import Any

from ..language import Rule, ShapedRule
from ..language.codegen import RuleSource
from .base import Made, interpolated, transformed


def lookahead(rule: Rule | ShapedRule, sync: bool = True) -> Any:
    """Return the rule with slow weights: an additional last state `slow_weight`, which must start equal to the weight.

    In a step whose hyper-parameter `sync` is above 0,
    slow_weight <- slow_weight + lookahead_alpha (w - slow_weight), then w <- slow_weight.

    Args:
        rule: an elementwise rule, or one of `rule_by_shape`.
        sync: if False, return a rule with the same states that never synchronizes. It neither reads nor writes
            `slow_weight`, and has neither of the hyper-parameters `lookahead_alpha` and `sync`. Default: True.

    Source: Zhang et al. (2019), "Lookahead Optimizer: k steps forward, 1 step back", alg. 1.
    """
    return transformed(lookahead, _compose, rule, bool(sync))


def _compose(rule: Rule, sync: bool) -> Made:
    added = ("lookahead_alpha", "sync") if sync else ()
    text = RuleSource(rule, "slow_weight", *added, interpolated=interpolated)
    stepped, met = text.new("stepped", "met")
    first = text.arguments(("slow_weight",), added)
    lines = text.step(stepped, text.call())
    if not sync:
        fn = text.define("between", first, lines, f"{stepped}, {text.returned('slow_weight')}")
        return Made(fn, rule.reduction, ("slow_weight",))
    lines += [f"{met} = {text['interpolated']}(slow_weight, {stepped}, lookahead_alpha)"]
    slow = f"{text.tl}.where(sync > 0.0, {met}, slow_weight)"
    result = f"{text.tl}.where(sync > 0.0, {met}, {stepped}), {text.returned(slow)}"
    return Made(text.define("lookahead", first, lines, result), rule.reduction, ("slow_weight",))
