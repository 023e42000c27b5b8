"""`cautious_weight_decay`: decoupled decay only in elements that the step moves towards zero."""

from __future__ import annotations

from collections.abc import Iterable

from ..language import Rule, jit
from ..language.codegen import RuleSource, tuple_text
from .base import Made, check_rule, transformed

__all__ = ["cautious_weight_decay"]


def cautious_weight_decay(rule: Rule, decay: Iterable[str] = ("decay", "decoupled_decay")) -> Rule:
    """The rule, with its decoupled weight decay only in elements where u w >= 0, of the step -u and the weight w.

    u is what the rule without decay takes off the weight. Where that is too small to change the weight, it counts as 0.

    Args:
        rule: an elementwise rule that has a decoupled weight decay.
        decay: the hyper-parameters of that; names that the rule does not have are ignored.

    Raises:
        ValueError: it has none of these.

    Source: Chen et al. (2025), "Cautious Weight Decay", arXiv 2510.12402, alg. 1.
    """
    check_rule(rule)
    decay = tuple(decay)
    if not (own := tuple(name for name in rule.own_hyper if name in decay)):
        raise ValueError(
            f"rule {rule.name!r} has none of the hyper-parameters {', '.join(map(repr, decay))}: there is no decoupled "
            "weight decay in it; apply decoupled_weight_decay first, or name it in decay="
        )
    return transformed(cautious_weight_decay, _make, rule, own)


@jit
def opposes(w, stepped):
    """Whether a step and a weight differ in sign. Their product could be too small to tell."""
    step = w - stepped
    return ((step > 0.0) & (w < 0.0)) | ((step < 0.0) & (w > 0.0))


def _make(rule: Rule, decay: tuple[str, ...]) -> Made:
    """The rule is computed with and without decay. States may depend on it, too."""
    text = RuleSource(rule, opposes=opposes)
    nothing, decayed, stepped, states, opposing = text.new("nothing", "decayed", "stepped", "states", "opposing")
    undecayed = dict(zip(rule.state, text.new(*(f"undecayed_{name}" for name in rule.state)), strict=True))
    lines = [
        *text.step(decayed, text.call()),
        f"{nothing} = 0.0 * {decay[0]}",
        f"{stepped}, {states} = {text.call(dict.fromkeys(decay, nothing))}",
        *([f"{tuple_text(undecayed.values())} = {states}"] if undecayed else []),
        f"{opposing} = {text['opposes']}({text.w}, {stepped})",
    ]
    new = tuple_text(
        f"{text.tl}.where({opposing}, {undecayed[name]}, {text.new_state(name)})" if name in rule.changed else name
        for name in rule.state
    )
    result = f"{text.tl}.where({opposing}, {stepped}, {decayed}), {new}"
    return Made(text.define("decaying_cautiously", text.arguments(), lines, result), rule.reduction)
