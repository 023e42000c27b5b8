"""Codes and scales of states of 8 and 4 bits: rounding, to the nearest and at random, and what is left of it.

The oracle lists the numbers that codes stand for and takes the nearest, or for random rounding one of the two neighbours.
"""

import math

import numpy as np
import pytest
import torch
from packed_numbers import blocks, levels, nearest, numbers, outliers, scale_of

from tristep.kernels import storage

F32, U8, I8 = torch.float32, torch.uint8, torch.int8  # in 8 bits, and in 4
SIZES = [4096, 70_001, 1, 0]
SIGNS = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
KINDS = pytest.mark.parametrize("dtype", [U8, I8], ids=["8 bits", "4 bits"])


def packed_and_back(values, unsigned, random=None, dtype=U8):
    return storage.decode(*storage.encode(values, unsigned, random, dtype), unsigned, dtype, len(values))


@SIGNS
def test_codes_of_4_bits_are_those_of_the_table(unsigned):
    """Two to a byte, the first one in the lower bits."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=U8)
    table = levels(unsigned, 4)
    expected = table if unsigned else np.concatenate([table, -table])
    assert storage.decode(codes, torch.tensor([0.5]), unsigned, I8).tolist() == (0.5 * expected).tolist()
    for n, size in ((0, 0), (1, 20), (32, 20), (33, 36), (128, 68), (129, 88), (4096, 2048 + 128)):
        assert storage.packed_size(n, I8) == size


@SIGNS
@KINDS
@pytest.mark.parametrize("n", [*SIZES, 128, 129, 256])
def test_codes_stand_for_the_nearest(n, dtype, unsigned):
    values, bits = numbers(n, n, unsigned), 8 if dtype == U8 else 4
    codes, scales = storage.encode(torch.tensor(values), unsigned, None, dtype)
    assert codes.shape == ((n * bits + 7) // 8,)
    assert scales.tolist() == [scale_of(block, unsigned, bits) for block in blocks(values)]
    got = storage.decode(codes, scales, unsigned, dtype, n).double().numpy()
    expected, gap = nearest(values, unsigned, bits)
    assert np.count_nonzero(got != expected) <= 0.001 * n  # halves may go to either side
    assert (np.abs(got - values) <= gap * (1 + 1e-5)).all()
    assert (got[values == 0] == 0).all()
    if unsigned:
        assert (got[values > 0] > 0).all()


@SIGNS
@pytest.mark.parametrize("exponent", [-100, -60, -3, 0, 43, 127])
def test_what_was_decoded_is_encoded_as_it_was(exponent, unsigned):
    """Every code, with any random bits, where the scale stays the same. Only -0 may come back as 0."""
    codes = torch.arange(128 if not unsigned else 256, dtype=torch.int32)
    codes = torch.cat([codes, codes[1:] | 128]) if not unsigned else codes
    largest = 255 if unsigned else 127
    codes = torch.cat([torch.nn.functional.pad(part, (0, 127 - len(part)), value=0) for part in codes.split(127)])
    codes = torch.nn.functional.pad(codes.view(-1, 127), (0, 1), value=largest).view(-1).to(U8)
    scales = torch.full((len(codes) // 128,), 2.0 ** (exponent - (16 if unsigned else 8)))
    values = storage.decode(codes, scales, unsigned)
    for random in (None, 0, 0xFFFFFFFF, 0x80000000):
        bits = None if random is None else torch.full((len(codes),), random)
        again, same = storage.encode(values, unsigned, bits)
        assert torch.equal(same, scales)
        assert torch.equal(again, codes), random


@SIGNS
def test_scales_change_at_the_numbers_that_the_largest_code_reaches(unsigned):
    block, top = torch.zeros(128), 2.0 ** (16 if unsigned else 8)
    just_above = float(np.nextafter(np.float32(31 / 16), np.float32(2)))
    for largest, scale in ((31 / 16, 1), (just_above, 2), (31 / 32, 0.5), (1.0, 1), (1.9, 1), (2.0, 2), (0.0, 2.0**-100)):
        block[5] = largest
        codes, scales = storage.encode(block, unsigned)
        assert scales.tolist() == [scale / top]
        assert abs(float(storage.decode(codes, scales, unsigned)[5]) - largest) <= largest / 31


@SIGNS
@KINDS
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_was_decoded_is_encoded_as_the_same_numbers(seed, dtype, unsigned):
    """Also where the largest was rounded to what has half the scale, as that of some of these blocks is."""
    rng = np.random.default_rng(5)
    values = rng.uniform(1, 2, size=2000)[:, None] * rng.uniform(0, 1, size=(2000, 128))
    values[:, 0] = rng.uniform(1.9, 2, size=2000)
    values = torch.tensor(values.reshape(-1) * (1 if unsigned else -1), dtype=F32)
    draw = None if seed is None else torch.randint(0, 1 << 32, values.shape, generator=torch.Generator().manual_seed(seed))
    numbers_ = packed_and_back(values, unsigned, draw, dtype)
    assert torch.equal(packed_and_back(numbers_, unsigned, draw, dtype), numbers_)
    once, twice = (storage.encode(each, unsigned, draw, dtype)[1] for each in (values, numbers_))
    assert int((once != twice).sum()) < 1000
    assert dtype == I8 or bool((once != twice).any())
    once = packed_and_back(outliers(dtype), unsigned, None, dtype)  # also next to infinities, with any random bits
    for bits in (None, 0, 0xFFFFFFFF, 0x80000000):
        drawn = None if bits is None else torch.full(once.shape, bits)
        assert torch.equal(packed_and_back(once, unsigned, drawn, dtype), once)


@SIGNS
@KINDS
def test_random_rounding_takes_a_neighbour_and_is_right_on_average(dtype, unsigned):
    table = levels(unsigned, 8 if dtype == U8 else 4)
    n = 128 * 400
    for code, share in zip((40, 100, 3) if dtype == U8 else (2, 5, 1), (1 / 8, 1 / 2, 13 / 16), strict=True):
        low, high = table[code : code + 2]
        values = np.full(n, low + share * (high - low), dtype=np.float32)
        values[::128] = table[-1]
        random = torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(code))
        got = packed_and_back(torch.tensor(values), unsigned, random, dtype).double().numpy()
        assert (got[::128] == table[-1]).all()
        got = np.delete(got, slice(None, None, 128))
        np.testing.assert_allclose(np.unique(got), [low, high], rtol=1e-5)
        up = (got > (low + high) / 2).mean()
        assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / len(got)) + 1e-3


def test_nothing_above_zero_becomes_zero_in_4_bits_where_nothing_is_negative():
    """However small next to the block's largest, and whatever the random bits."""
    values = torch.tensor([1.0, 2.0**-14, 2.0**-20, 1e-30, 1.2e-38, 0.0])
    for random in (None, torch.zeros(6, dtype=torch.int64), torch.full((6,), 0xFFFFFFFF)):
        got = packed_and_back(values, True, random, I8)
        assert got[1:5].tolist() == [2.0**-14] * 4
        assert got[5] == 0


