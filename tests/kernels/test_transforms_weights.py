"""Transforms by weights: adaptive gradient clipping, cautious weight decay, weights on spheres, and averages of weights. The
judges are the papers' formulas in NumPy and pytorch_optimizer, on what the rule itself makes of the same numbers.
"""

import math
import pickle

import numpy as np
import pytest
import torch
from composed_rules import hyper, numbers, result, rows, same_states

from tristep.kernels import Update, rules, transforms
from tristep.kernels.states import states_for

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


def test_what_cannot_be_composed_is_refused():
    with pytest.raises(ValueError, match="rule 'sgd' has none of the hyper-parameters 'decay', 'decoupled_decay'"):
        transforms.cautious_weight_decay(rules.sgd)
    with pytest.raises(ValueError, match="'adam_averaging' has a state or hyper-parameter 'ema' already"):
        transforms.ema(transforms.ema(rules.adam))
    with pytest.raises(ValueError, match="'adam_on_sphere' has a state or hyper-parameter 'hyperball_lr' already"):
        transforms.hyperball(transforms.hyperball(rules.adam))
    with pytest.raises(TypeError, match="rule must be elementwise"):
        transforms.hyperball(rules.muon)
    made = transforms.hyperball(rules.adam)
    for each in (transforms.cautious_weight_decay(rules.adamw), made, made.reduction):
        assert pickle.loads(pickle.dumps(each)) is each


def on_sphere(w, stepped, radius, lr):
    """The paper's formula, with the direction of w - stepped; the weight where there is none, as of a masked step."""
    u = w - stepped
    if not u.any():
        return w
    v = w - lr * radius * u / np.linalg.norm(u)
    return radius * v / np.linalg.norm(v)


SPHERICAL = {name: getattr(rules, name) for name in ("sgd", "adamw", "lamb", "lans", "novograd", "sgd_momentum")}
SPHERICAL |= {"cautious lamb": transforms.cautious(rules.lamb), "clipped": transforms.limited(rules.adamw)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SPHERICAL)
def test_weights_stay_on_their_spheres(place, name):
    """Two steps; the second one on the sphere of the first, whatever the norm has become."""
    base = SPHERICAL[name]
    made = transforms.hyperball(base)
    added = ("radius", "weight_scale", "step_scale")
    assert made.slots == (*base.state, *added, *base.kept) or made.slots == (*base.slots, *added)
    undecayed = {"wd": 0.0, "decay": 0.0, "clip_norm": 0.5}
    weights, gradients, states = numbers(place, made)
    bare, _, bare_states = numbers(place, base)
    radii = [np.linalg.norm(w.cpu().numpy()) for w in weights]
    for scale in (1.0, 1.5):
        for w, own, ours, row in zip(weights, bare, bare_states, states, strict=True):
            w *= scale
            own.copy_(w)
            for slot, tensor in zip(base.slots, ours, strict=True):
                tensor.copy_(row[made.slots.index(slot)])
        before = [w.cpu().numpy().copy() for w in weights]
        result(place, base, bare, gradients, bare_states, **undecayed)
        result(place, made, weights, gradients, states, clip_norm=0.5, wd=0.0 if "lamb" in name or "lans" in name else 0.3)
        for w, stepped, radius, new in zip(before, bare, radii, weights, strict=True):
            expected = on_sphere(w, stepped.cpu().numpy(), radius, 0.1)
            np.testing.assert_allclose(new.cpu().numpy(), expected, rtol=1e-9, atol=1e-12)
            assert np.linalg.norm(expected) == pytest.approx(radius) or (w == stepped.cpu().numpy()).all()
        for row, ours in zip(states, bare_states, strict=True):
            for slot, tensor in zip(base.slots, ours, strict=True):
                torch.testing.assert_close(row[made.slots.index(slot)], tensor, rtol=1e-12, atol=1e-14)


def sphere_step(place, w, g, dtype=F32, lr=0.5, masters=None, state=None):
    made = transforms.hyperball(rules.sgd)
    w, g = place.tensor(w, dtype), place.tensor(g, dtype)
    if state is None:
        (state,) = states_for(made, [w])
    place.run(made, [w], [g], [state], [hyper(made, lr=1.0, hyperball_lr=lr)], masters)
    return w, [float(each) for each in state], state


