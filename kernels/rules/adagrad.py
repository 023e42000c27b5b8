"""AdaGrad: the learning rate of each element falls with the sum of its squared gradients."""

from ..language import reduction, rule, rule_by_shape, tl
from .common import clipped, decayed_after_clip, weighted


@rule(full_precision=("history",), nonnegative=("history",))
def adagrad(w, g, state, hyper):
    """h <- h + g^2;  w <- w - lr g / (sqrt(h + epsilon) + epsilon_outside) - decay w. Duchi et al. (2011).

    MXNet 1.9.1 adds epsilon inside the root and decouples the decay; torch adds it outside, and wd w to the gradient.
    """
    (history,) = state
    lr, wd, decay, clip, epsilon, epsilon_outside = hyper
    g = decayed_after_clip(w, g, wd, clip)
    history = history + g * g
    return w - (lr * g / (tl.sqrt(history + epsilon) + epsilon_outside) + weighted(decay, w)), (history,)


@reduction(op="mean", scope="slice")
def slice_square(w, g, state, hyper):
    (clip,) = hyper
    g = clipped(g, clip)
    return (g * g,)


@slice_square.finish
def slice_history(sums, kept, hyper):
    (square,) = sums
    (history,) = kept
    return (history + square,)


@rule(reduction=slice_square)
def adagrad_of_slices(w, g, state, hyper, sums):
    """w <- w - lr g / sqrt(h + epsilon), with the history h of the element's slice."""
    lr, clip, epsilon = hyper
    (history,) = sums
    return w - lr * clipped(g, clip) / tl.sqrt(history + epsilon), state


@rule_by_shape(adagrad_of_slices, state=("history",))
def group_adagrad(shape):
    """AdaGrad with one sum for each row, of its mean squared gradients; no decay. Matches MXNet 1.9.1 GroupAdaGrad.

    A row is a slice along the first dimension.
    """
    return adagrad_of_slices
