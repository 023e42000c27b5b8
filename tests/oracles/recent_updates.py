"""As updates.py, rules of recent papers, with the peers that their optimizers are compared with.

A new optimizer gets its row here: its oracle, marked with all that tests must know of it (`Row` in oracle_rows.py).
`decay` is what is taken off the weight; `correction` is the paper's 1 / (1 - beta^t).
"""

import numpy as np
from oracle_rows import TABLE, Peer, Result, Row, clip, moments, norm_of, row, scaled, sign, sum_of


@row(
    hyper=({"beta1": 0.99}, {"beta1": 0.9}),
    ranges={"mean": (0.01, 0.02)},  # outvotes the gradient in the first row, and not in the second
    options={"beta1": 0.5, "clip_gradient": 0.5},
    arrays=5,
    peers={
        "lion": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "Lion",
            {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "weight_decouple": True},
        ),
    },
)
def lion(w, g, state, h):
    # Chen et al. (2023), algorithm 2: the vote first, with the old momentum
    (m,) = state
    g = clip(h.rescale_grad * g, h.clip)
    vote = sign(h.beta1 * m + h.one_minus_beta1 * g)
    return sum_of(w, -h.lr * vote, -h.decay * w), [sum_of(h.beta2 * m, h.one_minus_beta2 * g)]


@row(
    hyper=({"beta": 0.965}, {"beta": 0.1}),  # outvoted by the average, and not
    options={"beta": 0.8},
    arrays=5,
    peers={
        "tiger": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "Tiger",
            {"lr": 0.01, "beta": 0.965, "weight_decay": 0.1, "weight_decouple": True},
        ),
    },
)
def tiger(w, g, state, h):
    # Su (2023): sign momentum, with the new momentum
    (m,) = state
    m = sum_of(h.beta * m, h.one_minus_beta * clip(h.rescale_grad * g, h.clip))
    return sum_of(w, -h.lr * sign(m.value), -h.decay * w), [m]


@row(
    options={"beta1": 0.9},
    arrays=11,
    quick=True,
    peers={
        "adan": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "Adan",
            {
                "lr": 0.01,
                "betas": (0.98, 0.92, 0.99),
                "weight_decay": 0.1,
                "weight_decouple": False,  # which there means the proximal form
                "max_grad_norm": 0.0,
                "eps": 1e-8,
            },
        ),
    },
)
def adan(w, g, state, h):
    # Xie et al. (2022), algorithm 1, whose betas are 1 minus these; the corrections are those of the authors' code
    m, v, n, previous = state
    g = clip(h.rescale_grad * g, h.clip)
    change = g - previous if h.seen else np.zeros_like(g)
    m = sum_of(h.beta1 * m, h.one_minus_beta1 * g)
    v = sum_of(h.beta2 * v, h.one_minus_beta2 * change)
    n = sum_of(h.beta3 * n, h.one_minus_beta3 * (g + h.beta2 * change) ** 2)
    rate = h.lr / (np.sqrt(h.correction3 * n.value) + h.epsilon)
    w = sum_of(w, -rate * h.correction1 * m.value, -rate * h.beta2 * h.correction2 * v.value)
    return Result(w.value / (1 + h.decay), w.scale / (1 + h.decay)), [m, v, n, sum_of(g)]


@row(
    options={"alpha": 3.0, "warmup": 4},
    peers={
        "ademamix": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "AdEMAMix",
            {"lr": 0.01, "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.1, "weight_decouple": True, "eps": 1e-8},
        ),
        "ademamix, warm-up": Peer(
            {"learning_rate": 0.01, "warmup": 20, "alpha": 3.0},
            "AdEMAMix",
            {"lr": 0.01, "betas": (0.9, 0.999, 0.9999), "alpha": 3.0, "t_alpha_beta3": 20, "weight_decay": 0.0, "eps": 1e-8},
        ),
    },
)
def ademamix(w, g, state, h):
    # Pagliardini, Ablin & Grangier (2024), algorithm 1
    fast, slow, var = state
    g = clip(h.rescale_grad * g, h.clip)
    fast, var = moments(g, fast, var, h)
    slow = sum_of(h.beta3 * slow, h.one_minus_beta3 * g)
    root = np.sqrt(h.correction2 * var.value) + h.epsilon
    terms = h.correction1 * fast.value / root, h.alpha * slow.value / root
    return sum_of(w, *(-h.lr * term for term in terms), -h.decay * w), [fast, slow, var]


