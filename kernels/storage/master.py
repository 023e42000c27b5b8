"""What is stored alongside a 16-bit weight instead of a master copy, by the type of that tensor:

- its type's full width: the weight as the rule knows it, whose rounding the weight is;
- int16, alongside bfloat16: the bits that the weight lacks, so that both together are that copy (a split master);
- the weight's own type: what rounding took off the weight, itself rounded (Kahan's compensation).

Source of the second: Rae et al. (2021), "Scaling Language Models", appendix C, and the split weights of FlashOptim; of the
third: Kahan (1965), "Further remarks on reducing truncation errors".
"""

from __future__ import annotations

from enum import IntEnum

import torch

__all__ = ["MasterKind", "combined", "kind_of", "master_for", "split"]


class MasterKind(IntEnum):
    """What is stored alongside a weight: nothing, its full width, the bits that it lacks, or what rounding took off."""

    NONE = 0
    FULL = 1
    SPLIT = 2
    KAHAN = 3


def kind_of(weight: torch.dtype, master: torch.dtype | None) -> MasterKind | None:
    """What a tensor of this type alongside a weight is; None if it can be nothing."""
    if master is None:
        return MasterKind.NONE
    if master == (torch.float64 if weight == torch.float64 else torch.float32):
        return MasterKind.FULL
    if master == torch.int16 and weight == torch.bfloat16:
        return MasterKind.SPLIT
    return MasterKind.KAHAN if master == weight and weight.itemsize == 2 else None


def combined(weight: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The weight as the rule knows it, in the arithmetic's type."""
    kind = kind_of(weight.dtype, None if master is None else master.dtype)
    if kind == MasterKind.FULL:
        assert master is not None
        return master
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if master is None:
        return wide
    if kind == MasterKind.SPLIT:
        return (wide.view(torch.int32) + master.to(torch.int32)).view(torch.float32)
    return wide + master.to(torch.float32)


def split(value: torch.Tensor, weight: torch.dtype, kind: MasterKind) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as the rule knows it, float32, as what is to be stored: the weight, and what is stored alongside.

    A remainder must fit into 16 bits, so a weight half-way between two numbers is rounded away from zero there.
    """
    if kind == MasterKind.SPLIT:
        bits = value.view(torch.int32)
        nan = torch.isnan(value)
        high = torch.where(nan, value, ((bits + 0x8000) & -0x10000).view(torch.float32)).to(weight)
        low = (bits & 0xFFFF).to(torch.int16)
        return high, torch.where(nan, torch.zeros_like(low), low)
    rounded = value.to(weight)
    lost = value - rounded.to(torch.float32)
    return rounded, torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(weight)


def master_for(weight: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What must be stored alongside a weight so that together they are as near to the float32 value as this type allows."""
    if dtype == torch.int16:
        missing = value.view(torch.int32) - weight.to(torch.float32).view(torch.int32)
        return missing.clamp(-0x8000, 0x7FFF).to(torch.int16)
    lost = value - weight.to(torch.float32)
    return torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost)).to(dtype)
