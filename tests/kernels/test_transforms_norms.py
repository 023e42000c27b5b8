"""Transforms that need the norm of all gradients: clipping and skipped steps; and averages of weights with them.

The judge is the rule itself, given the clipped gradients.
"""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from composed_rules import VALUES, numbers, rows

from tristep.kernels import Update, rules, transforms
from tristep.kernels.states import states_for

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Without states, with one and two reductions of their own, with per-tensor state, with a reduction that reads it, with
# random numbers, and rules that are composed already.
RULES = {
    name: getattr(rules, name)
    for name in ("sgd", "adamw", "lamb", "lans", "lars_momentum", "novograd", "prodigy", "sgld", "sophia", "stable_adamw")
}
RULES |= {
    "cautious lamb": transforms.cautious(rules.lamb),
    "cautious prodigy": transforms.cautious(rules.prodigy),
    "skipping lans": transforms.apply_if_finite(rules.lans),
    "skipping prodigy": transforms.apply_if_finite(rules.prodigy),
}


@pytest.fixture(name="numbers")
def _numbers(place):
    """A function giving weights, gradients and states of a rule."""
    return partial(numbers, place, kept=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("clip_norm", [0.7, 1e4])
@pytest.mark.parametrize("name", RULES)
def test_a_clipped_rule_is_the_rule_on_clipped_gradients(place, numbers, name, clip_norm):
    base = RULES[name]
    made = transforms.clip_by_global_norm(base)
    weights, gradients, states = numbers(base)
    before = [g.clone() for g in gradients]
    expected, clipped, expected_states = numbers(base)
    norm = math.sqrt(sum(float((0.5 * g).square().sum()) for g in gradients))
    place.run(base, expected, [g * min(1.0, clip_norm / (norm + 1e-6)) for g in clipped], expected_states, rows(base))
    place.run(made, weights, gradients, states, rows(made, clip_norm=clip_norm))
    torch.testing.assert_close(gradients, before, rtol=0, atol=0)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(states, expected_states, rtol=1e-9, atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kinds", [((F32,), F32), ((BF16,), BF16), ((BF16,), F32), ((F32, F64, BF16), None)], ids=str)
def test_clipping_with_other_types(place, numbers, kinds):
    """The norm is that over all types."""
    made = transforms.clip_by_global_norm(rules.lamb)
    weights, gradients, states = numbers(made, *kinds)
    wide = [tensor.double() for tensor in weights], [tensor.double() for tensor in gradients]
    wide_states = [tuple(tensor.double() for tensor in row) for row in states]
    place.run(made, weights, gradients, states, rows(made))
    place.run(made, *wide, wide_states, rows(made))
    for w, expected, row, wide_row in zip(weights, wide[0], states, wide_states, strict=True):
        torch.testing.assert_close(w.double(), expected, rtol=1e-2 if w.dtype == BF16 else 4e-6, atol=1e-6)
        for tensor, other in zip(row, wide_row, strict=True):
            torch.testing.assert_close(tensor.double(), other, rtol=4e-6, atol=1e-6)


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes() if a.dtype != BF16 else torch.equal(a, b)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("kinds", [((F32,), F32), ((BF16, F64), None)], ids=str)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["adamw", "averaging lamb", "novograd", "prodigy"])
def test_a_step_with_nonfinite_gradients_changes_no_bit(place, numbers, name, clip, kinds, value):
    base = transforms.ema(transforms.cautious(rules.lamb)) if name == "averaging lamb" else RULES[name]
    made = transforms.apply_if_finite(transforms.clip_by_global_norm(base) if clip else base)
    weights, gradients, states = numbers(made, *kinds)
    masters = [w.float() * 1.001 if w.dtype == BF16 else None for w in weights]
    weights = [w if m is None else m.to(BF16) for w, m in zip(weights, masters, strict=True)]
    gradients[2][1200] = value
    before = copy.deepcopy((weights, states, masters))
    place.run(made, weights, gradients, states, rows(made), masters)
    same_bits(weights, before[0])
    for row, old in zip(states, before[1], strict=True):
        same_bits(row, old)
    same_bits([m for m in masters if m is not None], [m for m in before[2] if m is not None])


def test_a_sum_that_is_infinite_for_some_types_is_so_for_all(place):
    made = transforms.apply_if_finite(rules.sgd)
    weights = [torch.ones(3, dtype=dtype, device=place.device) for dtype in (F32, F64)]
    gradients = [torch.ones_like(weights[0]), torch.full_like(weights[1], 1e20)]
    place.run(made, weights, gradients, [(), ()], rows(made)[:2])
    assert [w.tolist() for w in weights] == [[1.0] * 3] * 2
    gradients[1] *= 1e-2
    place.run(made, weights, gradients, [(), ()], rows(made)[:2])
    assert all((w != 1.0).all() for w in weights)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RULES)
