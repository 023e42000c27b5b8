"""Updates skipped far above a running percentile of norms. The judges are the paper's formula and percentiles in NumPy, and
the rule itself.
"""

import copy
import math
import pickle
from statistics import NormalDist

import numpy as np
import pytest
import torch
from composed_rules import SHAPES, VALUES, rows

from tristep.kernels import Update, rules, transforms
from tristep.kernels.states import states_for

F64, F32 = torch.float64, torch.float32
# Without states, with reductions of their own, with per-tensor states; on gradients that are changed by the norm of all.
RULES = {name: getattr(rules, name) for name in ("sgd", "adamw", "lans", "novograd", "prodigy")}
RULES |= {
    "clipped lamb": transforms.clip_by_global_norm(rules.lamb),
    "adamw, zclip, agc": transforms.hyperball(transforms.zclip(transforms.agc(rules.adamw))),
}
# A norm that is 0, one that is NaN, a spike, an infinite norm, and a lasting change of their level.
NORMS = (1.0, 2.0, 0.8, 0.0, math.nan, 1.2, 30.0, math.inf, 0.9, *[9.0] * 7, 0.4)


def followed(norms, share=0.9, rate=0.2, factor=2.0, warmup=4):
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RULES)
def test_updates_above_a_percentile_change_no_bit(place, name):
    """Others do as without the transform."""
    base = RULES[name]
    made = transforms.skip_above_percentile(base)
    assert set(made.slots) - set(base.slots) >= {"norm_percentile", "percentile_count", "step_taken"}
    rng = np.random.default_rng(0)
    weights = [place.tensor(rng.normal(size=shape), F64) for shape in SHAPES]
    gradients = [place.tensor(rng.normal(size=shape), F64) for shape in SHAPES]
    expected = [w.clone() for w in weights]
    states, expected_states = states_for(made, weights), states_for(base, weights)
    for row, own in zip(states, expected_states, strict=True):
        for tensor, other in zip(row[: len(base.state)], own, strict=False):
            tensor.copy_(other.copy_(torch.tensor(np.abs(rng.normal(size=tensor.shape)) + 0.1)))
    norm = math.sqrt(sum(float((0.5 * g).square().sum()) for g in gradients))
    for n, (percentile, count, taken) in zip(NORMS, followed(NORMS), strict=True):
        before = copy.deepcopy((weights, states))
        given = [g * (n / norm) for g in gradients]
        place.run(made, weights, given, states, rows(made))
        if taken:
            place.run(base, expected, given, expected_states, rows(base))
        else:
            torch.testing.assert_close(weights, before[0], rtol=0, atol=0)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        for row, old, own in zip(states, before[1], expected_states, strict=True):
            slots, old_slots = (dict(zip(made.slots, each, strict=True)) for each in (row, old))
            found = [float(slots[slot]) for slot in ("norm_percentile", "percentile_count", "step_taken")]
            assert found == pytest.approx([percentile, count, taken], rel=1e-9)
            torch.testing.assert_close([slots[slot] for slot in base.slots], list(own), rtol=1e-9, atol=1e-12)
            if not taken:
                for slot in base.slots:
                    torch.testing.assert_close(slots[slot], old_slots[slot], rtol=0, atol=0)
    assert [taken for *_, taken in followed(NORMS)] == [1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_norm_above_a_given_one_is_skipped_and_counted(place):
    made = transforms.skip_above_percentile(rules.sgd)
    w = torch.ones(1, device=place.device)
    (state,) = states_for(made, [w])
    norms = (1.0, 1.2, 50.0, 0.7, 3.0, 60.0)
    for norm in norms:
        before = float(w)
        place.run(
            made, [w], [torch.full_like(w, 2 * norm)], [state], rows(made, skip_square=100.0, skip_factor=1e3, wd=0.0)[:1]
        )
        assert (float(w) == before) == (norm > 10)
    percentile, count, taken = followed(norms, factor=1e3)[-1]
    assert (percentile, count, taken) != (0.0, 0, 0.0)
    assert [float(each) for each in state[:3]] == pytest.approx([percentile, count, 0.0], rel=1e-5)


def test_tensors_of_all_types_are_skipped_together(place):
    """Also without a gradient for one; and the sum of squares of all is what is compared."""
    made = transforms.skip_above_percentile(rules.novograd)
    dtypes = (F32, F64, torch.bfloat16, F64)
    weights = [torch.ones(2, dtype=dtype, device=place.device) for dtype in dtypes]
    states = states_for(made, weights)
    update = Update(made, weights, states, engine=place.engine)
    update.hyper[1:] = [1.0, *rows(made)[0][1:]]
    norms = (1.0, 1.5, 1.0, 2.0, 6.0, 1.0)
    for norm, (percentile, count, taken) in zip(norms, followed(norms), strict=True):
        before = copy.deepcopy(weights)
        update.bind([None, *(torch.full_like(w, norm / math.sqrt(6)) for w in weights[1:])])
        update()
        assert [not torch.equal(a, b) for a, b in zip(weights, before, strict=True)] == [False, *[taken == 1.0] * 3]
        for row in states:
            found = [float(each) for each in row[made.slots.index("norm_percentile") :][:3]]
            assert found == pytest.approx([percentile, count, taken], rel=2e-3)  # gradients of bfloat16 are rounded
    assert [taken for *_, taken in followed(norms)] == [1, 1, 1, 1, 0, 1]


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
    watching = transforms.skip_above_percentile(rules.sgd).reductions[0]
    values = VALUES | {"skip_share": share, "skip_rate": rate}
    hyper = [torch.tensor(values[name], dtype=F64) for name in watching.finish_hyper]
    norms = np.exp(s * np.random.default_rng(0).normal(size=(steps, runs)))
    kept, below = tuple(torch.zeros(4, runs, dtype=F64)), np.zeros(runs)
    for k, row in enumerate(norms):
        if k == 2:
            first = kept[0].numpy()
        below += (row <= kept[0].numpy()) * (k >= 2)
        kept = watching.finished((torch.from_numpy(row**2),), kept, hyper)
    found = kept[0].numpy()
    distance = np.log(found) - np.log(np.percentile(norms, 100 * share))
    assert abs(distance.mean() - z * v / (2 * s)) < 4 * math.sqrt(v / runs) + 0.5 * z * v / (2 * s)
    assert distance.std() == pytest.approx(math.sqrt(v), rel=0.2)
    moved = np.log(found / first) / rate  # exactly what shares below are off by
    np.testing.assert_allclose(share * (steps - 2) - below, moved, rtol=1e-9, atol=1e-6)


def test_copies_and_what_comes_after():
    made = transforms.skip_above_percentile(transforms.zclip(rules.lans))
    assert (made.knows_total, made.skips_nonfinite, made.skip_above, made.skip_by) == (True, True, None, "step_taken")
    assert transforms.ema(made).skip_by == "step_taken"
    assert pickle.loads(pickle.dumps(made)) is made
    assert [pickle.loads(pickle.dumps(stage)) for stage in made.reductions] == list(made.reductions)
    with pytest.raises(ValueError, match="has a state or hyper-parameter 'skip_share' already"):
        transforms.skip_above_percentile(made)
