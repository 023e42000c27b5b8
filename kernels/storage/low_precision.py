"""Stochastic rounding to bfloat16, and the keys of its random bits.

Source: Gupta et al. (2015), "Deep Learning with Limited Numerical Precision".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_WORD = 0xFFFFFFFF
# The hash of a group of 4 elements, which one GPU thread holds: one multiplication spreads the groups' numbers, two more
# and two shifts mix them with the key (constants of Ettinger's "lowbias32"). The hash seeds a congruential generator, which
# yields the numbers of the group's elements, slot after slot, by one multiplication each. Philox would take 50 instructions
# for each element, more than most rules have.
HASH = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
NEXT = 1664525  # Press et al. (1992), "Numerical Recipes in C", section 7.1


class CodesOnly(NamedTuple):
    """A seed for stochastic rounding of packed states only; everything else is rounded to nearest."""

    seed: int


def keys(seed: int | CodesOnly, updates: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return a 32-bit random key for each of n tensors: float64 [n, 2], the low and the high 16 bits.

    A key travels as two columns of `hyper`. These may be float32, which holds 16 bits exactly, but not 32.

    Args:
        seed: the seed of the run.
        updates: [n], the number of each tensor's update.
        offsets: [n], each tensor's offset, which distinguishes it from the others.
    """
    seed = seed.seed if isinstance(seed, CodesOnly) else seed
    x = np.asarray(updates).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.asarray(offsets).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.array(seed % 2**64, dtype=np.uint64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):  # as in SplitMix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return np.stack([x >> np.uint64(48), (x >> np.uint64(32)) & np.uint64(0xFFFF)], axis=-1).astype(np.float64)


def multiplier(slot: int, element: int = 0) -> int:
    """Return the number that multiplies a group's hash to get the random bits of one of its elements.

    Args:
        slot: k for state k; the number of states for the weight.
        element: index in the group, 0 to 3.
    """
    return pow(NEXT, 4 * slot + element, 1 << 32)


def random_bits(low: float, high: float, index: torch.Tensor, slot: int = 0) -> torch.Tensor:
    """Return 32 random bits for each index, as int64, determined by key (`low`, `high`) and slot. High bits are better."""
    h = ((index >> 2) * HASH[0] & _WORD) ^ (int(low) | int(high) << 16)
    h = (h ^ (h >> 16)) * HASH[1] & _WORD
    h = (h ^ (h >> 15)) * HASH[2] & _WORD
    for bit in (0, 1):
        h = h * (1 + (index >> bit & 1) * (multiplier(0, 1 << bit) - 1)) & _WORD
    return h * multiplier(slot) & _WORD


def rounded_at_random(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 stochastically, by the upper 16 of 32 random bits for each number; NaN stays NaN."""
    bits = value.view(torch.int32).to(torch.int64) & _WORD
    cut = ((bits + (random >> 16)) >> 16).to(torch.int32) << 16
    return torch.where(torch.isnan(value), value, cut.view(torch.float32)).to(torch.bfloat16)
