"""Masters: tensors stored alongside low-precision weights to preserve their precision. The master's dtype says what it is:

- float32 (float64 for a float64 weight): the full-precision weight, of which the stored weight is a rounded copy. Where the
  weight is not its master rounded, it was written since the last step, by `load_state_dict` say, and the weight counts;
- int16, alongside bfloat16: the bits that the weight lacks; both together are the float32 weight (a split master);
- int8, alongside bfloat16: the upper 8 of these bits; both together are the float32 weight in 24 bits, 15 of mantissa.

For int8, the bits b of a float32 are rounded to 24, to nearest or stochastically, as v = b + 0x80 or v = b + r with 8 random
bits r; the lowest 8 bits of v are dropped. The weight is the nearest bfloat16, with the bits high = (v + 0x8000) >> 16, and
the int8 is the remainder low = (v >> 8) - (high << 8), from -128 to 127. As with int16, a weight above the largest bfloat16
is stored as infinity with a negative remainder, and both together are finite. A number that rounds to more than the largest
number of 24 bits becomes infinity.

Sources: for split weights, Rae et al. (2021), "Scaling Language Models", appendix C; for 8 bits (scaled by the weight's
exponent there), FlashOptim (2026), arXiv:2602.23349.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from .low_precision import CodesOnly
from .packed import is_packed

_SPLIT = {torch.int16: 16, torch.int8: 8}  # the bits of a split master, by its dtype


class MasterKind(IntEnum):
    """Kinds of masters: none, the full-precision weight, or 16 or 8 bits that the weight lacks."""

    NONE = 0
    FULL = 1
    SPLIT = 2
    SPLIT8 = 3


def kind_of(weight: torch.dtype, master: torch.dtype | None) -> MasterKind | None:
    """Return the kind of a master, given the dtypes of weight and master; None if the combination is not supported.

    `master` None, no master, has the kind `MasterKind.NONE`.
    """
    if master is None:
        return MasterKind.NONE
    if master == (torch.float64 if weight == torch.float64 else torch.float32):
        return MasterKind.FULL
    if master in _SPLIT and weight == torch.bfloat16:
        return MasterKind.SPLIT if master == torch.int16 else MasterKind.SPLIT8
    return None


def combined(weight: torch.Tensor, master: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weight that the rule sees: weight and master combined, float64 for a float64 weight, else float32."""
    kind = kind_of(weight.dtype, None if master is None else master.dtype)
    if kind == MasterKind.FULL:
        assert master is not None
        return torch.where(_rounds_to(master, weight), master, weight.to(master.dtype))
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if master is None:
        return wide
    return (wide.view(torch.int32) + (master.to(torch.int32) << 16 - _SPLIT[master.dtype])).view(torch.float32)


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return where a full master rounds to the weight: half-way between two of bfloat16 to both, as split masters do."""
    if weight.dtype == torch.float16:
        return master.to(torch.float16).view(torch.int16) == weight.view(torch.int16)
    if weight.dtype != torch.bfloat16:
        return master == weight
    less = master.view(torch.int32) - weight.to(torch.float32).view(torch.int32) + 0x8000
    return (less >= 0) & (less <= 0x10000) & ~torch.isnan(master)


def split(value: torch.Tensor, kind: MasterKind, random: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float32 weight into the bfloat16 weight and the split master to store.

    A weight half-way between two numbers is rounded away from zero, so that the remainder fits.

    Args:
        value: the weight that the rule computed, float32.
        kind: the kind of the master: `SPLIT` or `SPLIT8`.
        random: for `MasterKind.SPLIT8`, 32 random bits for each number from `random_bits`, for stochastic rounding by the
            upper 8. Default: round to nearest.
    """
    bits = value.view(torch.int32)
    if kind == MasterKind.SPLIT8:
        bits = bits + (0x80 if random is None else (random >> 24).to(torch.int32))
    nan = torch.isnan(value)
    high = torch.where(nan, value, ((bits + 0x8000) & -0x10000).view(torch.float32)).to(torch.bfloat16)
    low = (bits & 0xFFFF).to(torch.int16) if kind == MasterKind.SPLIT else (bits >> 8 & 0xFF).to(torch.int8)
    return high, torch.where(nan, torch.zeros_like(low), low)


def master_for(weight: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the split master of this dtype that, with the stored weight, comes closest to the float32 value.

    Args:
        weight: the stored weight, bfloat16.
        value: the full-precision weight, float32.
        dtype: the master's dtype: int16 or int8.
    """
    missing = value.view(torch.int32) - weight.to(torch.float32).view(torch.int32)
    cut, info = 16 - _SPLIT[dtype], torch.iinfo(dtype)
    missing = missing + (1 << cut >> 1) >> cut
    return missing.clamp(info.min, info.max).to(dtype)


class Storage(NamedTuple):
    """The storage formats of the tensors of a launch.

    Attributes:
        states: the dtype of each of the rule's states.
        master: the kind of the weights' masters.
        stochastic: whether rounding is stochastic for packed states, bfloat16 states, and weights in 24 bits or in bfloat16
            without a master.
        codes_only: whether stochastic rounding is limited to packed states.
    """

    states: tuple[torch.dtype, ...]
    master: MasterKind = MasterKind.NONE
    stochastic: bool = False
    codes_only: bool = False


def of_tensors(weight: torch.dtype, states: Any, master: torch.dtype | None, seed: int | CodesOnly | None) -> Storage:
    """Return the storage formats of a launch.

    Args:
        weight: the dtype of the weights.
        states: the dtype of each state.
        master: the dtype of the masters; None for no masters.
        seed: the seed of stochastic rounding; None rounds to nearest.
    """
    kind = kind_of(weight, master)
    assert kind is not None
    states, codes_only = tuple(states), isinstance(seed, CodesOnly)
    rounded = torch.bfloat16 in states or (weight == torch.bfloat16 and kind in (MasterKind.NONE, MasterKind.SPLIT8))
    stochastic = seed is not None and (any(map(is_packed, states)) or (rounded and not codes_only))
    return Storage(states, kind, stochastic, stochastic and codes_only)
