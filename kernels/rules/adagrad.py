"""AdaGrad: the rate of each element falls with the sum of its squared gradients."""

from ..language import rule, tl
from .common import clipped


@rule
def adagrad(w, g, state, hyper):
    """h <- h + g^2;  w <- w - lr (g / sqrt(h + epsilon) + wd w). Duchi et al. (2011); numbers of MXNet 1.9.1."""
    (history,) = state
    lr, wd, clip, epsilon = hyper
    g = clipped(g, clip)
    history = history + g * g
    return w - lr * (g / tl.sqrt(history + epsilon) + wd * w), (history,)
