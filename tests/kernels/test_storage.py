"""Weights and states in low precision: what is stored is the exact rounding of what was computed, the same on every engine.

The judges are NumPy, rounding by integers and by comparing neighbours, and float32 masters.
"""

import math

import numpy as np
import pytest
import torch

from tristep.kernels import Update, rule, rules
from tristep.kernels.states import slot_dtypes, states_for
from tristep.kernels.storage import Storage, keys, random_bits

F64, F32, F16, BF16, I16 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int16
SIZES = [(3, 5), (1030,), (0,)]
# No numbers below the normal ones: Triton's interpreter reads such bfloat16 as 0.
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38, 1.00390625, 1.01171875, -1.00390625]


@rule
def take(w, g, state, hyper):
    """All of it is a copy, so that nothing but loads and stores decides what comes out."""
    first, second = state  # noqa: RUF059  # names it
    return g, (w, first)


@rule(full_precision=("slow",))
def slowly(w, g, state, hyper):
    fast, slow = state
    return w - fast, (g, slow + g)


def as_bfloat16(values):
    """float32 numbers rounded to the nearest bfloat16, ties to even: of the two neighbours, by comparing distances."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    down = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    up = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    exact, low, high = (np.asarray(x, dtype=np.float64) for x in (values, down, up))
    high = np.where(np.isinf(high), np.sign(high) * 2.0**128, high)  # what the next number would be
    even = (bits & np.uint32(0x10000)) == 0
    nearer = np.abs(exact - high) < np.abs(exact - low)
    tie = np.abs(exact - high) == np.abs(exact - low)
    return np.where(np.isfinite(exact), np.where(nearer | (tie & ~even), up, down), values).astype(np.float32)


def numbers(seed, shape, scale=1.0):
    """float32 numbers of many sizes, the special ones among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * scale * 2.0 ** rng.integers(-20, 20, shape)
    flat = values.reshape(-1)
    count = min(flat.size, len(SPECIAL))
    flat[:count] = SPECIAL[:count]
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def same(tensor, expected):
    """Equal as numbers, signs of zeros included; NaN is NaN."""
    got = tensor.detach().cpu().to(torch.float32).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(expected)]))


def bits(tensor):
    return tensor.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def tensors(place, arrays, dtype):
    return [torch.tensor(np.asarray(array, dtype=np.float32)).to(dtype).to(place.device) for array in arrays]


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


def test_the_oracle_rounds_as_torch_does():
    values = numbers(3, (5000,))
    same(torch.tensor(values).to(BF16), as_bfloat16(values))


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