def test_a_finite_step_is_not_skipped(place, numbers, name):
    base = RULES[name]
    made = transforms.apply_if_finite(base)
    weights, gradients, states = numbers(base)
    expected, others, expected_states = numbers(base)
    place.run(base, expected, others, expected_states, rows(base))
    place.run(made, weights, gradients, states, rows(made))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(states, expected_states, rtol=1e-12, atol=1e-14)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sgd", "lamb", "novograd"])
def test_the_average_follows_the_weight(place, numbers, name):
    base = RULES[name]
    moves, rests = transforms.ema(base), transforms.ema(base, moves=False)
    assert moves.slots == rests.slots == (*base.state, "ema", *base.kept)
    expected, others, expected_states = numbers(base)
    place.run(base, expected, others, expected_states, rows(base))
    for made in (moves, rests):
        weights, gradients, states = numbers(base)
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


def test_copies_of_clipped_rules_and_their_reductions():
    made = transforms.apply_if_finite(transforms.cautious(transforms.clip_by_global_norm(rules.lans)))
    assert made.knows_total
    assert made.skips_nonfinite
    assert pickle.loads(pickle.dumps(made)) is made
    assert [pickle.loads(pickle.dumps(stage)) for stage in made.reductions] == list(made.reductions)
    assert transforms.clip_by_global_norm(rules.lans) is transforms.clip_by_global_norm(rules.lans)
    with pytest.raises(ValueError, match="has a state or hyper-parameter 'clip_norm' already"):
        transforms.clip_by_global_norm(made)
    with pytest.raises(ValueError, match="'adam_averaging' has a state or hyper-parameter 'ema' already"):
        transforms.ema(transforms.ema(rules.adam))
    for function in (transforms.agc, transforms.zclip, transforms.cautious):
        with pytest.raises(TypeError, match="rule must be elementwise, made with @rule, got TensorRule"):
            function(rules.muon)


COMPILE = """
import re
from triton.backends.compiler import GPUTarget
from tristep.kernels import transforms, rules
from tristep.kernels.backends.triton import compile as gpu

def found(rule, stage=None):
    compiled = gpu.compile_for(GPUTarget("cuda", 90, 32), rule, stage=stage)
    ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
    wide = re.findall(r"\\b(?:LDG|STG)\\.E\\S*", sass)
    return {
        "accesses": [len(re.findall(word, ptx)) for word in (r"ld\\.global\\S*v4", r"st\\.global\\S*v4")],
        "spills": len(re.findall(r"\\b(?:LDL|STL)\\b", sass)),
        "float64": len(re.findall(r"\\bD(?:ADD|MUL|FMA|SETP)\\b", sass)),
        "wide": sum(".128" in access for access in wide),
    }

clipped = transforms.clip_by_global_norm(rules.adamw)
result = {
    "plain": found(rules.adamw),
    "clipped": found(clipped),
    "skipping": found(transforms.apply_if_finite(clipped)),
    "averaging": found(transforms.ema(rules.adamw)),
    "square": found(clipped, 0),
}
"""


@pytest.mark.slow
@pytest.mark.sample(0)
def test_what_composed_rules_cost_a_gpu(compiling):
    """Clipping and leaving out read and write no more tensors than the rule; an average is one more, read and written."""
    found = compiling.run(COMPILE)
    assert all(one["spills"] == one["float64"] == 0 for one in found.values())
    assert found["clipped"]["accesses"] == found["skipping"]["accesses"] == found["plain"]["accesses"]
    loads, stores = found["plain"]["accesses"]
    assert (loads % 4, stores % 3) == (0, 0)
    assert found["averaging"]["accesses"] == [5, 4]  # of 4 elements a thread each, as of all rules of three states
    assert found["square"]["accesses"] == [2 * loads // 4, 0]  # the gradient alone, of 8 elements a thread


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
    made = transforms.clip_by_global_norm(rules.adamw)
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
