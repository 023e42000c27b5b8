"""Rules that scale the step by norms of the whole tensor: LARS, LAMB, LANS."""

from ..language import jit, reduction, rule, tl
from .adam import corrected_root, moments
from .common import clipped, norm_of, norm_of_both, squares, weighted
from .sgd import sgd, sgd_momentum


@jit
def ratio(above, below):
    """Return the ratio of two norms, given their squares; 1 if either is zero."""
    # Not their product, which is 0 for small ones too; and what is NaN is no zero.
    return tl.where((above == 0.0) | (below == 0.0), 1.0, norm_of(above) / norm_of(tl.where(below == 0.0, 1.0, below)))


@reduction
def weight_and_gradient(w, g, state, hyper):
    square, small_square = squares(g)
    return w * w, square, small_square


@jit
def lars_factor(w2, g2, small_g2, wd, eta, epsilon, scaled):
    """Return eta |w| / (|g| + wd |w| + epsilon), or 1 if a norm is zero or `scaled` is 0."""
    w_norm = norm_of(w2)
    factor = eta * w_norm / tl.where(g2 > 0.0, norm_of_both(g2, small_g2) + weighted(wd, w_norm) + epsilon, 1.0)
    return tl.where((scaled > 0.0) & (w2 > 0.0) & (g2 > 0.0), factor, 1.0)


@rule(reduction=weight_and_gradient)
def lars(w, g, state, hyper, sums):
    """SGD at the rate lr eta |w| / (|g| + wd |w| + epsilon) of each tensor. You, Gitman & Ginsburg (2017), alg. 1."""
    lr, wd, clip, eta, epsilon, scaled = hyper
    w2, g2, small_g2 = sums
    w, _ = sgd(w, g, (), (lr * lars_factor(w2, g2, small_g2, wd, eta, epsilon, scaled), wd, clip))
    return w, state


@rule(reduction=weight_and_gradient)
def lars_momentum(w, g, state, hyper, sums):
    """SGD with momentum, at the rate of each tensor that `lars` uses."""
    (mom,) = state
    lr, wd, clip, momentum, eta, epsilon, scaled = hyper
    w2, g2, small_g2 = sums
    return sgd_momentum(w, g, (mom,), (lr * lars_factor(w2, g2, small_g2, wd, eta, epsilon, scaled), wd, clip, momentum))


@jit
def direction(w, g, mean, var, wd, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2):
    """Return Adam's direction plus wd w, and the new averages; the corrections are 1 / (1 - beta^t)."""
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return correction1 * mean / corrected_root(var, correction2, epsilon) + weighted(wd, w), mean, var


@reduction
def lamb_squares(w, g, state, hyper):
    """Sum the squares of the weight and of its direction."""
    mean, var = state
    wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2 = hyper
    u, mean, var = direction(
        w, clipped(g, clip), mean, var, wd, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2
    )
    return w * w, u * u


@rule(reduction=lamb_squares, nonnegative=("var",))
def lamb(w, g, state, hyper, sums):
    """w <- w - lr (|w| / |u|) u with Adam's direction u. You et al. (2020), alg. 2; matches MXNet 1.9.1.

    |w| is clamped to [lower_bound, upper_bound].
    """
    mean, var = state
    (
        lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2, lower_bound,
        upper_bound,
    ) = hyper  # fmt: skip
    w2, u2 = sums
    u, mean, var = direction(
        w, clipped(g, clip), mean, var, wd, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2
    )
    norm = tl.minimum(tl.maximum(norm_of(w2), lower_bound), upper_bound)
    return w - lr * ratio(norm * norm, u2) * u, (mean, var)


@jit
def lans_directions(
    w, g, mean, var, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2, norm
):
    """Return the directions of the average and of the normalised gradient, and the new averages."""
    g = clipped(g / tl.where(norm == 0.0, 1.0, norm), clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    root = corrected_root(var, correction2, epsilon)
    return correction1 * mean / root + weighted(wd, w), g / root + weighted(wd, w), mean, var


@reduction
def gradient_squares(w, g, state, hyper):
    """Sum the squares of the gradient, for `norm_of_both`."""
    square, small_square = squares(g)
    return square, small_square


@reduction(reduction=gradient_squares)
def lans_squares(w, g, state, hyper, sums):
    """Sum the squares of the weight, of both directions, and of the gradient, which the rule needs too."""
    mean, var = state
    wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2 = hyper
    g2, small_g2 = sums
    a, b, mean, var = lans_directions(
        w, g, mean, var, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2,
        norm_of_both(g2, small_g2),
    )  # fmt: skip
    square, small_square = squares(g)
    return w * w, a * a, b * b, square, small_square


@rule(reduction=lans_squares, nonnegative=("var",))
def lans(w, g, state, hyper, sums):
    """LAMB with a normalised gradient and Nesterov's momentum. Zheng et al. (2020), alg. 2.

    Matches MXNet 2.0, except that a gradient of zeros stays zero when it is normalised.
    """
    mean, var = state
    (
        lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2, lower_bound,
        upper_bound,
    ) = hyper  # fmt: skip
    w2, a2, b2, g2, small_g2 = sums
    a, b, mean, var = lans_directions(
        w, g, mean, var, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2,
        norm_of_both(g2, small_g2),
    )  # fmt: skip
    norm = tl.minimum(tl.maximum(norm_of(w2), lower_bound), upper_bound)
    norm = norm * norm
    return w - lr * (beta1 * ratio(norm, a2) * a + one_minus_beta1 * ratio(norm, b2) * b), (mean, var)