@pytest.mark.parametrize("state_dtype", [None, BF16], ids=str)
def test_a_remainder_is_all_that_a_weight_lacks(place, state_dtype):
    """Weight and remainder are the float32 number, bit for bit, and the weight is the nearest."""
    values = [numbers(k, shape) for k, shape in enumerate(SIZES)]
    weights = tensors(place, [numbers(9 + k, shape) for k, shape in enumerate(SIZES)], BF16)
    remainders = [torch.zeros(shape, dtype=I16, device=place.device) for shape in SIZES]
    states = states_for(take, weights, state_dtype)
    place.run(take, weights, tensors(place, values, F32), states, [[1.0]] * 3, remainders)
    for weight, remainder, value in zip(weights, remainders, values, strict=True):
        high = weight.cpu().float().numpy().view(np.uint32)
        whole = (high + remainder.cpu().numpy().astype(np.int32).astype(np.uint32)).view(np.float32)
        np.testing.assert_array_equal(whole, value)
        finite = np.isfinite(value) & (np.abs(value) < 3.38e38)
        distance = np.abs(weight.cpu().double().numpy() - value)[finite]
        nearest = np.abs(as_bfloat16(value).astype(np.float64) - value)[finite]
        np.testing.assert_array_equal(distance, nearest)  # halves go away from zero, which is as near
    # And it is read so: the state gets the weight as the rule knew it.
    place.run(take, weights, tensors(place, [np.zeros(shape) for shape in SIZES], F32), states, [[1.0]] * 3, remainders)
    for row, value in zip(states, values, strict=True):
        same(row[0], value if state_dtype is None else as_bfloat16(value))


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "lamb"])
def test_with_remainders_every_step_is_that_of_float32_masters(place, name):
    used = getattr(rules, name)
    rng = np.random.default_rng(1)
    start = tensors(place, [rng.normal(size=(1030,)), rng.normal(size=(3, 5))], BF16)
    gradients = [tensors(place, [rng.normal(size=(1030,)), rng.normal(size=(3, 5))], BF16) for _ in range(6)]
    hyper = [[1.0, *np.linspace(0.01, 0.3, len(used.hyper))]] * 2
    found = []
    for master_dtype in (F32, I16):
        weights = [weight.clone() for weight in start]
        masters = [weight.to(F32) if master_dtype == F32 else torch.zeros_like(weight, dtype=I16) for weight in start]
        states = states_for(used, weights)
        for each in gradients:
            place.run(used, weights, each, states, hyper, masters)
        if master_dtype == I16:
            masters = [
                (w.float().view(torch.int32) + m.to(torch.int32)).view(F32) for w, m in zip(weights, masters, strict=True)
            ]
        found.append([*masters, *(state for row in states for state in row)])
    for master, expected in zip(*found, strict=True):
        assert torch.equal(bits(master), bits(expected))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_compensation_is_what_rounding_took_off(place, dtype):
    values = [numbers(k, shape, scale=1e-3) for k, shape in enumerate(SIZES)]
    weights = [torch.zeros(shape, dtype=dtype, device=place.device) for shape in SIZES]
    lost = [torch.zeros_like(weight) for weight in weights]
    states = states_for(take, weights)
    place.run(take, weights, tensors(place, values, F32), states, [[1.0]] * 3, lost)
    for weight, rest, value in zip(weights, lost, values, strict=True):
        rounded = torch.tensor(value).to(dtype)
        same(weight, rounded.float().numpy())
        difference = value.astype(np.float64) - rounded.double().numpy()
        expected = torch.tensor(np.where(np.isfinite(difference), difference, 0.0)).to(F32).to(dtype)
        same(rest, np.where(expected.isfinite(), expected.float(), 0.0).astype(np.float32))
    place.run(take, weights, tensors(place, values, F32), states, [[1.0]] * 3, lost)
    for row, value in zip(states, values, strict=True):
        rounded = torch.tensor(value).to(dtype)
        whole = rounded.float() + (torch.tensor(value) - rounded.float()).nan_to_num(0, 0, 0).to(dtype).float()
        same(row[0], whole.numpy())


def test_small_steps_are_not_lost_with_compensation(place):
    """Each is a hundredth of what bfloat16 tells from 1."""
    weights = [torch.ones(2000, dtype=BF16, device=place.device) for _ in range(2)]
    lost = [None, torch.zeros_like(weights[1])]
    gradient = torch.ones(2000, device=place.device)
    for _ in range(100):
        hyper = [[1.0, 2.0**-14, 0.0, math.inf]] * 2
        place.run(rules.sgd, weights, [gradient, gradient], [(), ()], hyper, lost)
    assert bool((weights[0] == 1.0).all())
    expected = 1.0 - 100 * 2.0**-14
    assert bool(((weights[1].double() + lost[1].double()) - expected).abs().max() < 100 * 2.0**-17 * 2.0**-8)


# Stochastic rounding.


def run_at_random(place, values, update_number=1, seed=0, repeat=1, states=None):
    weights = [torch.zeros(len(values), dtype=BF16, device=place.device) for _ in range(repeat)]
    states = states_for(take, weights, BF16)
    for row in states:
        row[0].fill_(1.0)
    run = Update(take, weights, states, engine=place.engine, seed=seed)
    run.hyper[:] = [1.0, update_number]
    gradients = [torch.tensor(values, device=place.device)] * repeat
    run.bind(gradients)
    run()
    return weights


def test_random_rounding_goes_to_a_neighbour_and_is_right_on_average(place):
    """With shares of 1/8 and so on between the neighbours; within 5 standard errors of the binomial distribution."""
    n = 60_000
    for share in (1 / 8, 1 / 2, 13 / 16):
        for unit in (2.0**-7, -(2.0**-7), 2.0**-100):
            value = np.float32(math.copysign(unit * 2.0**7, unit) + share * unit)
            (weight,) = run_at_random(place, np.full(n, value))
            got = weight.double().cpu().numpy()
            low = math.copysign(abs(unit) * 2.0**7, unit)
            high = low + unit
            assert set(got) == {low, high}
            error = math.sqrt(share * (1 - share) / n)
            assert abs((got == high).mean() - share) < 5 * error


