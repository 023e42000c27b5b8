"""What is stored alongside a 16-bit weight in the place of a master copy, by the type of that tensor:

- its type's full width: the weight as the rule knows it, whose rounding the weight is;
- int16, alongside bfloat16: the bits that the weight lacks, so that both together are that copy (a split master);
- the weight's own type: what rounding took off the weight, itself rounded (Kahan's compensation).

Source of the second: Rae et al. (2021), "Scaling Language Models", appendix C, and the split weights of FlashOptim; of the
third: Kahan (1965), "Further remarks on reducing truncation errors".
"""

from __future__ import annotations

import torch

__all__ = ["COMPENSATION", "FULL", "NONE", "REMAINDER", "beside", "combined", "kind_of", "parted"]

NONE, FULL, REMAINDER, COMPENSATION = range(4)  # what stands beside a weight


def kind_of(weight: torch.dtype, beside: torch.dtype | None) -> int | None:
    """What a tensor of this type beside a weight is; None if it can be nothing."""
    if beside is None:
        return NONE
    if beside == (torch.float64 if weight == torch.float64 else torch.float32):
        return FULL
    if beside == torch.int16 and weight == torch.bfloat16:
        return REMAINDER
    return COMPENSATION if beside == weight and weight.itemsize == 2 else None


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
