"""Rules with sums: what is summed over each tensor or all of them, numbers kept from step to step, and what is refused.

The judge is NumPy in more digits. A sum may differ from it by the rounding of adding in another order.
"""

# ruff: noqa: RUF059  # a rule names all its states and sums, whether it needs them or not

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from tristep.kernels import Reduction, Update, jit, reduction, rule, rules, tl
from tristep.kernels import update as one_step
from tristep.kernels.layouts import compute_dtype, widest
from tristep.kernels.states import states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SUM_ERROR = {F32: 2e-6, F64: 1e-14}  # relative to the sum of what is added, without its signs


@jit
def everywhere(w, value):
    return tl.where(w == w, value, value)


@reduction
def plain_sums(w, g, state, hyper):
    """A sum whose terms cancel, one whose terms do not, a count, and a count of some."""
    return w, g * g, 1.0, tl.where(g > 0.0, 1.0, 0.0)


@rule(reduction=plain_sums)
def shown(w, g, state, hyper, sums):
    """Writes the sums where they can be read."""
    a, b, c, d = state
    first, second, third, fourth = sums
    return w, (everywhere(w, first), everywhere(w, second), everywhere(w, third), everywhere(w, fourth))


def run(place, rule, weights, gradients, hyper=(), masters=None, rescale=1.0):
    """The states after one step, in more digits; nothing but the states may have changed."""
    states = states_for(rule, weights)
    before = [weight.clone() for weight in weights]
    place.run(rule, weights, gradients, states, [[rescale, *hyper]] * len(weights), masters)
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(weight, old, rtol=0, atol=0, equal_nan=True)
    return [[tensor.cpu().double().numpy() for tensor in row] for row in states]


def tensors(place, shapes, dtype, gradient_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    weights = [place.tensor(rng.normal(size=shape), dtype) for shape in shapes]
    return weights, [place.tensor(rng.normal(size=shape), gradient_dtype or dtype) for shape in shapes]


def check_sums(row, w, g, dtype, rescale=1.0):
    """Compare what `shown` wrote with the sums of these tensors."""
    w, g = (tensor.cpu().double().numpy().astype(np.longdouble) for tensor in (w, g))
    g = g * np.longdouble(rescale if dtype == F64 else np.float32(rescale))
    if not w.size:
        return
    for got, terms in zip(row, [w, g**2, np.ones_like(w), g > 0], strict=True):
        assert got.shape == w.shape
        assert np.all(got == got.flat[0])
        assert abs(got.flat[0] - np.sum(terms)) <= SUM_ERROR[dtype] * np.sum(np.abs(terms))
    assert row[2].flat[0] == w.size


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
def test_sums_of_tensors_of_many_sizes(place, dtype):
    """On the CPU engine one of these sets is work for several threads, and the other is not."""
    small = [(), (1,), (0,), (3, 5), (2, 0, 3), (100,), (place.tile - 1,)]
    for shapes in [small, [*small, (place.tile,), (place.tile + 1,), (3 * place.tile + 7,)]]:
        weights, gradients = tensors(place, shapes, dtype)
        rows = run(place, shown, weights, gradients, rescale=0.3)
        for row, w, g in zip(rows, weights, gradients, strict=True):
            check_sums(row, w, g, compute_dtype(dtype), rescale=0.3)


@pytest.mark.sample(0)
@pytest.mark.slow
def test_sums_of_a_tensor_with_more_tiles_than_are_added_up_at_once(place):
    """The GPU engine's last kernel adds 1,024 of them at a time."""
    if place.engine != "triton":
        pytest.skip("only there")
    weights, gradients = tensors(place, [(1025 * place.tile + 1,), (2,)], F32)
    check_sums(run(place, shown, weights, gradients)[0], weights[0], gradients[0], F32)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "one element off"])
@pytest.mark.parametrize("layout", ["transposed", "with gaps", "both"])
def test_sums_of_any_layout(place, layout, offset):
    """What lies between the elements and around them is NaN."""
    for which in ("weight", "gradient", "both"):
        pair = []
        for name, source in zip(("weight", "gradient"), tensors(place, [(40, 50)], F32), strict=True):
            strides = (50, 1)
            if which in (name, "both"):
                strides = {"transposed": (1, 40), "with gaps": (60, 1), "both": (2, 90)}[layout]
            buffer = torch.full((5000,), math.nan, device=place.device)
            pair.append(buffer.as_strided((40, 50), strides, 4 + offset).copy_(source[0]))
        (row,) = run(place, shown, [pair[0]], [pair[1]])
        check_sums(row, *pair, F32)


