"""Packed states with numbers that are huge or not finite: each stays an affair of its own element, on every engine.

The oracle is the list of numbers that codes stand for: with the largest scale those from 2^128 on are infinite.
"""

import numpy as np
import pytest
import torch
from packed_numbers import levels

from tristep.kernels import Update, rule, storage, tl
from tristep.kernels.storage import packed_size, pieces, unpacked

F32, I32, U8, I8 = torch.float32, torch.int32, torch.uint8, torch.int8
KINDS = pytest.mark.parametrize("dtype", [U8, I8], ids=["8 bits", "4 bits"])
SIGNS = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
MOST = float(np.finfo(np.float32).max)
NANS = [0x7FC00000, 0x7FFFFFFF, 0x7F800001]  # a GPU's own, 0x7fffffff, leaves no room above it to be rounded into
N = 4100


@rule(nonnegative=("square",))
def take(w, g, state, hyper):
    mean, square = state
    return mean + square, (g, tl.abs(g))


def largest(dtype, unsigned):
    """The largest number of this code that is finite."""
    return (2 - 2.0 ** -storage.CODES[dtype][unsigned].mantissa) * 2.0**127


def stored(place, values, dtype, seed=None, number=1):
    """The states of `take` after a step with these gradients."""
    zeros = [torch.zeros(packed_size(N, dtype), dtype=dtype, device=place.device) for _ in range(2)]
    weight = torch.zeros(N, device=place.device)
    update = Update(take, [weight], [tuple(zeros)], engine=place.engine, seed=seed)
    update.hyper[:] = [[1.0, *([] if seed is None else [number])]]
    gradient = values.to(place.device)
    update.bind([gradient])
    update()
    return [state.cpu() for state in zeros]


def numbers(dtype):
    """Blocks with an outlier each, or with NaN of all kinds; of the others one is ordinary, two are large."""
    values = torch.tensor(np.random.default_rng(1).normal(size=N), dtype=F32)
    values[1::128], values[2::128] = -1e37, 1.1e38
    outliers = [np.inf, -np.inf, MOST, -MOST, largest(dtype, False), 1.6 * 2.0**127, 3e38, -3e38]
    for block, outlier in enumerate(outliers):
        values[128 * block + 77] = outlier
    values[128 * 8 + 50 : 128 * 8 + 53] = torch.tensor(NANS, dtype=I32).view(F32)
    return values


def bounds(block, unsigned, dtype, at_random):
    """Between which numbers of the code each of a block's is stored, where they are large."""
    most = largest(dtype, unsigned)
    table = levels(unsigned, 8 if dtype == U8 else 4) * 2.0 ** (128 - storage.CODES[dtype][unsigned].powers)
    table = table[table <= most]  # the others are infinite
    below = np.searchsorted(table, block, side="right") - 1
    above = np.minimum(below + (table[below] != block), len(table) - 1)
    if np.isfinite(block).all():  # cut
        return table[np.maximum(below - at_random, 0)], table[below]
    return table[below], table[above]


@pytest.mark.sample(2)
@KINDS
@SIGNS
@pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "random"])
def test_what_is_not_finite_stays_so_alone(place, dtype, unsigned, seed):
    """Others stay finite, and those above the largest number of the code saturate."""
    values = numbers(dtype)
    values[128 * 8 + 60] = torch.tensor(-1, dtype=I32).view(F32)  # NaN; a GPU's arithmetic takes its sign off
    got = unpacked(stored(place, values, dtype, seed)[int(unsigned)], values.shape, unsigned)
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


@KINDS
@pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "random"])
def test_every_engine_stores_the_same_bytes(place, dtype, seed):
    values = numbers(dtype)
    for slot, state in enumerate(stored(place, values, dtype, seed, number=7)):
        random = None
        if seed is not None:
            low, high = storage.keys(seed, np.array([7]), np.array([0]))[0]
            random = storage.random_bits(low, high, torch.arange(N), slot)
        given = values.abs() if slot else values
        codes, scales = storage.encode(given, bool(slot), random, dtype)
        assert torch.equal(pieces(state, N)[1], scales)
        assert torch.equal(pieces(state, N)[0], codes)


@SIGNS
@KINDS
def test_what_was_decoded_is_encoded_as_the_same_numbers(dtype, unsigned):
    """Also next to infinities, with any random bits."""
    values = numbers(dtype)
    once = storage.decode(*storage.encode(values, unsigned, None, dtype), unsigned, dtype, N)
    for bits in (None, 0, 0xFFFFFFFF, 0x80000000):
        drawn = None if bits is None else torch.full((N,), bits)
        again = storage.decode(*storage.encode(once, unsigned, drawn, dtype), unsigned, dtype, N)
        assert torch.equal(again, once)


@KINDS
def test_a_state_in_full_is_packed_alike(dtype):
    """As when it is loaded with another `state_dtype`; an infinity is one of bfloat16, too."""
    values = numbers(dtype)
    packed = storage.copy(torch.zeros(packed_size(N, dtype), dtype=dtype), values, values.shape)
    assert torch.equal(unpacked(packed, values.shape).isfinite(), values.isfinite())
    assert torch.equal(storage.as_bfloat16(packed, values.shape).to(F32), unpacked(packed, values.shape))
    storage.check_scales("mean", packed)
