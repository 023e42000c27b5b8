"""States of 8 bits: codes and scales are those of a reimplementation in float64, alike on every engine.

The oracle lists the numbers that codes stand for and takes the nearest, or for random rounding one of the two neighbours.
"""

import math

import numpy as np
import pytest
import torch

from tristep.kernels import Update, rule, rules, storage, tl
from tristep.kernels.states import slot_dtypes, state_type, states_for
from tristep.kernels.storage import CodesOnly, packed_size, pieces, unpacked

F64, F32, F16, BF16, I16, U8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.uint8
SIZES = [4096, 70_001, 1, 0]  # one is longer than a tile of any engine
SIGNS = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])


@rule(nonnegative=("square",))
def take(w, g, state, hyper):
    """All of it is a copy, so that nothing but loads and stores decides what comes out."""
    mean, square = state  # noqa: RUF059  # names them
    return mean, (g, tl.abs(g))


@rule(nonnegative=("square",))
def show(w, g, state, hyper):
    mean, square = state
    return mean + square, (mean, square)


@rule(nonnegative=("square",))
def anew(w, g, state, hyper):
    """The states are written again as they are, but no compiler can know it."""
    mean, square = state
    return w, (mean * g, square * g)


@rule(full_precision=("sum_",))
def mixed(w, g, state, hyper):
    fast, sum_ = state
    return w - fast, (g, sum_ + g)


