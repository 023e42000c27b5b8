"""One step of MXNet's rules in NumPy, from the equations as published; written apart from kernels/rules, to judge it.

The numbers are those of MXNet 1.9.1, or of 2.0 where it says so: the comment of each function names its kernel in
`src/operator/optimizer_op-inl.h`, or its class in `python/mxnet/optimizer`, and the paper that the equations come from.
`recent_updates.py` and `matrix_updates.py` have those of recent papers, in the same form.

Each function takes the arrays w and g, a list of state arrays, and `h`, the hyper-parameters by name. The gradient is
multiplied by `h.rescale_grad` first; where the equations say 1 - x, it is taken from `h.one_minus_x`, because that is a
number of its own, which was rounded only once.

It gives the new weight and the list of the new states, each with the size of the largest number that was added up to it:
where terms cancel, the error of a sum is to be measured by them and not by what is left. `h.sum_error` is how far a sum of
many squares may be off, relative to itself: it is added up in another order by everybody. What comes of that is a result's
`slack`.
"""

import numpy as np
from oracle_rows import Result, clip, moments, norm_of, row, scaled, sign, sum_of

__all__ = ["adamw", "normal", "philox"]


@row(along_gradient=True, arrays=3, quick=True)
def sgd(w, g, state, h):
    # SGDKernel
    g = clip(h.rescale_grad * g, h.clip)
    return sum_of(w, -h.lr * g, -h.lr * h.wd * w), []


@row
def sgd_momentum(w, g, state, h):
    # SGDMomKernel; Polyak (1964), eq. 9
    (m,) = state
    g = clip(h.rescale_grad * g, h.clip)
    m = sum_of(h.momentum * m, -h.lr * g, -h.lr * h.wd * w)
    return sum_of(w, m.value), [m]


@row
def heavy_ball(w, g, state, h):
    # torch.optim.SGD with momentum; Sutskever et al. (2013), section 2, with the rate outside
    (m,) = state
    g = sum_of(clip(h.rescale_grad * g, h.clip), h.wd * w)
    m = sum_of(h.momentum * m, h.share * g.value)
    return sum_of(w, -h.lr * h.of_gradient * g.value, -h.lr * h.of_momentum * m.value), [m]


# It multiplies a difference, and the errors of it, by 1.9.
@row(ulps=3, options={"momentum": 0.7})
def nag(w, g, state, h):
    # NAGMomKernel, which brings the momentum forward with the weight that it has just written
    (m,) = state
    g = clip(h.rescale_grad * g, h.clip)
    m = h.momentum * m
    back, step = sum_of(w, -m), sum_of(m, -h.lr * g, -h.lr * h.wd * w)
    w = sum_of(back.value, (h.momentum + 1) * step.value)
    w = w._replace(scale=np.maximum(w.scale, back.scale))
    decay = (
        -h.lr * h.wd * w.value if h.wd else np.zeros_like(w.value)
    )  # without decay, as torch: an infinite weight adds none
    return w, [sum_of(m, -h.lr * g, decay)]


@row(options={"momentum": 0.5}, packed_distance=0.3)
def signum(w, g, state, h):
    # SignumKernel; Bernstein et al. (2018), algorithm 2
    (m,) = state
    g = clip(h.rescale_grad * g, h.clip)
    m = sum_of(h.momentum * m, -h.one_minus_momentum * g, -h.one_minus_momentum * h.wd * w)
    return sum_of(w, -h.lr * h.wd_lh * w, h.lr * sign(m.value)), [m]


@row
def sign_sgd(w, g, state, h):
    # SignSGDKernel; Bernstein et al. (2018), algorithm 1. Decay as in Signum next to it, as in MXNet 2.
    return sum_of(w, -h.lr * (h.wd + h.wd_lh) * w, -h.lr * sign(h.rescale_grad * g)), []


@row(along_gradient=True)
def adagrad(w, g, state, h):
    # AdaGrad of python/mxnet/optimizer/optimizer.py; Duchi et al. (2011)
    # and of torch.optim, which adds its epsilon to the root and its decay to the gradient
    (history,) = state
    g = clip(h.rescale_grad * g, h.clip) + h.wd * w
    history = sum_of(history, g**2)
    return sum_of(w, -h.lr * g / (np.sqrt(history.value + h.epsilon) + h.epsilon_outside), -h.decay * w), [history]


@row()
def adam(w, g, state, h):
    # AdamUpdateKernel; Kingma & Ba (2015), with both bias corrections in the rate
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = moments(g, *state, h)
    return sum_of(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon)), [mean, var]


