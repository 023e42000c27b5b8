"""Rules that rebuild the weight from a sum: Ftrl and FTML."""

from ..language import rule, tl
from .adam import corrected_root
from .common import clipped, decayed_before_clip, sign


@rule(full_precision=("z", "n"), nonnegative=("n",))
def ftrl(w, g, state, hyper):
    """FTRL-proximal with L1 (`lamda1`) and L2 (`wd`) penalties. McMahan et al. (2013), alg. 1; matches MXNet 1.9.1."""
    z, n = state
    lr, wd, clip, lamda1, beta = hyper
    g = clipped(g, clip)
    root = tl.sqrt(n + g * g)
    z = z + g - (root - tl.sqrt(n)) * w / lr
    n = n + g * g
    w = (sign(z) * lamda1 - z) / ((beta + tl.sqrt(n)) / lr + wd)
    return tl.where(tl.abs(z) <= lamda1, 0.0, w), (z, n)  # NaN stays NaN


@rule(full_precision=("d", "z"), nonnegative=("v",))
def ftml(w, g, state, hyper):
    """FTML, "follow the moving leader". Zheng & Kwok (2017), alg. 1; the decay is clipped too, as in MXNet 1.9.1.

    `scale` is (1 - beta1^t) / lr, and `correction2` is 1 / (1 - beta2^t).
    """
    d, v, z = state
    wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, scale, correction2 = hyper
    g = decayed_before_clip(w, g, wd, clip)
    v = beta2 * v + one_minus_beta2 * g * g
    new_d = scale * corrected_root(v, correction2, epsilon)
    z = beta1 * z + one_minus_beta1 * g - (new_d - beta1 * d) * w
    return -z / new_d, (new_d, v, z)
