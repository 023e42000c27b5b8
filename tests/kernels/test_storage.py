"""Weights and states in low precision: what is stored is the exact rounding of what was computed, on every engine.

The oracles are NumPy, rounding by integers and by comparing neighbours, and float32 masters.
"""

import math

import numpy as np
import pytest
import torch
from low_precision import as_bfloat16, in_24_bits, numbers, same, slowly, take, tensors

from tristep.kernels import Update, rule, rules
from tristep.kernels.states import slot_dtypes, states_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
I16, I8 = torch.int16, torch.int8
SIZES = [(3, 5), (1030,), (0,)]


@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=str)
def test_states_in_bfloat16_are_the_nearest(place, weight_dtype):
    gradients = [numbers(k, shape) for k, shape in enumerate(SIZES)]
    weights = tensors(place, [numbers(9 + k, shape) for k, shape in enumerate(SIZES)], weight_dtype)
    before = [weight.clone().float().cpu().numpy() for weight in weights]
    states = states_for(take, weights, BF16)
    for row, gradient in zip(states, gradients, strict=True):
        row[0].copy_(torch.tensor(gradient))
    firsts = [row[0].float().cpu().numpy() for row in states]
    place.run(take, weights, tensors(place, gradients, F32), states, [[1.0]] * 3)
    for weight, row, gradient, old, first in zip(weights, states, gradients, before, firsts, strict=True):
        if weight_dtype == F32:
            same(weight, gradient)
        elif weight_dtype == BF16:
            same(weight, as_bfloat16(gradient))
        same(row[0], as_bfloat16(old))
        same(row[1], first)


@pytest.mark.sample(0, "triton")
@pytest.mark.sample(1, "cpu")
@pytest.mark.parametrize(
    ("name", "gradient_dtype"), [("sgd_momentum", F32), ("adamw", BF16), ("lamb", F16), ("adan", F32)], ids=str
)
def test_a_step_is_that_of_float32_states_rounded(place, name, gradient_dtype):
    """Reductions read the same stored states."""
    used = getattr(rules, name)
    rng = np.random.default_rng(5)
    weights = tensors(place, [rng.normal(size=shape) for shape in SIZES], F32)
    gradients = tensors(place, [rng.normal(size=shape) for shape in SIZES], gradient_dtype)
    narrow = states_for(used, weights, BF16)
    for row in narrow:
        for state in row:
            state.uniform_(0.5, 2.0)
    wide = [tuple(state.to(F32) for state in row) for row in narrow]
    twins = [weight.clone() for weight in weights]
    hyper = [[1.0, *np.linspace(0.1, 0.9, len(used.hyper))]] * 3
    place.run(used, weights, gradients, narrow, hyper)
    place.run(used, twins, gradients, wide, hyper)
    for weight, twin, row, expected in zip(weights, twins, narrow, wide, strict=True):
        torch.testing.assert_close(weight, twin, rtol=1e-6, atol=1e-6)
        for state, each in zip(row, expected, strict=True):
            assert state.dtype == BF16
            exact = as_bfloat16(each.cpu().numpy())
            close = np.nextafter(np.abs(exact), np.inf) * 2.0**-8  # one more rounding error may tip one over
            assert (np.abs(state.float().cpu().numpy() - exact) <= close).all()
            assert np.count_nonzero(state.float().cpu().numpy() != exact) <= 0.01 * exact.size


def test_states_that_are_weights_or_sums_stay_exact():
    weight = torch.zeros(3)
    assert slot_dtypes(slowly, F32, BF16) == (BF16, F32)
    assert slot_dtypes(slowly, F64, BF16) == (F64, F64)
    assert [state.dtype for state in states_for(slowly, [weight], BF16)[0]] == [BF16, F32]
    assert slot_dtypes(rules.novograd, BF16, BF16) == (BF16, F32)  # the second is one number for each tensor
    with pytest.raises(TypeError, match=r"full_precision=\('mean',\): rule 'take' has no state 'mean'"):
        rule(take.fn, full_precision=("mean",))


