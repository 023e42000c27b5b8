"""Rules made of rules, on every engine: against the papers' formulas in NumPy, on what the rule itself makes of the same
numbers; what states cost that a rule leaves as they are; names."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from composed_rules import hyper, numbers, result, same_states

from tristep.kernels import rules, transforms

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Rules without states, with reductions, per-tensor state, random numbers, a state that only passes through, decay of another
# name, names that the composed rule would choose, and sums and means of rows for matrices only.
RULES = ("sgd", "adamw", "lamb", "lars_momentum", "novograd", "sgld", "stable_adamw", "ademamix", "adan", "came")
APART = {"stable_adamw": ("wd",)}


@pytest.fixture(name="numbers")
def _numbers(place):
    """A function giving weights, gradients and states of a rule."""
    return partial(numbers, place, kept=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RULES)
def test_a_cautious_rule_masks_its_step_and_nothing_else(place, numbers, name):
    base = getattr(rules, name)
    apart = APART.get(name, ("decay",))
    made = transforms.cautious(base, apart)
    assert (made.slots, made.hyper) == (base.slots, base.hyper)
    before, gradients, _ = numbers(base)
    full, states = result(place, base, *numbers(base))
    bare, _ = result(place, base, *numbers(base), **dict.fromkeys(apart, 0.0))
    found, found_states = result(place, made, *numbers(made))
    same_states(found_states, states)
    shares = []
    for w, g, w_full, w_bare, new in zip(before, gradients, full, bare, found, strict=True):
        step = w_bare - w.cpu().numpy()
        mask = step * g.cpu().numpy() < 0
        shares.append(mask.mean())
        expected = w.cpu().numpy() + step * mask / max(mask.mean(), 1e-3) + (w_full - w_bare)
        np.testing.assert_allclose(new, expected, rtol=1e-9, atol=1e-12)
    assert name in ("sgd", "lars_momentum") or 0 < min(shares[0], shares[2]) < 1
    assert name not in ("adamw", "stable_adamw", "adan") or not np.allclose(full[0], bare[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb", "lars_momentum", "novograd", "sgld"])
def test_a_decoupled_rule_decays_in_addition_to_its_step(place, numbers, name):
    base = getattr(rules, name)
    made = transforms.decoupled_weight_decay(base)
    assert made.hyper == (*base.own_hyper, "decoupled_decay", *base.hyper[len(base.own_hyper) :])
    before, _, _ = numbers(base)
    undecayed, states = result(place, base, *numbers(base), wd=0.0)
    found, found_states = result(place, made, *numbers(made), wd=0.0)
    same_states(found_states, states)
    for w, stepped, new in zip(before, undecayed, found, strict=True):
        np.testing.assert_allclose(new, stepped - 0.02 * w.cpu().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sgd", "lamb", "novograd", "sgld", "ademamix", "came"])
def test_lookahead_moves_the_slow_weight_where_it_is_time(place, numbers, name):
    base = getattr(rules, name)
    sync, between = transforms.lookahead(base), transforms.lookahead(base, sync=False)
    assert sync.slots == between.slots == (*base.state, "slow_weight", *base.kept)
    plain, states = result(place, base, *numbers(base))
    for made, others, moves in [(sync, {"sync": 1.0}, True), (sync, {"sync": 0.0}, False), (between, {}, False)]:
        weights, gradients, rows = numbers(base)
        slow, n = [w.cos().cpu().numpy() for w in weights], len(base.state)
        own = [(*row[:n], w.cos(), *row[n:]) for w, row in zip(weights, rows, strict=True)]
        found, found_states = result(place, made, weights, gradients, own, **others)
        same_states(found_states, states)
        for w, old, new, row in zip(plain, slow, found, found_states, strict=True):
            np.testing.assert_allclose(new, old + 0.3 * (w - old) if moves else w, rtol=1e-12, atol=1e-14)
            np.testing.assert_array_equal(row["slow_weight"], new if moves else old)


@pytest.mark.sample(1)
def test_rules_are_composed_in_any_depth(place, numbers):
    """LAMB, whose own reduction comes first; masked, decayed and synchronised at once."""
    made = transforms.lookahead(transforms.decoupled_weight_decay(transforms.cautious(rules.lamb)))
    assert [stage.name for stage in made.reductions] == ["lamb_squares", "lamb_agreement"]
    weights, gradients, states = numbers(made)
    before, slow = ([tensor.cpu().numpy().copy() for tensor in each] for each in (weights, [row[2] for row in states]))
    clones = [w.clone() for w in weights], gradients, [tuple(tensor.clone() for tensor in row[:2]) for row in states]
    masked, _ = result(place, transforms.cautious(rules.lamb), *clones, wd=0.0)
    found, _ = result(place, made, weights, gradients, states, wd=0.0, sync=1.0)
    for new, stepped, old, w in zip(found, masked, slow, before, strict=True):
        np.testing.assert_allclose(new, old + 0.3 * (stepped - 0.02 * w - old), rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kinds", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
def test_composed_rules_of_other_types(place, numbers, kinds):
    """In float32 the share is that of float64, and the result its rounding."""
    made = transforms.lookahead(transforms.cautious(rules.adamw))
    weights, gradients, states = numbers(made, *kinds)
    wide = [tensor.double() for tensor in weights], [tensor.double() for tensor in gradients]
    wide_states = [tuple(tensor.double() for tensor in row) for row in states]
    rows = [hyper(made, sync=1.0)] * 3
    place.run(made, weights, gradients, states, rows)
    place.run(made, *wide, wide_states, rows)
    for w, expected, row, wide_row in zip(weights, wide[0], states, wide_states, strict=True):
        torch.testing.assert_close(w.double(), expected, rtol=1e-2 if w.dtype == BF16 else 2e-6, atol=1e-6)
        for tensor, other in zip(row, wide_row, strict=True):
            torch.testing.assert_close(tensor.double(), other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [6, 3000])
def test_what_is_not_a_number_stays_that_under_a_mask(place, size):
    w, g = torch.ones(size, device=place.device), torch.ones(size, device=place.device)
    g[2] = math.nan
    made = transforms.cautious(rules.sgd)
    place.run(made, [w], [g], [()], [hyper(made, wd=0.0)])
    assert w.isnan().tolist() == [i == 2 for i in range(size)]


def test_masks_of_steps_nowhere_or_hardly_anywhere_down_the_gradient(place):
    """A share below a thousandth counts as that."""
    made = transforms.cautious(rules.sgd_momentum)
    w, mom = torch.ones(4, device=place.device), torch.full((4,), 1.0, device=place.device)
    place.run(made, [w], [torch.ones_like(w)], [(mom,)], [hyper(made, wd=0.0)])
    assert w.tolist() == [1.0] * 4
    assert mom.tolist() == pytest.approx([0.8] * 4)
    w, mom = torch.zeros(4000, device=place.device), torch.ones(4000, device=place.device)
    mom[7] = 0.0  # whose step alone is along its gradient
    place.run(made, [w], [torch.ones_like(w)], [(mom,)], [hyper(made, wd=0.0, lr=0.01)])
    assert w.nonzero().tolist() == [[7]]
    assert w[7].item() == pytest.approx(-0.01 * 1000)


# States that a rule leaves as they are.

TEXTS = {
    "all": ("    a, b = state\n    return w - g, (a + g, b * 2.0)", ("a", "b"), ("a", "b")),
    "read only": ("    a, b = state\n    return w - a, (a, b + g)", ("b",), ("a", "b")),
    "neither": ("    a, b = state\n    return w, (a, b + g)", ("b",), ("b",)),
    "written only": ("    a, b = state\n    return w, (g, b)", ("a",), ("a",)),
    "exchanged": ("    a, b = state\n    return w, (b, a)", ("a", "b"), ("a", "b")),
    "copied": ("    a, b = state\n    return w, (a, a)", ("b",), ("a", "b")),
    "assigned anew": ("    a, b = state\n    a = a + g\n    return w, (a, b)", ("a",), ("a",)),
    "as they came": ("    a, b = state\n    return w + b, state", (), ("b",)),
    "by a function": ("    a, b = state\n    return same(w, a, b)", ("a", "b"), ("a", "b")),
    "state assigned": ("    a, b = state\n    state = (b, a)\n    return w, state", ("a", "b"), ("a", "b")),
}


@pytest.mark.parametrize("what", TEXTS)
def test_states_that_come_back_as_they_were_are_known(write_rules, what):
    body, changed, used = TEXTS[what]
    text = f"@jit\ndef same(w, a, b):\n    return w, (a, b)\n\n@rule\ndef r(w, g, state, hyper):\n{body}\n"
    found = write_rules(text).r
    assert (found.changed, found.used) == (changed, used)


@pytest.mark.parametrize("size", [3, 5000])
def test_states_that_a_rule_leaves_as_they_are_are_not_written(place, write_rules, size):
    """Here such a state has the position of one that is changed: written after it, it would undo the change."""
    text = "@rule\ndef r(w, g, state, hyper):\n    a, b = state\n    return w + b, (a + g, b)\n"
    memory = torch.ones(size, device=place.device)
    w = torch.zeros(size, device=place.device)
    place.run(write_rules(text).r, [w], [torch.ones_like(w)], [(memory, memory)], [[1.0]])
    assert memory.tolist() == [2.0] * size
    assert w.tolist() == [1.0] * size


# Names.


AWKWARD = """
@rule
def awkward(weight, slope, memory, numbers, index):
    w, stepped, state = memory
    g, tl, rule = numbers
    return weight - g * slope + w * 0.0, (stepped, state, w * tl + rule)
"""


def test_names_of_the_rule_never_meet_those_of_the_text(place, write_rules):
    base = write_rules(AWKWARD).awkward
    made = transforms.lookahead(transforms.cautious(base))
    assert made.state == ("w", "stepped", "state", "slow_weight")
    assert made.hyper == ("g", "tl", "rule", "lookahead_alpha", "sync")
    weight = torch.zeros(3, device=place.device)
    states = [tuple(torch.full((3,), value, device=place.device) for value in (1.0, 2.0, 3.0, 10.0))]
    place.run(made, [weight], [torch.ones_like(weight)], states, [[1.0, 0.5, 4.0, 0.25, 0.5, 1.0]])
    assert weight.tolist() == [10.0 + 0.5 * (-0.5 - 10.0)] * 3
    assert [state.tolist() for state in states[0]] == [[2.0] * 3, [3.0] * 3, [4.25] * 3, weight.tolist()]


def test_a_name_that_is_there_already_is_refused():
    with pytest.raises(ValueError, match="'adam_lookahead' has a state or hyper-parameter 'slow_weight' already"):
        transforms.lookahead(transforms.lookahead(rules.adam))
