"""`lookahead`: slow weights that the fast ones return to."""

from __future__ import annotations

from ..language import Rule
from ..language.codegen import RuleSource
from .base import Made, interpolated, transformed

__all__ = ["lookahead"]


def lookahead(rule: Rule, sync: bool = True) -> Rule:
    """The rule with a last state `slow`, which must start as the weight, and which the weight returns to from time to time.

    Where the hyper-parameter `sync` is above 0, slow <- slow + lookahead_alpha (w - slow) and w <- slow after the step.

    Args:
        rule: an elementwise rule.
        sync: if False, a rule of the same states that never does so, and has neither of the two hyper-parameters. It reads
            and writes nothing of `slow`.

    Source: Zhang et al. (2019), "Lookahead Optimizer: k steps forward, 1 step back", alg. 1.
    """
    return transformed(lookahead, _make, rule, bool(sync))


def _make(rule: Rule, sync: bool) -> Made:
    added = ("lookahead_alpha", "sync") if sync else ()
    text = RuleSource(rule, "slow_weight", *added, interpolated=interpolated)
    stepped, met = text.new("stepped", "met")
    first = text.unpacked(rule.extras, (*rule.state, "slow_weight"), (*rule.own_hyper, *added), text.sums)
    lines = text.step(stepped, text.call())
    if not sync:
        return Made(text.define("between", first, lines, f"{stepped}, {text.returned('slow_weight')}"), rule.reduction)
    lines += [f"{met} = {text['interpolated']}(slow_weight, {stepped}, lookahead_alpha)"]
    slow = f"{text.tl}.where(sync > 0.0, {met}, slow_weight)"
    result = f"{text.tl}.where(sync > 0.0, {met}, {stepped}), {text.returned(slow)}"
    return Made(text.define("lookahead", first, lines, result), rule.reduction)
