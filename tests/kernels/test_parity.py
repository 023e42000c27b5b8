"""Every rule on every engine and in every type does what the published equations say, to the last bits.

The oracles are NumPy in more digits (`oracles/optimizer_table.py`). test_optim.py compares some with torch.optim.
"""

import math
from itertools import chain

import numpy as np
import pytest
import torch
import ulps
from optimizer_table import ORACLES
from parity_steps import HYPER, SUM_ERROR, Step, hyper_row
from rule_cases import COMPILED_RULES, RULES

from tristep.kernels import TensorRule, Update, rule, rules, tl, update
from tristep.kernels.language.ops import TORCH_OPS
from tristep.optimizer import create

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = (F64, F32, F16, BF16)
SMALL = [(), (0,), (1,), (3, 5), (2, 0, 3)]
MATRICES = [(3, 5), (5, 3), (2, 4, 3), (2, 4, 3), (70, 30)]  # more, for rules of whole tensors: each form, with both rows


def test_every_rule_has_an_oracle():
    assert sorted(ORACLES) == sorted(rules.__all__)


@pytest.mark.parametrize("rule", RULES)
def test_an_eager_step_is_the_oracles(eager_place, rule):
    _check_step(eager_place, rule, F32, 1030)


@pytest.mark.cover("rule", "compiled_place")
@pytest.mark.parametrize("rule", COMPILED_RULES)
def test_a_compiled_step_is_the_oracles(compiled_place, rule):
    _check_step(compiled_place, rule, F32, compiled_place.tile + 1)


@pytest.mark.parametrize("rule", [rules.sgd, rules.adamw, rules.lamb], ids=lambda rule: rule.name)
@pytest.mark.parametrize("more", [-1, 0])
def test_a_tile_that_is_the_last_may_be_full_or_not(place, rule, more):
    """Each size in a step of its own, because together they would be enough work for threads, which is another loop."""
    _check_step(place, rule, F32, place.tile + more)