@row(
    hyper=({"epsilon": 0.9}, {}),
    options={"beta1": 0.8},
    registers=72,
    peers={
        "adopt": Peer(
            {"learning_rate": 0.01},
            "ADOPT",
            # There the limit is that of the next update.
            {"lr": 0.01, "betas": (0.9, 0.9999), "eps": 1e-6, "clip_lambda": lambda step: (step - 1) ** 0.25},
        ),
    },
)
def adopt(w, g, state, h):
    # Taniguchi et al. (2024), algorithm 2, whose v_0 is the square of the first gradient
    m, v = state
    g = clip(h.rescale_grad * g, h.clip)
    if not h.seen:
        return sum_of(w), [sum_of(m), sum_of(g**2)]
    m = sum_of(h.beta1 * m, h.one_minus_beta1 * clip(g / np.maximum(np.sqrt(v), h.epsilon), h.limit))
    return sum_of(w, -h.lr * m.value, -h.decay * w), [m, sum_of(h.beta2 * v, h.one_minus_beta2 * g**2)]


@row(
    options={"beta1": 0.8},
    along_gradient=True,
    arrays=7,
    peers={
        "grams": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "Grams",
            {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1, "weight_decouple": True, "eps": 1e-6},
        ),
    },
)
def grams(w, g, state, h):
    # Cao, Li & Song (2024), algorithm 1, with both bias corrections
    g = clip(h.rescale_grad * g, h.clip)
    mean, var = moments(g, *state, h)
    adam = h.correction1 * mean.value / (np.sqrt(h.correction2 * var.value) + h.epsilon)
    return sum_of(w, -h.lr * sign(g) * np.abs(adam), -h.decay * w), [mean, var]


@row(
    ranges={"var": (0.05, 1.0)},  # gradients are as expected in the first row, and too large in the second
    arrays=7 + 2,
    peers={
        "stable adamw": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "StableAdamW",
            {
                "lr": 0.01,
                "betas": (0.9, 0.99),
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps": 1e-6,
                "kahan_sum": False,
            },
        ),
    },
)
def stable_adamw(w, g, state, h):
    # Wortsman et al. (2023), algorithm 2, whose corrections are in the betas
    g = clip(h.rescale_grad * g, h.clip)
    mean, var = moments(g, *state, h)
    rms = np.sqrt(np.sum(g**2 / np.maximum(var.value, h.epsilon**2)) / g.size)
    rate = h.lr / np.maximum(1, rms)
    return scaled(w, rate, h, mean.value / (np.sqrt(var.value) + h.epsilon), h.wd * w), [mean, var]


@row(
    arrays=9 + 2,
    peers={
        "mars": Peer(
            {"learning_rate": 0.01, "wd": 0.1, "epsilon": 1e-300},
            "MARS",
            {
                "lr": 0.01,
                "betas": (0.95, 0.99),
                "gamma": 0.025,
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps": 1e-300,
                "optimize_1d": True,
                "lr_1d": 0.01,
                "betas_1d": (0.95, 0.99),
                "weight_decay_1d": 0.1,
            },
        ),
    },
)
def mars(w, g, state, h):
    # Yuan et al. (2024), algorithm 2, with the gradient of the batch before; `gamma` is gamma_t beta1 / (1 - beta1)
    mean, var, previous = state
    g = clip(h.rescale_grad * g, h.clip)
    c = g + h.gamma * (g - previous)
    c = c / np.maximum(1, norm_of(c))
    mean, var = moments(c, mean, var, h)
    mean = mean._replace(slack=h.sum_error * h.one_minus_beta1 * np.abs(c))
    var = var._replace(slack=2 * h.sum_error * h.one_minus_beta2 * c**2)
    rate = h.lr * h.correction1 / (np.sqrt(h.correction2 * var.value) + h.epsilon)
    # What is in the averages of the norm's error; that of the root is not more than the square's own.
    slack = rate * (mean.slack + h.sum_error * np.abs(mean.value))
    return sum_of(w, -rate * mean.value, -h.decay * w)._replace(slack=slack), [mean, var, sum_of(g)]


@row(
    arrays=5 + 1,
    peers={
        "novograd": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "NovoGrad",
            {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1, "weight_decouple": False, "eps": 1e-8},
        ),
    },
)
def novograd(w, g, state, h):
    # Ginsburg et al. (2019), algorithm 1: v_1 is the first squared norm
    m, v = state
    g = clip(h.rescale_grad * g, h.clip)
    square = np.sum(g**2)
    v = sum_of(h.beta2 * v, h.one_minus_beta2 * square) if h.seen else sum_of(square)
    v = v._replace(slack=h.sum_error * square)
    normalized = g / (np.sqrt(v.value) + h.epsilon)
    m = sum_of(h.beta1 * m, normalized, h.wd * w)._replace(slack=h.sum_error * np.abs(normalized))
    return sum_of(w, -h.lr * m.value)._replace(slack=h.lr * m.slack), [m, v]


@row(
    peers={
        "radam": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "RAdam",
            {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
            "torch.optim",
        ),
        "radam, coupled": Peer(
            {"learning_rate": 0.01, "wd": 0.1, "beta2": 0.9, "decoupled": False},
            "RAdam",
            {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.9)},
            "torch.optim",
        ),
    }
)
def radam(w, g, state, h):
    # Liu et al. (2020), algorithm 2; `adaptive` is whether rho_t is large enough; r_t and the corrections are in the rate
    g = clip(h.rescale_grad * g, h.clip) + h.wd * w
    mean, var = moments(g, *state, h)
    below = np.sqrt(var.value) + h.epsilon if h.adaptive else 1
    return sum_of(w, -h.lr * mean.value / below, -h.decay * w), [mean, var]


