"""Codes and scales of states of 8 bits, on torch tensors: rounding, to the nearest and at random, and what is left of it.

The oracle lists the numbers that codes stand for and takes the nearest, or for random rounding one of the two neighbours.
"""

import math

import numpy as np
import pytest
import torch
from packed_numbers import blocks, levels, nearest, numbers, scale_of

from tristep.kernels import storage

F32, U8 = torch.float32, torch.uint8
SIZES = [4096, 70_001, 1, 0]
SIGNS = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])


def test_levels_are_those_of_small_floating_point_types():
    """Signed ones are torch's float8 with 4 bits of exponent, but one bit of these is of the mantissa here."""
    for unsigned, last in ((False, 127), (True, 255)):
        table = levels(unsigned)
        assert len(table) == last + 1
        assert table[0] == 0
        assert table[-1] == 31 / 16 * 2.0 ** (16 if unsigned else 8)
        assert (np.diff(table) > 0).all()
        assert (np.diff(table)[:31] == 0.25).all()
        assert (np.diff(table[16:]) / table[16:-1]).max() == 1 / 16


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
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_was_decoded_is_encoded_as_the_same_numbers(seed, unsigned):
    """Also where the largest was rounded to what has half the scale, as that of some of these blocks is."""
    rng = np.random.default_rng(5)
    values = rng.uniform(1, 2, size=2000)[:, None] * rng.uniform(0, 1, size=(2000, 128))
    values[:, 0] = rng.uniform(1.9, 2, size=2000)
    values = torch.tensor(values.reshape(-1) * (1 if unsigned else -1), dtype=F32)
    draw = None if seed is None else torch.randint(0, 1 << 32, values.shape, generator=torch.Generator().manual_seed(seed))
    once = storage.encode(values, unsigned, draw)
    numbers_ = storage.decode(*once, unsigned)
    twice = storage.encode(numbers_, unsigned, draw)
    assert torch.equal(storage.decode(*twice, unsigned), numbers_)
    assert 0 < int((once[1] != twice[1]).sum()) < 1000


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