def test_each_state_has_its_own_type(place):
    weight = torch.ones(1030, device=place.device)
    states = states_for(slowly, [weight], BF16)
    g = torch.full((1030,), 1.0 + 2.0**-12, device=place.device)
    place.run(slowly, [weight], [g], states, [[1.0]])
    place.run(slowly, [weight], [g], states, [[1.0]])
    assert bool((states[0][0] == 1.0).all())
    assert bool((states[0][1] == 2 * (1.0 + 2.0**-12)).all())
    assert bool((weight == 0.0).all())


# Master weights.


def rounded(kind, values):
    """float32 numbers as a weight with a rest of this type keeps them: all of them, or the nearest of 24 bits."""
    return in_24_bits(values) if kind == I8 else values


def whole(weight, rest):
    """The float32 numbers that a weight and its rest are."""
    return (weight.float().view(torch.int32) + (rest.to(torch.int32) << (8 if rest.dtype == I8 else 0))).view(F32)


EDGES = [0x7F7FFFFF, 0x7F7FFF80, 0x7F7FFF7F, 0x7F7F8000, 0xFF7FFFFF, 0x3F807F80, 0x3F807F7F, 0x3F808000, 0x3F818000]


@pytest.mark.cover("place", "kind")
@pytest.mark.parametrize("kind", [I16, I8], ids=["remainder", "24 bits"])
@pytest.mark.parametrize("state_dtype", [None, BF16], ids=str)
def test_a_rest_is_all_that_a_weight_lacks(place, state_dtype, kind):
    """Weight and rest are the number, bit for bit, and the weight is as near to it as a bfloat16 can be. Of 24 bits, what is
    above the last is infinity."""
    edges = np.array(EDGES, dtype=np.uint32).view(np.float32)
    values = [np.concatenate([edges, numbers(k, n)]) for k, n in enumerate((6, 1030))] + [
        numbers(2, (3, 5)),
        numbers(3, (0,)),
    ]
    weights = tensors(place, [numbers(9 + k, each.shape) for k, each in enumerate(values)], BF16)
    rests = [torch.zeros_like(weight, dtype=kind) for weight in weights]
    states = states_for(take, weights, state_dtype)
    place.run(take, weights, tensors(place, values, F32), states, [[1.0]] * 4, rests)
    for k, (weight, rest, value) in enumerate(zip(weights, rests, values, strict=True)):
        found, expected = whole(weight, rest).cpu().numpy(), rounded(kind, value)
        np.testing.assert_array_equal(found, expected)
        finite = np.isfinite(expected) & (np.abs(expected) < 3.38e38)
        distance = np.abs(weight.cpu().double().numpy() - expected)[finite]
        nearest = np.abs(as_bfloat16(expected).astype(np.float64) - expected)[finite]
        np.testing.assert_array_equal(distance, nearest)  # halves go away from zero, which is as near
        if k < 2 and kind == I8:
            assert np.isinf(found[[0, 1, 4]]).all()
            assert np.isinf(weight.cpu().float().numpy()[2])  # with a rest that makes it finite
    # And it is read so: the state gets the weight as the rule knew it.
    place.run(take, weights, tensors(place, [np.zeros(each.shape) for each in values], F32), states, [[1.0]] * 4, rests)
    for row, value in zip(states, values, strict=True):
        known = rounded(kind, value)
        same(row[0], known if state_dtype is None else as_bfloat16(known))


@pytest.mark.cover("place", "kind")
@pytest.mark.parametrize("kind", [I16, I8], ids=["remainder", "24 bits"])
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "lamb"])
def test_with_rests_a_step_is_that_of_float32_masters_rounded(place, name, kind):
    """At every step, from the masters that are stored."""
    used = getattr(rules, name)
    rng = np.random.default_rng(1)
    weights = tensors(place, [rng.normal(size=(1030,)), rng.normal(size=(3, 5))], BF16)
    rests = [torch.zeros_like(weight, dtype=kind) for weight in weights]
    hyper = [[1.0, *np.linspace(0.01, 0.3, len(used.hyper))]] * 2
    states = states_for(used, weights)
    for _ in range(2):
        wholes = list(map(whole, weights, rests))
        twins = [weight.clone() for weight in weights], [tuple(state.clone() for state in row) for row in states]
        gradients = tensors(place, [rng.normal(size=(1030,)), rng.normal(size=(3, 5))], BF16)
        place.run(used, weights, gradients, states, hyper, rests)
        place.run(used, twins[0], gradients, twins[1], hyper, wholes)
        for weight, rest, expected, *rows in zip(weights, rests, wholes, states, twins[1], strict=True):
            np.testing.assert_array_equal(whole(weight, rest).cpu().numpy(), rounded(kind, expected.cpu().numpy()))
            assert all(map(torch.equal, *rows))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("state_dtype", [None, BF16], ids=str)
