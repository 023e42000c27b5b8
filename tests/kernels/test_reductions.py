"""Reductions: sums over tensors of many sizes, types and layouts, over one tensor and over all.

The judge is NumPy in more digits. A sum may differ from it by the rounding of adding in another order.
"""

# ruff: noqa: RUF059  # a rule names all its states and sums, whether it needs them or not

import math

import numpy as np
import pytest
import torch
from reduction_rules import by_longest, everywhere, tensors

from tristep.kernels import Update, reduction, rule, rules, tl
from tristep.kernels.layouts import compute_dtype, widest
from tristep.kernels.states import states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

SUM_ERROR = {F32: 2e-6, F64: 1e-14}  # relative to the sum of what is added, without its signs


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


@pytest.mark.sample(2)
@pytest.mark.sample(0, "triton")
@pytest.mark.sample(1, "cpu")
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
def test_sums_of_tensors_of_many_sizes(place, dtype):
    """On the CPU engine one of these sets is work for several threads, and the other is not."""
    small = [(), (1,), (0,), (3, 5), (2, 0, 3), (100,), (place.tile - 1,)]
    for shapes in [small, [*small, (place.tile,), (place.tile + 1,), (3 * place.tile + 7,)]]:
        weights, gradients = tensors(place, shapes, dtype)
        rows = run(place, shown, weights, gradients, rescale=0.3)
        for row, w, g in zip(rows, weights, gradients, strict=True):
            check_sums(row, w, g, compute_dtype(dtype), rescale=0.3)


@reduction(op="max")
def largest_of_each(w, g, state, hyper):
    return tl.abs(w), tl.abs(g)


@rule(reduction=largest_of_each)
def by_largest(w, g, state, hyper, sums):
    weight, gradient = state
    of_weight, of_gradient = sums
    return w, (everywhere(w, of_weight), everywhere(w, of_gradient))


@reduction(op="max")
def largest_signed(w, g, state, hyper):
    return w, g


@rule(reduction=largest_signed)
def by_signed(w, g, state, hyper, sums):
    weight, gradient = state
    of_weight, of_gradient = sums
    return w, (everywhere(w, of_weight), everywhere(w, of_gradient))


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize(("values", "largest"), [([-6.0, -1.0], 0.0), ([-6.0, 2.0, 1.0], 2.0), ([-6.0, np.nan], np.nan)])
def test_the_largest_of_values_below_0_is_0(place, values, largest, dtype):
    w = place.tensor(values, dtype)
    states = states_for(by_signed, [w])
    place.run(by_signed, [w], [w.clone()], states, [[1.0]])
    np.testing.assert_array_equal([state[0].item() for state in states[0]], [largest] * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [16, 17], ids=["two launches", "three launches"])
def test_totals_of_more_tiles_than_are_added_up_at_once(triton_place, n, small_tiles, monkeypatch):
    """The triton engine adds up pieces of them first, here of 4, and pieces of these."""
    place, launch = triton_place, pytest.importorskip("tristep.kernels.backends.triton.launch")
    monkeypatch.setattr(launch, "TOTALS", 4)
    monkeypatch.setattr(launch, "BLOCKS_OF_SUMS", 1)
    weights, gradients = tensors(place, [(n * place.tile - 1,), (2,), (0,), (128,)], F32)
    for row, w, g in zip(run(place, shown, weights, gradients), weights, gradients, strict=True):
        check_sums(row, w, g, F32)
    for row, w, g in zip(run(place, by_largest, weights, gradients), weights, gradients, strict=True):
        for found, tensor in zip(row, (w, g), strict=True):
            assert (found == tensor.double().abs().cpu().amax().item()).all() if tensor.numel() else True
    square = sum(float((g.double() ** 2).sum()) for g in gradients)
    for row in run(place, globally, weights, gradients):
        for found, expected in zip(row, (square, sum(g.numel() for g in gradients)), strict=True):
            assert found.tolist() == pytest.approx([expected] * len(found), rel=2e-6)


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


@pytest.mark.sample(1)
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
        if k >= 8:
            w.copy_(masters[k])
    states = states_for(shown, weights)
    place.run(shown, weights, gradients, states, [[1.0]] * len(weights), masters)
    for row, w, g, master in zip(states, weights, gradients, masters, strict=True):
        values = [tensor.cpu().double().numpy() for tensor in row]
        check_sums(values, w if master is None else master, g, compute_dtype(w.dtype))


@pytest.mark.sample(1)
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


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_per_tensor_state_over_several_steps(place, dtype):
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


@reduction(scope="global")
def whole_square(w, g, state, hyper):
    return g * g, 1.0


@rule(reduction=whole_square)
def globally(w, g, state, hyper, sums):
    seen, count = state
    square, n = sums
    return w, (everywhere(w, square), everywhere(w, n))


@pytest.mark.sample(1)
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

    device = torch.empty(0, device=place.device).device
    widest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        assert widest(device) == torch.float32
    weights = [torch.ones(size, device=place.device) for size in (3, 100)]
    states = states_for(globally, weights)
    place.run(globally, weights, [torch.full_like(w, 2.0) for w in weights], states, [[1.0]] * 2)
    assert [[float(tensor[0]) for tensor in row] for row in states] == [[4.0 * 103, 103.0]] * 2
    widest.cache_clear()
    assert widest(torch.device("cpu")) == torch.float64


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
