"""`decoupled_weight_decay`: subtract decay from the weight, apart from the step."""

from __future__ import annotations

from typing import Any

from ..language import Rule, ShapedRule
from ..language.codegen import RuleSource
from ..rules.common import weighted
from .base import Made, check_rule, transformed


def decoupled_weight_decay(rule: Rule | ShapedRule) -> Any:
    """Return the rule with decoupled weight decay: w <- (w after the rule) - decoupled_decay w, with the old w.

    `decoupled_decay` is a new hyper-parameter. `wd`, the decay in the gradient, stays a hyper-parameter; set it to 0.

    Args:
        rule: an elementwise rule with a hyper-parameter `wd`, or one of `rule_by_shape`, all of whose rules have it.

    Raises:
        ValueError: the rule has no hyper-parameter `wd`.

    Source: Loshchilov & Hutter (2019), "Decoupled Weight Decay Regularization", alg. 1 and 2, lines 9 and 12.
    """
    check_rule(rule)
    if "wd" not in rule.hyper:
        raise ValueError(f"rule {rule.name!r} has no hyper-parameter 'wd': there is no weight decay in it to be decoupled")
    return transformed(decoupled_weight_decay, _compose, rule)


def _compose(rule: Rule) -> Made:
    text = RuleSource(rule, "decoupled_decay", weighted=weighted)
    (stepped,) = text.new("stepped")
    first = text.arguments(hyper=("decoupled_decay",))
    lines = text.step(stepped, text.call())
    result = f"{stepped} - {text['weighted']}(decoupled_decay, {text.w}), {text.returned()}"
    return Made(text.define("decoupled", first, lines, result), rule.reduction)
