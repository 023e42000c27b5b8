"""How weights and states lie in memory in fewer bits than the arithmetic has, in torch's operations.

The types of the tensors say which way it is, so that nothing else has to be handed on. A state may be bfloat16 where the
arithmetic is float32. What stands beside a 16-bit weight in the place of a master copy may be

- its type's full width: the weight as the rule knows it, whose rounding the weight is;
- int16, beside bfloat16: the bits that the weight lacks, so that both together are that copy;
- the weight's own type: what rounding took off the weight, itself rounded (Kahan's compensation).

Source of the second: Rae et al. (2021), "Scaling Language Models", appendix C, and the split weights of FlashOptim; of the
third: Kahan (1965), "Further remarks on reducing truncation errors"; of stochastic rounding: Gupta et al. (2015), "Deep
Learning with Limited Numerical Precision".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = [
    "COMPENSATION",
    "FULL",
    "HASH",
    "NONE",
    "REMAINDER",
    "SALT",
    "Storage",
    "beside",
    "combined",
    "keys",
    "kind_of",
    "of_tensors",
    "parted",
    "random_bits",
    "rounded_at_random",
]

NONE, FULL, REMAINDER, COMPENSATION = range(4)  # what stands beside a weight
_WORD = 0xFFFFFFFF

# A multiplication spreads the elements, two more and three shifts mix them with the key (the constants are those of
# Ettinger's "lowbias32"). Philox would need 50 instructions for each element, which is more than most rules have.
HASH = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
SALT = 0x85EBCA6B  # by which the keys of a tensor's states differ


class Storage:
    """What a table's tensors are stored as.

    Attributes:
        states: the type of each of the rule's states.
        beside: what stands beside the weights: NONE, FULL, REMAINDER or COMPENSATION.
        stochastic: whether what is stored as bfloat16 is rounded at random, but for a weight with something beside it.
    """

    def __init__(self, states: tuple[torch.dtype, ...], beside: int = NONE, stochastic: bool = False) -> None:
        self.states, self.beside, self.stochastic = states, beside, stochastic

    def __repr__(self) -> str:
        return f"Storage({self.states!r}, {self.beside!r}, {self.stochastic!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def kind_of(weight: torch.dtype, beside: torch.dtype | None) -> int | None:
    """What a tensor of this type beside a weight is; None if it can be nothing."""
    if beside is None:
        return NONE
    if beside == (torch.float64 if weight == torch.float64 else torch.float32):
        return FULL
    if beside == torch.int16 and weight == torch.bfloat16:
        return REMAINDER
    return COMPENSATION if beside == weight and weight.itemsize == 2 else None


def keys(seed: int, updates: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each tensor, by the number of its update and its place, a key of 32 bits: [n, 2], the low and the high half.

    Halves, because they travel among hyper-parameters, which may be float32.
    """
    x = np.asarray(updates).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.asarray(places).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.array(seed % 2**64, dtype=np.uint64)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):  # as SplitMix64 does
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return np.stack([x >> np.uint64(48), (x >> np.uint64(32)) & np.uint64(0xFFFF)], axis=-1).astype(np.float64)


def random_bits(low: float, high: float, index: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """16 bits for each index, those of an int64; always the same for the same key."""
    key = ((int(low) | int(high) << 16) + salt * SALT) & _WORD
    h = (index * HASH[0] & _WORD) ^ key
    h = (h ^ (h >> 16)) * HASH[1] & _WORD
    h = (h ^ (h >> 15)) * HASH[2] & _WORD
    return h >> 16


def rounded_at_random(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """float32 as bfloat16: up or down, with the probability of the bits that are cut off."""
    bits = value.view(torch.int32).to(torch.int64) & _WORD
    cut = ((bits + random) >> 16).to(torch.int32) << 16
    return torch.where(torch.isnan(value), value, cut.view(torch.float32)).to(torch.bfloat16)


def combined(weight: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """The weight as the rule knows it, in the arithmetic's type."""
    kind = kind_of(weight.dtype, None if beside is None else beside.dtype)
    if kind == FULL:
        assert beside is not None
        return beside
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if beside is None:
        return wide
    if kind == REMAINDER:
        return (wide.view(torch.int32) + beside.to(torch.int32)).view(torch.float32)
    return wide + beside.to(torch.float32)


def parted(value: torch.Tensor, weight: torch.dtype, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as the rule knows it, float32, as what is to be stored: the weight, and what stands beside it.

    A remainder must fit into 16 bits, so a weight half-way between two numbers is rounded away from zero there.
    """
    if kind == REMAINDER:
        bits = value.view(torch.int32)
        nan = torch.isnan(value)
        high = torch.where(nan, value, ((bits + 0x8000) & -0x10000).view(torch.float32)).to(weight)
        low = (bits & 0xFFFF).to(torch.int16)
        return high, torch.where(nan, torch.zeros_like(low), low)
    rounded = value.to(weight)
    lost = value - rounded.to(torch.float32)
    return rounded, torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(weight)


def beside(weight: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What must stand beside a weight so that together they are as near to the float32 value as this type allows."""
    if dtype == torch.int16:
        missing = value.view(torch.int32) - weight.to(torch.float32).view(torch.int32)
        return missing.clamp(-0x8000, 0x7FFF).to(torch.int16)
    lost = value - weight.to(torch.float32)
    return torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(dtype)


def of_tensors(weight: torch.dtype, states: Any, beside: torch.dtype | None, seed: int | None) -> Storage:
    """The storage of tensors of these types."""
    kind = kind_of(weight, beside)
    assert kind is not None
    states = tuple(states)
    some = torch.bfloat16 in states or (weight == torch.bfloat16 and kind == NONE)
    return Storage(states, kind, seed is not None and some)
