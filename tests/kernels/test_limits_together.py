"""Limits by the norm of all gradients of a limited rule, and of several updates together.

The judge is the rule itself, given the clipped gradients.
"""

import copy
import math
from functools import partial

import pytest
import torch
from composed_rules import OF_ALL, clipped_to, close, norm_of, numbers, rows, same_bits, same_rows

from tristep.kernels import Update, rules, transforms
from tristep.kernels.reductions import join_totals

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Without states, with one and two reductions of their own, with per-tensor state, with a reduction that reads it, and of
# whole tensors.
FEW = ("sgd", "adamw", "lans", "novograd", "prodigy", "muon")


@pytest.fixture(name="numbers")
def _numbers(place):
    """A function giving weights, gradients and states of a rule."""
    return partial(numbers, place, kept=True)


# Limits of the norm of all gradients and of this update's, in this order, and what remains of a norm of 8; None: skipped.
TWO = {
    "neither": ({"clip_norm": 9.0}, 8.0),
    "the outer": ({"clip_norm_of_all": 2.0, "clip_norm": 3.0}, 2.0),
    "the inner": ({"clip_norm": 3.0}, 3.0),
    "both": ({"clip_norm_of_all": 4.0, "clip_norm": 3.0}, 3.0),
    "neither skips": ({"clip_norm_of_all": 4.0, "clip_norm": 9.0, "skip_square_of_all": 65.0, "skip_square": 17.0}, 4.0),
    "the outer skips": ({"clip_norm_of_all": 4.0, "clip_norm": 9.0, "skip_square_of_all": 63.0}, None),
    "the inner skips": ({"clip_norm_of_all": 4.0, "clip_norm": 9.0, "skip_square": 15.0}, None),
}


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu")
@pytest.mark.parametrize("limits", TWO)
@pytest.mark.parametrize("name", FEW)
def test_the_inner_of_two_limits_sees_what_the_outer_leaves(place, numbers, name, limits):
    """Muon updates vectors by another rule than matrices; the norms are of both together."""
    base, (values, remains) = getattr(rules, name), TWO[limits]
    made = transforms.limited(transforms.limited(base, True), True, hyper=OF_ALL)
    assert [limit.hyper for limit in made.limits] == [OF_ALL, ("clip_norm", "skip_square")]
    weights, gradients, states = numbers(made)
    share = 8.0 / norm_of(gradients)
    before = copy.deepcopy((weights, states))
    place.run(made, weights, [g * share for g in gradients], states, rows(made, **values))
    if remains is None:
        same_bits(weights, before[0])
        same_rows(states, before[1])
        return
    expected, others, expected_states = numbers(base)
    factor = share * clipped_to(values.get("clip_norm_of_all", math.inf), 8.0)
    factor *= clipped_to(values["clip_norm"], factor / share * 8.0)
    assert factor / share * 8.0 == pytest.approx(remains, rel=1e-6)
    place.run(base, expected, [g * factor for g in others], expected_states, rows(base))
    close((weights, states), (expected, expected_states), name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["adamw", "lans", "prodigy", "muon"])
def test_updates_may_take_a_step_with_a_limit_of_all_together(place, numbers, name):
    """Two, each with a limit of its own, too, of which the one of a single update of all weights has no part."""
    base = getattr(rules, name)
    outer = partial(transforms.limited, skips=True, hyper=OF_ALL)
    together, made = outer(base), outer(transforms.limited(base, True))
    values = dict(zip(OF_ALL, (1.5, 1e4), strict=True)) | {"clip_norm": math.inf}
    weights, gradients, states = numbers(together)
    others, _, other_states = numbers(together)
    parts = (slice(0, 1), slice(1, 3))
    if name == "prodigy":  # whose own sums are over all tensors of an update, so one has them all
        parts = (slice(0, 0), slice(0, 3))

    updates = [Update(made, others[part], other_states[part], engine=place.engine) for part in parts if part.stop]
    for factor in (1.0, 1e3, 0.01):  # the second is above the limit
        given = [factor * g for g in gradients]
        before = copy.deepcopy((weights, states))
        place.run(together, weights, given, states, rows(together, **values))
        if factor == 1e3:
            same_bits(weights, before[0])
        else:
            assert not torch.equal(weights[0], before[0][0])
        for update, part in zip(updates, [part for part in parts if part.stop], strict=True):
            update.hyper[:] = rows(made, **values)[0]
            update.bind(given[part])
        totals = [total for update in updates for total in update.begin()]
        join_totals(totals, "sum")
        for update in updates:
            update()
        close((others, other_states), (weights, states), name)


def test_a_limit_of_all_comes_before_those_of_each_update(place):
    """A limit of 5 of all gradients, of norms 6 and 8, and limits of 1 and 10 of each; numbers made by hand."""
    made = transforms.limited(transforms.limited(rules.sgd), hyper=OF_ALL)
    weights = [torch.zeros(1, dtype=F64, device=place.device) for _ in range(2)]
    updates = [Update(made, [w], [()], engine=place.engine) for w in weights]
    for update, g, own in zip(updates, (6.0, 8.0), (1.0, 10.0), strict=True):
        values = {"clip_norm_of_all": 5.0, "clip_norm": own, "lr": 1.0, "wd": 0.0}
        update.hyper[:] = [1.0, *rows(made, **values)[0][1:]]
        update.bind([torch.full((1,), g, dtype=F64, device=place.device)])
    join_totals([total for update in updates for total in update.begin()], "sum")
    for update in updates:
        update()
    assert [float(w) for w in weights] == pytest.approx([-1.0, -4.0], rel=2e-6)


def test_gradients_that_are_bound_anew_are_looked_at_anew(place):
    """What `look` has begun ends with the next `bind`."""
    made = transforms.limited(rules.sgd)
    w = torch.zeros(1, dtype=F64, device=place.device)
    update = Update(made, [w], [()], engine=place.engine)
    for gradient in (8.0, 2.0):
        update.hyper[:] = [1.0, *rows(made, clip_norm=1.0, lr=1.0, wd=0.0)[0][1:]]
        update.bind([torch.full_like(w, gradient)])
        if gradient == 8.0:
            update.begin()
    update()
    assert float(w) == pytest.approx(-1.0, rel=2e-6)
    with pytest.raises(RuntimeError, match="no gradients to step with"):
        Update(made, [w], [()], engine=place.engine).begin()