def test_what_bfloat16_has_already_stays_as_it_is(place):
    values = as_bfloat16(numbers(0, (5000,)))
    (weight,) = run_at_random(place, values)
    same(weight, values)


def test_random_bits_are_alike_on_every_engine_and_in_any_tiles(compiled_place):
    """The other one is torch's, in one piece, from int64."""
    values = numbers(2, (70_001,))
    for weight, place_in_list in zip(run_at_random(compiled_place, values, 7, 5, repeat=2), range(2), strict=True):
        low, high = keys(5, np.array([7]), np.array([place_in_list]))[0]
        random = random_bits(low, high, torch.arange(len(values))).numpy().astype(np.uint64)
        cut = ((values.view(np.uint32) + random) >> np.uint64(16)).astype(np.uint32) << np.uint32(16)
        same(weight, np.where(np.isnan(values), values, cut.view(np.float32)))


def test_random_bits_differ_by_seed_update_and_tensor_and_repeat_with_them(place):
    values = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    first, other = run_at_random(place, values, 1, 0, repeat=2)
    again, _ = run_at_random(place, values, 1, 0, repeat=2)
    assert torch.equal(first, again)
    (later,) = run_at_random(place, values, 2, 0)
    (seeded,) = run_at_random(place, values, 1, 1)
    pairs = [(first, other), (first, later), (first, seeded)]
    for a, b in pairs:  # half of all rounded otherwise than the nearest disagree, about 1/3 of random numbers
        assert 0.2 < float((a != b).float().mean()) < 0.45


def test_random_bits_are_uniform_and_independent_of_their_neighbours():
    low, high = keys(0, np.array([1]), np.array([0]))[0]
    index = torch.arange(1 << 17)
    first = random_bits(low, high, index).double() / 2**16 - 0.5
    error = 5 / math.sqrt(12 * len(index))
    assert abs(float(first.mean())) < error
    assert abs(float((first**2).mean()) - 1 / 12) < error
    counts = np.bincount(random_bits(low, high, index).numpy() >> 8, minlength=256)
    assert abs(((counts - 512) ** 2 / 512).sum() - 255) < 5 * math.sqrt(2 * 255)  # chi-squared
    for lag in (1, 2, 32, 256, 1024, 4096, 65536):
        product = float((first[:-lag] * first[lag:]).mean()) * 12
        assert abs(product) < 5 / math.sqrt(len(index) - lag), lag
    after = keys(0, np.array([2]), np.array([0]))[0]
    second = random_bits(*after, index).double() / 2**16 - 0.5
    salted = random_bits(low, high, index, 1).double() / 2**16 - 0.5
    for other in (second, salted):
        assert abs(float((first * other).mean()) * 12) < 5 / math.sqrt(len(index))


def test_random_rounding_of_states(place):
    weight = torch.zeros(40_000, device=place.device)
    states = states_for(slowly, [weight], BF16)
    run = Update(slowly, [weight], states, engine=place.engine, seed=3)
    run.hyper[:] = [1.0, 1]
    gradient = torch.full((40_000,), 1 + 2.0**-9, device=place.device)
    run.bind([gradient])
    run()
    got = states[0][0].double()
    assert set(got.tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float((got > 1).double().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 40_000)
    assert bool((states[0][1] == gradient).all())  # float32


def test_a_weight_with_a_master_is_not_rounded_stochastically(place):
    values = numbers(1, (1030,))
    weight = torch.zeros(1030, dtype=BF16, device=place.device)
    master = torch.zeros(1030, device=place.device)
    run = Update(take, [weight], states_for(take, [weight], BF16), [master], engine=place.engine, seed=0)
    run.hyper[:] = [1.0, 1]
    gradient = torch.tensor(values, device=place.device)
    run.bind([gradient])
    run()
    same(weight, as_bfloat16(values))
    same(master, values)


# Anywhere in memory, and refusals.


@pytest.mark.parametrize("master_dtype", [None, I16, BF16], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "gaps", "one element off"])
def test_other_layouts(place, layout, master_dtype):
    values = np.random.default_rng(4).normal(size=(40, 30)).astype(np.float32)
    weight = torch.zeros(40, 30, dtype=BF16, device=place.device)
    if layout == "transposed":
        weight = torch.zeros(30, 40, dtype=BF16, device=place.device).T
    elif layout == "gaps":
        weight = torch.zeros(40, 60, dtype=BF16, device=place.device)[:, ::2]
    else:
        weight = torch.zeros(1201, dtype=BF16, device=place.device)[1:].view(40, 30)
    (states,) = states_for(take, [weight], BF16)
    strides = states[0].stride()
    master = None
    if master_dtype is not None:
        master = torch.empty_strided((40, 30), strides, dtype=master_dtype, device=place.device).zero_()
    place.run(take, [weight], [torch.tensor(values, device=place.device)], [states], [[1.0]], [master])
    same(weight, as_bfloat16(values))
    if master_dtype == BF16:
        same(master, as_bfloat16(values - as_bfloat16(values)))


