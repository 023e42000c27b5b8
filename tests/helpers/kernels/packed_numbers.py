"""What codes of 8 and 4 bits stand for, in float64: the list of numbers that codes have, and which is nearest. An oracle."""

import numpy as np
import torch

from tristep.kernels.storage import CODES

__all__ = ["blocks", "largest", "levels", "nearest", "numbers", "outliers", "scale_of"]


# Of codes of 4 bits as tables: a bit of mantissa and two of exponent after the sign, or, without sign, four of exponent.
FOUR_BITS = {False: [0, 2, 4, 6, 8, 12, 16, 24], True: [0, *(2.0**k for k in range(2, 17))]}


def levels(unsigned, bits=8):
    """The multiples of a block's scale that the codes from 0 on stand for: 4 bits of mantissa, subnormal ones at first."""
    if bits == 4:
        return np.array(FOUR_BITS[unsigned], dtype=np.float64)
    codes = np.arange(256 if unsigned else 128)
    exponent, mantissa = codes // 16, codes % 16
    return np.where(exponent == 0, mantissa / 4, (1 + mantissa / 16) * 4 * 2.0 ** (exponent - 1))


def scale_of(block, unsigned, bits=8):
    """The least power of two whose multiples reach the largest of a block."""
    largest, most = np.abs(np.asarray(block, dtype=np.float64)).max(), levels(unsigned, bits)[-1]
    top = 2.0 ** np.floor(np.log2(most))
    exponent = -100
    while most / top * 2.0**exponent < largest:
        exponent += 1
    return 2.0**exponent / top


def blocks(values):
    return [values[start : start + 128] for start in range(0, len(values), 128)]


def nearest(values, unsigned, bits=8):
    """The nearest that codes have, in float64, and half the distance of the neighbours there."""
    table, found, gaps = levels(unsigned, bits), [], []
    for block in blocks(np.asarray(values, dtype=np.float64)):
        numbers = table * scale_of(block, unsigned, bits)
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


def largest(dtype, unsigned):
    """The largest number of this code that is finite."""
    return (2 - 2.0 ** -CODES[dtype][unsigned].mantissa) * 2.0**127


MOST = float(np.finfo(np.float32).max)
NANS = [0x7FC00000, 0x7FFFFFFF, 0x7F800001]  # a GPU's own, 0x7fffffff, leaves no room above it to be rounded into


def outliers(dtype):
    """Blocks with an outlier each, or with NaN of all kinds; of the others one is ordinary, two are large."""
    values = torch.tensor(np.random.default_rng(1).normal(size=4100), dtype=torch.float32)
    values[1::128], values[2::128] = -1e37, 1.1e38
    ends = [np.inf, -np.inf, MOST, -MOST, largest(dtype, False), 1.6 * 2.0**127, 3e38, -3e38]
    values[77 : 77 + 128 * len(ends) : 128] = torch.tensor(ends)
    values[128 * 8 + 50 : 128 * 8 + 53] = torch.tensor(NANS, dtype=torch.int32).view(torch.float32)
    return values