@pytest.mark.sample(6)
@pytest.mark.sample(1, "cpu")
@pytest.mark.parametrize("dtype", [F64, F16, BF16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_in_other_types_is_the_oracles(place, rule, dtype):
    _check_step(place, rule, dtype, place.tile + 1)


def _check_step(place, rule, dtype, size):
    shapes = [*SMALL, *(MATRICES if isinstance(rule, TensorRule) else ()), (size,)]
    Step(place, rule, shapes, dtype, dtype).check(place)


@pytest.mark.cover("place", "weight_dtype")
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [rules.sgd, rules.adam], ids=lambda rule: rule.name)
def test_weights_and_gradients_of_any_two_types(place, rule, weight_dtype, gradient_dtype):
    Step(place, rule, [(3, 5), (1030,), (1030,)], weight_dtype, gradient_dtype).check(place)


@pytest.mark.parametrize(("weight_dtype", "gradient_dtype"), [(F16, F16), (BF16, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("rule", [rules.sgd_momentum, rules.adamw], ids=lambda rule: rule.name)
def test_masters_are_updated_and_the_weight_is_their_rounding(place, rule, weight_dtype, gradient_dtype):
    step = Step(place, rule, [(3, 5), (1030,)], weight_dtype, gradient_dtype, masters=True)
    step.check(place)


OPTIONED = ["rmsprop", "ftml", "schedulefreeadamw", "sgld"]  # with each option
OPTIONS = {"agc": 0.1, "clip_norm": 0.7, "cautious": True, "lookahead": 2, "ema_decay": 0.9}
OPTIONS |= {"skip_norm": 1e3, "skip_nonfinite": True}


def _check_alike(place, rule, row, dtype):
    """One step from the same numbers, eagerly and compiled.

    Without sums over elements both make the same operations, each rounded to the arithmetic's type, so they agree to the
    bit. With sums, which each engine makes in an order of its own, |difference| <= 2 ulps + SUM_ERROR |movement|, with ulps
    of the number as it is stored.
    """
    rng, shapes, arithmetic = np.random.default_rng(2), [(), (3, 5), (1030,)], F64 if dtype == F64 else F32
    before, gradients = [], []
    for shape in shapes:
        sizes = rule.shapes(torch.Size(shape))
        states = [place.tensor(rng.uniform(0.1, 2.0, size), arithmetic) for size in sizes]
        before.append([place.tensor(rng.normal(size=shape), dtype), *states])
        gradients.append(place.tensor(rng.normal(size=shape), dtype))
    found = []
    for engine in ("eager", place.engine):
        tensors = [[tensor.clone() for tensor in each] for each in before]
        weights, states = [each[0] for each in tensors], [tuple(each[1:]) for each in tensors]
        place._replace(engine=engine).run(rule, weights, gradients, states, [row] * len(shapes))
        found.append(tensors)
    exact = not rule.reductions and place.device == "cpu"
    for start, eager, compiled in zip(*(chain.from_iterable(tensors) for tensors in (before, *found)), strict=True):
        assert torch.equal(eager.isnan(), compiled.isnan())
        old, a, b = (ulps.numpy_of(tensor.nan_to_num()) for tensor in (start, eager, compiled))
        error, movement = np.abs(a - b), np.maximum(np.abs(a - old), np.abs(b - old))
        allowed = 2 * ulps.ulp(np.maximum(np.abs(a), np.abs(b)), start.dtype) + SUM_ERROR[arithmetic] * movement
        assert np.all(error <= (0.0 if exact else allowed)), np.max(error / allowed)


@pytest.mark.sample(5)
@pytest.mark.sample(2, "cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule.values[0], TensorRule)])
def test_eager_steps_are_the_compiled_ones(compiled_place, rule, dtype):
    for k in range(2):
        _check_alike(compiled_place, rule, [*hyper_row(rule, k, dtype).values()], dtype)


@pytest.mark.sample(5)
@pytest.mark.sample(1, "cpu")
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", OPTIONED)
def test_eager_steps_with_options_are_the_compiled_ones(compiled_place, name, option, dtype):
    optimizer = create(name, learning_rate=0.05, wd=0.1, **{option: OPTIONS[option]})
    optimizer.begin_step(0.05)
    _check_alike(compiled_place, optimizer.composed_rule, optimizer.row(2, 0.05, 0.1, 0), dtype)


def test_roots_are_rounded_correctly():
    """Those of torch may not be, which with a small denominator in a rule would be far more than an ulp."""
    for dtype in (F32, F64):  # a root of float64, rounded once more, is that of float32
        x = torch.rand(10_000, dtype=dtype, generator=torch.Generator().manual_seed(0))
        expected = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=F64).to(dtype)
        assert torch.equal(TORCH_OPS[dtype].sqrt(x), expected)
    special = torch.tensor([-1.0, math.nan, math.inf, -0.0, 4.0])
    assert str(tl.sqrt(special).tolist()) == "[nan, nan, inf, -0.0, 2.0]"
    assert tl.sqrt(4.0) == tl.sqrt(torch.tensor(4.0)) == 2.0


@pytest.mark.sample(24)
@pytest.mark.sample(6, "cpu", "triton")
@pytest.mark.parametrize("rule", RULES)
def test_zero_nan_and_infinite_gradients(place, rule):
    """Non-finite values stay so, at their positions; a NaN has no sign, so it moves no weight in rules by sign."""
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0]
    # With two rows: the first limits gradients, the second does not.
    Step(place, rule, [(6,), (6,)], F32, F32, special=special).check(place)


@pytest.mark.parametrize("size", [3, 1000, 100_000])
def test_old_values_may_become_new_ones_of_others(place, size):
    """States change places, and one takes the old weight, which the step overwrites."""
    w, g = torch.full((size,), 5.0, device=place.device), torch.ones(size, device=place.device)
    state = tuple(torch.full((size,), value, device=place.device) for value in (1.0, 2.0, 3.0))
    place.run(swapped, [w], [g], [state], [[1.0]])
    for tensor, value in zip((w, *state), (6.0, 2.0, 1.0, 5.0), strict=True):
        assert bool((tensor == value).all())


@rule
def swapped(w, g, state, hyper):
    first, second, _third = state
    return w + g, (second, first, w)


@pytest.mark.parametrize("size", [1e-12, 1e10])
def test_ratios_of_norms_that_are_very_small_or_large(place, size):
    """The product of their squares is beyond what float32 holds: LAMB's step is nevertheless lr times the weight's norm."""
    w, g = torch.full((4,), size, device=place.device), torch.ones(4, device=place.device)
    states = [(torch.full((4,), 1e-12, device=place.device), torch.ones(4, device=place.device))]
    one = {"correction1": 1.0, "correction2": 1.0, "lower_bound": 0.0, "upper_bound": math.inf, "epsilon": 0.0}
    values = {"lr": 0.25, "wd": 0.0, "clip": math.inf, "beta1": 1.0, "beta2": 1.0, **one}
    update(rules.lamb, [w], [g], states, values, engine=place.engine)
    assert w.tolist() == pytest.approx([0.75 * size] * 4, rel=1e-6)


@pytest.mark.parametrize("rule", [rules.lars, rules.lamb, rules.lans, rules.novograd], ids=lambda rule: rule.name)
def test_steps_that_do_not_depend_on_the_gradients_scale_do_not_where_its_square_is_subnormal(place, rule, monkeypatch):
    """Nor where roots of subnormal numbers are 0, as on GPUs (sqrt.approx.ftz), for which torch's words stand here."""

    def flushing(self, x):
        return torch.where(x < torch.finfo(x.dtype).tiny, 0.0, x.sqrt())

    monkeypatch.setattr(type(tl), "sqrt", flushing)
    alike = {"lr": 0.5, "eta": 0.5, "epsilon": 0.0, "seen": 0.0, "scaled": 1.0, "lower_bound": 0.0, "upper_bound": math.inf}
    values = HYPER[1] | alike
    values = {name: 1.0 - values[name[10:]] if name.startswith("one_minus_") else values[name] for name in rule.hyper}
    steps = []
    for scale in (1.0, 1e-21):
        w, g = torch.ones(2000, device=place.device), torch.full((2000,), scale, device=place.device)
        states = [tuple(torch.zeros(shape, device=place.device) for shape in rule.shapes(w.shape))]
        if rule is rules.lamb:  # its denominator is that of old gradients
            states[0][1].fill_(1.0)
        update(rule, [w], [g], states, values, engine=place.engine)
        steps.append(float((1.0 - w).mean()))
    assert steps[0] > 0.01
    assert steps[1] == pytest.approx(steps[0], rel=0.01)  # the square of the smaller has three digits


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_weight_without_gradient_stays_as_it_is(place, dtype):
    weights, gradients = (list(torch.ones(3, 3, dtype=dtype, device=place.device).unbind()) for _ in range(2))
    states = [(torch.full((3,), 0.5, device=place.device),) for _ in weights]
    run = Update(rules.sgd_momentum, weights, states, engine=place.engine)
    run.hyper[:] = [1.0, 0.5, 0.1, math.inf, 0.5]
    run.bind([None] * 3)
    run()
    assert all(bool((weight == 1).all()) for weight in weights)
    run.bind([gradients[0], None, gradients[2]])
    run()
    moved = [0.69921875] * 3 if dtype == BF16 else [pytest.approx(0.7)] * 3
    assert [weight.tolist() for weight in weights] == [moved, [1.0] * 3, moved]
    assert [bool((state == 0.5).all()) for (state,) in states] == [False, True, False]


# bfloat16: every class of numbers that rounding treats differently, as float32 bit patterns; each with both signs.
BIT_PATTERNS = {
    "ties go to even, down": 0x3F808000,
    "ties go to even, up": 0x3F818000,
    "just above a tie": 0x3F808001,
    "just below a tie": 0x3F807FFF,
    "a carry into the exponent": 0x3FFFFFFF,
    "a carry into infinity": 0x7F7FFFFF,
    "the largest that stays finite": 0x7F7F7FFF,
    "infinity": 0x7F800000,
    "NaN": 0x7FC00000,
    "NaN whose upper half is no NaN": 0x7F800001,
    "NaN that a carry would turn around": 0x7FFFFFFF,
    "smallest normal": 0x00800000,
    "largest denormal": 0x007FFFFF,
    "a denormal tie": 0x00018000,
    "smallest denormal": 0x00000001,
    "zero": 0x00000000,
}


@pytest.fixture
def copy_rule(write_rules):
    return write_rules("@rule\ndef copy(w, g, state, hyper):\n    return g, state\n", "copying").copy


def _float32_patterns(place):
    some = np.array([*BIT_PATTERNS.values()], dtype=np.uint32)
    others = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    return torch.from_numpy(np.concatenate([some, some | np.uint32(2**31), others]).view(np.float32)).to(place.device)


def _same_bits(found, expected):
    """Of a NaN only its being one is worth anything, and torch itself does not keep its other bits alike everywhere."""
    nan, bits = expected.isnan(), {2: torch.int16, 4: torch.int32}[expected.itemsize]
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(bits), expected[~nan].view(bits))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_results_are_rounded_to_16_bits_as_torch_does(place, dtype, copy_rule):
    values = _float32_patterns(place)
    weight = torch.zeros(values.shape, dtype=dtype, device=place.device)
    place.run(copy_rule, [weight], [values], [()], [[1.0]])
    _same_bits(weight, values.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_all_16_bit_gradients_are_read_as_torch_reads_them(place, dtype, copy_rule):
    gradient = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(place.device)
    if place.engine == "triton" and dtype == BF16:  # its interpreter takes denormal bfloat16 numbers for 0
        gradient = gradient[(gradient == 0) | ~(gradient.abs() < torch.finfo(BF16).tiny)]
    weight = torch.zeros(gradient.shape, device=place.device)
    place.run(copy_rule, [weight], [gradient], [()], [[1.0]])
    _same_bits(weight, gradient.float())
