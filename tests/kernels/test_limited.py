"""Rules whose gradients are clipped, and whose steps are skipped, by the norm of all gradients.

The judge is the rule itself, given the clipped gradients.
"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from composed_rules import OF_ALL, VALUES, clipped_to, close, norm_of, numbers, rows, same_bits, same_rows

from tristep.kernels import Update, rules, transforms
from tristep.kernels.states import states_for

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Without states, with one and two reductions of their own, with per-tensor state, with a reduction that reads it, with
# random numbers, and rules that are composed already.
RULES = {
    name: getattr(rules, name)
    for name in ("sgd", "adamw", "lamb", "lans", "lars_momentum", "novograd", "prodigy", "sgld", "stable_adamw")
}
RULES |= {
    "cautious lamb": transforms.cautious(rules.lamb),
    "cautious prodigy": transforms.cautious(rules.prodigy),
    "averaging lamb": transforms.ema(transforms.cautious(rules.lamb)),
    "limited lans": transforms.limited(rules.lans, True),
    "limited prodigy": transforms.limited(rules.prodigy, True),
}


@pytest.fixture(name="numbers")
def _numbers(place):
    """A function giving weights, gradients and states of a rule."""
    return partial(numbers, place, kept=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("clip_norm", "skips"), [(0.7, False), (0.7, True), (1e4, False), (math.inf, True)])
@pytest.mark.parametrize("name", RULES)
def test_a_limited_rule_is_the_rule_on_clipped_gradients(place, numbers, name, clip_norm, skips):
    base = RULES[name]
    names = OF_ALL if base.limits else ("clip_norm", "skip_square")
    made = transforms.limited(base, skips, hyper=names)
    assert made.slots == base.slots
    assert sorted(made.hyper) == sorted((*base.hyper, *names[: 1 + skips]))
    weights, gradients, states = numbers(base)
    before = [g.clone() for g in gradients]
    expected, others, expected_states = numbers(base)
    norm = norm_of(gradients)
    place.run(base, expected, [g * clipped_to(clip_norm, norm) for g in others], expected_states, rows(base))
    values = dict(zip(names, (clip_norm, norm**2 * (1 + 1e-9)), strict=True))
    place.run(made, weights, gradients, states, rows(made, **values))
    torch.testing.assert_close(gradients, before, rtol=0, atol=0)
    close((weights, states), (expected, expected_states), name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kinds", [((F32,), F32), ((BF16,), BF16), ((BF16,), F32), ((F32, F64, BF16), None)], ids=str)
def test_limits_with_other_types(place, numbers, kinds):
    """The norm is that over all types."""
    made = transforms.limited(rules.lamb)
    weights, gradients, states = numbers(made, *kinds)
    wide = [tensor.double() for tensor in weights], [tensor.double() for tensor in gradients]
    wide_states = [tuple(tensor.double() for tensor in row) for row in states]
    place.run(made, weights, gradients, states, rows(made))
    place.run(made, *wide, wide_states, rows(made))
    for w, expected, row, wide_row in zip(weights, wide[0], states, wide_states, strict=True):
        torch.testing.assert_close(w.double(), expected, rtol=1e-2 if w.dtype == BF16 else 4e-6, atol=1e-6)
        for tensor, other in zip(row, wide_row, strict=True):
            torch.testing.assert_close(tensor.double(), other, rtol=4e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [math.nan, -math.inf, "above the limit"])
@pytest.mark.parametrize("kinds", [((F64,), F64), ((F32,), F32), ((BF16, F64), None)], ids=str)
@pytest.mark.parametrize("clip_norm", [0.7, math.inf])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lans", "averaging lamb", "novograd", "prodigy", "limited prodigy"])
def test_a_skipped_step_changes_no_bit(place, numbers, name, clip_norm, kinds, value):
    base = RULES[name]
    names = OF_ALL if base.limits else ("clip_norm", "skip_square")
    made = transforms.limited(base, True, hyper=names)
    weights, gradients, states = numbers(made, *kinds)
    masters = [w.float() * 1.001 if w.dtype == BF16 else None for w in weights]
    weights = [w if m is None else m.to(BF16) for w, m in zip(weights, masters, strict=True)]
    limit = norm_of(gradients) ** 2 * (1 - (1e-9 if kinds[0] == (F64,) else 1e-3))
    if isinstance(value, float):
        gradients[2][1200], limit = value, math.inf
    before = copy.deepcopy((weights, states, masters))
    for skip_square in {limit, min(limit, 0.0)}:
        values = dict(zip(names, (clip_norm, limit if isinstance(value, float) else skip_square), strict=True))
        place.run(made, weights, gradients, states, rows(made, **values), masters)
        same_bits(weights, before[0])
        same_rows(states, before[1])
        same_bits([m for m in masters if m is not None], [m for m in before[2] if m is not None])


def test_a_sum_that_is_infinite_for_some_types_is_so_for_all(place):
    made = transforms.limited(rules.sgd, True)
    weights = [torch.ones(3, dtype=dtype, device=place.device) for dtype in (F32, F64)]
    gradients = [torch.ones_like(weights[0]), torch.full_like(weights[1], 1e20)]
    place.run(made, weights, gradients, [(), ()], rows(made)[:2])
    assert [w.tolist() for w in weights] == [[1.0] * 3] * 2
    gradients[1] *= 1e-2
    place.run(made, weights, gradients, [(), ()], rows(made)[:2])
    assert all((w != 1.0).all() for w in weights)


def test_an_infinite_limit_is_none_but_for_infinity(place):
    made = transforms.limited(rules.sgd, True)
    w = torch.ones(3, device=place.device)
    for value, moves in ((math.nan, False), (math.inf, False), (1e25, False), (1.0, True)):
        place.run(made, [w], [torch.full_like(w, value)], [()], rows(made, clip_norm=math.inf)[:1])
        assert bool((w != 1.0).all()) == moves


def test_tensors_of_all_types_are_skipped_together(place):
    """Around the limit, where the squares of some types are rounded and others' are not; also without a gradient for one."""
    from tristep.trainer.optimizer.limits import square_limit

    made = transforms.limited(rules.novograd, True)
    limit = 3.0
    for excess in (-1e-6, -1e-9, 0.0, 1e-9, 2e-8, 1e-6):
        weights = [torch.ones(2, dtype=dtype, device=place.device) for dtype in (F32, F64, F32, F64)]
        states = states_for(made, weights)
        update = Update(made, weights, states, engine=place.engine)
        update.hyper[1:] = [1.0, *rows(made, clip_norm=math.inf, skip_square=square_limit(limit))[0][1:]]
        gradients = [None, *(torch.zeros_like(w) for w in weights[1:])]
        gradients[1][0] = limit * (1 + excess)
        gradients[2][1] = 1e-5
        update.bind(gradients)
        update()
        moved = {not torch.equal(w, torch.ones_like(w)) for w in weights[1:]}
        assert len(moved) == 1
        assert moved == {excess < 4e-8}
        kept = {float(row[-1]) != 0.0 for row, g in zip(states, gradients, strict=True) if g is not None and g.any()}
        assert kept == moved


