"""One step of every rule in NumPy, from the equations as published; written apart from kernels/rules, to judge it.

Those of MXNet come first, with the numbers of 1.9.1, or of 2.0 where it says so: the comment of each function names its
kernel in `src/operator/optimizer_op-inl.h`, or its class in `python/mxnet/optimizer`, and the paper that the equations come
from. Those of recent papers follow. Each function takes the arrays w and g, a list of state arrays, and `h`, the
hyper-parameters by name. The gradient is multiplied by `h.rescale_grad` first; where the equations say 1 - x, it is taken
from `h.one_minus_x`, because that is a number of its own, which was rounded only once.

It gives the new weight and the list of the new states, each with the size of the largest number that was added up to it:
where terms cancel, the error of a sum is to be measured by them and not by what is left. `h.sum_error` is how far a sum of
many squares may be off, relative to itself: it is added up in another order by everybody. What comes of that is a result's
`slack`.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

__all__ = ["ORACLES", "Result", "normal", "philox"]


class Result(NamedTuple):
    """A new weight or state, the size of the largest term of the sum that it is, and an error that is beyond the rule."""

    value: np.ndarray
    scale: np.ndarray
    slack: np.ndarray | float = 0.0


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


def heavy_ball(w, g, state, h):
    # torch.optim.SGD with momentum; Sutskever et al. (2013), section 2, with the rate outside
    (m,) = state
    g = _sum(_clip(h.rescale_grad * g, h.clip), h.wd * w)
    m = _sum(h.momentum * m, h.share * g.value)
    return _sum(w, -h.lr * h.of_gradient * g.value, -h.lr * h.of_momentum * m.value), [m]


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
    # SignSGDKernel; Bernstein et al. (2018), algorithm 1. Decay as in Signum next to it, as in MXNet 2.
    return _sum(w, -h.lr * (h.wd + h.wd_lh) * w, -h.lr * _sign(h.rescale_grad * g)), []


def adagrad(w, g, state, h):
    # AdaGrad of python/mxnet/optimizer/optimizer.py; Duchi et al. (2011)
    # and of torch.optim, which adds its epsilon to the root and its decay to the gradient
    (history,) = state
    g = _clip(h.rescale_grad * g, h.clip) + h.wd * w
    history = _sum(history, g**2)
    return _sum(w, -h.lr * g / (np.sqrt(history.value + h.epsilon) + h.epsilon_outside), -h.decay * w), [history]


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
    # RMSPropUpdateKernel; Tieleman & Hinton (2012); and torch.optim.RMSprop, which adds its epsilon to the root
    (n,) = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    w = _sum(w, -h.lr * g / (np.sqrt(n.value + h.epsilon) + h.epsilon_outside))
    return w._replace(value=_clip(w.value, h.clip_weights)), [n]


def rmsprop_momentum(w, g, state, h):
    # torch.optim.RMSprop with momentum; Tieleman & Hinton (2012)
    n, delta = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    delta = _sum(h.gamma2 * delta, h.of_gradient * g / (np.sqrt(n.value + h.epsilon) + h.epsilon_outside))
    w = _sum(w, h.of_delta * delta.value)
    return w._replace(value=_clip(w.value, h.clip_weights)), [n, delta]


def rmsprop_variance(w, g, state, h):
    # torch.optim.RMSprop, centered; Graves (2013), eq. 38 to 40
    n, mean = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    mean = _sum(h.gamma1 * mean, h.one_minus_gamma1 * g)
    w = _sum(w, -h.lr * g / (np.sqrt(n.value - mean.value**2 + h.epsilon) + h.epsilon_outside))
    return w._replace(value=_clip(w.value, h.clip_weights)), [n, mean]


def rmsprop_centered(w, g, state, h):
    # RMSPropAlexUpdateKernel; Graves (2013), eq. 38 to 45
    n, mean, delta = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = _sum(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    mean = _sum(h.gamma1 * mean, h.one_minus_gamma1 * g)
    root = np.sqrt(n.value - mean.value**2 + h.epsilon) + h.epsilon_outside
    delta = _sum(h.gamma2 * delta, h.of_gradient * g / root)
    w = _sum(w, h.of_delta * delta.value)
    return w._replace(value=_clip(w.value, h.clip_weights)), [n, mean, delta]


def adadelta(w, g, state, h):
    # AdaDelta of optimizer.py, and of torch.optim, which adds the decay to the gradient; Zeiler (2012), algorithm 1
    square, step_square = state
    g = _clip(h.rescale_grad * g, h.clip) + h.wd * w
    square = _sum(h.rho * square, h.one_minus_rho * g**2)
    step = np.sqrt(step_square + h.epsilon) / np.sqrt(square.value + h.epsilon) * g
    return _sum(w, -h.lr * step, -h.decay * w), [square, _sum(h.rho * step_square, h.one_minus_rho * step**2)]


def group_adagrad(w, g, state, h):
    # contrib.GroupAdaGrad, of rows: all that has the same first index
    (history,) = state
    if not w.size:
        return _sum(w), [_sum(history)]
    g = _clip(h.rescale_grad * g, h.clip)
    history = _sum(history, np.mean(g**2, axis=tuple(range(1, g.ndim)), keepdims=True) if g.ndim else g**2)
    return _sum(w, -h.lr * g / np.sqrt(history.value + h.epsilon)), [history]


def adamax(w, g, state, h):
    # Adamax of optimizer.py, where epsilon is 0, and of torch.optim; Kingma & Ba (2015), algorithm 2. The bias correction is
    # in the rate.
    mean, largest = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean = _sum(h.beta1 * mean, h.one_minus_beta1 * g)
    largest = np.maximum(h.beta2 * largest, np.abs(g) + h.epsilon)
    return _sum(w, -h.lr * mean.value / largest), [mean, _sum(largest)]


def amsgrad(w, g, state, h):
    # torch.optim.Adam with amsgrad=True; Reddi, Kale & Kumar (2018), algorithm 2, with both bias corrections in the rate
    *averages, largest = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = _moments(g, *averages, h)
    largest = _sum(np.maximum(largest, var.value))
    return _sum(w, -h.lr * mean.value / (np.sqrt(largest.value) + h.epsilon), -h.decay * w), [mean, var, largest]


def nadam(w, g, state, h):
    # Nadam of optimizer.py; Dozat (2016), algorithm 2; and torch.optim.NAdam, which has decoupled decay as an option
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = _moments(g, *state, h)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    terms = -h.lr * h.of_gradient * g / root, -h.lr * h.of_mean * mean.value / root, -h.decay * w
    return _sum(w, *terms), [mean, var]


def adabelief(w, g, state, h):
    # AdaBelief of MXNet 2.0; Zhuang et al. (2020), algorithm 2, with both bias corrections in the rate
    mean, var = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean = _sum(h.beta1 * mean, h.one_minus_beta1 * g)
    var = _sum(h.beta2 * var, h.one_minus_beta2 * (g - mean.value) ** 2, np.full_like(var, h.epsilon))
    return _sum(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon)), [mean, var]


def dcasgd(w, g, state, h):
    # DCASGD of optimizer.py; Zheng et al. (2017), equation 10
    (previous,) = state
    return _sum(w, *_compensated(w, g, previous, h)), [_sum(w)]


def _compensated(w, g, previous, h):
    g = _clip(h.rescale_grad * g, h.clip)
    return -h.lr * g, -h.lr * h.wd * w, -h.lr * h.lamda * g**2 * (w - previous)


def dcasgd_momentum(w, g, state, h):
    # the same; MXNet 1.9.1 cannot run it
    m, previous = state
    m = _sum(h.momentum * m, *_compensated(w, g, previous, h))
    return _sum(w, m.value), [m, _sum(w)]


def ftml(w, g, state, h):
    # FTMLKernel; Zheng & Kwok (2017), algorithm 1
    d, v, z = state
    g = _clip(h.rescale_grad * g + h.wd * w, h.clip)
    v = _sum(h.beta2 * v, h.one_minus_beta2 * g**2)
    new_d = h.scale * (np.sqrt(v.value * h.correction2) + h.epsilon)
    z = _sum(h.beta1 * z, h.one_minus_beta1 * g, -new_d * w, h.beta1 * d * w)
    return Result(-z.value / new_d, z.scale / np.abs(new_d)), [_sum(new_d), v, z]


def ftrl(w, g, state, h):
    # FtrlUpdateKernel; McMahan et al. (2013), algorithm 1. MXNet multiplies by |z| > lamda1, so that NaN stays NaN.
    z, n = state
    g = _clip(h.rescale_grad * g, h.clip)
    root = np.sqrt(n + g**2)
    # The bracket first, which is infinite for an infinite gradient.
    z = _sum(z, g, -(root - np.sqrt(n)) * w / h.lr)
    z = z._replace(scale=np.maximum(z.scale, root * np.abs(w) / h.lr))
    n = _sum(n, g**2)
    below = (h.beta + np.sqrt(n.value)) / h.lr + h.wd
    w = (_sign(z.value) * h.lamda1 - z.value) / below * (np.abs(z.value) > h.lamda1)
    return Result(w, z.scale / below), [z, n]


def _norm(x):
    return np.sqrt(np.sum(x**2))


def _scaled(w, rate, h, *terms):
    """w - rate (the sum of the terms), where the rate comes from a norm."""
    moved = _sum(w, *(-rate * term for term in terms))
    return moved._replace(slack=h.sum_error * sum(np.abs(rate * term) for term in terms))


def _lars_rate(w, g, h):
    # MultiLARS: the norm of the gradient is taken before it is clipped
    w_norm, g_norm = _norm(w), _norm(h.rescale_grad * g)
    if h.scaled and w_norm > 0 and g_norm > 0:
        return h.lr * h.eta * w_norm / (g_norm + h.wd * w_norm + h.epsilon)
    return h.lr


def lars(w, g, state, h):
    # LARS; You, Gitman & Ginsburg (2017), algorithm 1
    return _scaled(w, _lars_rate(w, g, h), h, _clip(h.rescale_grad * g, h.clip), h.wd * w), []


def lars_momentum(w, g, state, h):
    # the same
    (m,) = state
    m = _scaled(h.momentum * m, _lars_rate(w, g, h), h, _clip(h.rescale_grad * g, h.clip), h.wd * w)
    return _sum(w, m.value)._replace(slack=m.slack), [m]


def _ratio(above, below):
    return above / below if above != 0 and below != 0 else 1.0


def _bounded_norm(w, h):
    return np.minimum(np.maximum(_norm(w), h.lower_bound), h.upper_bound)


def lamb(w, g, state, h):
    # LambUpdatePhaseOne and Two; You et al. (2020), algorithm 2
    mean, var = _moments(_clip(h.rescale_grad * g, h.clip), *state, h)
    step = h.correction1 * mean.value / (np.sqrt(h.correction2 * var.value) + h.epsilon)
    rate = h.lr * _ratio(_bounded_norm(w, h), _norm(step + h.wd * w))
    return _scaled(w, rate, h, step, h.wd * w), [mean, var]


def lans(w, g, state, h):
    # MultiLANS of MXNet 2.0; Zheng et al. (2020), algorithm 2
    g = h.rescale_grad * g
    g = _clip(g / _norm(g), h.clip)
    mean, var = _moments(g, *state, h)
    mean = mean._replace(slack=h.sum_error * h.one_minus_beta1 * np.abs(g))
    var = var._replace(slack=2 * h.sum_error * h.one_minus_beta2 * g**2)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    of_mean, of_gradient = h.correction1 * mean.value / root, g / root
    norm = _bounded_norm(w, h)
    first = h.lr * h.beta1 * _ratio(norm, _norm(of_mean + h.wd * w))
    second = h.lr * h.one_minus_beta1 * _ratio(norm, _norm(of_gradient + h.wd * w))
    rates = first * of_mean, first * h.wd * w, second * of_gradient, second * h.wd * w
    w = _sum(w, *(-term for term in rates))
    return w._replace(slack=2 * h.sum_error * sum(np.abs(term) for term in rates)), [mean, var]


def _large_batch(w, g, state, h, lars):
    total, m = state
    total = _sum(total, h.rescale_grad * g)
    if not h.apply:
        return _sum(w), [total, _sum(m)]
    mean, rate = total.value * h.one_over_scale, h.lr
    if lars:
        square = np.sum(w**2)
        rate = rate * np.minimum(np.maximum(np.sqrt(square / (np.sum(mean**2) + h.wd * square + 1e-18)), 0.01), 100.0)
    m = _scaled(h.momentum * m, rate, h, _clip(mean, h.clip), h.wd * w)
    return _sum(w, m.value)._replace(slack=m.slack), [_sum(np.zeros_like(w)), m]


def lbsgd(w, g, state, h):
    # LBSGD of optimizer.py, whose warm-up is in the rate
    return _large_batch(w, g, state, h, lars=False)


def lbsgd_lars(w, g, state, h):
    # LBSGD of optimizer.py with warmup_strategy="lars"
    return _large_batch(w, g, state, h, lars=True)


def sgld(w, g, state, h):
    # SGLD of optimizer.py; Welling & Teh (2011), equation 4. The noise is of float32, whatever the weight is.
    g = _clip(h.rescale_grad * g, h.clip)
    noise = np.sqrt(h.lr) * normal(int(h.key0), int(h.key1), np.arange(w.size)).reshape(w.shape)
    moved = _sum(w, -h.lr / 2 * g, -h.lr / 2 * h.wd * w, noise)
    return moved._replace(slack=6 * 2.0**-24 * np.abs(noise)), []


def test(w, g, state, h):
    # Test of optimizer.py
    return _sum(w, h.rescale_grad * g), [_sum(w, h.rescale_grad * g)]


# Rules of recent papers. `decay` is what is taken off the weight; `correction` is the paper's 1 / (1 - beta^t).


def lion(w, g, state, h):
    # Chen et al. (2023), algorithm 2: the vote first, with the old momentum
    (m,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    vote = _sign(h.beta1 * m + h.one_minus_beta1 * g)
    return _sum(w, -h.lr * vote, -h.decay * w), [_sum(h.beta2 * m, h.one_minus_beta2 * g)]


def adan(w, g, state, h):
    # Xie et al. (2022), algorithm 1, whose betas are 1 minus these; the corrections are those of the authors' code
    m, v, n, previous = state
    g = _clip(h.rescale_grad * g, h.clip)
    change = g - previous if h.seen else np.zeros_like(g)
    m = _sum(h.beta1 * m, h.one_minus_beta1 * g)
    v = _sum(h.beta2 * v, h.one_minus_beta2 * change)
    n = _sum(h.beta3 * n, h.one_minus_beta3 * (g + h.beta2 * change) ** 2)
    rate = h.lr / (np.sqrt(h.correction3 * n.value) + h.epsilon)
    w = _sum(w, -rate * h.correction1 * m.value, -rate * h.beta2 * h.correction2 * v.value)
    return Result(w.value / (1 + h.decay), w.scale / (1 + h.decay)), [m, v, n, _sum(g)]


def ademamix(w, g, state, h):
    # Pagliardini, Ablin & Grangier (2024), algorithm 1
    fast, slow, var = state
    g = _clip(h.rescale_grad * g, h.clip)
    fast, var = _moments(g, fast, var, h)
    slow = _sum(h.beta3 * slow, h.one_minus_beta3 * g)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    terms = h.correction1 * fast.value / root, h.alpha * slow.value / root
    return _sum(w, *(-h.lr * term for term in terms), -h.decay * w), [fast, slow, var]


def adopt(w, g, state, h):
    # Taniguchi et al. (2024), algorithm 2, whose v_0 is the square of the first gradient
    m, v = state
    g = _clip(h.rescale_grad * g, h.clip)
    if not h.seen:
        return _sum(w), [_sum(m), _sum(g**2)]
    m = _sum(h.beta1 * m, h.one_minus_beta1 * _clip(g / np.maximum(np.sqrt(v), h.epsilon), h.limit))
    return _sum(w, -h.lr * m.value, -h.decay * w), [m, _sum(h.beta2 * v, h.one_minus_beta2 * g**2)]


def sophia(w, g, state, h):
    # Liu et al. (2023), algorithm 3, lines 6 and 12 to 13, with rho for the paper's gamma
    m, curvature = state
    m = _sum(h.beta1 * m, h.one_minus_beta1 * _clip(h.rescale_grad * g, h.clip))
    step = _clip(m.value / np.maximum(h.rho * curvature, h.epsilon), 1)
    return _sum(w, -h.decay * w, -h.lr * step), [m, _sum(curvature)]


def sophia_curvature(w, g, state, h):
    # the same, line 9, with the Gauss-Newton-Bartlett estimate of algorithm 2; `scale` is B
    m, curvature = state
    estimate = h.scale * (h.rescale_grad * g) ** 2
    return _sum(w), [_sum(m), _sum(h.beta2 * curvature, h.one_minus_beta2 * estimate)]


def stable_adamw(w, g, state, h):
    # Wortsman et al. (2023), algorithm 2, whose corrections are in the betas
    g = _clip(h.rescale_grad * g, h.clip)
    mean, var = _moments(g, *state, h)
    rms = np.sqrt(np.sum(g**2 / np.maximum(var.value, h.epsilon**2)) / g.size)
    rate = h.lr / np.maximum(1, rms)
    return _scaled(w, rate, h, mean.value / (np.sqrt(var.value) + h.epsilon), h.wd * w), [mean, var]


def mars(w, g, state, h):
    # Yuan et al. (2024), algorithm 2, with the gradient of the batch before; `gamma` is gamma_t beta1 / (1 - beta1)
    mean, var, previous = state
    g = _clip(h.rescale_grad * g, h.clip)
    c = g + h.gamma * (g - previous)
    c = c / np.maximum(1, _norm(c))
    mean, var = _moments(c, mean, var, h)
    mean = mean._replace(slack=h.sum_error * h.one_minus_beta1 * np.abs(c))
    var = var._replace(slack=2 * h.sum_error * h.one_minus_beta2 * c**2)
    rate = h.lr * h.correction1 / (np.sqrt(h.correction2 * var.value) + h.epsilon)
    # What is in the averages of the norm's error; that of the root is not more than the square's own.
    slack = rate * (mean.slack + h.sum_error * np.abs(mean.value))
    return _sum(w, -rate * mean.value, -h.decay * w)._replace(slack=slack), [mean, var, _sum(g)]


def novograd(w, g, state, h):
    # Ginsburg et al. (2019), algorithm 1: v_1 is the first squared norm
    m, v = state
    g = _clip(h.rescale_grad * g, h.clip)
    square = np.sum(g**2)
    v = _sum(h.beta2 * v, h.one_minus_beta2 * square) if h.seen else _sum(square)
    v = v._replace(slack=h.sum_error * square)
    normalized = g / (np.sqrt(v.value) + h.epsilon)
    m = _sum(h.beta1 * m, normalized, h.wd * w)._replace(slack=h.sum_error * np.abs(normalized))
    return _sum(w, -h.lr * m.value)._replace(slack=h.lr * m.slack), [m, v]


def radam(w, g, state, h):
    # Liu et al. (2020), algorithm 2; `adaptive` is whether rho_t is large enough; r_t and the corrections are in the rate
    g = _clip(h.rescale_grad * g, h.clip) + h.wd * w
    mean, var = _moments(g, *state, h)
    below = np.sqrt(var.value) + h.epsilon if h.adaptive else 1
    return _sum(w, -h.lr * mean.value / below, -h.decay * w), [mean, var]


def asgd(w, g, state, h):
    # torch.optim.ASGD; Polyak & Juditsky (1992), eq. 3, with Bottou's decay: `decay` is lambda eta, `share` mu
    (average,) = state
    g = _clip(h.rescale_grad * g, h.clip)
    w = _sum(w, -h.decay * w, -h.lr * g, -h.lr * h.wd * w)
    return w, [_sum(average, -h.share * average, h.share * w.value)]


def averaged(w, g, state, h):
    # the weight that is looked at is the average
    (average,) = state
    return _sum(average), [_sum(average)]


def rprop(w, g, state, h):
    # torch.optim.Rprop; Riedmiller & Braun (1993), section II: a turn takes no step, and is forgotten
    previous, size = state
    g = _clip(h.rescale_grad * g, h.clip)
    turned, stayed = g * previous < 0, g * previous > 0
    size = np.where(stayed, np.minimum(size * h.grow, h.largest), size)
    size = np.where(turned, np.maximum(size * h.shrink, h.smallest), size)
    g = np.where(turned, 0, g)
    return _sum(w, -size * _sign(g)), [_sum(g), _sum(size)]


def muon(w, g, state, h):
    # Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; AdamW for all but matrices
    m, var = state
    if w.ndim != 2:
        own = {"lr": h.adam_lr, "decay": h.adam_decay, "epsilon": h.adam_epsilon}
        return adamw(w, g, state, SimpleNamespace(**vars(h) | own))
    g = _clip(h.rescale_grad * g, h.clip)
    m = _sum(h.momentum * m, h.one_minus_momentum * g)
    # The iteration is an odd polynomial of the matrix, and so of each of its singular values.
    left, values, right = np.linalg.svd((h.of_gradient * g + h.of_mean * m.value).astype(np.float64), full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for _ in range(int(h.steps)):
        values = h.ns_a * values + h.ns_b * values**3 + h.ns_c * values**5
    rows, columns = w.shape
    # `scale` is the 0.2 of Liu et al. (2025), "Muon is scalable for LLM training", eq. 4
    rate = h.lr * (h.scale * np.sqrt(max(rows, columns)) if h.scale else np.sqrt(max(1, rows / columns)))
    moved = _sum(w, -rate * ((left * values) @ right), -h.decay * w)
    return moved._replace(slack=rate * BFLOAT16_ORTHOGONAL), [m, _sum(var)]


def _factored(square, averages, share, h):
    # Shazeer & Stern (2018), algorithm 4, line 6 to 8, in means for sums; without rows and columns a plain average
    row, column, var = averages
    if square.ndim < 2:
        var = _sum((1 - share) * var, share * square)
        return var.value, [_sum(row), _sum(column), var]
    row, column = (
        _sum((1 - share) * old, share * new)._replace(slack=h.sum_error * share * new)
        for old, new in ((row, _mean(square, -1)), (column, _mean(square, -2)))
    )
    return row.value * column.value / _mean(row.value, -2), [row, column, _sum(var)]


def _mean(x, axis):
    return np.sum(x, axis=axis, keepdims=True) / x.shape[axis]


def _rms(x):
    return np.sqrt(np.sum(x**2) / x.size)


def adafactor(w, g, state, h):
    # the same, algorithms 4 and 5. The limits are those of torch.optim.Adafactor, which adds epsilon1 to nothing.
    if not w.size:
        return _sum(w), [_sum(each) for each in state]
    g = _clip(h.rescale_grad * g, h.clip)
    estimate, averages = _factored(g**2, state, h.new, h)
    step = g / np.sqrt(np.maximum(estimate, h.epsilon1**2))
    rate = h.lr * np.maximum(h.epsilon2, _rms(w)) / np.maximum(1, _rms(step) / h.limit)
    moved = _sum(w, -h.decay * w, -rate * step)
    return moved._replace(slack=3 * h.sum_error * np.abs(rate * step)), averages


def came(w, g, state, h):
    # Luo et al. (2023), algorithm 2; as in the authors' code, tensors without rows and columns are as steady as any
    m, *state = state
    if not w.size:
        return _sum(w), [_sum(each) for each in (m, *state)]
    g = _clip(h.rescale_grad * g, h.clip)
    estimate, averages = _factored(g**2 + h.epsilon1, state[:3], h.one_minus_beta2, h)
    step = g / np.sqrt(estimate)
    step = step / np.maximum(1, _rms(step) / h.limit)
    m = _sum(h.beta1 * m, h.one_minus_beta1 * step)._replace(slack=3 * h.sum_error * h.one_minus_beta1 * np.abs(step))
    direction, unsteady = m.value, [_sum(each) for each in state[3:]]
    if w.ndim > 1:
        estimate, unsteady = _factored((step - m.value) ** 2 + h.epsilon2, state[3:], h.one_minus_beta3, h)
        direction = direction / np.sqrt(estimate)
    moved = _sum(w, -h.lr * direction, -h.decay * w)
    return moved._replace(slack=3 * h.sum_error * np.abs(h.lr * direction)), [m, *averages, *unsteady]


def _schedule_free(y, z, step, h):
    # Defazio et al. (2024), eq. 3 to 5, with the x of before from y = (1 - beta) z + beta x; `share` is c
    x = (y - (1 - h.beta) * z) / h.beta
    new_z = _sum(z, -h.lr * step)
    x = (1 - h.share) * x + h.share * new_z.value
    new_y = (1 - h.beta) * new_z.value + h.beta * x
    return Result(new_y, np.max([np.abs(y), np.abs(h.share * z), np.abs(h.lr * step)], axis=0)), new_z


def schedule_free_sgd(w, g, state, h):
    # the same; the decay is of y
    y, z = _schedule_free(w, *state, _clip(h.rescale_grad * g, h.clip) + h.wd * w, h)
    return y, [z]


def schedule_free_adamw(w, g, state, h):
    # the same, algorithm 1, with the correction in the root, as in the authors' code
    z, var = state
    g = _clip(h.rescale_grad * g, h.clip)
    var = _sum(h.beta2 * var, h.one_minus_beta2 * g**2)
    y, z = _schedule_free(w, z, g / (np.sqrt(h.correction2 * var.value) + h.epsilon) + h.wd * w, h)
    return y, [z, var]


def toward(w, g, state, h):
    # the same, eq. 3 solved for x; `share` is 1 - 1 / beta
    (z,) = state
    beta = 1 / (1 - h.share)
    return _sum(w / beta, -(1 / beta - 1) * z), [_sum(z)]


def ascent(w, g, state, h):
    # Foret et al. (2021), eq. 2; adaptive: Kwon et al. (2021), eq. 8, with T = |w|. The norm is that of all tensors.
    # The 1e-12 is that of the implementation which its authors point to.
    def scaled(w, g, h):
        return h.rescale_grad * g * (np.abs(w) if h.adaptive else 1)

    norm = np.sqrt(sum(np.sum(scaled(*each) ** 2) for each in h.all))
    step = h.rho * (np.abs(w) if h.adaptive else 1) * scaled(w, g, h) / (norm + 1e-12)
    return _sum(w, step)._replace(slack=h.sum_error * np.abs(step)), []


def philox(counter, key):
    """Philox-4x32-10 of Salmon et al. (2011), section 3.3: four words of 32 bits, arrays or numbers, and two."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        upper, lower = np.uint64(32), np.uint64(0xFFFFFFFF)
        c0, c1, c2, c3 = (
            (second >> upper) ^ c1 ^ np.uint64(k0),
            second & lower,
            (first >> upper) ^ c3 ^ np.uint64(k1),
            first & lower,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def normal(key0, key1, index):
    """Box & Muller (1958) with the upper 24 bits of Philox's first two words; the first is from (0, 1], so it has a log."""
    index = np.asarray(index, dtype=np.uint64)
    first, second, _, _ = philox((index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), 0 * index, 0 * index), (key0, key1))
    first, second = ((word >> np.uint64(8)).astype(np.longdouble) for word in (first, second))
    x = np.abs(second / 2**24 - 0.5) - 0.25  # cos(2 pi u) = sin(2 pi x), which is right to the last bit near 0 too
    return np.sqrt(-2 * np.log((first + 1) / 2**24)) * np.sin(2 * np.longdouble(_PI) * x)


# Newton & Schulz' iteration is done in bfloat16, of which 1 has an ulp of 2^-7, and its first steps multiply small singular
# values, with their errors, by 3.4 each. Elements of an orthogonal matrix are 1 at most.
BFLOAT16_ORTHOGONAL = 0.03
_PI = "3.14159265358979323846264338327950288"
ORACLES = {
    function.__name__: function
    for function in (
        *(amsgrad, heavy_ball, rmsprop_momentum, rmsprop_variance),
        *(adabelief, adadelta, adagrad, adam, adamax, adamw, dcasgd, dcasgd_momentum, ftml, ftrl, group_adagrad, lamb, lans),
        *(lars, lars_momentum, lbsgd, lbsgd_lars, nadam, nag, rmsprop, rmsprop_centered, sgd, sgd_momentum, sgld, sign_sgd),
        *(signum, test),
        *(adafactor, adan, ademamix, adopt, ascent, asgd, averaged, came, lion, mars, muon, novograd, radam, rprop),
        *(schedule_free_adamw, schedule_free_sgd, sophia, sophia_curvature, stable_adamw, toward),
    )
}
