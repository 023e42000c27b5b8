"""How many stored weights a step leaves as they are: counted by every engine, and by torch on copies of the weights."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tristep.kernels import MetricsBuffer, Update, metrics, rule, storage

pytestmark = pytest.mark.usefixtures("small_tiles")

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
BOTH = metrics.joined(metrics.weight_unchanged, metrics.gradient_zeros)


@rule
def plain_sgd(w, g, state, hyper):
    (lr,) = hyper
    return w - lr * g, state


class Stored(NamedTuple):
    weight: torch.dtype
    master: torch.dtype | None = None
    seed: int | None = None
    lr: float = 1e-3  # so that some weights change and others do not


STORED = {
    "float64": Stored(F64, lr=3e-16),
    "float32": Stored(F32, lr=1e-7),
    "float16": Stored(F16),
    "bfloat16": Stored(BF16),
    "stochastic": Stored(BF16, seed=3),
    "master": Stored(BF16, F32, lr=1e-7),
    "split": Stored(BF16, torch.int16, lr=1e-7),
    "split8": Stored(BF16, torch.int8, lr=1e-5),
    "split8 stochastic": Stored(BF16, torch.int8, 3, lr=1e-5),
    "float16 master": Stored(F16, F32, lr=1e-7),
}


def bits(tensor):
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def kept_bits(before, after):
    """How many elements have the same bits in all tensors that a weight is stored as, but for the sign of 0."""
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0] is not None]
    same = [(bits(a) == bits(b)) | ((a == 0) & (b == 0)) for a, b in pairs]
    return int(torch.stack(same).all(dim=0).sum())


def sgd(place, weights, masters, lr, seed=None, control=None):
    update = Update(plain_sgd, weights, [()] * len(weights), masters, place.engine, None, seed, control)
    update.hyper[:, :2] = 1.0, lr
    return update


def values(into):
    return into.values(into.arrived(wait=True))


def weights_of(place, stored, sizes, rng):
    wide = [place.tensor(rng.normal(size=n), F64 if stored.weight == F64 else F32) for n in sizes]
    weights = [each.to(stored.weight, copy=True) for each in wide]
    if stored.master in (None, F32):
        return weights, [None if stored.master is None else each for each in wide]
    pairs = zip(weights, wide, strict=True)
    return weights, [storage.master_for(weight, each, stored.master) for weight, each in pairs]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STORED)
def test_count_is_that_of_equal_bits(name, place):
    stored, rng = STORED[name], np.random.default_rng(1)
    sizes = (700, 0, 1, 2 * place.tile + 5) if place.engine == "triton" else (700, 0, 1, 70000)
    weights, masters = weights_of(place, stored, sizes, rng)
    into = MetricsBuffer(BOTH, len(sizes))
    update = sgd(place, weights, masters, stored.lr, stored.seed)
    for step in range(2):
        gradients = [place.tensor(rng.normal(size=n) * (rng.random(n) > 0.1), stored.weight) for n in sizes]
        update.bind(gradients)
        if stored.seed is not None:
            update.hyper[:, -1] = step
        before = [[None if each is None else each.clone() for each in pair] for pair in zip(weights, masters, strict=True)]
        into.begin_step()
        update(into)
        into.end_step()
        expected = [kept_bits(*each) for each in zip(before, zip(weights, masters, strict=True), strict=True)]
        found = dict(zip(BOTH.names, values(into)[step].T, strict=True))
        assert found["weight_unchanged"].tolist() == expected
        assert found["gradient_zeros"].tolist() == [int((gradient == 0).sum()) for gradient in gradients]
        assert 70 < expected[0] < 690


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_zeros_are_equal_whatever_their_signs_and_nan_never_is(place, dtype):
    weight = place.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, math.inf, 1.0], dtype)
    gradient = place.tensor([0.0, -0.0, 0.0, 1.0, 0.0, math.inf, math.nan], dtype)
    before = weight.clone()
    into = MetricsBuffer(BOTH, 1)
    into.begin_step()
    update = sgd(place, [weight], None, 1.0)
    update.bind([gradient])
    update(into)
    assert into.end_step()
    expected = int((before == weight).sum())
    assert bits(weight)[1] != bits(before)[1]  # -0 - -0 is 0
    assert values(into)[0, 0, -1] == expected == 4


def test_skipped_steps_count_nothing_and_skipped_tensors_are_nan(place):
    weights = [place.tensor([1.0, 2.0], F32), place.tensor([3.0], F32)]
    gradients = [torch.ones_like(weights[0]), None]
    control = torch.tensor([1.0, 1.0], device=place.device)
    into = MetricsBuffer(BOTH, 2)
    update = sgd(place, weights, None, 0.0, control=control)
    for skip in (1.0, 0.0):
        control[1] = skip
        update.bind(gradients)
        into.begin_step()
        update(into)
        into.end_step()
    found = values(into)
    assert np.isnan(found[:, 1]).all()
    assert found[:, 0].tolist() == [[0.0, 0.0], [0.0, 2.0]]


def test_alone_it_needs_no_other_metric(place):
    """2 - 2^-8 is rounded to 2."""
    weight, gradient = place.tensor([1.0, 2.0, 0.5], BF16), place.tensor([0.0, 1.0, 1.0], BF16)
    into = MetricsBuffer(metrics.weight_unchanged, 1)
    into.begin_step()
    update = sgd(place, [weight], None, 2.0**-8)
    update.bind([gradient])
    update(into)
    assert into.end_step()
    assert values(into).tolist() == [[[2.0]]]
    assert weight.tolist() == [1.0, 2.0, 0.5 - 2.0**-8]
