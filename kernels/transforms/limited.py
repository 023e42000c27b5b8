"""`limited`: clip gradients, and skip steps, by the norm of all gradients together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..language import Limit, Rule, TensorRule, jit, tl
from ..language.codegen import RuleSource, tuple_text
from ..rules.common import clip_coefficient, total_square
from .base import Change, Made, after_first, changed_gradient, transformed


def limited(rule: Rule | TensorRule, skips: bool = False, hyper: tuple[str, str] = ("clip_norm", "skip_square")) -> Any:
    """Return the rule with gradients clipped by their norm over all tensors and, if `skips`, steps skipped by it.

    The new rule has an additional first reduction, the sum of squares of the gradients. Gradients are multiplied by
    min(1, clip_norm / (norm + 1e-6)). The rule's own reductions see the clipped gradient, too; the gradient tensors do not
    change. If `skips`, `clip_norm` may be infinite, for no limit, and a step is skipped if the sum of squares is not finite
    (in float32 it is not for norms above 1.8e19 either) or exceeds `skip_square`, which may be infinite. A skipped step
    changes neither weights nor states nor per-tensor states, but counts as an update, because the host does not wait for
    the device. `clip_norm` and, if `skips`, `skip_square` are hyper-parameters.

    Args:
        rule: an elementwise rule or a rule of whole tensors. No other transform may be applied after this one.
        skips: whether steps may be skipped.
        hyper: other names of the two hyper-parameters, for a second limit of the limited rule.

    Source: Pascanu et al. (2013), "On the difficulty of training recurrent neural networks", alg. 1, with the numbers of
    torch; `optax.skip_large_updates`.
    """
    limit, options = Limit(skips, hyper[: 1 + skips]), (bool(skips), tuple(hyper))
    around = partial(_around_whole, limit)
    return transformed(
        limited, _compose, rule, *options, around=around, hyper=limit.hyper, reduction=total_square, limit=limit
    )


@jit
def clip_factor(total, clip_norm):
    """Return the factor that clips gradients with this sum of squares, NaN for a NaN."""
    return clip_coefficient(tl.sqrt(total), clip_norm, 1e-6)


@jit
def factor_or_skip(total, clip_norm, skip_square):
    """Return the factor that clips gradients with this sum of squares, or -1 if the step is skipped."""
    taken = (total <= skip_square) & (total - total == 0.0)
    return tl.where(taken, clip_factor(total, clip_norm), -1.0)


def factor_of(limit: Limit, total: Any, hyper: Any) -> Any:
    """Return the factor of gradients with this sum of squares, negative if the step is skipped."""
    return (factor_or_skip if limit.skips else clip_factor)(total, *(hyper[name] for name in limit.hyper))


def _around_whole(limit: Limit, step: Any, w: Any, g: Any, states: Any, hyper: Any, sums: Any) -> Any:
    factor = factor_of(limit, sums[-1], hyper)
    if not limit.skips:
        return step(g * factor)
    going = factor >= 0.0
    new_w, new = step(torch.where(going, g * factor, 0.0))  # matrix decompositions fail for non-finite values
    new_states = {name: old if new[name] is old else torch.where(going, new[name], old) for name, old in states.items()}
    return torch.where(going, new_w, w), new_states


def _compose(rule: Rule, skips: bool, hyper: tuple[str, str]) -> Made:
    limit = Limit(skips, hyper[: 1 + skips])
    helper = factor_or_skip if skips else clip_factor
    helpers = {helper.name: helper}

    def clip(text: RuleSource, numbers: tuple[str, ...]) -> tuple[list[str], str]:
        clipped, factor = text.new("clipped", "factor")
        value = f"{text[helper.name]}({', '.join((numbers[-1], *limit.hyper))})"
        return [f"{factor} = {value}", f"{clipped} = {text.g} * {factor}"], clipped

    change = Change(clip, limit.hyper, helpers)
    if not skips:
        return changed_gradient(rule, "limited", total_square, change)._replace(limit=limit)
    sums = after_first(rule, "limited", total_square, change)
    text = RuleSource(rule, *limit.hyper, **helpers)
    stepped, going = text.new("stepped", "going")
    unpacked, numbers = text.arguments_after(sums, limit.hyper)
    lines, clipped = clip(text, numbers)
    factor = lines[0].partition(" ")[0]
    lines += [*text.step(stepped, text.call(g=clipped)), f"{going} = {factor} >= 0.0"]
    states = tuple_text(
        f"{text.tl}.where({going}, {text.new_state(name)}, {name})" if name in rule.changed else name for name in rule.state
    )
    result = f"{text.tl}.where({going}, {stepped}, {text.w}), {states}"
    return Made(text.define("limited", unpacked, lines, result), sums, limit=limit)
