"""Stochastic gradient descent: plain, with momentum, with Nesterov's momentum, and by sign.

Most match MXNet 1.9.1, where the momentum is a step in weight space: it includes the learning rate, so a change of the
learning rate does not rescale past gradients.
"""

from ..language import jit, reduction, rule, tl
from .common import clipped, decayed_after_clip, sign, weighted


@rule
def sgd(w, g, state, hyper):
    """SGD: w <- w - lr (g + wd w)."""
    lr, wd, clip = hyper
    return w - lr * decayed_after_clip(w, g, wd, clip), state


@rule
def sgd_momentum(w, g, state, hyper):
    """SGD with momentum: m <- momentum m - lr (g + wd w);  w <- w + m. Polyak (1964), eq. 9."""
    (mom,) = state
    lr, wd, clip, momentum = hyper
    mom = momentum * mom - lr * decayed_after_clip(w, g, wd, clip)
    return w + mom, (mom,)


@rule
def heavy_ball(w, g, state, hyper):
    """m <- momentum m + share (g + wd w);  w <- w - lr (of_gradient (g + wd w) + of_momentum m).

    The momentum excludes the learning rate, as in torch. `share` is 1 - dampening, but 1 at a parameter's first step.
    The step is m, or g + wd w + momentum m for Nesterov's momentum. Sutskever et al. (2013), section 2.
    """
    (mom,) = state
    lr, wd, clip, momentum, share, of_gradient, of_momentum = hyper
    g = decayed_after_clip(w, g, wd, clip)
    mom = momentum * mom + share * g
    return w - lr * (of_gradient * g + of_momentum * mom), (mom,)


@rule
def nag(w, g, state, hyper):
    """Nesterov's accelerated gradient as MXNet 1.9.1 computes it.

    With m' = momentum m:  w_new = w - m' + (momentum + 1) (m' - lr (g + wd w)),  m <- m' - lr (g + wd w_new).
    The stored momentum includes the decay of the *new* weight; without decay this is Sutskever et al. (2013), eq. 3-4.
    """
    (mom,) = state
    lr, wd, clip, momentum = hyper
    g = clipped(g, clip)
    mom = momentum * mom
    w = w - mom + (momentum + 1.0) * (mom - lr * (g + weighted(wd, w)))
    return w, (mom - lr * (g + weighted(wd, w)),)


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


@jit
def delay(w, g, previous, factor):
    """Return the correction for the weight's move since `previous`; 0 if `factor` is 0, also for non-finite numbers."""
    return tl.where(factor == 0.0, 0.0, factor * (w - previous) * g * g)


@rule(full_precision=("previous",))
def dcasgd(w, g, state, hyper):
    """Delay-compensated SGD: g + wd w + lamda g^2 (w - previous). Zheng et al. (2017), eq. 10; matches MXNet 1.9.1."""
    (previous,) = state
    lr, wd, clip, lamda = hyper
    g = clipped(g, clip)
    return w - (lr * (g + weighted(wd, w)) + delay(w, g, previous, lr * lamda)), (w,)


@rule(full_precision=("previous",))
def dcasgd_momentum(w, g, state, hyper):
    """Delay-compensated SGD with momentum. MXNet 1.9.1 accepts a momentum for DCASGD, but fails when it runs."""
    mom, previous = state
    lr, wd, clip, momentum, lamda = hyper
    g = clipped(g, clip)
    mom = momentum * mom - (lr * (g + weighted(wd, w)) + delay(w, g, previous, lr * lamda))
    return w + mom, (mom, w)


@rule
def sgld(w, g, state, hyper, index):
    """Langevin dynamics: half a step of SGD, and noise of variance lr. Welling & Teh (2011), eq. 4."""
    lr, wd, clip, key0, key1 = hyper
    return w - 0.5 * lr * decayed_after_clip(w, g, wd, clip) + tl.sqrt(lr) * tl.normal(key0, key1, index), state


@jit
def large_batch(w, g, total, mom, lr, wd, clip, momentum, one_over_scale, apply):
    """Add up gradients while `apply` is 0; when it is 1, `sgd_momentum` with their mean."""
    total = total + g
    new_w, new_state = sgd_momentum(w, total * one_over_scale, (mom,), (lr, wd, clip, momentum))
    (new_mom,) = new_state
    return tl.where(apply > 0.0, new_w, w), (tl.where(apply > 0.0, 0.0, total), tl.where(apply > 0.0, new_mom, mom))


@rule(full_precision=("total",))
def lbsgd(w, g, state, hyper):
    """SGD with momentum on the mean of several gradients; steps only if `apply` is 1. Matches MXNet 1.9.1.

    `lr` includes the warm-up.
    """
    total, mom = state
    lr, wd, clip, momentum, one_over_scale, apply = hyper
    return large_batch(w, g, total, mom, lr, wd, clip, momentum, one_over_scale, apply)


@reduction
def lbsgd_squares(w, g, state, hyper):
    (total,) = state
    (one_over_scale,) = hyper
    mean = (total + g) * one_over_scale
    return w * w, mean * mean


@rule(reduction=lbsgd_squares, full_precision=("total",))
def lbsgd_lars(w, g, state, hyper, sums):
    """`lbsgd` with its learning rate multiplied by |w| / sqrt(|g|^2 + wd |w|^2), clamped to [0.01, 100]."""
    total, mom = state
    lr, wd, clip, momentum, one_over_scale, apply = hyper
    w2, g2 = sums
    factor = tl.minimum(tl.maximum(tl.sqrt(w2 / (g2 + weighted(wd, w2) + 1e-18)), 0.01), 100.0)
    return large_batch(w, g, total, mom, lr * factor, wd, clip, momentum, one_over_scale, apply)


@rule(full_precision=("copy",))
def test(w, g, state, hyper):
    """w <- w + g, with a copy of w as the state: the optimizer with which MXNet 1.9.1 tests its stores."""
    (copy,) = state  # noqa: RUF059  # names it
    return w + g, (w + g,)
