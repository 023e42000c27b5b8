"""`cautious_weight_decay`: decoupled weight decay only in elements that the step moves towards zero."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ..language import Rule, TensorRule, jit
from ..language.codegen import RuleSource, tuple_text
from .base import Made, check_rule, transformed


def cautious_weight_decay(rule: Rule | TensorRule, decay: Iterable[str] = ("decay", "decoupled_decay")) -> Any:
    """Return the rule with its decoupled weight decay only in elements where u w >= 0, for the step -u and the weight w.

    u is what the rule without decay subtracts from the weight; if it is too small to change the weight, it counts as 0.

    Args:
        rule: an elementwise rule or a rule of whole tensors with decoupled weight decay. For whole tensors the decay is the
            sum of these hyper-parameters times the weight before the step.
        decay: names of hyper-parameters of decoupled weight decay; names that the rule does not have are ignored.

    Raises:
        ValueError: the rule has none of these hyper-parameters.

    Source: Chen et al. (2025), "Cautious Weight Decay", arXiv 2510.12402, alg. 1.
    """
    check_rule(rule, whole=True)
    decay = tuple(decay)
    names = rule.hyper if isinstance(rule, TensorRule) else rule.own_hyper
    if not (used := tuple(name for name in names if name in decay)):
        raise ValueError(
            f"rule {rule.name!r} has none of the hyper-parameters {', '.join(map(repr, decay))}: there is no decoupled "
            "weight decay in it; apply decoupled_weight_decay first, or name it in decay="
        )
    around = partial(_around_whole, decay=_of_whole(rule, used))
    return transformed(cautious_weight_decay, _compose, rule, used, around=around)


def _of_whole(rule: Rule | TensorRule, decay: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without those that a rule of whole tensors has only for its elementwise rule."""
    return tuple(name for name in decay if name in getattr(rule, "own_hyper", rule.hyper))


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, *sums: Any, decay: tuple[str, ...]) -> Any:
    """Compute the step once, without decay: in a rule of whole tensors the decay does not change the step."""
    stepped, new_states = step(g, **dict.fromkeys(decay, 0.0))
    decayed = stepped - sum(hyper[name] for name in decay) * w
    return torch.where(opposes(w, stepped), stepped, decayed), new_states


@jit
def opposes(w, stepped):
    """Return whether u and w differ in sign, for the step -u. Their product could underflow."""
    step = w - stepped
    return ((step > 0.0) & (w < 0.0)) | ((step < 0.0) & (w > 0.0))


def _compose(rule: Rule, decay: tuple[str, ...]) -> Made:
    """Compute the rule with and without decay, because states may depend on it, too."""
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
