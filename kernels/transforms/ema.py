"""`ema`: keep a moving average of the weights."""

from __future__ import annotations

from typing import Any

from ..language import Rule, TensorRule, rule
from ..language.codegen import RuleSource
from .base import Made, interpolated, transformed

_STARTS: Any = {"starts_as_weight": ("ema",)}


def ema(rule: Rule | TensorRule, moves: bool = True) -> Any:
    """Return the rule with a moving average of the weight: ema <- ema + (1 - ema_decay) (w - ema), with the new w.

    The average is an additional last state `ema`, which must start equal to the weight. `one_minus_ema_decay` is an
    additional hyper-parameter. The rule `moving_average` copies the average into the weight.

    Args:
        rule: an elementwise rule or a rule of whole tensors.
        moves: if False, return a rule with the same states that does not change the average and does not have the
            hyper-parameter. Default: True.

    Source: Polyak & Juditsky (1992); as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """
    added = ("one_minus_ema_decay",) if moves else ()
    return transformed(ema, _compose, rule, bool(moves), around=_around_whole, state=("ema",), hyper=added, **_STARTS)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, *sums: Any) -> Any:
    new, new_states = step(g)
    share = hyper.get("one_minus_ema_decay")
    return new, new_states if share is None else new_states | {"ema": interpolated(states["ema"], new, share)}


@rule
def moving_average(w, g, state, hyper):
    """w <- ema, whatever the gradient."""
    (ema,) = state
    return ema, (ema,)


def _compose(rule: Rule, moves: bool) -> Made:
    added = ("one_minus_ema_decay",) if moves else ()
    text = RuleSource(rule, "ema", *added, interpolated=interpolated)
    (stepped,) = text.new("stepped")
    first = text.arguments(("ema",), added)
    lines = text.step(stepped, text.call())
    average = f"{text['interpolated']}(ema, {stepped}, one_minus_ema_decay)" if moves else "ema"
    return Made(text.define("averaging", first, lines, f"{stepped}, {text.returned(average)}"), rule.reduction, **_STARTS)
