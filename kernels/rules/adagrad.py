"""AdaGrad: the learning rate of each element falls with the sum of its squared gradients."""

import torch

from ..language import rule, tensor_rule, tl
from .common import decayed_after_clip, limited, weighted


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


@tensor_rule(
    shapes=lambda shape: {"history": (*shape[:1], *[1] * len(shape[1:]))}, batched=True, full_precision=("history",)
)
def group_adagrad(w, g, state, hyper):
    """AdaGrad with one sum for each row, of its mean squared gradients; no decay. Matches MXNet 1.9.1 GroupAdaGrad."""
    (history,) = state
    lr, clip, epsilon = hyper
    g = limited(g, clip)
    square = g * g
    others = tuple(range(2, g.dim()))
    history = history + (square.mean(dim=others, keepdim=True) if others else square)  # or each element is a row
    return torch.mul(g, -lr / (history + epsilon).sqrt(), out=square).add_(w), (history,)
