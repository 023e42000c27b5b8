"""What codes of 8 bits stand for, in float64: the list of numbers that codes have, and which is nearest. An oracle."""

import numpy as np

__all__ = ["blocks", "levels", "nearest", "numbers", "scale_of"]


def levels(unsigned):
    """The multiples of a block's scale that the codes from 0 on stand for: 4 bits of mantissa, subnormal ones at first."""
    codes = np.arange(256 if unsigned else 128)
    exponent, mantissa = codes // 16, codes % 16
    return np.where(exponent == 0, mantissa / 4, (1 + mantissa / 16) * 4 * 2.0 ** (exponent - 1))


def scale_of(block, unsigned):
    """The least power of two whose multiples reach the largest of a block."""
    largest, top = np.abs(np.asarray(block, dtype=np.float64)).max(), 2.0 ** (16 if unsigned else 8)
    exponent = -100
    while 31 / 16 * 2.0**exponent < largest:
        exponent += 1
    return 2.0**exponent / top


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
