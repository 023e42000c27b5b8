"""Norms and clipping of lists of tensors, on every engine, against NumPy in float64 and torch.nn.utils."""

# ruff: noqa: RUF059  # a rule names all its states and sums, whether it needs them or not

import math

import numpy as np
import pytest
import torch

from tristep.kernels import (
    clip_by_global_norm_,
    global_norm,
    norms,
    reduction,
    rule,
    tl,
)
from tristep.kernels.states import states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ORDERS = (1, 2, math.inf)


@pytest.fixture(autouse=True)
def on_this_engine(request, monkeypatch):
    if "place" in request.fixturenames:
        monkeypatch.setenv("TRISTEP_ENGINE", request.getfixturevalue("place").engine)


def tensors(place, dtypes=(F32,), shapes=((5, 3), (), (1500,), (0,), (4, 2, 3)), seed=0):
    rng = np.random.default_rng(seed)
    return [place.tensor(rng.normal(size=shape), dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]


def flat(found):
    return np.concatenate([tensor.double().cpu().numpy().ravel() for tensor in found])


def norm_of(found, ord):
    return np.linalg.norm(flat(found), ord)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtypes", [(F32,), (F64,), (BF16, F32), (F16, F64, F32, BF16)], ids=str)
def test_the_norm_is_that_of_one_long_vector(place, ord, dtypes):
    for seed in (0, 1, 0):  # the second time by a plan of the first
        found = tensors(place, dtypes, seed=seed)
        norm = global_norm(found, ord)
        assert (norm.shape, norm.device.type) == ((), place.device)
        assert norm.dtype == (F64 if F64 in dtypes else F32)
        assert norm.item() == pytest.approx(norm_of(found, ord), rel=1e-13 if dtypes == (F64,) else 2e-6)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("dtypes", [(F32,), (F64,), (BF16, F64, F32)], ids=str)
def test_clipping_is_torchs(place, ord, max_norm, dtypes):
    found = tensors(place, dtypes)
    peers = [torch.nn.Parameter(tensor.double()) for tensor in found]
    for peer in peers:
        peer.grad = peer.detach().clone() if peer.numel() else None  # of which torch knows no largest element
    expected = torch.nn.utils.clip_grad_norm_(peers, max_norm, ord)
    norm = clip_by_global_norm_(found, max_norm, ord)
    torch.testing.assert_close(norm.double(), expected, rtol=2e-6, atol=0)
    for tensor, peer in zip(found, peers, strict=True):
        rounding = {BF16: 2**-8, F32: 2e-6, F64: 2e-6 if BF16 in dtypes else 1e-13}[tensor.dtype]
        expected = peer.detach() if peer.grad is None else peer.grad
        torch.testing.assert_close(tensor.double(), expected, rtol=rounding, atol=0)


def test_tensors_with_gaps_in_other_orders_and_in_odd_places(place):
    def make():
        base = torch.arange(1.0, 25.0, device=place.device)
        return [
            base.clone().view(4, 6)[:, ::2],
            base.clone().view(4, 6).t(),
            base.clone()[1:6],
            base.clone().view(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
            torch._neg_view(base.clone()[:3]),
        ]

    for _ in range(2):
        found, before = make(), flat(make())
        norm = clip_by_global_norm_(found, 3.0)
        assert norm.item() == pytest.approx(np.linalg.norm(before), rel=2e-6)
        np.testing.assert_allclose(flat(found), before * 3.0 / (np.linalg.norm(before) + 1e-6), rtol=2e-6)


def test_a_plan_is_not_taken_for_tensors_with_gaps_of_equal_strides(place):
    """(2, 3) without gaps and (3, 2) with gaps: equal strides, equal numbers of elements."""
    whole, base = torch.ones(2, 3, device=place.device), torch.ones(3, 3, device=place.device)
    assert global_norm([whole]).item() == pytest.approx(math.sqrt(6))
    clip_by_global_norm_([whole], 1.0)
    clip_by_global_norm_([base[:, :2]], 1.0)
    np.testing.assert_allclose(base[:, :2].cpu(), 1 / math.sqrt(6), rtol=1e-5)
    assert base[:, 2].tolist() == [1.0] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_nonfinite_gradient_is_detected_at_any_position(place, value, ord, dtype):
    for size, at in [(6, 0), (6, 5), (3000, 1024), (3000, 2999)]:
        found = [torch.ones(7, dtype=dtype, device=place.device), torch.ones(size, dtype=dtype, device=place.device)]
        found[1][at] = value
        norm = clip_by_global_norm_(found, 1.0, ord).item()
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf
        assert found[0].isnan().all() if math.isnan(value) else (found[0] == 0).all()
        assert bool(found[1][at].isnan())


def test_none_and_empty(place):
    assert global_norm([]).item() == clip_by_global_norm_([], 1.0).item() == 0.0
    empty = [torch.zeros(0, device=place.device), torch.zeros(3, 0, device=place.device)]
    assert [clip_by_global_norm_(empty, 1.0, ord).item() for ord in ORDERS] == [0.0] * 3


@pytest.mark.parametrize("name", ["cpu", "eager"])
def test_neither_threads_nor_runs_change_a_bit(name, monkeypatch):
    if name == "cpu":
        pytest.importorskip("numba", reason="not installed")
    monkeypatch.setenv("TRISTEP_ENGINE", name)
    found = [torch.randn(300_000), torch.randn(70_000), torch.randn(3)]
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 1):
            torch.set_num_threads(n)
            norms._plans.clear()
            results.append([global_norm(found, ord).item() for ord in ORDERS])
    finally:
        torch.set_num_threads(threads)
    assert results == [results[0]] * 4


@reduction(scope="global", op="max")
def largest(w, g, state, hyper):
    return tl.abs(w), tl.abs(g)


@rule(reduction=largest)
def by_largest(w, g, state, hyper, sums):
    a, b = state
    w_max, g_max = sums
    return w, (w * 0.0 + w_max, w * 0.0 + g_max)


@reduction(op="max")
def largest_of_each(w, g, state, hyper):
    return (tl.abs(g),)


@rule(reduction=largest_of_each)
def by_largest_of_each(w, g, state, hyper, sums):
    (a,) = state
    (g_max,) = sums
    return w, (w * 0.0 + g_max,)


@pytest.mark.sample(2)
@pytest.mark.parametrize("made", [by_largest, by_largest_of_each], ids=lambda made: made.name)
def test_reductions_by_the_largest(place, made):
    weights, gradients = tensors(place, (F32, F64)), tensors(place, (F64, F32), seed=1)
    states = states_for(made, weights)
    place.run(made, weights, [None, *gradients[1:]], states, [[1.0]] * len(weights))
    active = list(zip(weights[1:], gradients[1:], states[1:], strict=True))
    for _, g, row in active:
        if row[0].numel():
            over = [g] if made is by_largest_of_each else gradients[1:]
            assert float(row[-1].flatten()[0]) == pytest.approx(norm_of(over, math.inf), rel=1e-6)
            if made is by_largest:
                assert float(row[0].flatten()[0]) == pytest.approx(norm_of(weights[1:], math.inf), rel=1e-6)
    assert not states[0][0].any()


X = torch.ones(3)
REFUSED = {
    "integers": (
        lambda: clip_by_global_norm_([X.long()], 1.0),
        TypeError,
        r"tensors\[0\] is torch.int64: must be one of torch.float64",
    ),
    "one place": (
        lambda: clip_by_global_norm_([X, torch.ones(1).expand(3)], 1.0),
        ValueError,
        r"tensors\[1\] has several elements in one place in memory",
    ),
    "ord": (lambda: global_norm([X], 3), ValueError, r"ord=3: must be 1, 2 or inf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()
    assert X.tolist() == [1.0] * 3
