"""Stochastic gradient descent: plain, with momentum, with Nesterov's momentum, and by sign.

Numbers of MXNet 1.9.1, whose momentum is a step in weight space: the learning rate is folded into it, so a
change of the rate does not rescale the past.
"""

from ..language import rule
from .common import clipped, decayed_after_clip, sign


@rule
def sgd(w, g, state, hyper):
    """w <- w - lr (g + wd w)."""
    lr, wd, clip = hyper
    return w - lr * decayed_after_clip(w, g, wd, clip), state


@rule
def sgd_momentum(w, g, state, hyper):
    """m <- momentum m - lr (g + wd w);  w <- w + m. Polyak (1964), eq. 9."""
    (mom,) = state
    lr, wd, clip, momentum = hyper
    mom = momentum * mom - lr * decayed_after_clip(w, g, wd, clip)
    return w + mom, (mom,)


@rule
def nag(w, g, state, hyper):
    """Nesterov's accelerated gradient as MXNet 1.9.1 computes it.

    With m' = momentum m:  w_new = w - m' + (momentum + 1) (m' - lr (g + wd w)),  m <- m' - lr (g + wd w_new).
    The stored momentum takes the decay of the *new* weight; without decay this is Sutskever et al. (2013), eq. 3-4.
    """
    (mom,) = state
    lr, wd, clip, momentum = hyper
    g = clipped(g, clip)
    mom = momentum * mom
    w = w - mom + (momentum + 1.0) * (mom - lr * (g + wd * w))
    return w, (mom - lr * (g + wd * w),)


@rule
def signum(w, g, state, hyper):
    """m <- momentum m - (1 - momentum) (g + wd w);  w <- (1 - lr wd_lh) w + lr sign(m). Bernstein et al. (2018), alg. 2."""
    (mom,) = state
    lr, wd, clip, momentum, one_minus_momentum, wd_lh = hyper
    mom = momentum * mom - one_minus_momentum * decayed_after_clip(w, g, wd, clip)
    return (1.0 - lr * wd_lh) * w + lr * sign(mom), (mom,)


@rule
def sign_sgd(w, g, state, hyper):
    """w <- (1 - lr (wd + wd_lh)) w - lr sign(g). Bernstein et al. (2018), alg. 1; Signum without momentum."""
    lr, wd, wd_lh = hyper
    return (1.0 - lr * (wd + wd_lh)) * w - lr * sign(g), state
