"""Rules of recent papers, each with its own averages: Lion, Tiger, Adan, ADOPT, Grams, MARS and others.

`decay` w is subtracted from the weight; `decay` is usually lr wd. `correction1` is 1 / (1 - beta1^t), and so on.
"""

from ..language import jit, reduction, rule, tl
from .adam import corrected_root, moments
from .common import clipped, norm_of, norm_of_both, sign, squares, weighted


@rule
def lion(w, g, state, hyper):
    """Lion: w <- w - lr sign(beta1 m + (1 - beta1) g) - decay w, then m is updated. Chen et al. (2023), alg. 2."""
    (mean,) = state
    lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2 = hyper
    g = clipped(g, clip)
    vote = beta1 * mean + one_minus_beta1 * g
    return w - (lr * sign(vote) + weighted(decay, w)), (beta2 * mean + one_minus_beta2 * g,)


@rule
def tiger(w, g, state, hyper):
    """Tiger: w <- w - lr sign(m) - decay w with the new m. Su (2023), "Tiger: A Tight-fisted Optimizer"."""
    (mean,) = state
    lr, decay, clip, beta, one_minus_beta = hyper
    mean = beta * mean + one_minus_beta * clipped(g, clip)
    return w - (lr * sign(mean) + weighted(decay, w)), (mean,)


@rule(nonnegative=("square",))
def adan(w, g, state, hyper):
    """Adam with averages of the gradient and of its change. Xie et al. (2022), alg. 1, with their proximal decay.

    `seen` is 0 at a parameter's first update, where there is no previous gradient, and then 1. The betas are the shares of
    the old averages, 1 minus the paper's betas.
    """
    mean, change, square, previous = state
    (
        lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, epsilon, correction1,
        correction2, correction3, seen,
    ) = hyper  # fmt: skip
    g = clipped(g, clip)
    difference = tl.where(seen > 0.0, g - previous, 0.0)
    mean = beta1 * mean + one_minus_beta1 * g
    change = beta2 * change + one_minus_beta2 * difference
    looked_ahead = g + beta2 * difference
    square = beta3 * square + one_minus_beta3 * looked_ahead * looked_ahead
    step = (correction1 * mean + beta2 * correction2 * change) / corrected_root(square, correction3, epsilon)
    return (w - lr * step) / (1.0 + decay), (mean, change, square, g)


