"""Adam and its kin: a running mean of the gradient over the root of a running mean of its square."""

from ..language import jit, rule, tl
from .common import clipped, decayed_before_clip, weighted


@jit
def moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2):
    """The two exponential averages, of the gradient and of its square."""
    return beta1 * mean + one_minus_beta1 * g, beta2 * var + one_minus_beta2 * g * g


@rule(nonnegative=("var",))
def adam(w, g, state, hyper):
    """Kingma & Ba (2015), alg. 1 in the form of its section 2; decay inside the clip as in MXNet 1.9.1.

    `lr` arrives with both bias corrections in it, and `epsilon` is added after them.
    """
    mean, var = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return w - lr * mean / (tl.sqrt(var) + epsilon), (mean, var)


@rule(nonnegative=("var",))
def adamw(w, g, state, hyper):
    """Loshchilov & Hutter (2019), alg. 2: decoupled weight decay.

    `lr` arrives with the bias corrections in it. `decay` is what is taken off the weight: the plain rate times
    wd in the paper and in torch, the corrected rate times wd in MXNet.
    """
    mean, var = state
    lr, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = clipped(g, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    return w - (lr * mean / (tl.sqrt(var) + epsilon) + weighted(decay, w)), (mean, var)


@rule(nonnegative=("var", "largest"))
def amsgrad(w, g, state, hyper):
    """Adam divided by the root of the largest average of squares so far. Reddi, Kale & Kumar (2018), alg. 2.

    `lr` arrives with the bias corrections in it, as in torch. `wd` is added to the gradient, `decay` taken off the weight.
    """
    mean, var, largest = state
    lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    largest = tl.maximum(largest, var)
    return w - (lr * mean / (tl.sqrt(largest) + epsilon) + weighted(decay, w)), (mean, var, largest)


@rule(nonnegative=("largest",))
def adamax(w, g, state, hyper):
    """w <- w - lr m / u with the decaying maximum u of |g| + epsilon; `lr` arrives with 1 / (1 - beta1^t) in it.

    Kingma & Ba (2015), alg. 2; numbers of MXNet 1.9.1, whose epsilon is 0, except that a weight whose gradients were all
    zero stays.
    """
    mean, largest = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean = beta1 * mean + one_minus_beta1 * g
    largest = tl.maximum(beta2 * largest, tl.abs(g) + epsilon)
    return w - lr * mean / tl.where(largest == 0.0, 1.0, largest), (mean, largest)  # where it is 0, so is the mean


@rule(nonnegative=("var",))
def nadam(w, g, state, hyper):
    """Adam with Nesterov's momentum. Dozat (2016), alg. 2; decay inside the clip as in MXNet 1.9.1.

    The weights of gradient and average, `of_gradient` and `of_mean`, follow the momentum's schedule; `correction2` is
    1 / (1 - beta2^t). `wd` is added to the gradient, `decay` taken off the weight.
    """
    mean, var = state
    (
        lr, wd, decay, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, of_gradient, of_mean, correction2,
    ) = hyper  # fmt: skip
    g = decayed_before_clip(w, g, wd, clip)
    mean, var = moments(g, mean, var, beta1, one_minus_beta1, beta2, one_minus_beta2)
    step = (of_gradient * g + of_mean * mean) / (tl.sqrt(correction2 * var) + epsilon)
    return w - (lr * step + weighted(decay, w)), (mean, var)


@rule(nonnegative=("var",))
def adabelief(w, g, state, hyper):
    """Adam with the variance around the mean under the root. Zhuang et al. (2020), alg. 2; numbers of MXNet 2.0.

    `lr` arrives with the bias corrections in it.
    """
    mean, var = state
    lr, wd, clip, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon = hyper
    g = decayed_before_clip(w, g, wd, clip)
    mean = beta1 * mean + one_minus_beta1 * g
    var = beta2 * var + one_minus_beta2 * (g - mean) * (g - mean) + epsilon
    return w - lr * mean / (tl.sqrt(var) + epsilon), (mean, var)
