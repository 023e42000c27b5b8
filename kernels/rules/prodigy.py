"""Prodigy: Adam with a learning rate estimated from how far the weights have moved, the same for all tensors.

Mishchenko & Defazio (2023), alg. 4; matches the authors' package. `last_d` is the estimate before the step, `d` the
estimate after it; `lr` includes the bias correction, and `decay` is `lr` wd or 0. A tensor whose rate is 0 is left out, so
that a step at a rate of 0, as at the beginning of a warm-up, changes nothing.
"""

from ..language import jit, reduction, rule, tl
from .adam import moments
from .common import clipped, weighted


@jit
def followed(s, g, lr, d, d0, beta3, safeguard):
    """Return the new running sum of gradients; `safeguard` leaves `lr`, which is small during a warm-up, out of it."""
    return beta3 * s + d / d0 * tl.where(safeguard > 0.0, d, d * lr) * g


@reduction(scope="global")
def prodigy_distances(w, g, state, hyper, kept):
    """Sum, over all tensors, the weights' move along the gradient and the absolute values of the running sum."""
    s, start = state
    lr, wd, clip, d0, beta3, safeguard = hyper
    numerator, d, largest_d = kept  # noqa: RUF059  # names them
    g = clipped(g, clip) + weighted(wd, w)
    product, size = d / d0 * (d * lr) * g * (start - w), tl.abs(followed(s, g, lr, d, d0, beta3, safeguard))
    return tl.where(lr > 0.0, product, 0.0), tl.where(lr > 0.0, size, 0.0)


@prodigy_distances.finish
def prodigy_estimate(sums, kept, hyper):
    """Return the new estimate, which never falls, grows `growth_rate`-fold at most, and stays if no gradient counts."""
    product, size = sums
    numerator, d, largest_d = kept
    d0, beta3, d_coef, growth_rate = hyper
    numerator = tl.where(size == 0.0, numerator, beta3 * numerator + product)
    found = tl.where(size == 0.0, d, d_coef * numerator / tl.where(size == 0.0, 1.0, size))
    largest_d = tl.maximum(largest_d, found)
    grown = tl.where(d == d0, tl.maximum(d, found), d) * growth_rate
    return numerator, tl.where(size == 0.0, d, tl.minimum(largest_d, grown)), largest_d, d


@rule(reduction=prodigy_distances, full_precision=("s", "start"), nonnegative=("var",))
def prodigy(w, g, state, hyper, sums):
    """Adam on d g at the learning rate d lr, where d is the estimate."""
    mean, var, s, start = state
    old_mean, old_var, old_s = mean, var, s
    (
        lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, d0, beta3, safeguard,
    ) = hyper  # fmt: skip
    numerator, d, largest_d, last_d = sums  # noqa: RUF059  # names them
    g = clipped(g, clip) + weighted(wd, w)
    s = followed(s, g, lr, last_d, d0, beta3, safeguard)
    mean, var = moments(last_d * g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    moved = w - last_d * (lr * mean / (tl.sqrt(var) + d * epsilon) + weighted(decay, w))
    mean, var = tl.where(lr > 0.0, mean, old_mean), tl.where(lr > 0.0, var, old_var)
    return tl.where(lr > 0.0, moved, w), (mean, var, tl.where(lr > 0.0, s, old_s), start)
