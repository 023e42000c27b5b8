"""The rule `spikes`, which follows norms of gradients, clips those far above their average, and skips steps far above their
running percentile. The judges are the papers' formulas and percentiles in NumPy. Gradients of this rule are sums of squares.
"""

import math
import pickle
from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy import float32

from tristep.kernels import Update, rules
from tristep.kernels.rules import spikes
from tristep.kernels.states import states_for

F64, F32 = torch.float64, torch.float32
AVERAGE, ESTIMATE = ("norm_mean", "norm_variance", "norm_count"), ("norm_percentile", "percentile_count", "step_taken")
NOTHING = {
    "clip_norm": math.inf, "zclip": math.inf, "one_minus_zclip_decay": 0.0, "zclip_warmup": 1, "skips": 0.0,
    "skip_square": math.inf, "skip_share": 0.5, "skip_rate": 0.0, "skip_factor": math.inf, "skip_warmup": 1,
}  # fmt: skip
ZCLIP = NOTHING | {"zclip": 2.0, "one_minus_zclip_decay": 0.25, "zclip_warmup": 3}
PERCENTILE = NOTHING | {"skips": 1.0, "skip_share": 0.9, "skip_rate": 0.2, "skip_factor": 2.0, "skip_warmup": 4}


def followed(place, norms, values, dtype=F64):
    """For each row of norms the factor that is found, an array, and the states by name."""
    norms = np.asarray(norms, dtype=np.float64)
    weight = place.tensor(np.zeros(norms.shape[1:]), dtype)
    (state,) = states_for(spikes, [weight])
    update = Update(spikes, [weight], [state], engine=place.engine)
    found = []
    for row in norms:
        update.hyper[:] = [1.0, *(values[name] for name in spikes.hyper)]
        update.bind([place.tensor(np.square(row), dtype)])
        update()
        numbers = {name: tensor.cpu().double().numpy().copy() for name, tensor in zip(spikes.state, state, strict=True)}
        found.append((weight.cpu().double().numpy().copy(), numbers))
    return found


def zclipped(norms, zclip=2.0, decay=0.75, warmup=3, limit=math.inf):
    """After each norm what gradients are multiplied by, mean, variance and number (Kumar et al. 2025, alg. 1; section 3)."""
    found, seen, mean, variance, count = [], [], 0.0, 0.0, 0
    for n in norms:
        clipped = n
        if len(seen) < warmup:
            seen.append(n)
            mean, variance = np.mean(seen), np.var(seen)
        else:
            z = (n - mean) / (math.sqrt(variance) + 1e-6)
            if z > zclip:
                clipped = mean + math.sqrt(variance) * zclip / (z / zclip)
            mean = decay * mean + (1 - decay) * clipped
            variance = decay * variance + (1 - decay) * (clipped - mean) ** 2
        count, clipped = count + 1, min(clipped, limit)
        found.append((clipped / (n + 1e-6) if clipped < n else 1.0, mean, variance, count))
    return found


def estimated(norms, share=0.9, rate=0.2, factor=2.0, warmup=4):
    """After each norm the estimate, how many it is of, and whether the step is taken (Andrew et al. 2021)."""
    logs, found, c = [], [], 0.0
    for n in norms:
        taken = math.isfinite(n) and (len(logs) < warmup or n <= factor * c)
        if math.isfinite(n) and n > 0:
            c = c * math.exp(-rate * ((1 if n <= c else 0) - share)) if 2 * len(logs) >= warmup else None
            logs.append(math.log(n))
            c = math.exp(np.mean(logs)) if c is None else c
        found.append((c, len(logs), float(taken)))
    return found


def turned(norms, n):
    """Norms of n elements, [n_norms, n], or [n_norms] of a tensor without dimensions: each element begins at another one."""
    rolled = np.stack([np.roll(norms, -k) for k in range(len(norms))], axis=1)
    return rolled[:, 0] if n is None else rolled[:, np.arange(n) % len(norms)]