def test_copies_of_limited_rules_and_what_is_refused():
    made = transforms.limited(transforms.limited(transforms.cautious(rules.lans)), True, hyper=OF_ALL)
    assert [limit.skips for limit in made.limits] == [True, False]
    assert pickle.loads(pickle.dumps(made)) is made
    assert [pickle.loads(pickle.dumps(stage)) for stage in made.reductions] == list(made.reductions)
    assert transforms.limited(rules.lans) is transforms.limited(rules.lans, False)
    whole = transforms.limited(transforms.limited(rules.muon), True, hyper=OF_ALL)
    assert pickle.loads(pickle.dumps(whole)) is whole
    assert whole.limits == whole.elementwise_rule.limits
    with pytest.raises(ValueError, match="has a state or hyper-parameter 'clip_norm' already"):
        transforms.limited(transforms.limited(rules.lans))
    with pytest.raises(ValueError, match="'adam_limited' needs the norm over all tensors already: apply agc before"):
        transforms.agc(transforms.limited(rules.adam))
    for function in (transforms.agc, transforms.cautious):
        with pytest.raises(TypeError, match="rule must be elementwise, made with @rule or @rule_by_shape, got StagedRule"):
            function(rules.muon)


@pytest.fixture
def walked(monkeypatch, small_tiles):
    """The kernels that the triton engine launches from now on, and the tiles of tensors that each walks, in order."""
    launch = pytest.importorskip("tristep.kernels.backends.triton.launch", reason="Triton has builds for Linux only")
    found = []

    class Noting(launch.KernelCall):
        def __init__(self, kernel, programs, arguments, *others):
            super().__init__(kernel, programs, arguments, *others)
            self.name, self.tiles = kernel.__name__, arguments[4]

        def __call__(self, *last):
            if self.name != "totals_kernel":
                found.append((self.name, self.tiles.tolist()))
            super().__call__(*last)

    monkeypatch.setattr(launch, "KernelCall", Noting)
    return found


def clipped_step(flipped=False):
    """Weights and states after a step on tensors of two types, so two groups; `flipped` reverses the tiles of updates."""
    made = transforms.limited(rules.adamw)
    weights = [torch.linspace(-1, 1, 1500), torch.ones(700, dtype=BF16), torch.ones(3)]
    weights = [w.to("cuda" if torch.cuda.is_available() else "cpu") for w in weights]
    states = states_for(made, weights)
    update = Update(made, weights, states, engine="triton")
    update.hyper[:] = [0.5, *(VALUES[name] for name in made.hyper)]
    update.bind([torch.full_like(w, 0.25) for w in weights])
    for group in update.groups if flipped else ():
        group._tiles.copy_(group._tiles.flip(0))
    update()
    return [*weights, *(state for row in states for state in row)]


def test_the_pass_after_the_norm_goes_backwards(walked):
    """From what the norm has read last, which is still cached, and in the last group first. Results are the same bits."""
    found = clipped_step()
    norms, updates = walked[:2], walked[2:]
    assert [name for name, _ in walked] == ["sums_kernel"] * 2 + ["update_kernel"] * 2
    tile = 1024 if torch.cuda.is_available() else 128
    first = [[0, k] for k in range(-(-1500 // tile))] + [[1, 0]]
    second = [[0, k] for k in range(-(-700 // tile))]
    assert [tiles for _, tiles in updates] == [second[::-1], first[::-1]]
    assert all(tiles == sorted(tiles) for _, tiles in norms)
    walked.clear()
    assert all(map(torch.equal, found, clipped_step(flipped=True)))
    assert [tiles for _, tiles in walked[2:]] == [second, first]
