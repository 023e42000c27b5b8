"""Packed states: a byte for each element, and a float32 scale for each block of 128.

Source of blocks with a code each: Dettmers et al. (2022), "8-bit Optimizers via Block-wise Quantization".

A packed state of n elements is one stretch of bytes: n codes, zeros up to a multiple of 16, and the largest absolute value
of each block as float32. Their numbers are spaced like those of a floating-point type with 4 bits of mantissa, down to
1/256 of the block's largest, or 2^-16 in states that are never negative, and evenly below that. So a code is what a few
operations on a float32's bits leave of it (`encode`), the same on every backend:

    y = |x| (1 - c) / largest + c     in [c, 1], where c has the bits of code 0
    code = bits of y, rounded to the nearest, or stochastically, at the 4th bit of the mantissa; less those of c

A number that was decoded is encoded as what it was, also with stochastic rounding. No number above zero becomes zero in a
state that is never negative: it may be in a denominator. Where one number of a block is not finite, all of them become NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = [
    "BLOCK",
    "CUT",
    "LEVELS",
    "copy",
    "decode",
    "encode",
    "packed_size",
    "pieces",
    "scales_at",
    "stretch",
    "unpacked",
    "zero_level",
]

BLOCK = 128  # elements that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone
CUT = 19  # bits of a float32's mantissa that a code lacks
# The largest code, apart from a sign in the eighth bit, of states of either sign and of those that are never negative.
LEVELS = 127, 255


def scales_at(n: int) -> int:
    """The byte at which the scales of a packed state of n elements begin."""
    return -(-n // 16) * 16


def packed_size(n: int) -> int:
    """The bytes of a packed state of n elements."""
    return scales_at(n) + 4 * -(-n // BLOCK)


def _base(unsigned: bool) -> int:
    """What is taken off the bits that are left of a number to get its code."""
    return (127 << 23 >> CUT) - LEVELS[unsigned]


def zero_level(unsigned: bool) -> float:
    """c: what is added to numbers from 0 to 1 - c before their bits are cut."""
    return float(np.array(_base(unsigned) << CUT, dtype=np.int32).view(np.float32))


def stretch(unsigned: bool) -> np.float32:
    """1 / (1 - c), as float32, by which the largest code becomes 1 exactly."""
    return np.float32(1) / np.float32(1 - zero_level(unsigned))


def encode(
    values: torch.Tensor, unsigned: bool = False, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers, [n], as codes and the scales of their blocks: uint8 [n], float32 [ceil(n / 128)].

    Args:
        values: the numbers.
        unsigned: whether they are never negative; the sign of those that are is lost then.
        random: 16 bits for each, as `random_bits` gives them, by which they are rounded; by default to the nearest.
    """
    n, base = len(values), _base(unsigned)
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK)
    scales = blocks.abs().amax(dim=1)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)  # some devices know no smaller ones
    scales = torch.where(scales.isinf(), torch.nan, scales)
    range_ = torch.full_like(scales, 1 - zero_level(unsigned))  # torch takes a number over a tensor for a product
    shrunk = torch.where(scales > 0, range_ / scales, 0.0)
    bits = ((blocks * shrunk[:, None]).abs() + zero_level(unsigned)).view(torch.int32).view(-1)[:n]
    bits = bits.clamp(max=0x7F800000)  # those of some NaN, a GPU's among them, leave no room to round up
    # Numbers between those that codes have, not the codes themselves, whose rounding errors are smaller than 8.
    bits = bits + (1 << (CUT - 1) if random is None else ((random << 3) & 0x7FFF0 | 8).to(torch.int32))
    codes = (bits >> CUT) - base
    if unsigned:
        codes = torch.where((codes == 0) & (values != 0), 1, codes)
    else:
        codes = codes | torch.where(torch.signbit(values), 128, 0)
    return torch.where(bits >> CUT > base + LEVELS[unsigned], 0, codes).to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, unsigned: bool = False) -> torch.Tensor:
    """What `encode` made codes and scales of, rounded."""
    wide = codes.to(torch.int32)
    bits = (wide if unsigned else wide & 127) + _base(unsigned) << CUT
    sizes = (bits.view(torch.float32) - zero_level(unsigned)) * float(stretch(unsigned))
    values = sizes * scales.repeat_interleave(BLOCK)[: len(codes)]
    return values if unsigned else torch.where(wide > 127, -values, values)


def pieces(packed: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes and scales of a packed state of n elements."""
    return packed[:n], packed[scales_at(n) :].view(torch.float32)


def unpacked(packed: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """The numbers of a packed state of a tensor of this shape, float32."""
    return decode(*pieces(packed, shape.numel()), unsigned).view(shape)


def copy(new: torch.Tensor, old: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """Put a state of a tensor of this shape into another one, which may be stored in another way, and return that.

    Packed numbers are copied as they are; what is packed is rounded to the nearest.
    """
    if new.dtype == old.dtype == torch.uint8 or torch.uint8 not in (new.dtype, old.dtype):
        return new.copy_(old)
    if old.dtype == torch.uint8:
        return new.copy_(unpacked(old, shape, unsigned))
    codes, scales = encode(old.detach().to(torch.float32).contiguous().view(-1), unsigned)
    for piece, value in zip(pieces(new, shape.numel()), (codes, scales), strict=True):
        piece.copy_(value)
    return new
