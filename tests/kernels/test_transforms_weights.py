"""Transforms of a rule's step by its weights: cautious weight decay. The judge is the paper's formula in NumPy, on what the
rule itself makes of the same numbers.
"""

import math
import pickle

import numpy as np
import pytest
import torch

from tristep.kernels import rules, transforms
from tristep.kernels.states import states_for

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
VALUES = {
    "lr": 0.1, "wd": 0.3, "decay": 0.02, "clip": math.inf, "epsilon": 1e-3, "correction1": 1.5, "correction2": 1.2,
    "correction3": 1.1, "lower_bound": 0.0, "upper_bound": math.inf, "eta": 0.5, "scaled": 1.0, "alpha": 2.0,
    "decoupled_decay": 0.02, "momentum": 0.9, "seen": 1.0,
}  # fmt: skip
VALUES |= dict.fromkeys(("beta1", "beta2", "beta3"), 0.9) | {f"one_minus_beta{k}": 0.1 for k in (1, 2, 3)}
SHAPES = ((5, 3), (), (1500,))


def hyper(made, **others):
    values = VALUES | others
    return [1.0, *(values[name] for name in made.hyper)]


def numbers(place, made, dtype=F64):
    """Weights, gradients and states of a rule, none of them zero; always the same."""
    rng = np.random.default_rng(0)
    weights = [place.tensor(rng.normal(size=shape), dtype) for shape in SHAPES]
    gradients = [place.tensor(rng.normal(size=shape), dtype) for shape in SHAPES]
    states = states_for(made, weights)
    for row in states:
        for tensor in row[: len(made.state)]:
            tensor.copy_(torch.tensor(np.abs(rng.normal(size=tensor.shape)) + 0.1))
    return weights, gradients, states


def result(place, made, numbers, **others):
    """New weights and states as NumPy arrays after a step of this rule."""
    weights, gradients, states = numbers
    place.run(made, weights, gradients, states, [hyper(made, **others)] * len(weights))
    return [w.cpu().numpy() for w in weights], [[s.cpu().numpy() for s in row] for row in states]


DECAYING = {
    "adamw": (rules.adamw, "decay"),
    "lion": (rules.lion, "decay"),
    "adan": (rules.adan, "decay"),
    "stable_adamw": (rules.stable_adamw, "wd"),
    "decoupled sgd": (transforms.decoupled_weight_decay(rules.sgd_momentum), "decoupled_decay"),
    "cautious adamw": (transforms.cautious(rules.adamw), "decay"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DECAYING)
def test_decay_is_left_out_where_the_step_has_another_direction(place, name):
    base, decay = DECAYING[name]
    made = transforms.cautious_weight_decay(base, (decay,))
    assert (made.slots, made.hyper, made.reductions) == (base.slots, base.hyper, base.reductions)
    coupled = {"wd": 0.0} if decay != "wd" else {}
    before = [w.cpu().numpy().copy() for w in numbers(place, base)[0]]
    decayed, states = result(place, base, numbers(place, base), **coupled)
    bare, _ = result(place, base, numbers(place, base), **coupled, **{decay: 0.0})
    found, found_states = result(place, made, numbers(place, made), **coupled)
    for w, with_decay, without, new in zip(before, decayed, bare, found, strict=True):
        u = w - without  # alg. 1, with the rate in u and in the decay
        np.testing.assert_allclose(new, w - u + (u * w >= 0) * (with_decay - without), rtol=1e-12, atol=1e-14)
        assert w.size < 100 or 0.1 < (u * w >= 0).mean() < 0.9
    for row, expected in zip(found_states, states, strict=True):
        for a, b in zip(row, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


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


def test_cautious_decay_of_what_has_none_is_refused():
    with pytest.raises(ValueError, match="rule 'sgd' has none of the hyper-parameters 'decay', 'decoupled_decay'"):
        transforms.cautious_weight_decay(rules.sgd)
    with pytest.raises(TypeError, match="rule must be elementwise"):
        transforms.cautious_weight_decay(rules.muon)
    made = transforms.cautious_weight_decay(rules.adamw)
    assert pickle.loads(pickle.dumps(made)) is made
