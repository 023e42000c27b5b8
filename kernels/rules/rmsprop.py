"""RMSProp, plain (Tieleman & Hinton 2012) and centered (Graves 2013, eq. 38-45); numbers of MXNet 1.9.1."""

from ..language import rule, tl
from .common import clipped, decayed_before_clip


@rule
def rmsprop(w, g, state, hyper):
    """n <- gamma1 n + (1 - gamma1) g^2;  w <- w - lr g / sqrt(n + epsilon), then limited to +-clip_weights."""
    (n,) = state
    lr, wd, clip, gamma1, one_minus_gamma1, epsilon, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = gamma1 * n + one_minus_gamma1 * g * g
    return clipped(w - lr * g / tl.sqrt(n + epsilon), clip_weights), (n,)


@rule
def rmsprop_centered(w, g, state, hyper):
    """As `rmsprop`, with the variance n - mean^2 under the root, and momentum gamma2 on the step."""
    n, mean, delta = state
    lr, wd, clip, gamma1, one_minus_gamma1, gamma2, epsilon, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = gamma1 * n + one_minus_gamma1 * g * g
    mean = gamma1 * mean + one_minus_gamma1 * g
    delta = gamma2 * delta - lr * g / tl.sqrt(n - mean * mean + epsilon)
    return clipped(w + delta, clip_weights), (n, mean, delta)
