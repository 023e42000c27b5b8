"""AdaDelta: the gradient, scaled by the ratio of the RMS of past steps to the RMS of past gradients."""

from ..language import jit, rule, tl
from .common import decayed_after_clip, weighted


@jit
def delta(g, square, step_square, rho, one_minus_rho, epsilon):
    """Return the step and the new averages of squared gradients and of squared steps."""
    square = rho * square + one_minus_rho * g * g
    step = tl.sqrt(step_square + epsilon) / tl.sqrt(square + epsilon) * g
    return step, square, rho * step_square + one_minus_rho * step * step


@rule(nonnegative=("square", "step_square"))
def adadelta(w, g, state, hyper):
    """AdaDelta: w <- w - (lr delta + decay w). Zeiler (2012), alg. 1, where lr is 1.

    MXNet 1.9.1 decouples the weight decay from the gradient (`decay`); torch adds wd w to the gradient.
    """
    square, step_square = state
    lr, wd, decay, clip, rho, one_minus_rho, epsilon = hyper
    g = decayed_after_clip(w, g, wd, clip)
    step, square, step_square = delta(g, square, step_square, rho, one_minus_rho, epsilon)
    return w - (lr * step + weighted(decay, w)), (square, step_square)