@pytest.mark.sample(0, "cpu")
def test_sums_of_several_types_and_of_masters(place):
    """A weight that has a master is read from there."""
    kinds = [(F64, F64), (F32, F32), (F32, BF16), (F16, F16), (BF16, BF16), (BF16, F32)]
    weights, gradients, masters = [], [], []
    for k, (dtype, gradient_dtype) in enumerate(kinds * 2):
        (w,), (g,) = tensors(place, [(1030,)], dtype, gradient_dtype, seed=k)
        weights.append(w)
        gradients.append(g)
        masters.append(place.tensor(np.random.default_rng(99 + k).normal(size=1030), F32) if k >= 8 else None)
    states = states_for(shown, weights)
    place.run(shown, weights, gradients, states, [[1.0]] * len(weights), masters)
    for row, w, g, master in zip(states, weights, gradients, masters, strict=True):
        values = [tensor.cpu().double().numpy() for tensor in row]
        check_sums(values, w if master is None else master, g, compute_dtype(w.dtype))


def test_sums_are_bit_for_bit_the_same_every_time(place):
    weights, gradients = tensors(place, [(5 * place.tile + 3,), (3,)], F32)
    first = run(place, shown, weights, gradients)
    for _ in range(3):
        for row, other in zip(first, run(place, shown, weights, gradients), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(row, other, strict=True))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_sums_are_bit_for_bit_the_same_on_any_number_of_threads(monkeypatch, dtype):
    launch = pytest.importorskip("tristep.kernels.backends.cpu.launch", reason="needs numba")
    weights, gradients = tensors_on_cpu(dtype)
    results = []
    before = torch.get_num_threads()
    try:
        for threads, parallel_from in [(1, 10**9), (1, 0), (2, 0), (5, 0)]:
            monkeypatch.setattr(launch, "PARALLEL_FROM", parallel_from)
            torch.set_num_threads(threads)
            states = states_for(rules.lamb, weights)
            moved = [weight.clone() for weight in weights]
            update = Update(rules.lamb, moved, states, engine="cpu")
            update.hyper[:] = [1.0, 0.1, 0.01, math.inf, 0.9, 0.1, 0.99, 0.01, 1e-6, 1.0, 1.0, 0.0, math.inf]
            update.bind(gradients)
            update()
            results.append([*moved, *(tensor for row in states for tensor in row)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert not torch.equal(results[0][0], weights[0])


def tensors_on_cpu(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = [(200_000,), (7,), (65_537,)]
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(2)]


@pytest.mark.parametrize("size", [5, 70_000])
def test_nan_and_infinity_stay_what_they_are_in_a_sum(place, size):
    for values, expected in [
        ([math.nan], math.nan),
        ([math.inf], math.inf),
        ([-math.inf], -math.inf),
        ([math.inf, -math.inf], math.nan),
    ]:
        w, g = torch.ones(size), torch.ones(size)
        w[1 : 1 + len(values)] = torch.tensor(values)
        weights = [w.to(place.device), torch.ones(3, device=place.device)]
        states = states_for(shown, weights)
        place.run(shown, weights, [g.to(place.device), weights[1]], states, [[1.0]] * 2)
        assert np.array_equal(states[0][0].cpu().numpy(), np.full(size, expected, dtype=np.float32), equal_nan=True)
        assert states[0][1][0] == size
        assert states[1][0].tolist() == [3.0] * 3  # a neighbour's are its own


# Skipped tensors.


@reduction
def longest(w, g, state, hyper):
    return (g * g,)


@longest.finish
def longest_norm(sums, kept, hyper):
    """The largest norm so far, forgotten little by little, and the number of steps."""
    norm, steps = kept
    (fading,) = hyper
    (square,) = sums
    return tl.maximum(fading * norm, tl.sqrt(square)), steps + 1.0


@rule(reduction=longest)
def by_longest(w, g, state, hyper, sums):
    """w <- w - lr g / the largest norm so far."""
    lr, fading = hyper
    norm, steps = sums
    return w - lr * g / norm, state


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_kept_numbers_over_several_steps(place, dtype):
    """Each tensor has its own, with its own hyper-parameters; a tensor without gradient keeps them as they are."""
    shapes = [(3, 4), (), (1500,), (0,)]
    fading = [0.5, 0.9, 0.99, 0.5]
    rng = np.random.default_rng(3)
    weights = [place.tensor(rng.normal(size=shape), dtype) for shape in shapes]
    states = states_for(by_longest, weights)
    assert [[tuple(number.shape) for number in row] for row in states] == [[(), ()]] * 4
    update = Update(by_longest, weights, states, engine=place.engine)
    update.hyper[:] = [[0.5, 0.1, each] for each in fading]
    expected = [weight.cpu().double().numpy().copy() for weight in weights]
    norms, steps = [0.0] * 4, [0] * 4
    arithmetic = compute_dtype(dtype)
    for t in range(4):
        gradients = [place.tensor(rng.normal(size=shape) * 0.3**t, dtype) for shape in shapes]
        if t == 2:
            gradients[0] = gradients[2] = None
        update.bind(gradients)
        update()
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            g = 0.5 * gradient.cpu().double().numpy()
            norms[i] = max(fading[i] * norms[i], float(np.sqrt(np.sum(g**2))))
            steps[i] += 1
            expected[i] = expected[i] - (0.1 * g / norms[i] if g.size else g)
        for row, norm, count in zip(states, norms, steps, strict=True):
            assert float(row[0]) == pytest.approx(norm, rel=SUM_ERROR[arithmetic])
            assert float(row[1]) == count
    for weight, values in zip(weights, expected, strict=True):
        tolerance = {F64: 1e-12, F32: 2e-6, BF16: 0.05}[dtype]
        np.testing.assert_allclose(weight.cpu().double().numpy(), values, rtol=tolerance, atol=tolerance)


def test_a_tensor_without_gradient_adds_nothing(place):
    weights, gradients = tensors(place, [(5,), (2000,), (7,)], F32)
    states = states_for(globally, weights)
    before = weights[1].clone()
    place.run(globally, weights, [gradients[0], None, gradients[2]], states, [[1.0]] * 3)
    square = sum(float((gradients[i].double() ** 2).sum()) for i in (0, 2))
    assert float(states[0][0][0]) == float(states[2][0][0]) == pytest.approx(square, rel=2e-6)
    assert torch.equal(weights[1], before)
    assert not states[1][0].any()


# Over all tensors.


@reduction(scope="global")
def whole_square(w, g, state, hyper):
    return g * g, 1.0


@rule(reduction=whole_square)
def globally(w, g, state, hyper, sums):
    seen, count = state
    square, n = sums
    return w, (everywhere(w, square), everywhere(w, n))


@pytest.mark.sample(2)
def test_sums_over_tensors_of_all_types(place):
    """They lie in groups of their own, one of them without any elements, and one without gradients."""
    kinds = [F32, F64, BF16, F32, F16]
    shapes = [(3, 5), (100,), (1030,), (), (0,)]
    weights = [place.tensor(np.ones(shape), kind) for kind, shape in zip(kinds, shapes, strict=True)]
    gradients = [torch.randn_like(weight) for weight in weights]
    states = states_for(globally, weights)
    update = Update(globally, weights, states, engine=place.engine)
    update.hyper[:] = [[0.5 + k] for k in range(5)]
    update.bind(gradients)
    for _ in range(3):  # a sum of the step before must not come into it
        update()
        assert update.launches == 4
        square = sum(float((((0.5 + k) * g.double()) ** 2).sum()) for k, g in enumerate(gradients))
        for row, weight in zip(states, weights, strict=True):
            if weight.numel():
                assert float(row[0].flatten()[0]) == pytest.approx(square, rel=2e-6)
                assert bool((row[1] == 3 * 5 + 100 + 1030 + 1).all())
    update.bind([*gradients[:2], None, *gradients[3:]])
    update()
    assert float(states[0][1][0, 0]) == 3 * 5 + 100 + 1
    assert float(states[2][1][0]) == 3 * 5 + 100 + 1030 + 1  # as it was


def test_sums_over_tensors_on_devices_without_float64(monkeypatch, place):
    def zeros(*shape, **options):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    widest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        assert widest(torch.device(place.device).type) == torch.float32
    weights = [torch.ones(size, device=place.device) for size in (3, 100)]
    states = states_for(globally, weights)
    place.run(globally, weights, [torch.full_like(w, 2.0) for w in weights], states, [[1.0]] * 2)
    assert [[float(tensor[0]) for tensor in row] for row in states] == [[4.0 * 103, 103.0]] * 2
    widest.cache_clear()
    assert widest("cpu") == torch.float64


def test_sums_over_no_tensors(place):
    for used in (shown, globally, by_longest):
        Update(used, [], [], engine=place.engine).bind([])
        assert place.run(used, [], [], [], []).launches == 0
        empty = [torch.zeros(0, device=place.device)]
        place.run(used, empty, empty, states_for(used, empty), [[1.0, *[0.5] * len(used.hyper)]])


# One reduction after another.


@reduction
def total(w, g, state, hyper):
    return w, 1.0


@reduction(reduction=total)
def deviation(w, g, state, hyper, sums):
    w_sum, count = sums
    d = w - w_sum / count
    return d * d, count * 0.0 + 1.0


@rule(reduction=deviation)
def standardised(w, g, state, hyper, sums):
    (variance,) = state
    square, count = sums
    return w, (everywhere(w, square / count),)


def test_a_reduction_may_use_the_sums_of_another(place):
    """A variance about a mean that is a thousand times as large: squares added up at once would give no digit of it."""
    shapes = [(3,), (5000,), (2 * place.tile + 1,)]
    rng = np.random.default_rng(5)
    weights = [place.tensor(1000.0 * (k + 1) + rng.normal(size=shape), F32) for k, shape in enumerate(shapes)]
    rows = run(place, standardised, weights, [torch.zeros_like(weight) for weight in weights])
    assert [stage.name for stage in standardised.reductions] == ["total", "deviation"]
    for (variance,), weight in zip(rows, weights, strict=True):
        expected = float(weight.double().var(correction=0))
        assert variance[0] == pytest.approx(expected, rel=2e-3)


@reduction
def kept_first(w, g, state, hyper):
    return (g * g,)


@kept_first.finish
def first_finish(sums, kept, hyper):
    (square,) = sums
    (average,) = kept
    return (0.5 * average + 0.5 * square,)


@reduction(reduction=kept_first, scope="global")
def kept_second(w, g, state, hyper, sums):
    (average,) = sums
    return (g * g / average,)


@kept_second.finish
def second_finish(sums, kept, hyper):
    (ratio,) = sums
    previous, last = kept
    return last, ratio


@rule(reduction=kept_second)
def doubly_kept(w, g, state, hyper, sums):
    (seen,) = state
    previous, last = sums
    return w, (everywhere(w, previous),)


def test_two_reductions_may_both_keep_numbers(place):
    assert (doubly_kept.state, doubly_kept.kept) == (("seen",), ("average", "previous", "last"))
    assert doubly_kept.slots == ("seen", "average", "previous", "last")
    assert doubly_kept.shapes(torch.Size([2, 3])) == [torch.Size([2, 3]), *[torch.Size()] * 3]
    weights, gradients = tensors(place, [(4,), (6,)], F32)
    states = states_for(doubly_kept, weights)
    update = Update(doubly_kept, weights, states, engine=place.engine)
    update.hyper[:] = 1.0
    update.bind(gradients)
    averages, last, previous = [0.0, 0.0], 0.0, 0.0
    for _ in range(3):
        update()
        squares = [float((g.double() ** 2).sum()) for g in gradients]
        averages = [0.5 * a + 0.5 * s for a, s in zip(averages, squares, strict=True)]
        previous, last = last, sum(s / a for s, a in zip(squares, averages, strict=True))
        for row, average in zip(states, averages, strict=True):
            found = [float(row[0][0]), *map(float, row[1:])]
            assert found == pytest.approx([previous, average, previous, last], rel=2e-6)


# What a reduction has kept.


@reduction(scope="global")
def since(w, g, state, hyper, kept, index):
    (lr,) = hyper
    level, steps = kept
    return lr * (g - level), tl.where(index == 0, steps, 0.0)


@since.finish
def level_since(sums, kept, hyper):
    change, steps_seen = sums
    level, steps = kept
    (fading,) = hyper
    return fading * level + change, steps_seen + 1.0


@rule(reduction=since)
def by_level(w, g, state, hyper, sums):
    (lr,) = hyper
    level, steps = sums
    return w - lr * level, state


@pytest.mark.sample(2)
def test_a_reduction_may_read_what_it_has_kept(place):
    """Numbers of all tensors together are the same for all: of other types, without gradient, of other rates."""
    kinds = [(F32, 3), (F64, 5), (F32, 1500), (BF16, 2)]
    weights = [torch.zeros(size, dtype=dtype, device=place.device) for dtype, size in kinds]
    states = states_for(by_level, weights)
    update = Update(by_level, weights, states, engine=place.engine)
    rates = [0.5, 0.25, 0.125, 1.0]
    level, steps, moved = 0.0, 0.0, [0.0] * 4
    for t in range(4):
        gradients = [torch.full_like(weight, 1.0 + i - t) for i, weight in enumerate(weights)]
        left_out = {0: [0, 1], 2: [2, 3], 3: [0, 1, 2, 3]}.get(t, [])
        for i in left_out:
            gradients[i] = None
        for i, rate in enumerate(rates):  # a tensor that is left out may have any hyper-parameters
            update.hyper[i] = [1.0, *([math.nan] * 2 if i in left_out else [rate, 0.5])]
        update.bind(gradients)
        update()
        there = [i for i in range(4) if i not in left_out]
        if there:
            change = sum(rates[i] * weights[i].numel() * (1.0 + i - t - level) for i in there)
            level, steps = 0.5 * level + change, len(there) * steps + 1.0
        for i in there:
            moved[i] -= rates[i] * level
        for row in states:
            assert [float(number) for number in row] == pytest.approx([level, steps], rel=1e-6)
    for weight, expected in zip(weights, moved, strict=True):
        assert weight[0].item() == weight[-1].item() == pytest.approx(expected, rel=1e-2 if weight.dtype == BF16 else 1e-5)


@reduction
def first_sum(w, g, state, hyper):
    return g, 1.0


@reduction(reduction=first_sum, feeds_next=True)
def with_the_first(w, g, state, hyper, sums):
    total, count = sums
    return ((g - total / count) * (g - total / count),)


@reduction(reduction=with_the_first, feeds_next=True)
def with_both(w, g, state, hyper, sums):
    square, total, count = sums
    return (w,)


@with_both.finish
def weight_sums(sums, kept, hyper):
    (w_sum,) = sums
    (sum_of_weights,) = kept
    return (sum_of_weights + w_sum,)


@rule(reduction=with_both)
def by_all_of_them(w, g, state, hyper, sums):
    a, b, c, d = state
    w_sum, square, total, count = sums
    return w, (everywhere(w, w_sum), everywhere(w, square), everywhere(w, total), everywhere(w, count))


@pytest.mark.sample(2)
def test_reductions_may_pass_on_what_came_before_them(place):
    assert (with_both.n_results, by_all_of_them.kept) == (4, ("sum_of_weights",))
    weights, gradients = tensors(place, [(5,), (place.tile + 3,)], F64)
    states = states_for(by_all_of_them, weights)
    for t in (1, 2):
        place.run(by_all_of_them, weights, gradients, states, [[1.0]] * 2)
        for w, g, row in zip(weights, gradients, states, strict=True):
            w, g = w.cpu().double(), g.cpu().double()
            expected = [t * w.sum(), ((g - g.mean()) ** 2).sum(), g.sum(), g.numel()]
            assert [float(state[-1]) for state in row[:4]] == pytest.approx([float(x) for x in expected], rel=1e-9)


@reduction
def flagged(w, g, state, hyper):
    return (g * g,)


@flagged.finish
def with_constants(sums, kept, hyper):
    (square,) = sums
    seen, many, rate = kept
    (lr,) = hyper
    return 1.0, square > 5.0, lr


@rule(reduction=flagged)
def by_flags(w, g, state, hyper, sums):
    (lr,) = hyper
    seen, many, rate = sums
    return w - rate * seen * (1.0 + many), state


def test_kept_numbers_may_be_constants_comparisons_and_hyper_parameters(place):
    weights = [torch.zeros(n, device=place.device) for n in (3, 10)]
    states = states_for(by_flags, weights)
    place.run(by_flags, weights, [torch.ones_like(w) for w in weights], states, [[1.0, 0.5], [1.0, 0.25]])
    assert [[float(number) for number in row] for row in states] == [[1.0, 0.0, 0.5], [1.0, 1.0, 0.25]]
    assert [w[0].item() for w in weights] == [-0.5, -0.5]


# Names.


@reduction
def some_names(w, g, state, hyper, index):
    third, first = state
    c, a = hyper
    return tl.where(index < 3, third * c, 0.0), first * a, tl.where(index == 0, w, 0.0)


@rule(reduction=some_names)
def all_names(w, g, state, hyper, sums, index):
    first, second, third = state
    a, b, c = hyper
    x, y, z = sums
    return w + tl.where(index == 1, b, 0.0), (everywhere(w, x), second, everywhere(w, z + y))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [4, 5000])
def test_a_reduction_may_name_some_of_the_rules_values_in_any_order(place, size):
    w = torch.arange(size, dtype=F32, device=place.device) + 7.0
    state = tuple(torch.full((size,), value, device=place.device) for value in (1.0, 2.0, 4.0))
    place.run(all_names, [w], [torch.ones_like(w)], [state], [[1.0, 10.0, 0.5, 1000.0]])
    assert w[:3].tolist() == [7.0, 8.5, 9.0]
    assert [float(values[-1]) for values in state] == [3 * 4.0 * 1000.0, 2.0, 7.0 + size * 10.0]


@reduction
def scaled_sum(w, g, state, hyper):
    beta, scale = hyper
    return (scale * g,)


@scaled_sum.finish
def scaled_average(sums, kept, hyper):
    (found,) = sums
    (average,) = kept
    fresh, beta = hyper
    return (beta * average + fresh * found,)


@rule(reduction=scaled_sum)
def by_average(w, g, state, hyper, sums):
    lr, scale = hyper
    (average,) = sums
    return w - lr * scale * average, state


@pytest.mark.sample(2)
def test_hyper_parameters_of_reductions_alone_follow_the_rules_own(place):
    """Weights with different ones, which lie in one table, one of them on two tiles."""
    assert by_average.own_hyper == ("lr", "scale")
    assert by_average.hyper == ("lr", "scale", "beta", "fresh")
    weights = [torch.zeros(size, device=place.device) for size in (4, place.tile + 1)]
    states = states_for(by_average, weights)
    rows = [[1.0, 0.5, 2.0, 0.25, 3.0], [1.0, 0.25, 4.0, 0.5, 0.125]]
    for _ in range(2):
        place.run(by_average, weights, [torch.ones_like(w) for w in weights], states, rows)
    for w, (average,), (_, lr, scale, beta, fresh) in zip(weights, states, rows, strict=True):
        first = fresh * scale * w.numel()
        assert float(average) == pytest.approx((1.0 + beta) * first)
        assert w[0].item() == w[-1].item() == pytest.approx(-lr * scale * (2.0 + beta) * first)


def test_a_hyper_parameter_of_a_reduction_alone_is_asked_for_by_name():
    w = torch.zeros(3)
    with pytest.raises(TypeError, match="rule 'by_average' needs the hyper-parameter 'fresh'; given were beta, lr, scale"):
        one_step(by_average, [w], [w], [(torch.zeros(()),)], {"lr": 1.0, "scale": 1.0, "beta": 0.5})


# What is refused.

REFUSED = {
    "a state that the rule has not": (
        "@reduction\ndef r(w, g, state, hyper):\n    (n,) = state\n    return (n,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (m,) = state\n    return w, (m,)\n",
        "reduction 'r' unpacks 'n' from state: rule 'u' has only m",
    ),
    "sums without a reduction": (
        "@rule\ndef u(w, g, state, hyper, sums):\n    (s,) = sums\n    return w * s, state\n",
        r"rule 'u' must take `sums` as an argument and name its reduction, @rule\(reduction=...\), or neither",
    ),
    "a reduction without sums": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper):\n    return w, state\n",
        "rule 'u' must take `sums` as an argument",
    ),
    "a reduction with sums of none": (
        "@reduction\ndef r(w, g, state, hyper, sums):\n    (s,) = sums\n    return (s * g,)\n",
        r"reduction 'r' must take `sums` as an argument and name its reduction, @reduction\(reduction=...\)",
    ),
    "sums that are no reduction": (
        "@jit\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w, state\n",
        "reduction of 'u' must be made with @reduction, got Function",
    ),
    "too few sums unpacked": (
        "@reduction\ndef r(w, g, state, hyper):\n    return g, w\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (s,) = sums\n    return w * s, state\n",
        r"rule 'u' unpacks 1 sums \(s\): reduction 'r' gives 2",
    ),
    "more sums than kept numbers": (
        "@reduction\ndef r(w, g, state, hyper):\n    return g, w\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    a, b = sums\n    (x,) = kept\n    return (a + b + x,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    s, t = sums\n    return w * s * t, state\n",
        r"rule 'u' unpacks 2 sums \(s, t\): reduction 'r' gives 1",
    ),
    "sums that are not unpacked": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w * sums, state\n",
        "'u' must unpack sums into names on a line of its own",
    ),
    "a reduction that returns no tuple": (
        "@reduction\ndef r(w, g, state, hyper):\n    return g * g\n",
        r"reduction 'r' must end by returning a tuple of values, such as `return \(g \* g,\)`",
    ),
    "a reduction that returns nothing": ("@reduction\ndef r(w, g, state, hyper):\n    return ()\n", "a tuple of values"),
    "a reduction of three arguments": (
        "@reduction\ndef r(w, g, state):\n    return (g,)\n",
        r"reduction 'r' takes \(w, g, state\): it must have four arguments",
    ),
    "a reduction of an unknown word": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (tl.sum(g),)\n",
        "uses tl.sum; rules",
    ),
    "a rule with kept": (
        "@rule\ndef u(w, g, state, hyper, kept):\n    (k,) = kept\n    return w * k, state\n",
        r"rule 'u' takes \(w, g, state, hyper, kept\): .* may have sums and index after them",
    ),
    "a reduction with sums and kept": (
        "@reduction\ndef r(w, g, state, hyper, sums, kept):\n    (k,) = kept\n    return (g * k,)\n",
        r"reduction 'r' takes .* may have sums or kept and index after them",
    ),
    "kept numbers of no finish": (
        "@reduction\ndef r(w, g, state, hyper, kept):\n    (k,) = kept\n    return (g * k,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w, state\n",
        "reduction 'r' takes kept, but keeps nothing: give it a @r.finish",
    ),
    "kept numbers of other names": (
        "@reduction\ndef r(w, g, state, hyper, kept):\n    (k,) = kept\n    return (g * k,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n",
        "'f' unpacks kept into x: reduction 'r' has k",
    ),
    "a finish of two arguments": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept):\n    (x,) = kept\n    return (x,)\n",
        r"'f' takes \(sums, kept\): it must be \(sums, kept, hyper\)",
    ),
    "a finish that keeps nothing": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = sums\n    return (x,)\n",
        "'f' must unpack kept into the names of one number or more",
    ),
    "a finish that gives too few": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    x, y = kept\n    return (x,)\n",
        r"'f' must unpack kept .* a tuple of as many, as in `return \(new_x, new_y,\)`",
    ),
    "a finish with too many sums": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    a, b = sums\n    return (a + b,)\n",
        r"'f' unpacks 2 sums \(a, b\): reduction 'r' gives 1",
    ),
    "a second finish": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n"
        "@r.finish\ndef h(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n",
        "reduction 'r' cannot be given 'h' to finish it: it has one, 'f'",
    ),
    "a finish that comes too late": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    return w, state\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (x,) = kept\n    return (x,)\n",
        "reduction 'r' cannot be given 'f' to finish it: 'u' uses it already",
    ),
    "a kept number with a state's name": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
        "@rule(reduction=r)\ndef u(w, g, state, hyper, sums):\n    (m,) = state\n    return w, (m,)\n",
        "rule 'u': the names of its states and kept numbers must differ",
    ),
    "two kept numbers of one name": (
        "@reduction\ndef r(w, g, state, hyper):\n    return (g,)\n"
        "@r.finish\ndef f(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
        "@reduction(reduction=r)\ndef q(w, g, state, hyper, sums):\n    return (g,)\n"
        "@q.finish\ndef h(sums, kept, hyper):\n    (m,) = kept\n    return (m,)\n"
        "@rule(reduction=q)\ndef u(w, g, state, hyper, sums):\n    return w, state\n",
        "rule 'u': the names of its states and kept numbers must differ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(write_rules, what):
    text, message = REFUSED[what]
    with pytest.raises(TypeError, match=message):
        write_rules(text)


def test_what_a_reduction_sums_over_is_one_of_two():
    with pytest.raises(ValueError, match="scope='rows': must be 'tensor' or 'global'"):
        reduction(scope="rows")


def test_kept_numbers_of_another_shape_or_type_are_refused():
    w = torch.zeros(3)
    with pytest.raises(ValueError, match=r"the state of weights\[0\] has 1 tensors: .* has 2 \(norm, steps\)"):
        Update(by_longest, [w], [(torch.zeros(()),)])
    with pytest.raises(ValueError, match=r"steps of weights\[0\] is torch.float32 \(1,\) .*must be torch.float32 \(\)"):
        Update(by_longest, [w], [(torch.zeros(()), torch.zeros(1))])
    with pytest.raises(ValueError, match=r"norm of weights\[0\] is torch.float64"):
        Update(by_longest, [w], [(torch.zeros((), dtype=F64), torch.zeros(()))])


# Copies, and compiled code.


def test_reductions_are_pickled_by_name():
    squares = rules.lars.reduction
    assert isinstance(squares, Reduction)
    assert pickle.loads(pickle.dumps(squares)) is squares
    assert copy.deepcopy(squares) is squares
    assert pickle.loads(pickle.dumps(rules.lars)) is rules.lars
    assert pickle.loads(pickle.dumps(rules.lars)).reduction is squares


def test_a_rule_says_what_it_keeps():
    assert repr(by_longest) == "<rule by_longest: state (norm, steps), hyper (lr, fading)>"
    assert repr(longest) == "<reduction longest>"
    assert (by_longest.state, by_longest.kept, rules.lans.kept) == ((), ("norm", "steps"), ())


TEXT = """
@reduction
def sums_of(w, g, state, hyper):
    return (2.0 * g,)

@rule(reduction=sums_of)
def stepped(w, g, state, hyper, sums):
    (s,) = sums
    return w - s * g, state
"""


def test_a_reduction_written_anew_takes_effect(place, write_rules):
    """The same names, and the same rule: only the reduction differs, by one figure."""
    for factor in (2.0, 3.0):
        w = torch.ones(4, device=place.device)
        module = write_rules(TEXT.replace("2.0", str(factor)))
        place.run(module.stepped, [w], [torch.ones_like(w)], [()], [[1.0]])
        assert w.tolist() == [1.0 - factor * 4.0] * 4


def test_a_reduction_may_serve_several_rules(place):
    """With states and hyper-parameters in other places: `lars` and `lars_momentum` have one reduction, by one name."""
    assert rules.lars.reduction is rules.lars_momentum.reduction
    for each, rest in [(rules.lars, []), (rules.lars_momentum, [0.0])]:
        w = torch.full((4,), 3.0, device=place.device)
        hyper = [1.0, 0.5, 0.0, math.inf, *rest, 0.25, 0.0, 1.0]
        place.run(each, [w], [torch.ones_like(w)], states_for(each, [w]), [hyper])
        assert w.tolist() == pytest.approx([3.0 - 0.5 * 0.25 * 3.0] * 4)


def test_other_values_need_no_other_loop():
    loops = pytest.importorskip("tristep.kernels.backends.cpu.loops", reason="needs numba").loops
    for value in (0.5, 1.0, math.inf):
        for size in (3, 4):
            w = torch.ones(size)
            update = Update(by_longest, [w], states_for(by_longest, [w]), engine="cpu")
            update.hyper[:] = [1.0, value, 0.5]
            update.bind([torch.ones(size)] if size == 3 else [w.clone()])
    keys = [key for key in loops if key[1] is by_longest and key[2] == F32]
    assert len({key[0] for key in keys}) == 2  # the rule and its reduction
