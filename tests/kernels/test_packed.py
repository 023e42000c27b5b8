"""States of 8 and 4 bits on the engines: alike on all, and as `storage.encode` and the oracle have them."""

import math

import numpy as np
import pytest
import torch
from packed_numbers import largest, levels, nearest, numbers, outliers

from tristep.kernels import Update, rule, rules, storage, tl
from tristep.kernels.states import slot_dtypes, state_type, states_for
from tristep.kernels.storage import CodesOnly, packed_size, pieces, unpacked

F64, F32, F16, BF16, I16, U8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.uint8
I8 = torch.int8  # packed in 4 bits
KINDS = pytest.mark.parametrize("dtype", [U8, I8], ids=["8 bits", "4 bits"])
SIZES = [4096, 70_001, 1, 0]  # one is longer than a tile of any engine


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
def either(w, g, state, hyper):
    """One of the states, by the gradient."""
    mean, square = state
    return tl.where(g == 0.0, mean, square), (mean, square)


@rule(full_precision=("sum_",))
def mixed(w, g, state, hyper):
    fast, sum_ = state
    return w - fast, (g, sum_ + g)


def run(place, used, gradients, states, seed=None, weights=None, number=1):
    weights = weights or [torch.zeros(len(g), device=place.device) for g in gradients]
    update = Update(used, weights, states, engine=place.engine, seed=seed)
    update.hyper[:] = [[1.0, *([] if seed is None else [number])]] * len(weights)
    bound = [torch.as_tensor(g, device=place.device) for g in gradients]
    update.bind(bound)
    update()
    return weights


def packed_states(place, sizes, seed=0, dtype=U8):
    """Packed states with numbers in them."""
    states = []
    for k, n in enumerate(sizes):
        row = []
        for unsigned in (False, True):
            state = torch.zeros(packed_size(n, dtype), dtype=dtype, device=place.device)
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


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("seed", [None, 3, CodesOnly(3)], ids=str)
def test_every_engine_stores_the_same_bytes(place, seed, dtype):
    gradients = [*(numbers(10 + k, n) for k, n in enumerate(SIZES)), outliers(dtype).numpy()]
    sizes = [*SIZES, 4100]
    states = packed_states(place, sizes, dtype=dtype)
    before = [unpacked(row[0], torch.Size([n])) for row, n in zip(states, sizes, strict=True)]
    weights = run(place, take, gradients, states, seed, number=7)
    for k, (weight, row, gradient) in enumerate(zip(weights, states, gradients, strict=True)):
        assert torch.equal(weight, before[k])
        random = None
        for slot, (state, unsigned) in enumerate(zip(row, (False, True), strict=True)):
            values = torch.tensor(np.abs(gradient) if unsigned else gradient)
            if seed is not None:
                low, high = storage.keys(3, np.array([7]), np.array([k]))[0]
                random = storage.random_bits(low, high, torch.arange(len(values)), slot)
            codes, scales = storage.encode(values, unsigned, random, dtype)
            got_codes, got_scales = pieces(state.cpu(), len(values))
            assert torch.equal(got_scales, scales)
            assert torch.equal(got_codes, codes)