def test_states_have_their_weights_layout_and_share_no_elements(apart, state_dtype):
    """The oracle is `torch.zeros_like`."""
    wide = torch.zeros(6, 8)
    weights = [torch.zeros(3, 5), torch.zeros(5, 3).t(), torch.zeros(3, 5), wide[:, ::2], wide.view(2, 3, 8).movedim(1, 2)]
    weights += [torch.zeros(3, 5, dtype=F64), torch.zeros(()), torch.zeros(0, 2), torch.zeros(5, dtype=F16), torch.zeros(7)]
    rows = states_for(rules.adamw, weights, state_dtype, apart)
    for weight, row in zip(weights, rows, strict=True):
        kind = F64 if weight.dtype == F64 else state_dtype or F32
        for state in row:
            like = torch.zeros_like(weight, dtype=kind)
            assert (state.shape, state.stride(), state.dtype) == (like.shape, like.stride(), kind)
            assert torch.equal(state, like)
            assert state.data_ptr() % 64 == 0
    states = [state for row in rows for state in row]
    for number, state in enumerate(states):
        state.fill_(number)
    assert all((state == number).all() for number, state in enumerate(states))
    if apart:  # a state that is saved alone takes no other with it
        assert all(state.untyped_storage().nbytes() == state.nbytes for state in states)


# Anywhere in memory, and refusals.


def nearest_of_24_bits(values):
    """The bfloat16 next to 8 bits: the nearest to the number of 24 bits, ties away from zero."""
    known = in_24_bits(values)
    return as_bfloat16(np.nextafter(known, np.copysign(np.float32(math.inf), known)))


@pytest.mark.parametrize("master_dtype", [None, I16, I8], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "gaps", "one element off"])
def test_other_layouts(place, layout, master_dtype):
    values = np.random.default_rng(4).normal(size=(40, 30)).astype(np.float32)
    shape, view = {
        "transposed": ((30, 40), lambda x: x.T),
        "gaps": ((40, 60), lambda x: x[:, ::2]),
        "one element off": ((1201,), lambda x: x[1:].view(40, 30)),
    }[layout]
    weight = view(torch.zeros(shape, dtype=BF16, device=place.device))
    (states,) = states_for(take, [weight], BF16)
    master = None
    if master_dtype is not None:
        master = torch.empty_strided((40, 30), states[0].stride(), dtype=master_dtype, device=place.device).zero_()
    place.run(take, [weight], [torch.tensor(values, device=place.device)], [states], [[1.0]], [master])
    same(weight, nearest_of_24_bits(values) if master_dtype == I8 else as_bfloat16(values))


def test_types_that_do_not_go_together_are_refused():
    any_master = "torch.float32 or torch.int16 or torch.int8"
    for weight, state, master, message in [
        (F64, BF16, None, r"mom of weights\[0\] is torch.bfloat16 .* must be torch.float64"),
        (F32, I16, None, r"mom of weights\[0\] is torch.int16 .* must be torch.float32 or torch.bfloat16"),
        (F16, F32, I16, r"master of weights\[0\] is torch.int16 .* must be torch.float32"),
        (BF16, F32, F16, rf"master of .* torch.float16 .* must be {any_master}"),
        (F32, F32, I16, r"master of weights\[0\] is torch.int16 .* must be torch.float32"),
        (F16, F32, I8, r"master of weights\[0\] is torch.int8 .* must be torch.float32"),
    ]:
        masters = [None if master is None else torch.zeros(3, dtype=master)]
        with pytest.raises(ValueError, match=message):
            Update(rules.sgd_momentum, [torch.zeros(3, dtype=weight)], [(torch.zeros(3, dtype=state),)], masters)
