"""Limits of a step by running statistics of the norms of all gradients: spikes are clipped, or their steps skipped."""

from ..language import jit, rule, tl
from .common import clip_coefficient, norm_of


@jit
def followed(total, percentile, count, share, rate, factor, warmup, limit):
    """Return the new percentile, the number of norms, and whether a step with this sum of squares is taken."""
    norm = norm_of(total)
    is_finite = total - total == 0.0
    taken = is_finite & (total <= limit) & ((count < warmup) | (norm <= factor * percentile))
    learns = is_finite & (norm > 0.0)
    known = count + 1.0
    before = tl.where(count > 0.0, percentile, norm)
    mean = before * tl.exp((tl.log(norm) - tl.log(before)) / known)
    moved = before * tl.exp(rate * (share - tl.where(norm <= before, 1.0, 0.0)))
    new = tl.where(2.0 * count < warmup, mean, moved)
    # Up to 3.6 Triton's interpreter has no & of a block and a comparison of numbers.
    new_percentile = tl.where(rate > 0.0, tl.where(learns, new, percentile), percentile)
    return new_percentile, tl.where(rate > 0.0, tl.where(learns, known, count), count), taken


@rule
def spikes(w, g, state, hyper):
    """w <- the factor of gradients whose sum of squares is g, or -1 if `skips` and the step is to be skipped.

    `zclip` (Kumar et al. 2025, "ZClip", arXiv 2504.02507, with reciprocal clipping; the order in which mean and variance are
    updated is that of the authors' code): with the norm n, mean m and variance v of those before, and
    z = (n - m) / (sqrt(v) + 1e-6), the norm is a spike where z > `zclip`. The gradients are then clipped to the norm
    n* = m + `zclip`^2 sqrt(v) / z, else n* = n; and

        m <- m + (1 - zclip_decay) (n* - m), v <- v + (1 - zclip_decay) ((n* - m)^2 - v), with the new m

    In the first `zclip_warmup` updates there are no spikes, and m and v are the mean and the variance of all norms so far.
    In any case gradients are clipped to the norm `clip_norm`, too; infinity is for no such limit. A skipped step changes
    neither m nor v, nor does a norm that is not finite. With a `zclip_decay` of 1 nothing is counted or averaged.

    `skip_factor` (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, the
    geometric update, of one norm at a time and without noise; TensorFlow Federated's `ZeroingConfig` zeroes updates above a
    multiple of such an estimate): a step is skipped if n exceeds `skip_factor` P, with P a running estimate of the norm that
    the fraction `skip_share` of norms does not exceed, and then

        P <- P exp(skip_rate (skip_share - b)), b = 1 if n <= P, else 0

    After T updates log P has moved by skip_rate times the sum of skip_share - b. So if P stays within bounds, the fraction
    of norms with n <= P converges to skip_share as 1 / T, for any distribution of norms. Norms of skipped steps move P, too,
    so that it follows a lasting change of their level; each moves it by a factor of at most exp(skip_rate). Unlike the
    paper, which is given an initial P, this skips no step because of P in the first `skip_warmup` updates, and in the first
    half of these P is the geometric mean of all norms so far. A norm that is 0 or not finite does not change P. With a
    `skip_rate` of 0 nothing is counted or estimated. A step is also skipped if g is not finite or exceeds `skip_square`.
    """
    norm_mean, norm_variance, norm_count, clip_scale, norm_square, norm_percentile, percentile_count, step_taken = state  # noqa: RUF059  # names them
    (
        clip_norm,
        zclip,
        one_minus_zclip_decay,
        zclip_warmup,
        skips,
        skip_square,
        skip_share,
        skip_rate,
        skip_factor,
        skip_warmup,
    ) = hyper
    norm = norm_of(g)
    percentile, n_norms, taken = followed(
        g, norm_percentile, percentile_count, skip_share, skip_rate, skip_factor, skip_warmup, skip_square
    )
    starting = norm_count < zclip_warmup
    deviation = tl.sqrt(norm_variance)
    z = (norm - norm_mean) / (deviation + 1e-6)
    is_spike = (norm_count >= zclip_warmup) & (z > zclip)
    spike_limit = norm_mean + zclip * zclip * deviation / z
    limit = tl.where(is_spike, tl.minimum(spike_limit, clip_norm), clip_norm)
    is_limit = limit - limit == 0.0
    scale = tl.where(is_limit, clip_coefficient(norm, limit, 1e-6), 1.0)
    counted = tl.where(is_spike, spike_limit, norm)
    count = norm_count + 1.0
    weight = tl.where(starting, 1.0 / count, one_minus_zclip_decay)
    mean = norm_mean + weight * (counted - norm_mean)
    square = tl.where(starting, (counted - norm_mean) * (counted - mean), (counted - mean) * (counted - mean))
    variance = norm_variance + weight * (square - norm_variance)
    learns = tl.where(one_minus_zclip_decay > 0.0, tl.where(taken, 1.0, 0.0), 0.0) > 0.0
    new_mean = tl.where(learns, mean, norm_mean)
    new_variance = tl.where(learns, variance, norm_variance)
    new_count = tl.where(learns, count, norm_count)
    went = tl.where(taken, 1.0, 0.0)
    factor = tl.where(taken, scale, tl.where(skips == 0.0, scale, -1.0))
    return factor, (new_mean, new_variance, new_count, scale, g, percentile, n_norms, went)
