"""As recent_updates.py, rules of whole matrices: Muon, NorMuon, Adafactor and CAME."""

from types import SimpleNamespace

import numpy as np
from oracle_rows import Peer, Result, clip, row, sum_of
from updates import adamw

# Newton & Schulz' iteration is done in bfloat16, of which 1 has an ulp of 2^-7, and its five steps multiply small singular
# values, with their errors, by 3.4 each. Elements of an orthogonal matrix are 1 at most.
BFLOAT16_ORTHOGONAL = 2**-4
EPSILON = float(np.finfo(np.float64).eps)


@row(
    hyper=({"scale": 0.2}, {"scale": 0.0, "of_gradient": 0.0, "of_mean": 1.0}),
    options={"gram": False},
    peers={
        "muon": Peer({"learning_rate": 0.01, "wd": 0.1}, "Muon", {"lr": 0.01, "weight_decay": 0.1}, "torch.optim", (2,)),
        "muon in AdamW's size": Peer(
            {"learning_rate": 0.01, "momentum": 0.8, "nesterov": False, "match_adamw": True},
            "Muon",
            {"lr": 0.01, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
            "torch.optim",
            (2,),
        ),
        "muon's companion": Peer(
            {"learning_rate": 0.01, "adam_learning_rate": 0.002, "wd": 0.1},
            "AdamW",
            {"lr": 0.002, "weight_decay": 0.1},
            "torch.optim",
            (0, 1),
        ),
    },
)
def muon(w, g, state, h):
    # Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; AdamW for all but matrices
    m, var = state
    if w.ndim == 3:
        moved, (m,) = _stacked(lambda w, g, m: _of(muon(w, g, [m, var], h), 0), w, g, m)
        return moved, [m, sum_of(var)]
    if w.ndim != 2:
        own = {"lr": h.adam_lr, "decay": h.adam_decay, "epsilon": h.adam_epsilon}
        return adamw(w, g, state, SimpleNamespace(**vars(h) | own))
    g = clip(h.rescale_grad * g, h.clip)
    m = sum_of(h.momentum * m, h.one_minus_momentum * g)
    orthogonal = _orthogonal(h.of_gradient * g + h.of_mean * m.value)
    rows, columns = w.shape
    # `scale` is the 0.2 of Liu et al. (2025), "Muon is scalable for LLM training", eq. 4
    rate = h.lr * (h.scale * np.sqrt(max(rows, columns)) if h.scale else np.sqrt(max(1, rows / columns)))
    moved = sum_of(w, -rate * orthogonal, -h.decay * w)
    return moved._replace(slack=rate * BFLOAT16_ORTHOGONAL), [m, sum_of(var)]


def _stacked(step, *stacks):
    """The results of a step of each matrix of some stacks, as stacks."""
    if not stacks[0].size:
        return sum_of(stacks[0]), [sum_of(stack) for stack in stacks[2:]]
    steps = [step(*matrices) for matrices in zip(*stacks, strict=True)]
    moved, *states = (Result(*map(np.stack, zip(*results, strict=True))) for results in zip(*steps, strict=True))
    return moved, states


def _of(result, *places):
    """The new weight and the new states at these places, with as many slacks as values."""
    moved, states = result
    chosen = [moved, *(states[place] for place in places)]
    return [each._replace(slack=np.broadcast_to(each.slack, each.value.shape)) for each in chosen]


def _orthogonal(direction):
    # The iteration is an odd polynomial of the matrix, and so of each of its singular values.
    left, values, right = np.linalg.svd(direction.astype(np.float64), full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@row(
    hyper=({"scale": 0.2, "row_beta": 0.9}, {"scale": 0.0, "row_beta": 0.5, "of_gradient": 0.0, "of_mean": 1.0}),
    options={"gram": False, "row_beta": 0.8},
)
def normuon(w, g, state, h):
    # Li et al. (2025), algorithm 1; with scale 0 as large as before, as in their code; AdamW for all but matrices
    m, var, row = state
    if w.ndim == 3:
        moved, (m, row) = _stacked(lambda w, g, m, row: _of(normuon(w, g, [m, var, row], h), 0, 2), w, g, m, row)
        return moved, [m, sum_of(var), row]
    if w.ndim != 2:
        own = {"lr": h.adam_lr, "decay": h.adam_decay, "epsilon": h.adam_epsilon}
        moved, new = adamw(w, g, [m, var], SimpleNamespace(**vars(h) | own))
        return moved, [*new, sum_of(row)]
    g = clip(h.rescale_grad * g, h.clip)
    m = sum_of(h.momentum * m, h.one_minus_momentum * g)
    orthogonal = _orthogonal(h.of_gradient * g + h.of_mean * m.value)
    rows, columns = w.shape
    row = sum_of(h.row_beta * row, h.one_minus_row_beta * _mean(orthogonal**2, -1))
    divided = orthogonal / (np.sqrt(row.value) + 1e-10)
    size = h.scale * np.sqrt(rows * columns) if h.scale else _norm(orthogonal)
    even = divided * (size / (_norm(divided) + 1e-10))
    rate = h.lr if h.scale else h.lr * np.sqrt(max(1, rows / columns))
    moved = sum_of(w, -rate * even, -h.decay * w)
    # What errors of the orthogonal matrix make of the average, and both of quotient and norm, to first order.
    row = row._replace(slack=h.one_minus_row_beta * 2 * BFLOAT16_ORTHOGONAL * np.sqrt(_mean(orthogonal**2, -1)))
    relative = row.slack / (2 * row.value) + BFLOAT16_ORTHOGONAL * np.sqrt(rows * columns) / _norm(orthogonal)
    slack = size / _norm(divided) * BFLOAT16_ORTHOGONAL / np.sqrt(row.value) + np.abs(even) * relative
    return moved._replace(slack=rate * slack), [m, sum_of(var), row]


def _norm(x):
    return np.sqrt(np.sum(x**2))


def _factored(square, averages, share, h):
    # Shazeer & Stern (2018), algorithm 4, line 6 to 8, in means for sums; without rows and columns a plain average
    row, column, var = averages
    if square.ndim < 2:
        var = sum_of((1 - share) * var, share * square)
        return var.value, [sum_of(row), sum_of(column), var]
    row, column = (
        sum_of((1 - share) * old, share * new)._replace(slack=h.sum_error * share * new)
        for old, new in ((row, _mean(square, -1)), (column, _mean(square, -2)))
    )
    return row.value * column.value / _mean(row.value, -2), [row, column, sum_of(var)]


def _mean(x, axis):
    return np.sum(x, axis=axis, keepdims=True) / x.shape[axis]


def _rms(x):
    return np.sqrt(np.sum(x**2) / x.size)


@row(
    peers={
        "adafactor": Peer(
            {"learning_rate": 0.1, "wd": 0.1, "epsilon1": EPSILON},
            "Adafactor",
            {"lr": 0.1, "weight_decay": 0.1},
            "torch.optim",
        ),
    }
)
def adafactor(w, g, state, h):
    # the same, algorithms 4 and 5. The limits are those of torch.optim.Adafactor, which adds epsilon1 to nothing.
    if not w.size:
        return sum_of(w), [sum_of(each) for each in state]
    g = clip(h.rescale_grad * g, h.clip)
    estimate, averages = _factored(g**2, state, h.new, h)
    step = g / np.sqrt(np.maximum(estimate, h.epsilon1**2))
    rate = h.lr * np.maximum(h.epsilon2, _rms(w)) / np.maximum(1, _rms(step) / h.limit)
    moved = sum_of(w, -h.decay * w, -rate * step)
    return moved._replace(slack=3 * h.sum_error * np.abs(rate * step)), averages


@row(
    peers={
        "came": Peer(
            {"learning_rate": 0.01, "wd": 0.1},
            "CAME",
            {
                "lr": 0.01,
                "betas": (0.9, 0.999, 0.9999),
                "weight_decay": 0.1,
                "weight_decouple": True,
                "eps1": 1e-30,
                "eps2": 1e-16,
                "clip_threshold": 1.0,
            },
        ),
    }
)
def came(w, g, state, h):
    # Luo et al. (2023), algorithm 2; as in the authors' code, tensors without rows and columns are as steady as any
    m, *state = state
    if not w.size:
        return sum_of(w), [sum_of(each) for each in (m, *state)]
    g = clip(h.rescale_grad * g, h.clip)
    estimate, averages = _factored(g**2 + h.epsilon1, state[:3], h.one_minus_beta2, h)
    step = g / np.sqrt(estimate)
    step = step / np.maximum(1, _rms(step) / h.limit)
    m = sum_of(h.beta1 * m, h.one_minus_beta1 * step)._replace(slack=3 * h.sum_error * h.one_minus_beta1 * np.abs(step))
    direction, unsteady = m.value, [sum_of(each) for each in state[3:]]
    if w.ndim > 1:
        estimate, unsteady = _factored((step - m.value) ** 2 + h.epsilon2, state[3:], h.one_minus_beta3, h)
        direction = direction / np.sqrt(estimate)
    moved = sum_of(w, -h.lr * direction, -h.decay * w)
    return moved._replace(slack=3 * h.sum_error * np.abs(h.lr * direction)), [m, *averages, *unsteady]