def each(oracle, norms, **options):
    """What the oracle finds for each element, [n_norms, n_elements, n_numbers] or [n_norms, n_numbers]."""
    if norms.ndim == 1:
        return np.array(oracle(norms, **options))
    different = min(norms.shape[1], len(norms))
    columns = [oracle(norms[:, k], **options) for k in range(different)]
    return np.array([columns[k % different] for k in range(norms.shape[1])]).swapaxes(0, 1)


PRECISION = {F64: {"rtol": 1e-9, "atol": 1e-12}, F32: {"rtol": 3e-5, "atol": 3e-6}}
SIZES = pytest.mark.parametrize(("size", "dtype"), [(None, F64), (None, F32), (150, F64), (150, F32)])


@SIZES
@pytest.mark.parametrize("limit", [math.inf, 0.9])
def test_spikes_are_clipped_as_in_the_paper(place, size, dtype, limit):
    norms = turned((1.0, 1.2, 0.7, 1.1, 8.0, 1.0, 0.2, 2.5, 900.0, 1.1), size)
    expected = each(zclipped, norms, limit=limit)
    found = followed(place, norms, ZCLIP | {"clip_norm": limit}, dtype)
    for n, (factor, numbers), wanted in zip(norms, found, expected, strict=True):
        names = ("clip_scale", *AVERAGE)
        np.testing.assert_allclose(np.stack([numbers[name] for name in names], -1), wanted, **PRECISION[dtype])
        np.testing.assert_array_equal(factor, numbers["clip_scale"])
        np.testing.assert_allclose(numbers["norm_square"], np.square(n), rtol=1e-6)
        assert (numbers["step_taken"] == 1.0).all()
        assert not numbers["percentile_count"].any()
    assert np.count_nonzero(expected[..., 0] < 0.9) >= 2


# A norm that is 0, one that is NaN, a spike, an infinite norm, and a lasting change of their level.
NORMS = (1.0, 2.0, 0.8, 0.0, math.nan, 1.2, 30.0, math.inf, 0.9, 9.0, 9.3, 9.1, 9.4, 9.2, 8.9, 8.7, 0.4)


@SIZES
def test_steps_above_a_percentile_are_skipped(place, size, dtype):
    norms = turned(NORMS, size)
    expected = each(estimated, norms)
    for (factor, numbers), wanted in zip(followed(place, norms, PERCENTILE, dtype), expected, strict=True):
        np.testing.assert_allclose(np.stack([numbers[name] for name in ESTIMATE], -1), wanted, **PRECISION[dtype])
        np.testing.assert_array_equal(factor, np.where(wanted[..., 2] > 0, 1.0, -1.0))
        assert not numbers["norm_count"].any()
    taken = estimated(NORMS)
    assert [each for *_, each in taken] == [1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]


def test_what_is_skipped_is_no_part_of_the_average_but_of_the_percentile(place):
    """Above the percentile, or a given norm."""
    norms = (1.0, 1.2, 50.0, 0.7, 3.0, 60.0, 4.0)
    both = ZCLIP | PERCENTILE | {name: ZCLIP[name] for name in ("zclip", "one_minus_zclip_decay", "zclip_warmup")}
    for values, factor in ((both, 2.0), (both | {"skip_square": 100.0, "skip_factor": 1e3}, 1e3)):
        found, wanted = followed(place, norms, values), estimated(norms, factor=factor)
        taken = [each if n < 10 or factor < 10 else 0.0 for n, (*_, each) in zip(norms, wanted, strict=True)]
        assert [float(numbers["step_taken"]) for _, numbers in found] == taken
        assert 0.0 in taken
        assert [factor < 0 for factor, _ in found] == [not each for each in taken]
        average = zclipped([n for n, each in zip(norms, taken, strict=True) if each])
        for k, ((factor, numbers), (percentile, count, _)) in enumerate(zip(found, wanted, strict=True)):
            scale, *mean = average[sum(map(bool, taken[: k + 1])) - 1]
            assert factor == pytest.approx(scale if taken[k] else -1.0)
            assert [float(numbers[name]) for name in AVERAGE] == pytest.approx(mean)
            assert [float(numbers[name]) for name in ESTIMATE[:2]] == pytest.approx([percentile, count])


