"""What is stored alongside a 16-bit weight instead of a master copy, by the type of that tensor:

- its type's full width: the weight as the rule knows it, whose rounding the weight is;
- int16, alongside bfloat16: the bits that the weight lacks, so that both together are that copy (a split master);
- int8, alongside bfloat16: the upper 8 of these, so that both together are that copy rounded to 24 bits (15 of mantissa);
- the weight's own type: what rounding took off the weight, itself rounded (Kahan's compensation).

The bits b of a float32 are rounded to 24, to the nearest or stochastically, as v = b + 0x80 or v = b + r with 8 random bits
r; the lowest 8 of v are dropped. The weight is the bfloat16 nearest to that, of the bits high = (v + 0x8000) >> 16, and int8
is the rest, low = (v >> 8) - (high << 8), from -128 to 127. As with int16, a weight above the largest bfloat16 is infinity
with a negative rest, which together are finite; what rounds to more than the largest number of 24 bits becomes infinity.

Source of split weights: Rae et al. (2021), "Scaling Language Models", appendix C; with 8 bits, there scaled by the weight's
exponent: FlashOptim (2026), arXiv:2602.23349. Of the last: Kahan (1965), "Further remarks on reducing truncation errors".
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from .low_precision import CodesOnly
from .packed import is_packed

_SPLIT = {torch.int16: 16, torch.int8: 8}  # by the type of the lower part its bits


class MasterKind(IntEnum):
    """What is stored alongside a weight: nothing, its full width, 16 or 8 bits that it lacks, or what rounding took off."""

    NONE = 0
    FULL = 1
    SPLIT = 2
    KAHAN = 3
    SPLIT8 = 4


def kind_of(weight: torch.dtype, master: torch.dtype | None) -> MasterKind | None:
    """What a tensor of this type alongside a weight is; None if it can be nothing."""
    if master is None:
        return MasterKind.NONE
    if master == (torch.float64 if weight == torch.float64 else torch.float32):
        return MasterKind.FULL
    if master in _SPLIT and weight == torch.bfloat16:
        return MasterKind.SPLIT if master == torch.int16 else MasterKind.SPLIT8
    return MasterKind.KAHAN if master == weight and weight.itemsize == 2 else None


def combined(weight: torch.Tensor, master: torch.Tensor | None = None) -> torch.Tensor:
    """The weight as the rule knows it, in the arithmetic's type."""
    kind = kind_of(weight.dtype, None if master is None else master.dtype)
    if kind == MasterKind.FULL:
        assert master is not None
        return master
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if master is None:
        return wide
    if master.dtype in _SPLIT:
        return (wide.view(torch.int32) + (master.to(torch.int32) << 16 - _SPLIT[master.dtype])).view(torch.float32)
    return wide + master.to(torch.float32)


def split(
    value: torch.Tensor, weight: torch.dtype, kind: MasterKind, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as the rule knows it, float32, as what is to be stored: the weight, and what is stored alongside.

    A remainder must fit into 16 or 8 bits, so a weight half-way between two numbers is rounded away from zero there.

    Args:
        value: the weight as the rule knows it.
        weight: the type that it is stored in.
        kind: what is stored alongside.
        random: 32 bits for each number, as `random_bits` gives them, by whose upper 8 one of 24 bits is rounded; by default
            to the nearest. Only of `MasterKind.SPLIT8`.
    """
    if kind in (MasterKind.SPLIT, MasterKind.SPLIT8):
        bits = value.view(torch.int32)
        if kind == MasterKind.SPLIT8:
            bits = bits + (0x80 if random is None else (random >> 24).to(torch.int32))
        nan = torch.isnan(value)
        high = torch.where(nan, value, ((bits + 0x8000) & -0x10000).view(torch.float32)).to(weight)
        low = (bits & 0xFFFF).to(torch.int16) if kind == MasterKind.SPLIT else (bits >> 8 & 0xFF).to(torch.int8)
        return high, torch.where(nan, torch.zeros_like(low), low)
    rounded = value.to(weight)
    lost = value - rounded.to(torch.float32)
    return rounded, torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(weight)


def master_for(weight: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What must be stored alongside a weight so that together they are as near to the float32 value as this type allows."""
    if dtype in _SPLIT:
        missing = value.view(torch.int32) - weight.to(torch.float32).view(torch.int32)
        cut, info = 16 - _SPLIT[dtype], torch.iinfo(dtype)
        missing = missing + (1 << cut >> 1) >> cut
        return missing.clamp(info.min, info.max).to(dtype)
    lost = value - weight.to(torch.float32)
    return torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(dtype)


def unchanged(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which elements are the same number in both, each a weight and, if there is anything, what is stored alongside.

    NaN never is. With Kahan's compensation both tensors must be equal, because other pairs may have the same sum.
    """
    if len(old) > 1 and kind_of(old[0].dtype, old[1].dtype) == MasterKind.KAHAN:
        return (old[0] == new[0]) & (old[1] == new[1])
    return combined(*old) == combined(*new)


class Storage(NamedTuple):
    """What the tensors of a launch are stored as.

    Attributes:
        states: the type of each of the rule's states.
        master: what is stored alongside the weights.
        stochastic: whether packed states are rounded at random, and what is stored as bfloat16 or in 24 bits, but for a
            weight with something else alongside.
        codes_only: whether only packed states are.
    """

    states: tuple[torch.dtype, ...]
    master: MasterKind = MasterKind.NONE
    stochastic: bool = False
    codes_only: bool = False


def of_tensors(weight: torch.dtype, states: Any, master: torch.dtype | None, seed: int | CodesOnly | None) -> Storage:
    """The storage of tensors of these types."""
    kind = kind_of(weight, master)
    assert kind is not None
    states, codes_only = tuple(states), isinstance(seed, CodesOnly)
    some = torch.bfloat16 in states or (weight == torch.bfloat16 and kind in (MasterKind.NONE, MasterKind.SPLIT8))
    stochastic = seed is not None and (any(map(is_packed, states)) or (some and not codes_only))
    return Storage(states, kind, stochastic, stochastic and codes_only)
