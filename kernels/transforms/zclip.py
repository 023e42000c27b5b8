"""`zclip`: clip gradients if their norm is far above its moving average."""

from __future__ import annotations

from ..language import Rule, reduction, tl
from ..language.codegen import RuleSource
from ..rules.common import clip_coefficient, norm_of
from .base import Change, Made, changed_gradient, transformed


def zclip(rule: Rule) -> Rule:
    """Return the rule with gradients clipped if their norm over all tensors is a spike, by its running mean and variance.

    With the norm n of an update, mean m and variance v of those before, and z = (n - m) / (sqrt(v) + 1e-6), the norm is
    a spike where z > `zclip`. The gradients are then clipped to the norm n* = m + `zclip`^2 sqrt(v) / z, else n* = n; and

        m <- m + (1 - zclip_decay) (n* - m), v <- v + (1 - zclip_decay) ((n* - m)^2 - v), with the new m

    In the first `zclip_warmup` updates there are no spikes, and m and v are the mean and the variance of all norms so far.
    In any case gradients are clipped to the norm `clip_norm`, too; infinity is for no such limit. Clipping to n* multiplies
    by min(1, n* / (n + 1e-6)). A norm that is not finite changes neither mean nor variance.

    `zclip`, `zclip_decay`, `zclip_warmup` and `clip_norm` are hyper-parameters. The per-tensor states, the same for all
    tensors, are `norm_mean`, `norm_variance` and `norm_count`, of the norms so far, and of the last update `clip_scale`, by
    which gradients were multiplied, and `norm_square`. It needs one more reduction; the gradients themselves stay as they
    are. With a `zclip_decay` of 1 nothing is counted or averaged.

    Args:
        rule: an elementwise rule. Apply this transform first, before others that read the gradient.

    Source: Kumar et al. (2025), "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", arXiv 2504.02507, with reciprocal
    clipping; the order in which mean and variance are updated is that of the authors' code.
    """
    return transformed(zclip, _make, rule)


@reduction(scope="global")
def watched_square(w, g, state, hyper):
    """Sum of squares of the gradient over all tensors, with running statistics of its root."""
    return (g * g,)


@watched_square.finish
def watched(sums, kept, hyper):
    """Mean, variance and number of norms, the factor for gradients, and the sum of squares."""
    (total,) = sums
    norm_mean, norm_variance, norm_count, clip_scale, norm_square = kept  # noqa: RUF059  # names them
    zclip, one_minus_zclip_decay, zclip_warmup, clip_norm = hyper
    norm = norm_of(total)
    is_finite = total - total == 0.0
    starting = norm_count < zclip_warmup
    deviation = tl.sqrt(norm_variance)
    z = (norm - norm_mean) / (deviation + 1e-6)
    is_spike = ~starting & (z > zclip)
    spike_limit = norm_mean + zclip * zclip * deviation / z
    limit = tl.where(is_spike, tl.minimum(spike_limit, clip_norm), clip_norm)
    is_limit = limit - limit == 0.0
    scale = tl.where(is_limit, clip_coefficient(norm, limit, 1e-6), 1.0)
    counted = tl.where(is_spike, spike_limit, norm)
    learns = is_finite & (one_minus_zclip_decay > 0.0)
    count = norm_count + 1.0
    weight = tl.where(starting, 1.0 / count, one_minus_zclip_decay)
    mean = norm_mean + weight * (counted - norm_mean)
    square = tl.where(starting, (counted - norm_mean) * (counted - mean), (counted - mean) * (counted - mean))
    variance = norm_variance + weight * (square - norm_variance)
    new_mean = tl.where(learns, mean, norm_mean)
    new_variance = tl.where(learns, variance, norm_variance)
    return new_mean, new_variance, tl.where(learns, count, norm_count), scale, total


def _clip(text: RuleSource, numbers: tuple[str, ...]) -> tuple[list[str], str]:
    (clipped,) = text.new("clipped")
    return [f"{clipped} = {text.g} * {numbers[-2]}"], clipped


def _make(rule: Rule) -> Made:
    RuleSource(rule, *watched_square.kept, *watched_square.finish_hyper)  # refuses names that the rule has
    return changed_gradient(rule, "zclipped", watched_square, Change(_clip), knows_total=True)