@KINDS
@pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
def test_every_code_is_read_with_any_scale(place, dtype, unsigned):
    """To the bit. The scales are the least, the largest, that of infinities, 0 as of a new block, and NaN of old files."""
    bits, powers = 8 if dtype == U8 else 4, storage.CODES[dtype][unsigned].powers
    scales = [*(2.0 ** (k - powers) for k in (-100, -99, -15, 0, 15, 126, 127, 128)), 0.0, math.nan]
    n = 128 * 16 // bits * len(scales)  # all bytes, with each of the scales
    state = torch.zeros(packed_size(n, dtype), dtype=dtype)
    codes, of_blocks = pieces(state, n)
    codes.copy_(torch.arange(256).repeat(len(scales)))
    of_blocks.copy_(torch.tensor(scales).repeat_interleave(16 // bits))
    table = torch.tensor(levels(unsigned, bits), dtype=F32)
    table = table if unsigned else torch.cat([table, -table])
    each = torch.arange(256).repeat(len(scales))
    each = each if bits == 8 else torch.stack([each & 15, each >> 4], dim=-1).flatten()
    expected = table[each] * torch.tensor(scales).repeat_interleave(n // len(scales))
    states = [tuple(state.to(place.device) for _ in range(2))]
    gradient = np.full(len(expected), float(unsigned), dtype=np.float32)
    (weight,) = run(place, either, [gradient], states)
    same = weight.cpu().view(torch.int32) == expected.view(torch.int32)
    assert bool((same | (weight.cpu().isnan() & expected.isnan())).all())


def bounds(block, unsigned, dtype, at_random):
    """Between which numbers of the code each of a block's is stored, where they are large; the others are infinite."""
    most = largest(dtype, unsigned)
    table = levels(unsigned, 8 if dtype == U8 else 4) * 2.0 ** (128 - storage.CODES[dtype][unsigned].powers)
    table = table[table <= most]
    below = np.searchsorted(table, block, side="right") - 1
    above = np.minimum(below + (table[below] != block), len(table) - 1)
    if np.isfinite(block).all():  # cut
        return table[np.maximum(below - at_random, 0)], table[below]
    return table[below], table[above]


@pytest.mark.sample(2)
@pytest.mark.sample(0, "cpu")
@KINDS
@pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
@pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "random"])
def test_what_is_not_finite_stays_so_alone(place, dtype, unsigned, seed):
    """Others stay finite, and those above the largest number of the code saturate."""
    values = outliers(dtype)
    values[128 * 8 + 60] = torch.tensor(-1, dtype=torch.int32).view(F32)  # NaN; a GPU's arithmetic takes its sign off
    states = [tuple(torch.zeros(packed_size(len(values), dtype), dtype=dtype, device=place.device) for _ in range(2))]
    run(place, take, [values.numpy()], states, seed)
    got = unpacked(states[0][int(unsigned)], values.shape, unsigned).cpu()
    finite, infinite = values.isfinite(), values.isinf()
    assert torch.equal(got.isfinite(), finite)
    assert not got.isnan().any()
    assert torch.equal(got[infinite], values[infinite].abs() if unsigned else values[infinite])
    assert float(got[finite].abs().max()) == largest(dtype, unsigned)
    for start in (0, 128, 256, 384, 1024):  # where the largest is infinite, NaN, or above all codes
        exact = values[start : start + 128].abs().double().numpy()
        large = np.isfinite(exact) & (exact > 1e36)
        lower, upper = bounds(exact, unsigned, dtype, seed is not None)
        found = got[start : start + 128].abs().double().numpy()
        assert large.sum() >= 2
        assert (lower[large] <= found[large]).all()
        assert (found[large] <= upper[large]).all()


def test_zeros_and_numbers_at_the_ends_of_float32(place):
    gradient = np.zeros(6 * 128, dtype=np.float32)
    gradient[128:256] = 1e-39  # below the smallest normal number
    gradient[256:384:2] = 3.2e38
    gradient[384:512:2] = 1.1754944e-38
    gradient[512:640] = -1e-30
    gradient[640:] = 3.4028234e38  # above the largest number that a code stands for
    states = packed_states(place, [768])
    run(place, take, [gradient], states)
    for state, unsigned in zip(states[0], (False, True), strict=True):
        got = unpacked(state, torch.Size([768]), unsigned).cpu().numpy()
        expected, _ = nearest(np.abs(gradient) if unsigned else gradient, unsigned)
        np.testing.assert_array_equal(got[:640], expected[:640].astype(np.float32))
        assert not got[:128].any()
        assert (got[640:] == 31 / 16 * 2.0**127).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("adamw", (F32, F32, None)), ("lamb", (BF16, BF16, I16)), ("novograd", (F16, F32, F32))],
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
        assert [state.dtype for state in states_for(mixed, [weight], I8)[0]] == [I8 if packs else F32, F32]
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


@KINDS
def test_copies_between_all_ways_of_storing(dtype):
    values = torch.tensor(numbers(1, 4100)).view(41, 100)
    packed = storage.copy(torch.zeros(packed_size(4100, dtype), dtype=dtype), values, values.shape)
    (other,) = {U8, I8} - {dtype}
    across = storage.copy(torch.zeros(packed_size(4100, other), dtype=other), packed, values.shape)
    rounded = unpacked(packed, values.shape)
    expected = storage.copy(torch.zeros_like(across), rounded, values.shape)
    assert torch.equal(unpacked(across, values.shape), unpacked(expected, values.shape))
    for wide in (F32, BF16):
        plain = storage.copy(torch.zeros(41, 100, dtype=wide), packed, values.shape)
        assert torch.equal(plain, rounded.to(wide))
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
        state = list(map(torch.zeros, used.shapes(weight.shape)[: len(used.state)]))
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
    with pytest.raises(ValueError, match="is packed, so the weight must be contiguous"):
        Update(take, [weight.view(32, 128).t()], [(torch.zeros(4224, dtype=U8),) * 2])
    with pytest.raises(ValueError, match=r"torch.uint8 .*must be torch.float64"):
        Update(take, [small.double()], [(torch.zeros(20, dtype=U8),) * 2])
    with pytest.raises(TypeError, match=r"nonnegative=\('other',\): rule 'take' has no state 'other'"):
        rule(take.fn, nonnegative=("other",))