def test_types_that_do_not_go_together_are_refused():
    w64, w32, w16, wb = (torch.zeros(3, dtype=dtype) for dtype in (F64, F32, F16, BF16))
    for weight, state, master, message in [
        (w64, BF16, None, r"mom of weights\[0\] is torch.bfloat16 .* must be torch.float64"),
        (w32, I16, None, r"mom of weights\[0\] is torch.int16 .* must be torch.float32 or torch.bfloat16"),
        (w16, F32, I16, r"master of weights\[0\] is torch.int16 .* must be torch.float32 or torch.float16"),
        (wb, F32, F16, r"master of .* torch.float16 .* must be torch.float32 or torch.int16 or torch.bfloat16"),
        (w32, F32, I16, r"master of weights\[0\] is torch.int16 .* must be torch.float32"),
    ]:
        masters = [None if master is None else torch.zeros(3, dtype=master)]
        with pytest.raises(ValueError, match=message):
            Update(rules.sgd_momentum, [weight], [(torch.zeros(3, dtype=state),)], masters)
    with pytest.raises(TypeError, match=r"seed=0: rule 'muon' is one of whole tensors"):
        Update(rules.muon, [torch.zeros(3, 3)], states_for(rules.muon, [torch.zeros(3, 3)]), seed=0)


def test_groups_are_formed_by_how_tensors_are_stored(place):
    """Alike they go into one launch; the values are those of each alone."""
    values = np.random.default_rng(4).normal(size=1030).astype(np.float32)
    gradient = torch.tensor(values, device=place.device)
    master_dtypes = [None, F32, I16, BF16, None]
    weights = [torch.zeros(1030, dtype=BF16, device=place.device) for _ in master_dtypes]
    masters = [
        None if master_dtype is None else torch.zeros(1030, dtype=master_dtype, device=place.device)
        for master_dtype in master_dtypes
    ]
    states = [*states_for(take, weights[:4]), *states_for(take, weights[4:], BF16)]
    run = place.run(take, weights, [gradient] * 5, states, [[1.0]] * 5, masters)
    assert run.launches == 5
    for weight in weights:
        same(weight, as_bfloat16(values))


def test_keys_are_splitmix64():
    """Outputs of the published generator for two seeds (Steele, Lea & Flood 2014), as far as its last step leaves them."""
    published = {
        0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC],
        1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431],
    }
    for seed, outputs in published.items():
        found = keys(seed, np.arange(1, 5), np.zeros(4, np.int64)).astype(np.int64)
        assert found[:, 0].tolist() == [output >> 48 for output in outputs]
        assert (found[:, 1] >> 1).tolist() == [(output >> 33) & 0x7FFF for output in outputs]
    other = keys(0, np.ones(2, np.int64), np.arange(2)).astype(np.int64)  # a tensor's number is another start
    assert other[0].tolist() != other[1].tolist()


def test_storages_are_equal_that_store_alike():
    assert Storage((F32,), 1) == Storage((F32,), 1)
    assert Storage((F32,), 1) != Storage((BF16,), 1)
    assert Storage((F32,)) != repr(Storage((F32,)))
