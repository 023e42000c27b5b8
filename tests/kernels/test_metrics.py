"""Measures: what they find of each tensor, on every engine, and that finding it changes no update.

The oracle is NumPy in float64, on copies of the weights from before and after a step.
"""

import math

import numpy as np
import pytest
import torch
from reduction_rules import tensors

from tristep.kernels import MetricsBuffer, Update, metric, metrics, rules, storage, tl, transforms
from tristep.kernels.states import states_for

pytestmark = pytest.mark.usefixtures("small_tiles")

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = [
    *("weight_square", "gradient_square", "update_square", "gradient_times_update"),
    *("weight_absmax", "gradient_absmax", "update_absmax", "gradient_zeros", "gradient_nonfinite"),
]
ALL = metrics.joined(*(getattr(metrics, name) for name in NAMES))


@metric(largest="max", cubes="sum", ones="sum", moved="max")
def of_my_own(w, g, new_w):
    """Maxima and sums in turns, and one that is the same for all elements."""
    cube = g * g * g
    return tl.abs(w) + tl.abs(g), tl.where(new_w > w, cube, -cube), 1.0, tl.maximum(new_w - w, w - new_w)


def array(tensor):
    return tensor.detach().cpu().double().numpy().copy()


def judged(w, g, new_w):
    """What `ALL` finds, of arrays of float64; and what its terms add up to without their signs."""
    w, g, new_w = (each.ravel() for each in (w, g, new_w))
    step = new_w - w
    sums = [w**2, g**2, step**2, g * step]
    maxima = [w, g, step]
    counts = [g == 0, ~np.isfinite(g)]
    found = [np.sum(x) for x in sums] + [np.max(np.abs(x), initial=0.0) for x in maxima] + [np.sum(x) for x in counts]
    scale = [np.sum(np.abs(x)) for x in sums] + found[4:]
    return np.array(found, dtype=np.float64), np.array(scale, dtype=np.float64)


def check(found, w, g, new_w, error=3e-6):
    expected, scale = judged(w, g, new_w)
    # The update is a small difference of large numbers, whose rounding it has.
    slack = np.zeros(9)
    if w.size:
        spacing = 1e-7 * np.max(np.abs(w), initial=0.0) if error > 1e-9 else 0.0
        slack[6] = spacing
        slack[2] = 2 * spacing * np.sum(np.abs(new_w - w)) + spacing**2 * w.size
        slack[3] = spacing * np.sum(np.abs(g))
    assert np.all(np.abs(found - expected) <= error * scale + slack), (found, expected)
    assert np.array_equal(found[7:], expected[7:])  # counts are exact


def hyper(rule, rescale=1.0, seed=5):
    return [rescale, *np.random.default_rng(seed).uniform(0.01, 0.3, size=len(rule.hyper))]


def step(place, rule, weights, gradients, into=None, masters=None, states=None, rescale=1.0, steps=1, seed=None):
    """Some steps, each measured if `into` is there; gives the states, too."""
    states = states_for(rule, weights) if states is None else states
    run = Update(rule, weights, states, masters, place.engine, seed=seed)
    run.hyper[:, : 1 + len(rule.hyper)] = hyper(rule, rescale)
    run.bind(gradients)
    for k in range(steps):
        if seed is not None:
            run.hyper[:, -1] = k
        if into is not None:
            into.begin_step()
        run(into)
        if into is not None:
            assert into.end_step() == any(gradient is not None for gradient in gradients)
    return states