@row(
    peers={
        "asgd": Peer(
            {"learning_rate": 0.05, "wd": 0.1, "lambd": 0.1},
            "ASGD",
            {"lr": 0.05, "weight_decay": 0.1, "lambd": 0.1, "t0": 1e6},
            "torch.optim",
            close=(1e-7, 1e-8),  # its rates are float32
        ),
    }
)
def asgd(w, g, state, h):
    # torch.optim.ASGD; Polyak & Juditsky (1992), eq. 3, with Bottou's decay: `decay` is lambda eta, `share` mu
    (average,) = state
    g = clip(h.rescale_grad * g, h.clip)
    w = sum_of(w, -h.decay * w, -h.lr * g, -h.lr * h.wd * w)
    return w, [sum_of(average, -h.share * average, h.share * w.value)]


@row(arrays=2, benchmarked=False)
def averaged(w, g, state, h):
    # the weight that is looked at is the average
    (average,) = state
    return sum_of(average), [sum_of(average)]


@row(
    peers={
        "rprop": Peer({"learning_rate": 0.01}, "Rprop", {"lr": 0.01}, "torch.optim"),
    }
)
def rprop(w, g, state, h):
    # torch.optim.Rprop; Riedmiller & Braun (1993), section II: a turn takes no step, and is forgotten
    previous, size = state
    if h.lr == 0:
        return sum_of(w), [sum_of(previous), sum_of(size)]
    g = clip(h.rescale_grad * g, h.clip)
    turned, stayed = g * previous < 0, g * previous > 0
    size = np.where(stayed, np.minimum(size * h.grow, h.largest), size)
    size = np.where(turned, np.maximum(size * h.shrink, h.smallest), size)
    g = np.where(turned, 0, g)
    return sum_of(w, -size * sign(g)), [sum_of(g), sum_of(size)]


def _schedule_free(y, z, step, h):
    # Defazio et al. (2024), eq. 3 to 5, with the x of before from y = (1 - beta) z + beta x; `share` is c
    x = (y - (1 - h.beta) * z) / h.beta
    new_z = sum_of(z, -h.lr * step)
    x = (1 - h.share) * x + h.share * new_z.value
    new_y = (1 - h.beta) * new_z.value + h.beta * x
    return Result(new_y, np.max([np.abs(y), np.abs(h.share * z), np.abs(h.lr * step)], axis=0)), new_z


@row(hyper=({"beta": 0.9, "share": 0.3}, {"beta": 0.98}), options={"warmup": 3})
def schedule_free_sgd(w, g, state, h):
    # the same; the decay is of y
    y, z = _schedule_free(w, *state, clip(h.rescale_grad * g, h.clip) + h.wd * w, h)
    return y, [z]


@row(hyper=({"beta": 0.9, "share": 0.3}, {"beta": 0.98}), options={"warmup": 3}, arrays=7)
def schedule_free_adamw(w, g, state, h):
    # the same, algorithm 1, with the correction in the root, as in the authors' code
    z, var = state
    g = clip(h.rescale_grad * g, h.clip)
    var = sum_of(h.beta2 * var, h.one_minus_beta2 * g**2)
    y, z = _schedule_free(w, z, g / (np.sqrt(h.correction2 * var.value) + h.epsilon) + h.wd * w, h)
    return y, [z, var]


@row(hyper=({"share": 1 - 1 / 0.9}, {"share": 1 - 1 / 0.98}), arrays=3, benchmarked=False)
def toward(w, g, state, h):
    # the same, eq. 3 solved for x; `share` is 1 - 1 / beta
    (z,) = state
    beta = 1 / (1 - h.share)
    return sum_of(w / beta, -(1 / beta - 1) * z), [sum_of(z)]


@row(hyper=({"rho": 0.05}, {"rho": 2.0}), arrays=3 + 2, benchmarked=False)
def ascent(w, g, state, h):
    # Foret et al. (2021), eq. 2; adaptive: Kwon et al. (2021), eq. 8, with T = |w|. The norm is that of all tensors.
    # The 1e-12 is that of the implementation which its authors point to.
    def scaled(w, g, h):
        return h.rescale_grad * g * (np.abs(w) if h.adaptive else 1)

    norm = np.sqrt(sum(np.sum(scaled(*each) ** 2) for each in h.all))
    step = h.rho * (np.abs(w) if h.adaptive else 1) * scaled(w, g, h) / (norm + 1e-12)
    return sum_of(w, step)._replace(slack=h.sum_error * np.abs(step)), []


TABLE["prodigy"] = Row(options={"d0": 0.1})  # see test_modern.py
