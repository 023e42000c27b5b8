"""One step of every rule in NumPy, from the equations as published; written apart from kernels/rules, to judge it.

The numbers are those of MXNet 1.9.1: the comment of each function names its kernel in `src/operator/optimizer_op-inl.h`,
and the paper that the equations come from. Each function takes the arrays w and g, a list of state arrays, and `h`, the
hyper-parameters by name. The gradient is multiplied by `h.rescale_grad` first; where the equations say 1 - x, it is taken
from `h.one_minus_x`, because that is a number of its own, which was rounded only once.

It gives the new weight and the list of the new states, each with the size of the largest number that was added up to it:
where terms cancel, the error of a sum is to be measured by them and not by what is left.
"""

from typing import NamedTuple

import numpy as np

__all__ = ["ORACLES", "Result"]


class Result(NamedTuple):
    """A new weight or state, and the size of the largest term of the sum that it is."""

    value: np.ndarray
    scale: np.ndarray


def _sum(*terms):
    return Result(sum(terms), np.max([np.abs(term) for term in terms], axis=0))


def _clip(x, bound):
    return np.minimum(np.maximum(x, -bound), bound)  # NaN stays NaN in both


def _sign(x):
    # mshadow_op::sign: 0 for 0, and for NaN
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def sgd(w, g, state, h):
    # SGDKernel
    g = _clip(h.rescale_grad * g, h.clip)
    return _sum(w, -h.lr * g, -h.lr * h.wd * w), []


def sgd_momentum(w, g, state, h):
    # SGDMomKernel; Polyak (1964), eq. 9
    (m,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    m = _sum(h.momentum * m, -h.lr * g, -h.lr * h.wd * w)
    return _sum(w, m.value), [m]


def nag(w, g, state, h):
    # NAGMomKernel, which brings the momentum forward with the weight that it has just written
    (m,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    m = h.momentum * m
    back, step = _sum(w, -m), _sum(m, -h.lr * g, -h.lr * h.wd * w)
    w = _sum(back.value, (h.momentum + 1) * step.value)
    w = w._replace(scale=np.maximum(w.scale, back.scale))
    return w, [_sum(m, -h.lr * g, -h.lr * h.wd * w.value)]


def signum(w, g, state, h):
    # SignumKernel; Bernstein et al. (2018), algorithm 2
    (m,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    m = _sum(h.momentum * m, -h.one_minus_momentum * g, -h.one_minus_momentum * h.wd * w)
    return _sum(w, -h.lr * h.wd_lh * w, h.lr * _sign(m.value)), [m]


def sign_sgd(w, g, state, h):
    # SignSGDKernel; Bernstein et al. (2018), algorithm 1. Decay as of Signum beside it, as in MXNet 2.
    return _sum(w, -h.lr * (h.wd + h.wd_lh) * w, -h.lr * _sign(h.rescale_grad * g)), []


def adagrad(w, g, state, h):
    # AdaGrad of python/mxnet/optimizer/optimizer.py; Duchi et al. (2011)
    (history,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    history = _sum(history, g**2)
    return _sum(w, -h.lr * g / np.sqrt(history.value + h.epsilon), -h.lr * h.wd * w), [history]


def _moments(g, mean, var, h):
    return _sum(h.beta1 * mean, h.one_minus_beta1 * g), _sum(h.beta2 * var, h.one_minus_beta2 * g**2)


def adam(w, g, state, h):
    # AdamUpdateKernel; Kingma & Ba (2015), with both bias corrections in the rate
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = _moments(g, *state, h)
    return _sum(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon)), [mean, var]


def adamw(w, g, state, h):
    # MultiMPAdamW of src/operator/contrib/adamw-inl.h; Loshchilov & Hutter (2019), algorithm 2
    g = _clip(h.rescale_grad * g, h.clip)
    mean, var = _moments(g, *state, h)
    return _sum(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon), -h.decay * w), [mean, var]


def rmsprop(w, g, state, h):
    # RMSPropUpdateKernel; Tieleman & Hinton (2012)
    (n,) = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    w = _sum(w, -h.lr * g / np.sqrt(n.value + h.epsilon))
    return w._replace(value=_clip(w.value, h.clip_weights)), [n]


def rmsprop_centered(w, g, state, h):
    # RMSPropAlexUpdateKernel; Graves (2013), eq. 38 to 45
    n, mean, delta = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    mean = _sum(h.gamma1 * mean, h.one_minus_gamma1 * g)
    delta = _sum(h.gamma2 * delta, -h.lr * g / np.sqrt(n.value - mean.value**2 + h.epsilon))
    w = _sum(w, delta.value)
    return w._replace(value=_clip(w.value, h.clip_weights)), [n, mean, delta]


ORACLES = {
    function.__name__: function
    for function in (sgd, sgd_momentum, nag, signum, sign_sgd, adagrad, adam, adamw, rmsprop, rmsprop_centered)
}
