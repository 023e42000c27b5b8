"""`ema`: keep a moving average of the weights."""

from __future__ import annotations

from typing import Any

from ..language import Rule, TensorRule, rule
from ..language.codegen import RuleSource
from .base import Made, interpolated, transformed

_STARTS: Any = {"starts_as_weight": ("ema",)}
_ADDED = ("one_minus_ema_decay",)


def ema(rule: Rule | TensorRule) -> Any:
    """Return the rule with a moving average of the weight: ema <- ema + (1 - ema_decay) (w - ema), with the new w.

    The average is an additional last state `ema`, which must start equal to the weight. `one_minus_ema_decay` is an
    additional hyper-parameter. The rule `moving_average` copies the average into the weight.

    Args:
        rule: an elementwise rule or a rule of whole tensors.

    Source: Polyak & Juditsky (1992); as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """
    return transformed(ema, _compose, rule, around=_around_whole, state=("ema",), hyper=_ADDED, **_STARTS)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, *sums: Any) -> Any:
    new, new_states = step(g)
    return new, new_states | {"ema": interpolated(states["ema"], new, hyper["one_minus_ema_decay"])}


@rule
def moving_average(w, g, state, hyper):
    """w <- ema, whatever the gradient."""
    (ema,) = state
    return ema, (ema,)


def _compose(rule: Rule) -> Made:
    text = RuleSource(rule, "ema", *_ADDED, interpolated=interpolated)
    (stepped,) = text.new("stepped")
    first = text.arguments(("ema",), _ADDED)
    lines = text.step(stepped, text.call())
    average = f"{text['interpolated']}(ema, {stepped}, one_minus_ema_decay)"
    return Made(text.define("averaging", first, lines, f"{stepped}, {text.returned(average)}"), rule.reduction, **_STARTS)