@SIGNS
@KINDS
def test_all_numbers_are_numbers_of_bfloat16(dtype, unsigned, monkeypatch):
    """Each code with the least, the largest and middle scales; also in pieces."""
    bits = 8 if dtype == U8 else 4
    codes = torch.arange(256, dtype=torch.int32).to(U8).repeat_interleave(bits // 4).repeat(64 if bits == 8 else 128)
    n = len(codes) * 8 // bits
    packed = torch.zeros(storage.packed_size(n, dtype), dtype=dtype)
    own, scales = storage.pieces(packed, n)
    own.copy_(codes)
    most = 127 - storage.CODES[dtype][unsigned].powers
    least = -100 - storage.CODES[dtype][unsigned].powers
    scales.copy_(torch.exp2(torch.linspace(least, most, len(scales)).round()))
    monkeypatch.setattr("tristep.kernels.storage.packed.AT_A_TIME", 1024)
    found, expected = (
        storage.as_bfloat16(packed, torch.Size([n]), unsigned),
        storage.unpacked(packed, torch.Size([n]), unsigned),
    )
    assert found.dtype == torch.bfloat16
    assert expected.isfinite().all()
    assert torch.equal(found.to(F32), expected)
    again = storage.copy(torch.zeros_like(packed), found, torch.Size([n]), unsigned)
    assert torch.equal(storage.unpacked(again, torch.Size([n]), unsigned), expected)
    # An infinity is one of bfloat16, too; a state in full is packed so when it is loaded with another `state_dtype`.
    values = outliers(dtype)
    packed = storage.copy(torch.zeros(storage.packed_size(len(values), dtype), dtype=dtype), values, values.shape)
    assert torch.equal(storage.unpacked(packed, values.shape).isfinite(), values.isfinite())
    assert torch.equal(storage.as_bfloat16(packed, values.shape).to(F32), storage.unpacked(packed, values.shape))
    storage.check_scales("mean", packed)
