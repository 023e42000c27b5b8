"""Reductions over rows, columns and slices, and rules chosen by shape, compared with NumPy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tristep.kernels import Update, reduction, rule, rule_by_shape, rules, tl, transforms
from tristep.kernels.states import states_for


@reduction(op="mean", scope=("row", "column"), means=("row",))
def squares(w, g, state, hyper):
    return g * g, w * g


@squares.finish
def added(sums, kept, hyper):
    square, product = sums
    row, column = kept
    (beta,) = hyper
    return beta * row + square, column + product, 2.0 * square


@rule(reduction=squares)
def by_parts(w, g, state, hyper, sums):
    """Uses each result: of rows, of columns, and of matrices."""
    (mom,) = state
    lr, beta = hyper
    row, column, twice, row_mean = sums
    mom = beta * mom + g * column + twice
    return w - lr * (mom + row * row_mean), (mom,)


@reduction(op="mean", scope="slice")
def unfinished(w, g, state, hyper):
    return (tl.abs(g),)


@rule(reduction=unfinished)
def by_slices(w, g, state, hyper, sums):
    (lr,) = hyper
    (size,) = sums
    return w - lr * g * size, state


@rule_by_shape(by_parts, by_slices, state=("mom", "row", "column"))
def parted(shape):
    """Matrices by rows and columns, others by slices."""
    return by_parts if len(shape) > 1 else by_slices


def _expected(w, g, mom, row, column):
    if w.ndim < 2:
        return w - 0.1 * g * np.abs(g), mom, row, column
    square = np.mean(g**2, -1, keepdims=True)
    row, column = 0.5 * row + square, column + np.mean(w * g, -2, keepdims=True)
    mom = 0.5 * mom + g * column + 2 * square
    return w - 0.1 * (mom + row * np.mean(row, -2, keepdims=True)), mom, row, column


# Small matrices, some in a tile; one cut into tiles across its rows and one across its columns; a row of several pieces.
SHAPES = [(3, 5), (4, 3, 3), (2, 3, 1, 1), (300, 7), (5, 301), (2, 70, 130), (1, 4500), (4500, 1), (7,), (0, 3)]


def test_rows_and_columns_are_averaged(place):
    """In the second step states are no zeros, and a tensor has no gradient."""
    rng = np.random.default_rng(0)
    weights = [place.tensor(rng.normal(size=shape), torch.float32) for shape in SHAPES]
    states = states_for(parted, weights)
    numbers = [1.0, *({"lr": 0.1, "beta": 0.5}[name] for name in parted.hyper)]
    for step in range(2):
        gradients = [place.tensor(rng.normal(size=shape), torch.float32) for shape in SHAPES]
        before = [[each.double().cpu().numpy() for each in (w, *row)] for w, row in zip(weights, states, strict=True)]
        expected = [
            _expected(w, g.double().cpu().numpy(), *row) if w.size else (w, *row)
            for (w, *row), g in zip(before, gradients, strict=True)
        ]
        if step:
            gradients[0], expected[0] = None, before[0]
        run = place.run(parted, weights, gradients, states, [numbers] * len(weights))
        assert run.engines() == [place.engine]
        for w, row, wanted in zip(weights, states, expected, strict=True):
            for one, other in zip((w, *row), wanted, strict=True):
                np.testing.assert_allclose(one.double().cpu().numpy(), other, rtol=2e-5, atol=2e-5)


@reduction(op="mean", scope=("row", "column"))
def moments(w, g, state, hyper):
    mom, size = state
    return tl.abs(mom) + size, mom * g


@rule(reduction=moments, nonnegative=("size",))
def by_moments(w, g, state, hyper, sums):
    mom, size = state
    row, column = sums
    return w - 0.1 * (row + column), (0.5 * mom + g, 0.5 * size + g * g)


@rule_by_shape(by_moments, state=("mom", "size"))
def with_moments(shape):
    return by_moments


@pytest.mark.sample(0, "triton")  # which may be interpreted, element by element
@pytest.mark.parametrize(
    "state_dtype",
    [*(pytest.param(each, marks=pytest.mark.sample(0)) for each in (torch.bfloat16, torch.uint8)), torch.int8],
    ids=str,
)
def test_means_read_states_in_low_precision(compiled_place, state_dtype):
    """As the rule does: for the CPU's tiles and the GPU's blocks begin within a block of codes."""
    place, rng, found = compiled_place, np.random.default_rng(2), []
    draws = [(rng.normal(size=shape), rng.normal(size=shape)) for shape in [(130, 37), (2, 70, 129)] for _ in range(2)]
    for engine in ("eager", place.engine):
        weights = [place.tensor(w, torch.float32) for w, _ in draws]
        states = states_for(with_moments, weights, state_dtype)
        assert all(state.dtype == state_dtype for row in states for state in row)
        run = Update(with_moments, weights, states, engine=engine)
        run.hyper[:] = [1.0]
        for _ in range(2):
            run.bind([place.tensor(g, torch.float32) for _, g in draws])
            run()
        found.append(weights)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)  # a code may be the neighbouring one


@pytest.mark.parametrize("layout", ["transposed", "channels last", "with gaps"])
def test_matrices_in_any_layout(place, layout):
    rng = np.random.default_rng(1)
    shape = (6, 4, 3, 5) if layout == "channels last" else (6, 10)
    w, g = rng.normal(size=shape), rng.normal(size=shape)
    weight = place.tensor(w, torch.float32)
    if layout == "transposed":
        weight = weight.T.contiguous().T
    elif layout == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    else:
        weight = torch.cat([weight, weight], 1)[:, :10]
    states = states_for(parted, [weight])
    numbers = [1.0, *({"lr": 0.1, "beta": 0.5}[name] for name in parted.hyper)]
    run = place.run(parted, [weight], [place.tensor(g, torch.float32)], states, [numbers])
    assert run.engines() == [place.engine if layout == "with gaps" else "eager"]
    expected = _expected(w, g, 0.0, np.zeros((*shape[:-1], 1)), np.zeros((*shape[:-2], 1, shape[-1])))
    for one, other in zip((weight, *states[0]), expected, strict=True):
        np.testing.assert_allclose(one.double().cpu().numpy(), other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["adafactor", "came", "group_adagrad"])
def test_a_skipped_step_changes_no_state_and_the_next_one_does(place, name):
    made = transforms.limited(getattr(rules, name), True)
    values = dict.fromkeys(made.hyper, 0.25) | {"clip": math.inf, "clip_norm": math.inf, "skip_square": 1e3}
    weights = [torch.ones(shape, device=place.device) for shape in [(6, 4), (3, 1, 1), (5,)]]
    states = states_for(made, weights)
    run = Update(made, weights, states, engine=place.engine)
    run.hyper[:] = [1.0, *(values[name] for name in made.hyper)]
    previous = None
    for size in (1.0, 1e3, 1.0):
        run.bind(
            [
                torch.full_like(w, size) * (1 + torch.arange(w.numel(), device=place.device).view(w.shape)) / 9
                for w in weights
            ]
        )
        run()
        now = [tensor.clone() for tensor in (*weights, *(state for row in states for state in row if state.numel()))]
        if previous is not None:
            same = [torch.equal(one, other) for one, other in zip(now, previous, strict=True)]
            assert all(same) if size > 1 else not any(same[:3])
            assert size > 1 or not all(same[3:])
        previous = now


def test_a_rule_with_means_is_not_used_by_itself():
    w = torch.ones(3, 4)
    with pytest.raises(TypeError, match="'by_parts' has means over parts of tensors: choose it in a @rule_by_shape"):
        Update(by_parts, [w], [(w.clone(), torch.zeros(3, 1), torch.zeros(1, 4))])
    with pytest.raises(TypeError, match=r"state=\('mom',\) of 'parted': its rules have the states mom, row, column"):
        rule_by_shape(by_parts, by_slices, state=("mom",))(parted.fn)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", [4, 8])
def test_lines_of_pieces_hold_each_element_once(unit, packed):
    """They are at multiples of a unit where these are promised; and only lines of parts of rows are of wide rows."""
    pieces = pytest.importorskip("tristep.kernels.backends.triton.pieces", reason="Triton has builds for Linux only")
    shapes = [
        (1, 9, 5),
        (4096, 3, 3),
        (30, 5, 16),
        (7, 1, 1),
        (1, 4096, 16),
        (3, 301, 33),
        (2, 70, 130),
        (1, 12, 300),
        (0, 1, 1),
    ]
    parts = SimpleNamespace(sizes=np.array(shapes))
    walks, found = pieces.walks_of(parts, True, unit, packed), [np.zeros(math.prod(shape), int) for shape in shapes]
    assert sorted(np.concatenate([walk.tensors for walk in walks])) == list(range(len(shapes)))
    for walk in walks:
        for lines in (1, 8):
            width = pieces.WIDEST if walk.line == pieces.PART else pieces.STACKED
            for t, row, matrix, column, down, _, length, rows, matrices in pieces.pieces_of(parts, walk, lines, width):
                columns = shapes[t][2]
                assert length <= width
                assert packed or length % walk.unit == 0
                assert row // shapes[t][1] == matrix
                for k in range(down):
                    first = (row + k * rows) * columns + column if rows else row * columns + column
                    assert first % walk.unit == 0
                    assert not matrices or (matrix + k * matrices) * shapes[t][1] == row + k * rows
                    found[t][first : first + length] += 1
    assert all((each == 2).all() for each in found)  # once by pieces of each number of lines
