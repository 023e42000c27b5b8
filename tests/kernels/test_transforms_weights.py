"""Transforms by weights: adaptive gradient clipping, cautious weight decay, and averages of weights.

The judges are the papers' formulas in NumPy and pytorch_optimizer, on what the rule itself makes of the same numbers.
"""

import math

import numpy as np
import pytest
import torch
from composed_rules import hyper, numbers, result, rows, same_states

from tristep.kernels import rules, transforms

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("pytorch_optimizer.optimizer.agc", reason="the reference library is not installed").agc


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sgd", "adamw", "lans", "novograd", "cautious lamb"])
def test_gradients_are_clipped_by_the_ratio_of_norms(place, reference, name):
    """As pytorch_optimizer does for vectors, whose unit is the whole vector."""
    base = transforms.cautious(rules.lamb) if name == "cautious lamb" else getattr(rules, name)
    made = transforms.agc(base)
    assert made.slots == base.slots
    for ratio in (0.02, 2.0):
        weights, gradients, states = numbers(place, made)
        weights[0] *= 1e-6  # of which the norm counts as 0.001
        expected, others, expected_states = numbers(place, base)
        expected[0] *= 1e-6
        clipped = [
            reference(w.flatten(), 0.5 * g.flatten(), agc_clip_val=ratio).view(w.shape) * 2.0
            for w, g in zip(expected, others, strict=True)
        ]
        assert sum(not torch.equal(a, b) for a, b in zip(clipped, others, strict=True)) == (3 if ratio < 1 else 1)
        place.run(base, expected, clipped, expected_states, rows(base))
        place.run(made, weights, gradients, states, rows(made, agc=ratio))
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(states, expected_states, rtol=1e-9, atol=1e-12)


def test_zeros_and_nan_are_clipped_to_themselves(place):
    made = transforms.agc(rules.sgd)
    w = torch.zeros(4, device=place.device)
    g = torch.tensor([1.0, math.nan, 0.0, -1.0], device=place.device)
    row = [[1.0, *rows(made, lr=1.0, wd=0.0)[0][1:]]]
    place.run(made, [w], [torch.zeros_like(g)], [()], row)
    assert w.tolist() == [0.0] * 4
    place.run(made, [w], [g], [()], row)
    assert w.isnan().tolist() == [False, True, False, False]


DECAYING = {
    "adamw": (rules.adamw, "decay"),
    "lion": (rules.lion, "decay"),
    "adan": (rules.adan, "decay"),
    "stable_adamw": (rules.stable_adamw, "wd"),
    "decoupled sgd": (transforms.decoupled_weight_decay(rules.sgd_momentum), "decoupled_decay"),
    "cautious adamw": (transforms.cautious(rules.adamw), "decay"),
}


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("name", DECAYING)
def test_decay_is_left_out_where_the_step_has_another_direction(place, name):
    base, decay = DECAYING[name]
    made = transforms.cautious_weight_decay(base, (decay,))
    assert (made.slots, made.hyper, made.reductions) == (base.slots, base.hyper, base.reductions)
    coupled = {"wd": 0.0} if decay != "wd" else {}
    before = [w.cpu().numpy().copy() for w in numbers(place, base)[0]]
    decayed, states = result(place, base, *numbers(place, base), **coupled)
    bare, _ = result(place, base, *numbers(place, base), **coupled, **{decay: 0.0})
    found, found_states = result(place, made, *numbers(place, made), **coupled)
    for w, with_decay, without, new in zip(before, decayed, bare, found, strict=True):
        u = w - without  # alg. 1, with the rate in u and in the decay
        np.testing.assert_allclose(new, w - u + (u * w >= 0) * (with_decay - without), rtol=1e-12, atol=1e-14)
        assert w.size < 100 or 0.1 < (u * w >= 0).mean() < 0.9
    same_states(found_states, states)


def test_the_signs_of_small_steps_and_of_none_are_right(place):
    """The product of the first ones is 0 in float32. A step of zero decays; NaN stays what it is."""
    made = transforms.cautious_weight_decay(transforms.decoupled_weight_decay(rules.sgd))
    tiny = 1e-30
    w = place.tensor([tiny, tiny, -tiny, -tiny, 1.0, 0.0, 1.0], F32)
    g = place.tensor([tiny, -tiny, tiny, -tiny, 0.0, 1.0, math.nan], F32)
    place.run(made, [w], [g], [()], [hyper(made, wd=0.0, lr=0.5, decoupled_decay=0.25)])
    expected = torch.tensor([0.25 * tiny, 1.5 * tiny, -1.5 * tiny, -0.25 * tiny, 0.75, -0.5, math.nan])
    torch.testing.assert_close(w.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)


def test_states_are_those_of_the_step_that_is_taken(place, write_rules):
    """Of a rule whose state has the decay in it."""
    text = """
@rule
def remembering(w, g, state, hyper):
    (last,) = state
    lr, decay = hyper
    step = lr * g + decay * w
    return w - step, (step,)
"""
    made = transforms.cautious_weight_decay(write_rules(text).remembering)
    w, last = place.tensor([1.0, 1.0], F64), place.tensor([0.0, 0.0], F64)
    place.run(made, [w], [place.tensor([1.0, -1.0], F64)], [(last,)], [[1.0, 0.5, 0.25]])
    assert w.tolist() == [0.25, 1.5]
    assert last.tolist() == [0.75, -0.5]


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("name", ["sgd", "lamb", "novograd"])
def test_the_average_follows_the_weight(place, name):
    base = getattr(rules, name)
    made = transforms.ema(base)
    assert made.slots == (*base.state, "ema", *base.kept)
    expected, others, expected_states = numbers(place, base, kept=True)
    place.run(base, expected, others, expected_states, rows(base))
    weights, gradients, states = numbers(place, base, kept=True)
    averages = [w.cos() for w in weights]
    n = len(base.state)
    own = [(*row[:n], average, *row[n:]) for row, average in zip(states, averages, strict=True)]
    before = [average.clone() for average in averages]
    place.run(made, weights, gradients, own, rows(made))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
    for average, old, w in zip(averages, before, weights, strict=True):
        torch.testing.assert_close(average, old + 0.25 * (w - old), rtol=1e-12, atol=1e-14)
    place.run(transforms.moving_average, weights, gradients, [(average,) for average in averages], [[1.0]] * 3)
    torch.testing.assert_close(weights, averages, rtol=0, atol=0)
