"""Adam and its variants: a running mean of the gradient, divided by the root of a running mean of its square."""

from ..language import jit, rule, tl
from .common import clipped, decayed_before_clip, weighted


@jit
def moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2):
    """Return the new exponential averages of the gradient and of its square.

    The square is computed from left to right, so that it overflows only where the average does, as in torch.
    """
    return beta1 * mean + one_minus_beta1 * g, beta2 * var + one_minus_beta2 * g * g


@jit
def corrected_root(var, correction, epsilon):
    """Return sqrt(correction var) + epsilon; the product of the roots does not overflow where `var` does not."""
    return tl.sqrt(correction) * tl.sqrt(var) + epsilon


@rule(nonnegative=("var",))
def adam(w, g, state, hyper):
    """Adam. Kingma & Ba (2015), alg. 1 in the form of its section 2; the decay is clipped too, as in MXNet 1.9.1.

    `lr` includes both bias corrections. `epsilon` is added to the root of the uncorrected `var`: the paper's epsilon-hat.
    """
    mean, var = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return w - lr * mean / (tl.sqrt(var) + epsilon), (mean, var)


@rule(nonnegative=("var",))
def adamw(w, g, state, hyper):
    """Adam with decoupled weight decay. Loshchilov & Hutter (2019), alg. 2.

    `lr` includes the bias corrections. `decay` times the weight is subtracted from it: `decay` is the plain learning rate
    times wd in the paper and in torch, and the corrected learning rate times wd in MXNet.
    """
    mean, var = state
    lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = clipped(g, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return w - (lr * mean / (tl.sqrt(var) + epsilon) + weighted(decay, w)), (mean, var)


@rule(nonnegative=("var", "largest"))
def amsgrad(w, g, state, hyper):
    """Adam that divides by the root of the largest average of squares so far. Reddi, Kale & Kumar (2018), alg. 2.

    `lr` includes the bias corrections, as in torch. `wd` w is added to the gradient, `decay` w subtracted from the weight.
    """
    mean, var, largest = state
    lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    largest = tl.maximum(largest, var)
    return w - (lr * mean / (tl.sqrt(largest) + epsilon) + weighted(decay, w)), (mean, var, largest)


@rule(nonnegative=("largest",))
def adamax(w, g, state, hyper):
    """AdaMax: w <- w - lr m / u with the decaying maximum u of |g| + epsilon; `lr` includes 1 / (1 - beta1^t).

    Kingma & Ba (2015), alg. 2. Matches MXNet 1.9.1, where epsilon is 0, except that a weight stays unchanged while all its
    gradients have been zero.
    """
    mean, largest = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean = beta1 * mean + one_minus_beta1 * g
    largest = tl.maximum(beta2 * largest, tl.abs(g) + epsilon)
    return w - lr * mean / tl.where(largest == 0.0, 1.0, largest), (mean, largest)  # where it is 0, so is the mean


@rule(nonnegative=("var",))
def nadam(w, g, state, hyper):
    """Adam with Nesterov's momentum. Dozat (2016), alg. 2; the decay by `wd` is clipped too, as in MXNet 1.9.1.

    The shares of gradient and average in the step, `of_gradient` and `of_mean`, follow the momentum's schedule.
    `correction2` is 1 / (1 - beta2^t). `wd` w is added to the gradient, `decay` w subtracted from the weight.
    """
    mean, var = state
    (
        lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, of_gradient, of_mean, correction2,
    ) = hyper  # fmt: skip
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    step = (of_gradient * g + of_mean * mean) / corrected_root(var, correction2, epsilon)
    return w - (lr * step + weighted(decay, w)), (mean, var)


@rule(nonnegative=("var",))
def adabelief(w, g, state, hyper):
    """Adam with the average of (g - mean)^2 under the root. Zhuang et al. (2020), alg. 2; matches MXNet 2.0.

    `lr` includes the bias corrections.
    """
    mean, var = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean = beta1 * mean + one_minus_beta1 * g
    var = beta2 * var + one_minus_beta2 * (g - mean) * (g - mean) + epsilon
    return w - lr * mean / (tl.sqrt(var) + epsilon), (mean, var)
