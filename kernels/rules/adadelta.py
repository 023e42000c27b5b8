"""AdaDelta: steps measured by the running size of the steps before."""

from ..language import jit, rule, tl
from .common import clipped


@jit
def delta(g, square, step_square, rho, one_minus_rho, epsilon):
    """The step, and the two new averages."""
    square = rho * square + one_minus_rho * g * g
    step = tl.sqrt(step_square + epsilon) / tl.sqrt(square + epsilon) * g
    return step, square, rho * step_square + one_minus_rho * step * step


@rule
def adadelta(w, g, state, hyper):
    """w <- w - (delta + wd w), without a learning rate. Zeiler (2012), alg. 1; numbers of MXNet 1.9.1."""
    square, step_square = state
    wd, clip, rho, one_minus_rho, epsilon = hyper
    step, square, step_square = delta(clipped(g, clip), square, step_square, rho, one_minus_rho, epsilon)
    return w - (step + wd * w), (square, step_square)