def test_tensors_without_a_sphere_a_direction_or_a_number(place):
    w, kept, state = sphere_step(place, [0.0, 0.0], [3.0, 4.0])  # the rule's own step
    assert (w.tolist(), kept) == ([-3.0, -4.0], [-1.0, 1.0, 1.0])
    w, kept, _ = sphere_step(place, w.tolist(), [1.0, 1.0], state=state)  # for good
    assert (w.tolist(), kept[0]) == ([-4.0, -5.0], -1.0)
    w, kept, _ = sphere_step(place, [3.0, 4.0], [0.0, 0.0])
    assert (w.tolist(), kept) == ([3.0, 4.0], [5.0, 1.0, 0.0])
    w, kept, _ = sphere_step(place, [3.0, 4.0], [3.0, 4.0], lr=1.0)  # through the centre, where there is no direction
    assert (w.tolist(), kept) == ([3.0, 4.0], [5.0, 1.0, 0.0])
    w, _, _ = sphere_step(place, -2.0, 1.0)
    assert w.item() == -2.0
    w, _, _ = sphere_step(place, [3.0, 4.0], [math.nan, 0.0])
    assert w.isnan().all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_norms_do_not_drift(place, dtype):
    """After a thousand steps, 30 of them where the engine is slow, the norm is that of the first weight, to rounding."""
    made, rng = transforms.hyperball(rules.sgd), np.random.default_rng(3)
    w = place.tensor(rng.normal(size=64), dtype)
    masters = [w.float() * 1.001] if dtype == BF16 else None
    kept_in = w if masters is None else masters[0]
    radius = kept_in.double().norm()
    (state,) = states_for(made, [w])
    update = Update(made, [w], [state], masters, engine=place.engine)
    g = torch.zeros_like(w)
    update.bind([g])
    for _ in range(30 if place.engine == "triton" and place.device == "cpu" else 1000):
        g.copy_(torch.tensor(rng.normal(size=64)))
        update.hyper[:] = hyper(made, hyperball_lr=0.3)
        update()
    assert float(kept_in.double().norm()) == pytest.approx(float(radius), rel=4 * torch.finfo(kept_in.dtype).eps)
    torch.testing.assert_close(w, kept_in.to(dtype), rtol=0, atol=0)


@pytest.mark.sample(1)
def test_spheres_of_other_types_are_those_of_float64(place):
    """A bfloat16 weight with a master, and one without, whose norm is the sphere's to the rounding of its elements."""
    rng = np.random.default_rng(4)
    values, g = rng.normal(size=1500), place.tensor(rng.normal(size=1500), BF16).double().cpu().numpy()
    start = place.tensor(values, BF16).double().cpu().numpy()
    expected = on_sphere(start, start - g, np.linalg.norm(start), 0.5)
    for masters in (None, [place.tensor(start, F32)]):
        w, _, _ = sphere_step(place, start, g, BF16, masters=masters)
        np.testing.assert_allclose(w.double().cpu().numpy(), expected, rtol=4e-3, atol=1e-6)
        if masters:
            np.testing.assert_allclose(masters[0].cpu().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("name", ["sgd", "lamb", "novograd"])
def test_the_average_follows_the_weight(place, name):
    base = getattr(rules, name)
    moves, rests = transforms.ema(base), transforms.ema(base, moves=False)
    assert moves.slots == rests.slots == (*base.state, "ema", *base.kept)
    expected, others, expected_states = numbers(place, base, kept=True)
    place.run(base, expected, others, expected_states, rows(base))
    for made in (moves, rests):
        weights, gradients, states = numbers(place, base, kept=True)
        averages = [w.cos() for w in weights]
        n = len(base.state)
        own = [(*row[:n], average, *row[n:]) for row, average in zip(states, averages, strict=True)]
        before = [average.clone() for average in averages]
        place.run(made, weights, gradients, own, rows(made))
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
        for average, old, w in zip(averages, before, weights, strict=True):
            new = old + 0.25 * (w - old) if made is moves else old
            torch.testing.assert_close(average, new, rtol=1e-12, atol=1e-14)
        place.run(transforms.moving_average, weights, gradients, [(average,) for average in averages], [[1.0]] * 3)
        torch.testing.assert_close(weights, averages, rtol=0, atol=0)