@rule(nonnegative=("var",))
def ademamix(w, g, state, hyper):
    """AdamW with a second, much slower average of the gradient. Pagliardini, Ablin & Grangier (2024), alg. 1."""
    fast, slow, var = state
    (
        lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, alpha, epsilon, correction1,
        correction2,
    ) = hyper  # fmt: skip
    g = clipped(g, clip)
    fast, var = moments(g, fast, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    slow = beta3 * slow + one_minus_beta3 * g
    step = (correction1 * fast + alpha * slow) / corrected_root(var, correction2, epsilon)
    return w - (lr * step + weighted(decay, w)), (fast, slow, var)


@rule(nonnegative=("var",))
def grams(w, g, state, hyper):
    """AdamW's step with its signs replaced by the gradient's signs. Cao, Li & Song (2024), alg. 1."""
    mean, var = state
    lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2 = hyper
    g = clipped(g, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    size = tl.abs(correction1 * mean) / corrected_root(var, correction2, epsilon)
    return w - (lr * (sign(g) * size) + weighted(decay, w)), (mean, var)


@rule(nonnegative=("var",))
def adopt(w, g, state, hyper):
    """Adam that divides by the average of the squares before this gradient. Taniguchi et al. (2024), alg. 2.

    `seen` is 0 at a parameter's first update, which only fills `var`, and then 1; `limit` is the paper's c_t.
    """
    mean, var = state
    lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, limit, seen = hyper
    g = clipped(g, clip)
    normalized = clipped(g / tl.maximum(tl.sqrt(var), epsilon), limit)
    new_mean = beta1 * mean + one_minus_beta1 * normalized
    mean = tl.where(seen > 0.0, new_mean, mean)
    var = tl.where(seen > 0.0, beta2 * var + one_minus_beta2 * g * g, g * g)
    return tl.where(seen > 0.0, w - (lr * new_mean + weighted(decay, w)), w), (mean, var)


@reduction
def surprise(w, g, state, hyper):
    """Sum g^2 / v and ones, so that the rule can compute the mean."""
    (var,) = state
    clip, beta2, one_minus_beta2, epsilon = hyper
    g = clipped(g, clip)
    _, var = moments(g, 0.0, var, 0.0, 0.0, beta2, one_minus_beta2)
    relative = g / tl.maximum(tl.sqrt(var), epsilon)  # squared last, because the square of `g` may overflow
    return relative * relative, 1.0


@rule(reduction=surprise, nonnegative=("var",))
def stable_adamw(w, g, state, hyper, sums):
    """AdamW at the rate lr / max(1, RMS(g / sqrt(v))) of each tensor. Wortsman et al. (2023), alg. 2.

    The betas include the bias correction. `wd` is multiplied by the reduced rate.
    """
    mean, var = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    size, count = sums
    mean, var = moments(clipped(g, clip), mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    lr = lr / tl.maximum(tl.sqrt(size / count), 1.0)
    return w - lr * (mean / (tl.sqrt(var) + epsilon) + weighted(wd, w)), (mean, var)


@jit
def corrected(g, previous, gamma):
    """Return g + gamma (g - previous); before the first update, `previous` is zero, as in the authors' code."""
    return g + gamma * (g - previous)


@reduction
def corrected_square(w, g, state, hyper):
    (previous,) = state
    clip, gamma = hyper
    square, small_square = squares(corrected(clipped(g, clip), previous, gamma))
    return square, small_square


@rule(reduction=corrected_square, nonnegative=("var",))
def mars(w, g, state, hyper, sums):
    """AdamW on variance-reduced gradients, clipped to a norm of 1. Yuan et al. (2024), alg. 2 (MARS-AdamW).

    `gamma` is the paper's gamma beta1 / (1 - beta1).
    """
    mean, var, previous = state
    (
        lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, correction1, correction2, gamma,
    ) = hyper  # fmt: skip
    square, small_square = sums
    g = clipped(g, clip)
    c = corrected(g, previous, gamma) / tl.maximum(norm_of_both(square, small_square), 1.0)
    mean, var = moments(c, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    step = correction1 * mean / corrected_root(var, correction2, epsilon)
    return w - (lr * step + weighted(decay, w)), (mean, var, g)


@reduction
def novograd_square(w, g, state, hyper):
    (clip,) = hyper
    g = clipped(g, clip)
    return (g * g,)


@novograd_square.finish
def novograd_average(sums, kept, hyper):
    """Return the running average of the squared norm; at the first update, the squared norm itself."""
    (square,) = sums
    (norm2,) = kept
    beta2, one_minus_beta2, seen = hyper
    return (tl.where(seen > 0.0, beta2 * norm2 + one_minus_beta2 * square, square),)


@rule(reduction=novograd_square)
def novograd(w, g, state, hyper, sums):
    """m <- beta1 m + g / (|g| + epsilon) + wd w; |g| is a running norm of the tensor. Ginsburg et al. (2019), alg. 1."""
    (mean,) = state
    lr, wd, clip, beta1, epsilon = hyper
    (norm2,) = sums
    mean = beta1 * mean + (clipped(g, clip) / (norm_of(norm2) + epsilon) + weighted(wd, w))
    return w - lr * mean, (mean,)


@rule(nonnegative=("var",))
def radam(w, g, state, hyper):
    """Adam without its denominator while that is too uncertain (`adaptive` 0). Liu et al. (2020), alg. 2.

    `lr` includes the bias corrections and the rectification. `wd` w is added to the gradient.
    """
    mean, var = state
    lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, adaptive = hyper
    g = clipped(g, clip) + weighted(wd, w)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return w - (lr * tl.where(adaptive > 0.0, mean / (tl.sqrt(var) + epsilon), mean) + weighted(decay, w)), (mean, var)


@rule(full_precision=("average",))
def asgd(w, g, state, hyper):
    """SGD that decays and averages the weights. Polyak & Juditsky (1992), with the rates of Bottou's sgd as in torch.

    `decay` is lr lambd; `share` is the weight of the new parameter in the average.
    """
    (average,) = state
    lr, wd, clip, decay, share = hyper
    new_w = w - (weighted(decay, w) + lr * (clipped(g, clip) + weighted(wd, w)))
    return new_w, (average + share * (new_w - average),)


@rule(full_precision=("average",))
def averaged(w, g, state, hyper):
    """Give the weight its average's value, as optimizers with averages do for evaluation; the gradient is ignored."""
    (average,) = state
    return average, (average,)


@rule(nonnegative=("size",))
def rprop(w, g, state, hyper):
    """Rprop: signed steps that grow while a sign stays and shrink when it flips. Riedmiller & Braun (1993), as in torch.

    `lr` is where `size` starts; a rate of 0 skips the update.
    """
    previous, size = state
    lr, clip, shrink, grow, smallest, largest = hyper
    g = clipped(g, clip)
    agreement = g * previous
    factor = tl.where(agreement > 0.0, grow, tl.where(agreement < 0.0, shrink, 1.0))
    size = tl.where(lr > 0.0, tl.minimum(tl.maximum(size * factor, smallest), largest), size)
    g = tl.where(agreement < 0.0, 0.0, g)
    return tl.where(lr > 0.0, w - size * sign(g), w), (tl.where(lr > 0.0, g, previous), size)
