"""Stochastic rounding to bfloat16, and the keys of its random bits.

Source: Gupta et al. (2015), "Deep Learning with Limited Numerical Precision".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_WORD = 0xFFFFFFFF
# A multiplication spreads groups of 4 elements, which a thread of a GPU holds, two more and two shifts mix them with the key
# (the constants are those of Ettinger's "lowbias32"). What it gives is the seed of a congruential generator, whose next
# numbers are those of the elements of the group, for one slot after the other: one multiplication each. Philox would need
# 50 instructions for each element, which is more than most rules have.
HASH = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
NEXT = 1664525  # Press et al. (1992), "Numerical Recipes in C", section 7.1


class CodesOnly(NamedTuple):
    """A seed by which packed states alone are rounded at random, and all else to the nearest."""

    seed: int


def keys(seed: int | CodesOnly, updates: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each tensor, by the number of its update and its offset, a key of 32 bits: [n, 2], the low and the high half.

    Halves, because they travel among hyper-parameters, which may be float32.
    """
    seed = seed.seed if isinstance(seed, CodesOnly) else seed
    x = np.asarray(updates).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.asarray(offsets).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.array(seed % 2**64, dtype=np.uint64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):  # as SplitMix64 does
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return np.stack([x >> np.uint64(48), (x >> np.uint64(32)) & np.uint64(0xFFFF)], axis=-1).astype(np.float64)


def multiplier(slot: int, element: int = 0) -> int:
    """What a group's hash is multiplied by for an element of it, from 0 to 3, and a slot.

    Args:
        slot: k of state k, and the number of states of the weight.
        element: which of the group.
    """
    return pow(NEXT, 4 * slot + element, 1 << 32)


def random_bits(low: float, high: float, index: torch.Tensor, slot: int = 0) -> torch.Tensor:
    """32 bits for each index, an int64; always the same for the same key and slot. The upper ones are the better ones."""
    h = ((index >> 2) * HASH[0] & _WORD) ^ (int(low) | int(high) << 16)
    h = (h ^ (h >> 16)) * HASH[1] & _WORD
    h = (h ^ (h >> 15)) * HASH[2] & _WORD
    for bit in (0, 1):
        h = h * (1 + (index >> bit & 1) * (multiplier(0, 1 << bit) - 1)) & _WORD
    return h * multiplier(slot) & _WORD


def rounded_at_random(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 as bfloat16: up or down, with the probability of the bits that are cut off; by the upper 16 of 32 bits."""
    bits = value.view(torch.int32).to(torch.int64) & _WORD
    cut = ((bits + (random >> 16)) >> 16).to(torch.int32) << 16
    return torch.where(torch.isnan(value), value, cut.view(torch.float32)).to(torch.bfloat16)