def values(into):
    return into.values(into.arrived(wait=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_tensors_of_many_sizes(place, dtype):
    """On the CPU engine one of these sets is work for several threads, and the other is not. Some are skipped."""
    small = [(), (1,), (0,), (3, 5), (2, 0, 3), (100,), (place.tile - 1,), (7,), (0,)]
    for shapes in [small, [*small, (place.tile,), (2 * place.tile + 7,)]]:
        weights, gradients = tensors(place, shapes, dtype)
        gradients[5][::3] = 0.0
        skipped = (7, 8)
        given = [None if i in skipped else gradient for i, gradient in enumerate(gradients)]
        before = [array(weight) for weight in weights]
        into = MetricsBuffer(ALL, len(weights))
        step(place, rules.adamw, weights, given, into, rescale=0.3)
        (found,) = values(into)
        for i, (w, g, new_w) in enumerate(zip(before, gradients, weights, strict=True)):
            if i in skipped:
                assert np.isnan(found[i]).all()
            else:
                scale = 0.3 if dtype == F64 else float(np.float32(0.3))
                check(found[i], w, array(g) * scale, array(new_w), 1e-12 if dtype == F64 else 3e-6)


@pytest.mark.sample(0, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("master_dtype", [None, F32, torch.int16, torch.int8], ids=str)
def test_low_precision_updates_are_measured_as_the_rule_computes_them(place, master_dtype):
    """Not as they are stored: the judge has the same weights and gradients in float32, and eager torch's update."""
    rng = np.random.default_rng(1)
    exact = [rng.normal(size=shape).astype(np.float32) for shape in [(1500,), (3, 4)]]
    weights = [place.tensor(each, BF16) for each in exact]
    gradients = [place.tensor(rng.normal(size=each.shape), BF16) for each in exact]
    masters, known = None, [weight.float() for weight in weights]
    if master_dtype is not None:
        pairs = [(weight, place.tensor(each, F32)) for weight, each in zip(weights, exact, strict=True)]
        masters = [wide if master_dtype == F32 else storage.master_for(w, wide, master_dtype) for w, wide in pairs]
        known = [storage.combined(weight, b) for weight, b in zip(weights, masters, strict=True)]
    known = [each.clone() for each in known]
    before = [array(each) for each in known]
    into = MetricsBuffer(ALL, 2)
    step(place, rules.adamw, weights, gradients, into, masters)
    step(place._replace(engine="eager"), rules.adamw, known, gradients)
    for row, w, g, new_w in zip(values(into)[0], before, gradients, known, strict=True):
        check(row, w, array(g), array(new_w), 1e-5)


@pytest.mark.sample(0, "cpu")
def test_groups_of_several_types_put_their_results_into_one_slot(place):
    kinds = [(F64, F64), (F32, F32), (F32, BF16), (F16, F32)] * 2
    weights, gradients = [], []
    for k, (dtype, gradient_dtype) in enumerate(kinds):
        (w,), (g,) = tensors(place, [(130 + k,)], dtype, gradient_dtype, seed=k)
        weights.append(w)
        gradients.append(g)
    before = [array(weight) for weight in weights]
    into = MetricsBuffer(ALL, len(weights))
    step(place, rules.sgd, weights, gradients, into)
    (found,) = values(into)
    assert into.count == 1
    for row, w, g, new_w in zip(found, before, gradients, weights, strict=True):
        if new_w.dtype == F16:  # whose rounding is no part of the update
            row, new_w = row[[0, 1, 4, 5, 7, 8]], array(new_w)
            expected, scale = (each[[0, 1, 4, 5, 7, 8]] for each in judged(w, array(g), new_w))
            assert np.all(np.abs(row - expected) <= 3e-6 * scale)
        else:
            check(row, w, array(g), array(new_w))


@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("strides", [(1, 40), (60, 1)], ids=["transposed", "with gaps"])
def test_any_layout(place, strides):
    """What lies between the elements is NaN."""
    (weight,), (gradient,) = tensors(place, [(40, 50)], F32)
    strange = torch.full((5000,), math.nan, device=place.device).as_strided((40, 50), strides, 3).copy_(weight)
    into = MetricsBuffer(ALL, 1)
    step(place, rules.sgd, [strange], [gradient], into)
    check(values(into)[0, 0], array(weight), array(gradient), array(strange))


def test_nan_and_infinity(place):
    (w, w2), (g, g2) = tensors(place, [(600,), (600,)], F32)
    g[5], g[7], g[599] = math.nan, math.inf, -math.inf
    g2[1] = -math.inf
    into = MetricsBuffer(ALL, 2)
    step(place, rules.sgd, [w, w2], [g, g2], into)
    found = dict(zip(NAMES, values(into)[0].T, strict=True))
    assert found["gradient_nonfinite"].tolist() == [3, 1]
    assert np.isfinite(found["weight_square"]).all()
    assert np.isfinite(found["weight_absmax"]).all()
    assert math.isnan(found["gradient_square"][0])
    assert math.isnan(found["gradient_absmax"][0])
    assert found["gradient_square"][1] == found["gradient_absmax"][1] == math.inf


def test_a_metric_of_ones_own(place):
    (w,), (g,) = tensors(place, [(2 * place.tile + 5,)], F32)
    before, gradient = array(w), array(g)
    into = MetricsBuffer(of_my_own, 1)
    step(place, rules.sgd, [w], [g], into)
    largest, cubes, ones, moved = values(into)[0, 0]
    update = array(w) - before
    terms = np.where(update > 0, 1, -1) * gradient**3
    assert largest == pytest.approx(np.max(np.abs(before) + np.abs(gradient)), rel=1e-6)
    assert abs(cubes - np.sum(terms)) <= 3e-6 * np.sum(np.abs(terms))
    assert ones == w.numel()
    assert moved == pytest.approx(np.max(np.abs(update)), rel=1e-5)


@pytest.mark.sample(0, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("what", ["weight", "gradient", "update"])
def test_histograms_count_between_powers_of_two_of_either_sign_and_zeros_apart(place, what):
    """Infinities are in the first and the last bin, where NumPy puts them, and NaN is in none."""
    rng, n = np.random.default_rng(2), 301 if place.engine == "triton" else 3001  # which may be interpreted
    w, g = (place.tensor(rng.normal(size=n) * 2.0 ** rng.integers(-34, 8, size=n), F32) for _ in range(2))
    w[:4] = torch.tensor([0.0, -0.0, -math.inf, 2.0**-28])
    g[:3] = torch.tensor([0.0, math.nan, math.inf])
    g[3:6] = torch.tensor([2.0**-28, 4.0, np.nextafter(np.float32(4), np.float32(0))])
    g[6:9] = torch.tensor([-0.0, -4.0, -(2.0**-28)])
    w[200:300:5], g[201:300:5], g[202:300:5] = math.inf, math.nan, -math.inf
    before = w.clone()
    into = MetricsBuffer(metrics.histogram(what), 1)
    step(place, rules.sgd, [w], [g], into)
    x = {"weight": before, "gradient": g, "update": w - before}[what].cpu().numpy()
    x = x[~np.isnan(x)]
    expected, _ = np.histogram(np.clip(x, -1e30, 1e30), bins=[-math.inf, *metrics.EDGES, math.inf])
    found = metrics.bins_of(values(into)[0, 0])
    assert found.sum() == x.size == n - {"weight": 0, "gradient": 21, "update": 42}[what]
    if what == "update":  # it is rounded in one more step here
        assert np.abs(found - expected).max() <= 2
    else:
        assert np.array_equal(found, expected)
        assert found[32] == np.count_nonzero(x == 0) > 1
        assert min(found[:32].sum(), found[33:].sum()) > n / 3
        assert found[0] + found[-1] >= 21


RULES = {
    "sgd": rules.sgd,
    "adam": rules.adam,
    "heavy_ball": rules.heavy_ball,  # with a sum of products, of which a compiler may fuse either
    "test": rules.test,
    "novograd": rules.novograd,  # which keeps numbers
    "cautious": transforms.cautious(rules.lion),
    "clipped": transforms.limited(rules.adamw),
    "group_adagrad": rules.group_adagrad,
    "muon": rules.muon,
}
FEW = ("novograd", "group_adagrad")


@pytest.mark.sample(2, "cpu")
@pytest.mark.sample(1, "triton")
@pytest.mark.parametrize("name", RULES)
def test_an_update_with_a_metric_is_the_same_to_the_bit(place, name):
    if place.engine == "triton" and name not in FEW:
        pytest.skip("NumPy computes there; test_codegen.py looks at the compiled code")
    rule = RULES[name]
    shapes = [(40, 7), (5,), (40, 7), (1029,)] if name != "muon" else [(40, 7), (5, 6), (40, 7), (1, 9)]
    outcomes = []
    for measured in (False, True):
        weights, gradients = tensors(place, shapes, F32)
        into = MetricsBuffer(ALL, 4) if measured else None
        before = [array(weight) for weight in weights]
        states = step(place, rule, weights, gradients, into, steps=3)
        outcomes.append([*weights, *(tensor for row in states for tensor in row)])
    for plain, measured in zip(*outcomes, strict=True):
        assert torch.equal(plain.nan_to_num(7.0), measured.nan_to_num(7.0))
    # and what is measured is the gradient as the rule gets it, and the whole of what it does
    first = values(into)[0]
    for row, w, g in zip(first, before, gradients, strict=True):
        expected, _ = judged(w, array(g), w)
        assert row[0] == pytest.approx(expected[0], rel=1e-5)
        assert row[1] == pytest.approx(expected[1], rel=1e-5)
    last = values(into)[2]
    weights, gradients = tensors(place, shapes, F32)
    states = step(place, rule, weights, gradients, steps=2)
    before = [array(weight) for weight in weights]
    step(place, rule, weights, gradients, states=states)
    for row, w, g, new_w in zip(last, before, gradients, weights, strict=True):
        check(row, w, array(g), array(new_w))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_random_rounding_is_the_same_to_the_bit(compiled_place, dtype):
    outcomes = []
    for measured in (False, True):
        weights, gradients = tensors(compiled_place, [(compiled_place.tile + 200,)], dtype)
        states = states_for(rules.adamw, weights, BF16)
        into = MetricsBuffer(ALL, 1) if measured else None
        step(compiled_place, rules.adamw, weights, gradients, into, states=states, steps=2, seed=3)
        outcomes.append([*weights, *states[0]])
    assert all(map(torch.equal, *outcomes))


def test_results_are_bit_for_bit_the_same_every_time_on_any_number_of_threads(place):
    shapes = [(2 * place.tile + 3,), (3,)] if place.engine != "eager" else [(70000,)]
    results, threads = [], torch.get_num_threads()
    try:
        for n in (1, 1, 2):
            torch.set_num_threads(n)
            weights, gradients = tensors(place, shapes, F32)
            into = MetricsBuffer(of_my_own, len(shapes))
            step(place, rules.sgd, weights, gradients, into)
            results.append(values(into))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_rows_are_those_of_the_places(place):
    weights, gradients = tensors(place, [(3,), (4,)], F32)
    before = [weight.clone() for weight in weights]
    with pytest.raises(ValueError, match=r"buffer has 1 rows, the offset of a weight is 1"):
        step(place, rules.sgd, weights, gradients, MetricsBuffer(ALL, 1))
    assert all(map(torch.equal, weights, before))
    into = MetricsBuffer(metrics.weight_square, 5)
    into.begin_step()
    for row, weight, gradient in zip((3, 1), weights, gradients, strict=True):
        run = Update(rules.sgd, [weight], [()], engine=place.engine)
        run.rng_offsets[:] = row
        run.bind([gradient])
        run(into)
    assert into.end_step()
    (found,) = values(into)
    squares = [np.sum(array(weight) ** 2) for weight in before]
    np.testing.assert_allclose(found, [[math.nan], [squares[1]], [math.nan], [squares[0]], [math.nan]], rtol=1e-6)


def test_values_of_one_name_are_refused():
    with pytest.raises(ValueError, match="several of them give a value 'weight_square'"):
        metrics.joined(metrics.weight_square, metrics.weight_square)
