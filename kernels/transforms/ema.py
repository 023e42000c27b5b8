"""`ema`: a moving average of the weights."""

from __future__ import annotations

from typing import Any

from ..language import Rule, TensorRule, rule
from ..language.codegen import RuleSource
from .base import Made, interpolated, transformed


def ema(rule: Rule | TensorRule, moves: bool = True) -> Any:
    """The rule with a last state `ema`, the moving average of the weight: ema <- ema + (1 - ema_decay) (w - ema).

    It must start as the weight. The hyper-parameter is `one_minus_ema_decay`. `moving_average` shows the average.

    Args:
        rule: any rule.
        moves: if False, a rule of the same states that leaves the average as it is, and has no such hyper-parameter.

    Source: Polyak & Juditsky (1992); as `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    """
    added = ("one_minus_ema_decay",) if moves else ()
    return transformed(ema, _make, rule, bool(moves), around=_around_whole, state=("ema",), hyper=added)


def _around_whole(step: Any, w: Any, g: Any, states: Any, hyper: Any, *sums: Any) -> Any:
    new, found = step(g)
    share = hyper.get("one_minus_ema_decay")
    return new, found if share is None else found | {"ema": interpolated(states["ema"], new, share)}


@rule
def moving_average(w, g, state, hyper):
    """w <- ema, whatever the gradient."""
    (ema,) = state
    return ema, (ema,)


def _make(rule: Rule, moves: bool) -> Made:
    added = ("one_minus_ema_decay",) if moves else ()
    text = RuleSource(rule, "ema", *added, interpolated=interpolated)
    (stepped,) = text.new("stepped")
    first = text.arguments(("ema",), added)
    lines = text.step(stepped, text.call())
    average = f"{text['interpolated']}(ema, {stepped}, one_minus_ema_decay)" if moves else "ema"
    return Made(text.define("averaging", first, lines, f"{stepped}, {text.returned(average)}"), rule.reduction)