def levels(unsigned):
    """What the codes from 0 on stand for, as multiples of a block's scale: 16 between each two powers of two, shifted."""
    last = 255 if unsigned else 127
    above = np.array([(1 + code % 16 / 16) * 2.0 ** (code // 16) for code in range(2048 - last - 1, 2048)]) / 2.0**127
    return above - above[0]


def scale_of(block, unsigned):
    """The least power of two whose multiples reach the largest of a block; 0 if there are only zeros, or nearly so."""
    largest = np.abs(np.asarray(block, dtype=np.float64)).max()
    scale = 2.0 ** (math.ceil(math.log2(largest)) - 2) if largest > 0 else 0.0
    while scale * levels(unsigned)[-1] < largest:
        scale *= 2
    return scale if scale >= 2.0**-126 else 0.0


def blocks(values):
    return [values[start : start + 128] for start in range(0, len(values), 128)]


def nearest(values, unsigned):
    """The nearest that codes have, in float64, and half the distance of the neighbours there."""
    table, found, gaps = levels(unsigned), [], []
    for block in blocks(np.asarray(values, dtype=np.float64)):
        numbers = table * scale_of(block, unsigned)
        place = np.abs(np.abs(block)[:, None] - numbers).argmin(axis=1)
        place = np.where((place == 0) & (block != 0) & unsigned, 1, place)
        found.append(np.copysign(numbers[place], block))
        gap = np.diff(numbers)[np.minimum(place, len(table) - 2)] / 2
        gaps.append(np.maximum(gap, numbers[1]) if unsigned else gap)  # what is above zero is not rounded to zero
    return np.concatenate(found or [np.zeros(0)]), np.concatenate(gaps or [np.zeros(0)])


def numbers(seed, n, unsigned=False):
    """float32 numbers of many sizes."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=n) * 2.0 ** rng.integers(-12, 6, n)).astype(np.float32)
    values[n // 3 : n // 3 + 5] = 0
    return np.abs(values) if unsigned else values


def run(place, used, gradients, states, seed=None, weights=None, number=1):
    weights = weights or [torch.zeros(len(g), device=place.device) for g in gradients]
    update = Update(used, weights, states, engine=place.engine, seed=seed)
    update.hyper[:] = [[1.0, *([] if seed is None else [number])]] * len(weights)
    bound = [torch.as_tensor(g, device=place.device) for g in gradients]
    update.bind(bound)
    update()
    return weights


def packed_states(place, sizes, seed=0):
    """Packed states with numbers in them."""
    states = []
    for k, n in enumerate(sizes):
        row = []
        for unsigned in (False, True):
            state = torch.zeros(packed_size(n), dtype=U8, device=place.device)
            values = torch.tensor(numbers(seed + k, n, unsigned), device=place.device)
            row.append(storage.copy(state, values, values.shape, unsigned))
        states.append(tuple(row))
    return states


def test_packed_states_begin_at_a_multiple_of_4(place):
    """As their scales do, which are read as float32: elsewhere a GPU would fault."""
    memory = torch.zeros(packed_size(5000) + 1, dtype=U8, device=place.device)
    states = [(memory[1:], torch.zeros(packed_size(5000), dtype=U8, device=place.device))]
    with pytest.raises(ValueError, match=r"mean of .* begins 1 bytes after a multiple of 4.*clone"):
        Update(take, [torch.zeros(5000, device=place.device)], states, engine=place.engine)


def test_levels_begin_with_zero_and_are_finest_near_it():
    for unsigned, last, least in ((False, 127, 5e-4), (True, 255, 2e-6)):
        table = levels(unsigned)
        assert len(table) == last + 1
        assert table[0] == 0
        assert 1.92 < table[-1] < 31 / 16
        assert (np.diff(table) > 0).all()
        assert table[1] < least
        middle = table > (2**-11 if unsigned else 2**-3)
        assert (np.diff(table[middle]) / table[middle][:-1]).max() < 0.07


@SIGNS
@pytest.mark.parametrize("n", [*SIZES, 128, 129, 256])
def test_codes_stand_for_the_nearest(n, unsigned):
    values = numbers(n, n, unsigned)
    codes, scales = storage.encode(torch.tensor(values), unsigned)
    assert codes.shape == (n,)
    assert scales.tolist() == [scale_of(block, unsigned) for block in blocks(values)]
    got = storage.decode(codes, scales, unsigned).double().numpy()
    expected, gap = nearest(values, unsigned)
    assert np.count_nonzero(got != expected) <= 0.001 * n  # halves may go to either side
    assert (np.abs(got - values) <= gap * (1 + 1e-5)).all()
    assert (got[values == 0] == 0).all()
    if unsigned:
        assert (got[values > 0] > 0).all()


@SIGNS
@pytest.mark.parametrize("exponent", [-126, -100, -3, 0, 43, 126])
def test_what_was_decoded_is_encoded_as_it_was(exponent, unsigned):
    """Every code, with any random bits, where the scale stays the same. Only -0 may come back as 0."""
    codes = torch.arange(128 if not unsigned else 256, dtype=torch.int32)
    codes = torch.cat([codes, codes[1:] | 128]) if not unsigned else codes
    largest = 255 if unsigned else 127
    codes = torch.cat([torch.nn.functional.pad(part, (0, 127 - len(part)), value=0) for part in codes.split(127)])
    codes = torch.nn.functional.pad(codes.view(-1, 127), (0, 1), value=largest).view(-1).to(U8)
    scales = torch.full((len(codes) // 128,), 2.0**exponent)
    values = storage.decode(codes, scales, unsigned)
    for random in (None, 0, 0xFFFFFFFF, 0x80000000):
        bits = None if random is None else torch.full((len(codes),), random)
        again, same = storage.encode(values, unsigned, bits)
        assert torch.equal(same, scales)
        assert torch.equal(again, codes), random


@SIGNS
def test_scales_change_at_the_numbers_that_the_largest_code_reaches(unsigned):
    top = float(levels(unsigned)[-1])
    block = torch.zeros(128)
    for largest, scale in ((top, 1), (math.nextafter(top, 2) + 1e-6, 2), (top / 2, 0.5), (1.0, 1), (1.9, 1), (2.0, 2)):
        block[5] = largest
        codes, scales = storage.encode(block, unsigned)
        assert scales.tolist() == [scale]
        assert abs(float(storage.decode(codes, scales, unsigned)[5]) - largest) <= largest / 31


@SIGNS
def test_random_rounding_takes_a_neighbour_and_is_right_on_average(unsigned):
    table = levels(unsigned)
    n = 128 * 400
    for code, share in ((40, 1 / 8), (100, 1 / 2), (3, 13 / 16)):
        low, high = table[code : code + 2]
        values = np.full(n, low + share * (high - low), dtype=np.float32)
        values[::128] = table[-1]
        random = torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(code))
        got = storage.decode(*storage.encode(torch.tensor(values), unsigned, random), unsigned).double().numpy()
        assert (got[::128] == table[-1]).all()
        got = np.delete(got, slice(None, None, 128))
        np.testing.assert_allclose(np.unique(got), [low, high], rtol=1e-5)
        up = (got > (low + high) / 2).mean()
        assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / len(got)) + 1e-3


def test_slow_averages_move_only_if_rounded_at_random():
    """1,000 steps of a variance with beta2 = 0.999, whose gradients have become ten times as small in half of it."""
    torch.manual_seed(0)
    size = torch.cat([torch.ones(8, 64), torch.full((8, 64), 0.1)], dim=1).view(-1)
    var = {name: torch.ones(1024) for name in ("exact", "nearest", "random")}
    for _ in range(1500):
        square = (size * torch.randn(1024)) ** 2
        for name, old in var.items():
            new = 0.999 * old + 0.001 * square
            random = torch.randint(0, 1 << 32, (1024,)) if name == "random" else None
            var[name] = new if name == "exact" else storage.decode(*storage.encode(new, True, random), True)
    small = size < 1
    exact = var["exact"][small].mean()
    assert abs(var["random"][small].mean() / exact - 1) < 0.1
    assert var["nearest"][small].mean() > 2 * exact


# On the engines.


@pytest.mark.parametrize("seed", [None, 3, CodesOnly(3)], ids=str)
def test_every_engine_stores_the_same_bytes(place, seed):
    gradients = [numbers(10 + k, n) for k, n in enumerate(SIZES)]
    states = packed_states(place, SIZES)
    before = [unpacked(row[0], torch.Size([n])) for row, n in zip(states, SIZES, strict=True)]
    weights = run(place, take, gradients, states, seed, number=7)
    for k, (weight, row, gradient) in enumerate(zip(weights, states, gradients, strict=True)):
        assert torch.equal(weight, before[k])
        random = None
        for slot, (state, unsigned) in enumerate(zip(row, (False, True), strict=True)):
            values = torch.tensor(np.abs(gradient) if unsigned else gradient)
            if seed is not None:
                low, high = storage.keys(3, np.array([7]), np.array([k]))[0]
                random = storage.random_bits(low, high, torch.arange(len(values)), slot)
            codes, scales = storage.encode(values, unsigned, random)
            got_codes, got_scales = pieces(state.cpu(), len(values))
            assert torch.equal(got_scales, scales)
            assert torch.equal(got_codes, codes)


def test_every_engine_reads_the_same_numbers(place):
    states = packed_states(place, SIZES)
    expected = [
        [unpacked(s, torch.Size([n]), u) for s, u in zip(row, (False, True), strict=True)]
        for row, n in zip(states, SIZES, strict=True)
    ]
    weights = run(place, show, [np.zeros(n, dtype=np.float32) for n in SIZES], states)
    for weight, (mean, square) in zip(weights, expected, strict=True):
        assert torch.equal(weight, mean + square)


@pytest.mark.parametrize("seed", [None, 0], ids=str)
def test_states_that_are_written_again_as_they_are_stay_so_to_the_bit(place, seed):
    """But for blocks whose largest was rounded to what has half the scale: these take it the first time."""
    states = packed_states(place, SIZES)
    ones = [np.ones(n, dtype=np.float32) for n in SIZES]
    before = [[unpacked(state, torch.Size([n])) for state in row] for row, n in zip(states, SIZES, strict=True)]
    run(place, anew, ones, states, seed)
    for row, old, n in zip(states, before, SIZES, strict=True):
        changed = (unpacked(row[0], torch.Size([n])) != old[0]).float()
        assert n == 0 or float(changed.mean()) < 0.05
    before = [[state.clone() for state in row] for row in states]
    run(place, anew, ones, states, seed)
    for row, old in zip(states, before, strict=True):
        assert all(map(torch.equal, row, old))


@pytest.mark.parametrize("seed", [None, 3])
def test_nan_whatever_its_bits_makes_its_block_nan_and_no_other(place, seed):
    """Those of a GPU's own, 0x7fffffff, leave no room above them to be rounded up into."""
    g = torch.ones(5000)
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    g[130:134] = bits.view(torch.float32)
    state = packed_states(place, [len(g)])
    run(place, take, [g], state, seed=seed)
    for packed, unsigned in zip(state[0], (False, True), strict=True):
        assert pieces(packed, len(g))[1].isnan().nonzero().tolist() == [[1]]
        got = unpacked(packed, g.shape, unsigned).cpu()
        assert got[128:256].isnan().all()
        assert ((got[:128] - 1).abs() < 1 / 16).all()
        assert ((got[256:] - 1).abs() < 1 / 16).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_makes_its_block_nan(place, bad):
    gradient = numbers(0, 4100)
    gradient[[200, 4099]] = bad
    states = packed_states(place, [4100])
    run(place, take, [gradient], states)
    for state, unsigned in zip(states[0], (False, True), strict=True):
        got = unpacked(state, torch.Size([4100]), unsigned).cpu()
        where = torch.zeros(4100, dtype=torch.bool)
        where[128:256] = where[4096:] = True
        assert torch.equal(got.isnan(), where)
        codes, scales = storage.encode(torch.tensor(np.abs(gradient) if unsigned else gradient), unsigned)
        found = pieces(state.cpu(), 4100)
        assert torch.equal(found[0][~where], codes[~where])
        assert torch.equal(found[1].isnan(), scales.isnan())


def test_zeros_and_numbers_at_the_ends_of_float32(place):
    gradient = np.zeros(6 * 128, dtype=np.float32)
    gradient[128:256] = 1e-39  # below the smallest normal number
    gradient[256:384:2] = 3.2e38
    gradient[384:512:2] = 1.1754944e-38
    gradient[512:640] = -1e-30
    gradient[640:] = 3.4028234e38  # above the largest number that the largest scale reaches
    states = packed_states(place, [768])
    run(place, take, [gradient], states)
    for state, unsigned in zip(states[0], (False, True), strict=True):
        got = unpacked(state, torch.Size([768]), unsigned).cpu().numpy()
        expected, gap = nearest(np.abs(gradient) if unsigned else gradient, unsigned)
        np.testing.assert_array_equal(got[:256], 0)
        np.testing.assert_array_equal(got[256:640], expected[256:640].astype(np.float32))
        assert np.isnan(got[640:]).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("adamw", (F32, F32, None)), ("lamb", (BF16, BF16, I16)), ("novograd", (F16, F32, F16))],
    ids=str,
)
def test_a_step_is_that_of_float32_states_rounded(place, name, kinds):
    """Reductions read the same stored states."""
    used, (weight_dtype, gradient_dtype, master_dtype) = getattr(rules, name), kinds
    n, rng = 4100, np.random.default_rng(5)
    weight = torch.tensor(rng.normal(size=n)).to(weight_dtype).to(place.device)
    gradient = torch.tensor(rng.normal(size=n)).to(gradient_dtype).to(place.device)
    (packed,) = states_for(used, [weight], U8)
    plain = []
    for slot, state in zip(used.slots, packed, strict=True):
        if state.dtype != U8:
            plain.append(state.clone())
            continue
        values = torch.tensor(rng.uniform(0.1, 1, n), dtype=F32, device=place.device)
        storage.copy(state, values, values.shape, slot in used.nonnegative)
        plain.append(unpacked(state, weight.shape, slot in used.nonnegative))
    twin = weight.clone()
    masters = None if master_dtype is None else [[torch.zeros(n, dtype=master_dtype, device=place.device)] for _ in range(2)]
    hyper = [[1.0, *np.linspace(0.1, 0.9, len(used.hyper))]]
    place.run(used, [weight], [gradient], [packed], hyper, masters and masters[0])
    place.run(used, [twin], [gradient], [tuple(plain)], hyper, masters and masters[1])
    torch.testing.assert_close(weight.float(), twin.float(), rtol=1e-2 if weight_dtype != F32 else 1e-6, atol=1e-6)
    for slot, state, exact in zip(used.slots, packed, plain, strict=True):
        if state.dtype == U8:
            unsigned = slot in used.nonnegative
            again = storage.decode(*storage.encode(exact.cpu(), unsigned), unsigned)
            got = unpacked(state, weight.shape, unsigned).cpu()
            assert float((got != again).float().mean()) < 0.05  # scales may differ by a rounding error
            torch.testing.assert_close(got, exact.cpu(), rtol=0.07 if unsigned else 0.13, atol=1e-3)


def test_only_large_contiguous_weights_have_packed_states():
    kinds = {"small": torch.zeros(4095), "large": torch.zeros(64, 64), "transposed": torch.zeros(100, 50).t()}
    kinds["gaps"] = torch.zeros(100, 100)[:, :50]
    states = dict(zip(kinds, states_for(mixed, list(kinds.values()), U8), strict=True))
    for name, weight in kinds.items():
        packs = name == "large"
        assert state_type(weight, U8) == (U8 if packs else None)
        assert [state.dtype for state in states[name]] == [U8 if packs else F32, F32]
        assert states[name][0].shape == ((packed_size(4096),) if packs else weight.shape)
    assert slot_dtypes(rules.novograd, BF16, U8) == (U8, F32)
    assert states_for(mixed, [torch.zeros(64, 64, dtype=F64)], U8)[0][0].dtype == F64
    assert packed_size(4096) == 4096 + 4096 // 128 * 4
    assert [packed_size(n) for n in (0, 1, 128, 129)] == [0, 20, 132, 152]


def test_a_weight_that_has_got_other_strides_keeps_its_states_order(place):
    weight = torch.zeros(8, 32, 4, 4, device=place.device)
    states = packed_states(place, [weight.numel()])
    expected = unpacked(states[0][0], weight.shape) + unpacked(states[0][1], weight.shape, True)
    update = Update(show, [weight], states, engine=place.engine)
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert not update.fits()  # whoever owns the states is to unpack them
    update.hyper[:] = [1.0]
    gradient = torch.zeros_like(weight)
    update.bind([gradient])
    update()
    assert torch.equal(weight, expected)


def test_copies_between_all_ways_of_storing():
    values = torch.tensor(numbers(1, 4100)).view(41, 100)
    packed = storage.copy(torch.zeros(packed_size(4100), dtype=U8), values, values.shape)
    rounded = unpacked(packed, values.shape)
    for dtype in (F32, BF16):
        plain = storage.copy(torch.zeros(41, 100, dtype=dtype), packed, values.shape)
        assert torch.equal(plain, rounded.to(dtype))
    again = storage.copy(torch.zeros_like(packed), rounded, values.shape)
    assert torch.equal(storage.copy(torch.zeros_like(packed), unpacked(again, values.shape), values.shape), again)
    assert torch.equal(storage.copy(torch.zeros_like(packed), packed, values.shape), packed)
    turned = storage.copy(torch.zeros_like(packed), values.t().contiguous().t(), values.shape)
    assert torch.equal(turned, packed)


def test_every_state_said_to_be_never_negative_is_that():
    """Of every rule: after steps with gradients of both signs."""
    torch.manual_seed(0)
    for name in rules.__all__:
        used = getattr(rules, name)
        if not getattr(used, "nonnegative", ()):
            continue
        weight = torch.randn(50)
        state = [torch.zeros(50) for _ in used.state]
        update = Update(used, [weight], [(*state, *(torch.ones(()) for _ in used.kept))], engine="eager")
        update.hyper[0] = [1.0, *(0.9 if "beta" in h or "gamma" in h or h == "rho" else 0.1 for h in used.hyper)]
        for _ in range(3):
            gradient = torch.randn(50)
            update.bind([gradient])
            update()
        for slot, each in zip(used.state, state, strict=True):
            if slot in used.nonnegative:
                assert not bool((each < 0).any()), (name, slot)


def test_refusals():
    weight, small = torch.zeros(64, 64), torch.zeros(3)
    with pytest.raises(ValueError, match=r"mean of weights\[0\] is torch.uint8 \(4096,\).* torch.uint8 \(4224,\)"):
        Update(take, [weight], [(torch.zeros(4096, dtype=U8), torch.zeros(4224, dtype=U8))])
    with pytest.raises(ValueError, match="is packed, which must be that of a contiguous weight"):
        Update(take, [weight.view(32, 128).t()], [(torch.zeros(4224, dtype=U8),) * 2])
    with pytest.raises(ValueError, match=r"torch.uint8 .*must be torch.float64"):
        Update(take, [small.double()], [(torch.zeros(20, dtype=U8),) * 2])
    with pytest.raises(TypeError, match=r"nonnegative=\('other',\): rule 'take' has no state 'other'"):
        rule(take.fn, nonnegative=("other",))
