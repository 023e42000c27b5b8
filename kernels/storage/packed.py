"""Packed states: a byte for each element, and a float32 scale for each block of 128.

Source of blocks with a code each: Dettmers et al. (2022), "8-bit Optimizers via Block-wise Quantization".

A packed state of n elements is one stretch of bytes: n codes, zeros up to a multiple of 16, and the scale of each block as
float32, a power of two at or below its largest absolute value, or the next one. Their numbers are spaced like those of a
floating-point type with 4 bits of mantissa, down to 1/256 of the block's largest, or 2^-16 in states that are never negative,
and evenly below that. So a code is what a few operations on a float32's bits leave of it (`encode`):

    y = |x| / scale + c     in [c, 31/16], where c = 2^-7, or 2^-15 in states that are never negative
    code = bits of y, rounded to the nearest, or stochastically, at the 4th bit of the mantissa; the lowest 7 or 8 of them

All of that but the rounding is exact, and therefore the same on every backend. Numbers that were decoded are encoded as they
were, unless their block's largest was rounded to what has half the scale, as one of 50 is; they then change once. No normal number above zero becomes zero in a
state that is never negative: it may be in a denominator. Where one number of a block is not finite, or 1.93 * 2^127 or more,
all of them become NaN, and the codes mean nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = [
    "BLOCK",
    "CUT",
    "LEVELS",
    "ROOM",
    "copy",
    "decode",
    "encode",
    "first_level",
    "first_number",
    "packed_size",
    "pieces",
    "scales_at",
    "unpacked",
]

BLOCK = 128  # elements that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone
CUT = 19  # bits of a float32's mantissa that a code lacks
# The largest code, apart from a sign in the eighth bit, of states of either sign and of those that are never negative.
LEVELS = 127, 255
# What is added to the bits of a block's largest before those of its exponent are taken for its scale: 31/16 - c is the most
# that is left of it by then.
ROOM = 0x8FFFF, 0x800FF
_INFINITE, _GREATEST, _LEAST = 0x7F800000, 0x7F000000, 0x00400000  # bits of infinity, 2^127, 2^-127


def scales_at(n: int) -> int:
    """The byte at which the scales of a packed state of n elements begin."""
    return -(-n // 16) * 16


def packed_size(n: int) -> int:
    """The bytes of a packed state of n elements."""
    return scales_at(n) + 4 * -(-n // BLOCK)


def first_level(unsigned: bool) -> int:
    """The bits that are left of c, the number of code 0: those of the largest code are the last below 2."""
    return (128 << 23 >> CUT) - 1 - LEVELS[unsigned]


def first_number(unsigned: bool) -> float:
    """c, the number of code 0."""
    return float(np.array(first_level(unsigned) << CUT, dtype=np.int32).view(np.float32))


def encode(
    values: torch.Tensor, unsigned: bool = False, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers, [n], as codes and the scales of their blocks: uint8 [n], float32 [ceil(n / 128)].

    Args:
        values: the numbers.
        unsigned: whether they are never negative; the sign of those that are is lost then.
        random: 32 bits for each, as `random_bits` gives them, by which they are rounded; by default to the nearest.
    """
    n, first = len(values), first_level(unsigned)
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK)
    sizes = blocks.abs().view(torch.int32)  # in the order of the numbers, with NaN above all
    exponents = (sizes.amax(dim=1).clamp(max=_INFINITE) + ROOM[unsigned]) & _INFINITE
    scales = exponents.view(torch.float32)
    scales = torch.where(scales.isinf(), torch.nan, scales)
    inverse = (_GREATEST - exponents).clamp(min=_LEAST).view(torch.float32)
    bits = (blocks.abs() * inverse[:, None] + first_number(unsigned)).view(torch.int32).view(-1)[:n]
    bits = bits + (1 << (CUT - 1) if random is None else (random >> (32 - CUT)).to(torch.int32))
    levels = bits >> CUT
    if unsigned:
        levels = torch.maximum(levels, sizes.view(-1)[:n].clamp(max=first + 1))
    else:
        levels = levels & 127 | torch.where(torch.signbit(values), 128, 0)
    return (levels & 255).to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, unsigned: bool = False) -> torch.Tensor:
    """What `encode` made codes and scales of, rounded."""
    wide, first = codes.to(torch.int32), first_level(unsigned)
    bits = (wide if unsigned else wide & 127) + first << CUT
    sizes = bits.view(torch.float32) - first_number(unsigned)
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