def test_norms_that_are_not_finite_are_not_averaged(place):
    """Gradients with such a norm reach the weights, with whatever factor, unless such steps are skipped."""
    norms = (1.0, 2.0, math.nan, math.inf, 1.5, 1.0)
    for skips in (0.0, 1.0):
        found = followed(place, norms, ZCLIP | {"skips": skips}, F32)
        scale, *wanted = zclipped((1.0, 2.0, 1.5, 1.0))[-1]
        factor, numbers = found[-1]
        assert factor == pytest.approx(scale, rel=1e-5)
        assert [float(numbers[name]) for name in AVERAGE] == pytest.approx(wanted, rel=1e-5)
        assert [bool(found[k][0] < 0) for k in (2, 3)] == [bool(skips)] * 2


def test_a_given_norm_is_the_limit_of_what_is_taken(place):
    limit = float(float32(9.0))
    for norm, taken in ((3.0, 1.0), (float(np.nextafter(float32(3.0), float32(4.0))), 0.0), (1e-30, 1.0), (0.0, 1.0)):
        ((factor, numbers),) = followed(place, [norm], NOTHING | {"skips": 1.0, "skip_square": limit})
        assert (float(factor), float(numbers["step_taken"])) == (1.0 if taken else -1.0, taken)
        assert not any(numbers[name].any() for name in ("norm_mean", "norm_count", "norm_percentile", "percentile_count"))


@pytest.mark.parametrize("share", [0.5, 0.95])
@pytest.mark.parametrize("rate", [0.02, 0.2])
def test_the_estimate_converges_to_the_percentile(rate, share):
    """400 runs on norms whose logarithms are normal, with deviation s and density f at the percentile.

    Where d, the distance in logarithms, is small, it moves by -rate f d on average and by noise of the variance
    rate^2 share (1 - share). So its variance becomes v = rate share (1 - share) / 2f; its mean z v / 2s, as the mean share
    below it is exact, with z the percentile in deviations.
    """
    runs, steps, s = 400, int(20 / rate), 0.3
    z = NormalDist().inv_cdf(share)
    v = rate * share * (1 - share) / 2 / (NormalDist().pdf(z) / s)
    values = PERCENTILE | {"skip_share": share, "skip_rate": rate}
    weight, g = torch.zeros(runs, dtype=F64), torch.zeros(runs, dtype=F64)
    (state,) = states_for(spikes, [weight])
    kept = state[spikes.state.index("norm_percentile")]
    update = Update(spikes, [weight], [state], engine="eager")
    update.hyper[:] = [1.0, *(values[name] for name in spikes.hyper)]
    update.bind([g])
    norms, below = np.exp(s * np.random.default_rng(0).normal(size=(steps, runs))), np.zeros(runs)
    for k, row in enumerate(norms):
        if k == 2:
            first = kept.numpy().copy()
        below += (row <= kept.numpy()) * (k >= 2)
        g.copy_(torch.from_numpy(row**2))
        update()
    found = kept.numpy()
    distance = np.log(found) - np.log(np.percentile(norms, 100 * share))
    assert abs(distance.mean() - z * v / (2 * s)) < 4 * math.sqrt(v / runs) + 0.5 * z * v / (2 * s)
    assert distance.std() == pytest.approx(math.sqrt(v), rel=0.2)
    moved = np.log(found / first) / rate  # exactly what shares below are off by
    np.testing.assert_allclose(share * (steps - 2) - below, moved, rtol=1e-9, atol=1e-6)


def test_the_rule_is_pickled_by_name_and_is_none_of_optimizers():
    """test_limits_together.py has rules that are told what it finds, and tests of trainers both together."""
    assert pickle.loads(pickle.dumps(spikes)) is spikes
    assert "spikes" not in rules.__all__
