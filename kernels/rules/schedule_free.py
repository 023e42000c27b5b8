"""Schedule-free training: gradients are taken at y, between the iterate z and the average x, which needs no schedule.

Defazio et al. (2024), eq. 3-5. During training the weight is y; `toward` computes x from it.
"""

from ..language import rule
from .adam import corrected_root
from .common import clipped, weighted


@rule(full_precision=("z",))
def schedule_free_sgd(w, g, state, hyper):
    """Schedule-free SGD; `share` is c_{t+1}, the weight of z in the new average."""
    (z,) = state
    lr, wd, clip, beta, share = hyper
    g = clipped(g, clip) + weighted(wd, w)
    y = w + share * (z - w) - lr * (1.0 - beta * (1.0 - share)) * g
    return y, (z - lr * g,)


@rule(full_precision=("z",), nonnegative=("var",))
def schedule_free_adamw(w, g, state, hyper):
    """Schedule-free AdamW: as `schedule_free_sgd`, with the gradient divided by sqrt(corrected var), then the decay."""
    z, var = state
    lr, wd, clip, beta, beta2, one_minus_beta2, epsilon, correction2, share = hyper
    g = clipped(g, clip)
    var = beta2 * var + one_minus_beta2 * g * g
    step = g / corrected_root(var, correction2, epsilon) + weighted(wd, w)
    y = w + share * (z - w) - lr * (1.0 - beta * (1.0 - share)) * step
    return y, (z - lr * step, var)


@rule(full_precision=("z",))
def toward(w, g, state, hyper):
    """w <- w + share (z - w): the average x from the weight y if share = 1 - 1 / beta. The gradient is ignored."""
    (z,) = state
    (share,) = hyper
    return w + share * (z - w), state
