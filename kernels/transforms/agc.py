"""`agc`: gradients clipped by the ratio of their norm to the weight's, tensor by tensor."""

from __future__ import annotations

from ..language import Rule, jit, reduction, tl
from ..language.codegen import RuleSource
from ..rules.common import norm_of
from .base import Change, Made, changed_gradient, transformed


def agc(rule: Rule) -> Rule:
    """The rule with adaptive gradient clipping by tensors: a gradient's norm is at most `agc` times its weight's.

    With the norms |g| and |w| of a whole tensor, and L = agc max(|w|, 0.001), the gradient is multiplied by L / |g| where
    |g| > L. In the paper each row of a matrix, or filter, has a norm of its own, as in `tristep.kernels.clip_adaptively_`;
    here it is the whole tensor's, which is the same for vectors and numbers. `agc` is a hyper-parameter; there is one more
    reduction, before the rule's own, which see the clipped gradient, too. The gradients themselves stay as they are.

    Args:
        rule: an elementwise rule. Apply this transform before all others.

    Raises:
        ValueError: the rule needs the norm over all tensors already.

    Source: Brock et al. (2021), "High-Performance Large-Scale Image Recognition Without Normalization", eq. 3, with norms of
    tensors instead of units.
    """
    return transformed(agc, _make, rule)


@reduction
def squares(w, g, state, hyper):
    """Sums of squares of the gradient and of the weight."""
    return g * g, w * w


@jit
def clipped_by_ratio(g, g_square, w_square, ratio):
    """The clipped gradient; what is NaN, and a gradient of a tensor in which there is NaN, stays as it is."""
    norm, limit = norm_of(g_square), ratio * tl.maximum(norm_of(w_square), 0.001)
    return tl.where(norm > limit, g * (limit / norm), g)


def _clip(text: RuleSource, numbers: tuple[str, ...]) -> tuple[list[str], str]:
    (clipped,) = text.new("clipped")
    return [f"{clipped} = {text['clipped_by_ratio']}({text.g}, {', '.join(numbers[-2:])}, agc)"], clipped


def _make(rule: Rule) -> Made:
    if rule.knows_total:
        raise ValueError(f"rule {rule.name!r} needs the norm over all tensors already: apply agc before what does")
    return changed_gradient(rule, "agc", squares, Change(_clip, ("agc",), {"clipped_by_ratio": clipped_by_ratio}))
