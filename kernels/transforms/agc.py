"""`agc`: clip each tensor's gradient by the ratio of its norm to the weight's."""

from __future__ import annotations

from typing import Any

from ..language import Rule, ShapedRule, jit, reduction, tl
from ..language.codegen import RuleSource
from ..rules.common import norm_of
from .base import Change, Made, changed_gradient, transformed


def agc(rule: Rule | ShapedRule) -> Any:
    """Return the rule with adaptive gradient clipping: a gradient's norm is limited to `agc` times the norm of its weight.

    With the norms |g| and |w| of a whole tensor, and L = agc max(|w|, 0.001), the gradient is multiplied by L / |g| if
    |g| > L. The paper compares the norms of each row of a matrix, or filter; for vectors and scalars both are the
    same. `agc` is an additional hyper-parameter. The rule has an additional first reduction, and its own reductions see the
    clipped gradient, too. The gradient tensors do not change.

    Args:
        rule: an elementwise rule, or one of `rule_by_shape`. Apply this transform before all others.

    Raises:
        ValueError: the rule has a transform that needs the norm over all tensors.

    Source: Brock et al. (2021), "High-Performance Large-Scale Image Recognition Without Normalization", eq. 3, with norms of
    tensors instead of units.
    """
    return transformed(agc, _compose, rule)


@reduction
def squares(w, g, state, hyper):
    """Sums of squares of the gradient and of the weight."""
    return g * g, w * w


@jit
def clipped_by_ratio(g, g_square, w_square, ratio):
    """Return the clipped gradient; the gradient of a tensor with a NaN does not change."""
    norm, limit = norm_of(g_square), ratio * tl.maximum(norm_of(w_square), 0.001)
    return tl.where(norm > limit, g * (limit / norm), g)


def _clip(text: RuleSource, numbers: tuple[str, ...]) -> tuple[list[str], str]:
    (clipped,) = text.new("clipped")
    return [f"{clipped} = {text['clipped_by_ratio']}({text.g}, {', '.join(numbers[-2:])}, agc)"], clipped


def _compose(rule: Rule) -> Made:
    if rule.limits:
        raise ValueError(f"rule {rule.name!r} needs the norm over all tensors already: apply agc before what does")
    return changed_gradient(rule, "agc", squares, Change(_clip, ("agc",), {"clipped_by_ratio": clipped_by_ratio}))
