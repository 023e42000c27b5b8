"""RMSProp, plain (Tieleman & Hinton 2012) and centered (Graves 2013, eq. 38-45), each with and without momentum.

MXNet 1.9.1 adds epsilon under the root, torch outside of it. With momentum, of_gradient g / root is added to delta, and
of_delta delta to the weight. MXNet applies the learning rate to the gradient (of_gradient -lr, of_delta 1), torch to delta
(of_gradient 1, of_delta -lr).
"""

from ..language import jit, rule, tl
from .common import clipped, decayed_before_clip


@jit
def average(old, new, gamma1, one_minus_gamma1):
    return gamma1 * old + one_minus_gamma1 * new


@jit
def average_square(old, g, gamma1, one_minus_gamma1):
    """Return the new average of squares; from left to right a square overflows only where the average does, as in torch."""
    return gamma1 * old + one_minus_gamma1 * g * g


@jit
def variance(n, mean):
    """Return n - mean^2; infinite, not NaN, where both have overflowed."""
    square = mean * mean
    return n - tl.where(square - square == 0.0, square, 0.0)


@jit
def over_root(g, mean_square, epsilon, epsilon_outside):
    """Return the gradient divided by its running root mean square."""
    return g / (tl.sqrt(mean_square + epsilon) + epsilon_outside)


@rule(nonnegative=("n",))
def rmsprop(w, g, state, hyper):
    """n <- gamma1 n + (1 - gamma1) g^2;  w <- w - lr g / sqrt(n + epsilon), clamped to +-clip_weights."""
    (n,) = state
    lr, wd, clip, gamma1, one_minus_gamma1, epsilon, epsilon_outside, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = average_square(n, g, gamma1, one_minus_gamma1)
    return clipped(w - lr * over_root(g, n, epsilon, epsilon_outside), clip_weights), (n,)


@rule(nonnegative=("n",))
def rmsprop_momentum(w, g, state, hyper):
    """RMSProp with momentum gamma2 on the step."""
    n, delta = state
    wd, clip, gamma1, one_minus_gamma1, gamma2, epsilon, epsilon_outside, of_gradient, of_delta, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = average_square(n, g, gamma1, one_minus_gamma1)
    delta = gamma2 * delta + of_gradient * over_root(g, n, epsilon, epsilon_outside)
    return clipped(w + of_delta * delta, clip_weights), (n, delta)


@rule(full_precision=("n", "mean"), nonnegative=("n",))  # their difference may be far smaller than they are
def rmsprop_variance(w, g, state, hyper):
    """RMSProp with the variance n - mean^2 under the root: centered, without momentum."""
    n, mean = state
    lr, wd, clip, gamma1, one_minus_gamma1, epsilon, epsilon_outside, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = average_square(n, g, gamma1, one_minus_gamma1)
    mean = average(mean, g, gamma1, one_minus_gamma1)
    return clipped(w - lr * over_root(g, variance(n, mean), epsilon, epsilon_outside), clip_weights), (n, mean)


@rule(full_precision=("n", "mean"), nonnegative=("n",))
def rmsprop_centered(w, g, state, hyper):
    """RMSProp with the variance n - mean^2 under the root and momentum gamma2, which MXNet 1.9.1 calls centered."""
    n, mean, delta = state
    wd, clip, gamma1, one_minus_gamma1, gamma2, epsilon, epsilon_outside, of_gradient, of_delta, clip_weights = hyper
    g = decayed_before_clip(w, g, wd, clip)
    n = average_square(n, g, gamma1, one_minus_gamma1)
    mean = average(mean, g, gamma1, one_minus_gamma1)
    delta = gamma2 * delta + of_gradient * over_root(g, variance(n, mean), epsilon, epsilon_outside)
    return clipped(w + of_delta * delta, clip_weights), (n, mean, delta)