@row(arrays=7)
def adamw(w, g, state, h):
    # MultiMPAdamW of src/operator/contrib/adamw-inl.h; Loshchilov & Hutter (2019), algorithm 2
    g = clip(h.rescale_grad * g, h.clip)
    mean, var = moments(g, *state, h)
    return sum_of(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon), -h.decay * w), [mean, var]


@row
def rmsprop(w, g, state, h):
    # RMSPropUpdateKernel; Tieleman & Hinton (2012); and torch.optim.RMSprop, which adds its epsilon to the root
    (n,) = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = sum_of(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    w = sum_of(w, -h.lr * g / (np.sqrt(n.value + h.epsilon) + h.epsilon_outside))
    return w._replace(value=clip(w.value, h.clip_weights)), [n]


@row(ulps=4)
def rmsprop_momentum(w, g, state, h):
    # torch.optim.RMSprop with momentum; Tieleman & Hinton (2012)
    n, delta = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = sum_of(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    delta = sum_of(h.gamma2 * delta, h.of_gradient * g / (np.sqrt(n.value + h.epsilon) + h.epsilon_outside))
    w = sum_of(w, h.of_delta * delta.value)
    return w._replace(value=clip(w.value, h.clip_weights)), [n, delta]


@row(ulps=3)
def rmsprop_variance(w, g, state, h):
    # torch.optim.RMSprop, centered; Graves (2013), eq. 38 to 40
    n, mean = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = sum_of(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    mean = sum_of(h.gamma1 * mean, h.one_minus_gamma1 * g)
    w = sum_of(w, -h.lr * g / (np.sqrt(n.value - mean.value**2 + h.epsilon) + h.epsilon_outside))
    return w._replace(value=clip(w.value, h.clip_weights)), [n, mean]


@row(ulps=4)
def rmsprop_centered(w, g, state, h):
    # RMSPropAlexUpdateKernel; Graves (2013), eq. 38 to 45
    n, mean, delta = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    n = sum_of(h.gamma1 * n, h.one_minus_gamma1 * g**2)
    mean = sum_of(h.gamma1 * mean, h.one_minus_gamma1 * g)
    root = np.sqrt(n.value - mean.value**2 + h.epsilon) + h.epsilon_outside
    delta = sum_of(h.gamma2 * delta, h.of_gradient * g / root)
    w = sum_of(w, h.of_delta * delta.value)
    return w._replace(value=clip(w.value, h.clip_weights)), [n, mean, delta]


@row(ulps=4, along_gradient=True)
def adadelta(w, g, state, h):
    # AdaDelta of optimizer.py, and of torch.optim, which adds the decay to the gradient; Zeiler (2012), algorithm 1
    square, step_square = state
    g = clip(h.rescale_grad * g, h.clip) + h.wd * w
    square = sum_of(h.rho * square, h.one_minus_rho * g**2)
    step = np.sqrt(step_square + h.epsilon) / np.sqrt(square.value + h.epsilon) * g
    return sum_of(w, -h.lr * step, -h.decay * w), [square, sum_of(h.rho * step_square, h.one_minus_rho * step**2)]


@row(benchmarked=False)
def group_adagrad(w, g, state, h):
    # contrib.GroupAdaGrad, of rows: all that has the same first index
    (history,) = state
    if not w.size:
        return sum_of(w), [sum_of(history)]
    g = clip(h.rescale_grad * g, h.clip)
    history = sum_of(history, np.mean(g**2, axis=tuple(range(1, g.ndim)), keepdims=True) if g.ndim else g**2)
    return sum_of(w, -h.lr * g / np.sqrt(history.value + h.epsilon)), [history]


@row
def adamax(w, g, state, h):
    # Adamax of optimizer.py, where epsilon is 0, and of torch.optim; Kingma & Ba (2015), algorithm 2. The bias correction is
    # in the rate.
    mean, largest = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean = sum_of(h.beta1 * mean, h.one_minus_beta1 * g)
    largest = np.maximum(h.beta2 * largest, np.abs(g) + h.epsilon)
    return sum_of(w, -h.lr * mean.value / largest), [mean, sum_of(largest)]


@row
def amsgrad(w, g, state, h):
    # torch.optim.Adam with amsgrad=True; Reddi, Kale & Kumar (2018), algorithm 2, with both bias corrections in the rate
    *averages, largest = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = moments(g, *averages, h)
    largest = sum_of(np.maximum(largest, var.value))
    return sum_of(w, -h.lr * mean.value / (np.sqrt(largest.value) + h.epsilon), -h.decay * w), [mean, var, largest]


@row
def nadam(w, g, state, h):
    # Nadam of optimizer.py; Dozat (2016), algorithm 2; and torch.optim.NAdam, which has decoupled decay as an option
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean, var = moments(g, *state, h)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    terms = -h.lr * h.of_gradient * g / root, -h.lr * h.of_mean * mean.value / root, -h.decay * w
    return sum_of(w, *terms), [mean, var]


@row
def adabelief(w, g, state, h):
    # AdaBelief of MXNet 2.0; Zhuang et al. (2020), algorithm 2, with both bias corrections in the rate
    mean, var = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    mean = sum_of(h.beta1 * mean, h.one_minus_beta1 * g)
    var = sum_of(h.beta2 * var, h.one_minus_beta2 * (g - mean.value) ** 2, np.full_like(var, h.epsilon))
    return sum_of(w, -h.lr * mean.value / (np.sqrt(var.value) + h.epsilon)), [mean, var]


@row(options={"momentum": 0.9, "lamda": 0.1}, benchmarked=False)
def dcasgd(w, g, state, h):
    # DCASGD of optimizer.py; Zheng et al. (2017), equation 10
    (previous,) = state
    return sum_of(w, *_compensated(w, g, previous, h)), [sum_of(w)]


def _compensated(w, g, previous, h):
    g = clip(h.rescale_grad * g, h.clip)
    return -h.lr * g, -h.lr * h.wd * w, -h.lr * h.lamda * g**2 * (w - previous)


@row(benchmarked=False)
def dcasgd_momentum(w, g, state, h):
    # the same; MXNet 1.9.1 cannot run it
    m, previous = state
    m = sum_of(h.momentum * m, *_compensated(w, g, previous, h))
    return sum_of(w, m.value), [m, sum_of(w)]


@row(ulps=6, benchmarked=False)
def ftml(w, g, state, h):
    # FTMLKernel; Zheng & Kwok (2017), algorithm 1
    d, v, z = state
    g = clip(h.rescale_grad * g + h.wd * w, h.clip)
    v = sum_of(h.beta2 * v, h.one_minus_beta2 * g**2)
    new_d = h.scale * (np.sqrt(v.value * h.correction2) + h.epsilon)
    z = sum_of(h.beta1 * z, h.one_minus_beta1 * g, -new_d * w, h.beta1 * d * w)
    return Result(-z.value / new_d, z.scale / np.abs(new_d)), [sum_of(new_d), v, z]


@row(ulps=4)
def ftrl(w, g, state, h):
    # FtrlUpdateKernel; McMahan et al. (2013), algorithm 1. MXNet multiplies by |z| > lamda1, so that NaN stays NaN.
    z, n = state
    g = clip(h.rescale_grad * g, h.clip)
    root = np.sqrt(n + g**2)
    # The bracket first, which is infinite for an infinite gradient.
    z = sum_of(z, g, -(root - np.sqrt(n)) * w / h.lr)
    z = z._replace(scale=np.maximum(z.scale, root * np.abs(w) / h.lr))
    n = sum_of(n, g**2)
    below = (h.beta + np.sqrt(n.value)) / h.lr + h.wd
    w = (sign(z.value) * h.lamda1 - z.value) / below * (np.abs(z.value) > h.lamda1)
    return Result(w, z.scale / below), [z, n]


def _lars_rate(w, g, h):
    # MultiLARS: the norm of the gradient is taken before it is clipped
    w_norm, g_norm = norm_of(w), norm_of(h.rescale_grad * g)
    if h.scaled and w_norm > 0 and g_norm > 0:
        return h.lr * h.eta * w_norm / (g_norm + h.wd * w_norm + h.epsilon)
    return h.lr


@row(arrays=3 + 2, options={"momentum": 0.8, "eta": 1.0})
def lars(w, g, state, h):
    # LARS; You, Gitman & Ginsburg (2017), algorithm 1
    return scaled(w, _lars_rate(w, g, h), h, clip(h.rescale_grad * g, h.clip), h.wd * w), []


@row(arrays=5 + 2)
def lars_momentum(w, g, state, h):
    # the same
    (m,) = state
    m = scaled(h.momentum * m, _lars_rate(w, g, h), h, clip(h.rescale_grad * g, h.clip), h.wd * w)
    return sum_of(w, m.value)._replace(slack=m.slack), [m]


def _ratio(above, below):
    return above / below if above != 0 and below != 0 else 1.0


def _bounded_norm(w, h):
    return np.minimum(np.maximum(norm_of(w), h.lower_bound), h.upper_bound)


@row(arrays=7 + 4, quick=True)
def lamb(w, g, state, h):
    # LambUpdatePhaseOne and Two; You et al. (2020), algorithm 2
    mean, var = moments(clip(h.rescale_grad * g, h.clip), *state, h)
    step = h.correction1 * mean.value / (np.sqrt(h.correction2 * var.value) + h.epsilon)
    rate = h.lr * _ratio(_bounded_norm(w, h), norm_of(step + h.wd * w))
    return scaled(w, rate, h, step, h.wd * w), [mean, var]


@row(arrays=7 + 1 + 4, benchmarked=False)
def lans(w, g, state, h):
    # MultiLANS of MXNet 2.0; Zheng et al. (2020), algorithm 2
    g = h.rescale_grad * g
    g = clip(g / norm_of(g), h.clip)
    mean, var = moments(g, *state, h)
    mean = mean._replace(slack=h.sum_error * h.one_minus_beta1 * np.abs(g))
    var = var._replace(slack=2 * h.sum_error * h.one_minus_beta2 * g**2)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    of_mean, of_gradient = h.correction1 * mean.value / root, g / root
    norm = _bounded_norm(w, h)
    first = h.lr * h.beta1 * _ratio(norm, norm_of(of_mean + h.wd * w))
    second = h.lr * h.one_minus_beta1 * _ratio(norm, norm_of(of_gradient + h.wd * w))
    rates = first * of_mean, first * h.wd * w, second * of_gradient, second * h.wd * w
    w = sum_of(w, *(-term for term in rates))
    return w._replace(slack=2 * h.sum_error * sum(np.abs(term) for term in rates)), [mean, var]


def _large_batch(w, g, state, h, lars):
    total, m = state
    total = sum_of(total, h.rescale_grad * g)
    if not h.apply:
        return sum_of(w), [total, sum_of(m)]
    mean, rate = total.value * h.one_over_scale, h.lr
    if lars:
        square = np.sum(w**2)
        rate = rate * np.minimum(np.maximum(np.sqrt(square / (np.sum(mean**2) + h.wd * square + 1e-18)), 0.01), 100.0)
    m = scaled(h.momentum * m, rate, h, clip(mean, h.clip), h.wd * w)
    return sum_of(w, m.value)._replace(slack=m.slack), [sum_of(np.zeros_like(w)), m]


@row(benchmarked=False)
def lbsgd(w, g, state, h):
    # LBSGD of optimizer.py, whose warm-up is in the rate
    return _large_batch(w, g, state, h, lars=False)


@row(arrays=7 + 3, benchmarked=False)
def lbsgd_lars(w, g, state, h):
    # LBSGD of optimizer.py with warmup_strategy="lars"
    return _large_batch(w, g, state, h, lars=True)


@row(options={"seed": 3}, budget=1.3, quick=True, benchmarked=False)
def sgld(w, g, state, h):
    # SGLD of optimizer.py; Welling & Teh (2011), equation 4. The noise is of float32, whatever the weight is.
    g = clip(h.rescale_grad * g, h.clip)
    noise = np.sqrt(h.lr) * normal(int(h.key0), int(h.key1), np.arange(w.size)).reshape(w.shape)
    moved = sum_of(w, -h.lr / 2 * g, -h.lr / 2 * h.wd * w, noise)
    return moved._replace(slack=6 * 2.0**-24 * np.abs(noise)), []


@row(arrays=4, benchmarked=False)
def test(w, g, state, h):
    # Test of optimizer.py
    return sum_of(w, h.rescale_grad * g), [sum_of(w, h.rescale_grad * g)]


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
    """Box & Muller (1958), both numbers of both pairs of Philox's four words for index // 4, of the upper 24 bits of each.

    The first of a pair is from (0, 1], so it has a log.
    """
    index = np.asarray(index, dtype=np.uint64)
    group, place = index // np.uint64(4), index % np.uint64(4)
    words = philox((group & np.uint64(0xFFFFFFFF), group >> np.uint64(32), 0 * group, 0 * group), (key0, key1))
    words = [(word >> np.uint64(8)).astype(np.longdouble) for word in words]
    first, second = np.where(place < 2, words[0], words[2]), np.where(place < 2, words[1], words[3])
    # cos(2 pi u) = sin(2 pi x) for this x, which is right to the last bit near 0 too; and sin(2 pi u) is that of u - 1/4
    x = np.abs(np.abs(second / 2**24 - np.where(place % 2 == 0, 0, np.longdouble(0.25))) - 0.5) - 0.25
    return np.sqrt(-2 * np.log((first + 1) / 2**24)) * np.sin(2 * np.longdouble(_PI) * x)


_PI = "3.14159265358979323846264338327950288"
