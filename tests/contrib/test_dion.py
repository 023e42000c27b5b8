"""Dion2 and NorDion2 against NumPy in float64, and against Muon and NorMuon."""

import numpy as np
import pytest
import torch

import tristep
from tristep import Trainer
from tristep.contrib.dion.rules import selected

ORTHOGONAL = 2**-4  # the most by which an element of an orthogonal matrix differs, computed in bfloat16
SHAPES = {"wide": (12, 30), "tall": (30, 12), "square": (16, 16), "gram": (6, 40)}


def parameters(*shapes, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def backward(params, seed):
    torch.manual_seed(100 + seed)
    for param in params:
        param.grad = torch.randn_like(param)


def orthogonal(matrix):
    """Newton & Schulz' five steps, by the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def changed(now, before, by_rows=None):
    """The rows or columns with elements that differ by more than rounding does."""
    by_rows = now.shape[0] <= now.shape[1] if by_rows is None else by_rows
    return np.flatnonzero((np.abs(now - before) > 1e-5).any(axis=1 if by_rows else 0))


def dion2(w, m, g, lr, wd, mu, fraction):
    """Ahn, Amsel & Langford (2025): add to all, select, orthogonalize, decay and apply the selected ones only."""
    m = m + g
    by_rows = w.shape[0] <= w.shape[1]
    sums = np.abs(m).sum(axis=1 if by_rows else 0)
    chosen = np.sort(np.argsort(-sums)[: int(np.ceil(fraction * len(sums)))])
    at = (chosen, slice(None)) if by_rows else (slice(None), chosen)
    step = np.zeros_like(w)
    step[at] = orthogonal(m[at])
    m[at] *= mu
    return w * (1 - lr * wd) - lr * np.sqrt(max(1, w.shape[0] / w.shape[1])) * step, m, chosen


def nordion2(w, m, v, g, lr, wd, mu, fraction, beta):
    """The same with Li et al. (2025), alg. 1, on the selected rows, and the size of the step as in their code."""
    m = m + g
    chosen = np.sort(np.argsort(-np.abs(m).sum(axis=1))[: int(np.ceil(fraction * len(m)))])
    part = orthogonal(m[chosen])
    m[chosen] *= mu
    v = v.copy()
    v[chosen] = beta * v[chosen] + (1 - beta) * np.mean(part**2, axis=1, keepdims=True)
    even = part / (np.sqrt(v[chosen]) + 1e-10)
    step = np.zeros_like(w)
    step[chosen] = even * np.linalg.norm(part) / np.linalg.norm(even)
    rate = lr * np.sqrt(max(1, w.shape[0] / w.shape[1]))
    return w * (1 - lr * wd) - rate * step, m, v, chosen


@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize("kind", ["Dion2", "NorDion2"])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_as_numpy(name, kind, fraction):
    (param,), plain = parameters(SHAPES[name]), kind == "Dion2"
    given = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "fraction": fraction}
    optim = getattr(tristep.optim, kind)([param], **given, **({} if plain else {"row_beta": 0.8}))
    m, v = np.zeros(param.shape), np.zeros((len(param), 1))
    for k in range(12):
        w = param.detach().double().numpy()
        backward([param], k)
        g = param.grad.double().numpy()
        if plain:
            expected, m, moved = dion2(w, m, g, 0.02, 0.1, 0.9, fraction)
        else:
            expected, m, v, moved = nordion2(w, m, v, g, 0.02, 0.1, 0.9, fraction, 0.8)
        optim.step()
        found = param.detach().double().numpy()
        rows = changed(found, w * (1 - 0.02 * 0.1), by_rows=None if plain else True)
        assert np.array_equal(rows, moved)  # the same rows or columns
        assert np.max(np.abs(found - expected)) < 0.02 * (2 if plain else 3) * ORTHOGONAL
        np.testing.assert_allclose(optim.state[param]["mean"] / 0.1, m, rtol=1e-5, atol=1e-5)
        if not plain:
            np.testing.assert_allclose(optim.state[param]["row"], v, rtol=0.25)  # squares of such elements


WHOLE = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "blocks": {"split": [2, 6, 4]},
    "as large as adamw's": {"match_adamw": True},
    "on products": {"gram": True},
    "flattened": {"flatten": True, "coefficients": "polar_express", "cautious_wd": True},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize(("name", "of"), [("dion2", "muon"), ("nordion2", "normuon")])
def test_a_fraction_of_1_is_muon_to_the_bit(name, of, case):
    """Matrices, stacks of them, vectors and kernels of convolutions. Other engines add up norms in another order."""
    shapes = ((12, 20), (12, 5), (12, 20), (3, 12, 5), (7,), (12, 3, 2, 2))
    settings = {"learning_rate": 0.02, "wd": 0.1, "nesterov": False, **WHOLE[case]}
    ours, muons = parameters(*shapes), parameters(*shapes)
    trainers = (
        Trainer(ours, name, settings | {"fraction": 1}, engine="eager"),
        Trainer(muons, of, settings, engine="eager"),
    )
    for k in range(4):
        for params, trainer in zip((ours, muons), trainers, strict=True):
            backward(params, k)
            trainer.step(1)
    assert all(map(torch.equal, ours, muons))


def test_each_block_and_each_matrix_of_a_stack_has_a_selection_of_its_own():
    (whole,) = parameters((3, 8, 6))
    apart = [torch.nn.Parameter(block.clone()) for matrix in whole.detach() for block in matrix.split((2, 6))]
    arguments = {"learning_rate": 0.02, "fraction": 0.5, "wd": 0.1, "match_adamw": True}
    trainers = Trainer([whole], "dion2", arguments | {"split": [2, 6]}), Trainer(apart, "dion2", arguments)
    for k in range(6):
        backward([whole], k)
        for param, gradient in zip(apart, [g for matrix in whole.grad for g in matrix.split((2, 6))], strict=True):
            param.grad = gradient.clone()
        for trainer in trainers:
            trainer.step(1)
    parts = [block for matrix in whole.detach() for block in matrix.split((2, 6))]
    torch.testing.assert_close(parts, [each.detach() for each in apart], rtol=1e-5, atol=1e-3)


def test_a_fraction_may_change_between_steps():
    (param,) = parameters((8, 8))
    trainer = Trainer([param], "dion2", {"learning_rate": 0.1, "fraction": 0.25})
    for k, (fraction, rows) in enumerate(((0.25, 2), (0.5, 4), (1.0, 8))):
        trainer.optimizer.fraction = fraction
        before = param.detach().clone()
        backward([param], k)
        trainer.step(1)
        assert int((param.detach() != before).any(dim=1).sum()) == rows


def test_how_many_are_selected_and_equal_rows_from_the_first():
    assert [selected(100, 0.07), selected(10, 0.25), selected(3, 0.01), selected(3, 1.0)] == [7, 3, 1, 3]
    param = torch.nn.Parameter(torch.zeros(4, 4))
    trainer = Trainer([param], "dion2", {"learning_rate": 0.1, "fraction": 0.5})
    param.grad = torch.ones(4, 4)
    trainer.step(1)
    assert (param.detach() != 0).any(dim=1).tolist() == [True, True, False, False]
