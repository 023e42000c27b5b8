"""Packed states: a byte for each element, and a float32 scale for each block of 128.

Source of blocks with a code each: Dettmers et al. (2022), "8-bit Optimizers via Block-wise Quantization".

A packed state of n elements is one stretch of bytes: n codes, zeros up to a multiple of 16, and the scale of each block as
float32. A code is a sign and a floating-point number with 3 bits of exponent and 4 of mantissa, or, in states that are never
negative, such a number with 4 bits of exponent; both have subnormal ones. A scale is the least power of two by which the
block's largest absolute value can be divided to become such a number, so that dividing is exact. Rounding is to the nearest
or stochastic. It is done on the bits of a float32 that are in the same order (`encode`):

    v = |x| / scale, which is at most 31/16 times 2^8 or 2^16
    bits of v, or of (v + 4) / 2 if that is more; from the 4th bit of the mantissa on, less those of 2

All of that but the rounding is exact, and therefore the same on every backend. Numbers that were decoded are encoded as the
same numbers, though perhaps by other codes and half the scale. No normal number above zero becomes zero in a state that is
never negative: it may be in a denominator. Where one number of a block is not finite, or above 31/16 * 2^127, all of them
become NaN, and the codes mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "BLOCK",
    "CUT",
    "FIRST",
    "HALF",
    "INFINITE",
    "LEAST",
    "ONE",
    "ROOM",
    "check_scales",
    "copy",
    "decode",
    "encode",
    "exponents",
    "packed_size",
    "pieces",
    "scales_at",
    "unpacked",
]

BLOCK = 128  # elements that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone
CUT = 19  # bits of a float32's mantissa that a code lacks
ROOM = (1 << CUT) - 1  # what is added to the bits of a block's largest before those of its exponent are taken for its scale
FIRST = 128 << 4  # the bits that are left of 2, the number of code 0
LEAST, INFINITE = 27 << 23, 255 << 23  # bits of the exponent of 2^-100, to which scales are limited, and of infinity
ONE, HALF = 127 << 23, 126 << 23  # bits of 1 and of 1/2


def exponents(unsigned: bool) -> int:
    """The powers of two between a block's scale and its largest number: 8, or 16 if numbers are never negative."""
    return 16 if unsigned else 8


def scales_at(n: int) -> int:
    """The byte at which the scales of a packed state of n elements begin."""
    return -(-n // 16) * 16


def packed_size(n: int) -> int:
    """The bytes of a packed state of n elements."""
    return scales_at(n) + 4 * -(-n // BLOCK)


def encode(
    values: torch.Tensor, unsigned: bool = False, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers, [n], as codes and the scales of their blocks: uint8 [n], float32 [ceil(n / 128)].

    Args:
        values: the numbers.
        unsigned: whether they are never negative; the sign of those that are is lost then.
        random: 32 bits for each, as `random_bits` gives them, by which they are rounded; by default to the nearest.
    """
    n, between = len(values), exponents(unsigned) << 23
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK).abs()
    sizes = blocks.view(torch.int32)  # in the order of the numbers, with NaN above all
    largest = ((sizes.amax(dim=1).clamp(max=INFINITE) + ROOM) & INFINITE).clamp(min=LEAST)
    scales = torch.where(largest == INFINITE, torch.nan, (largest - between).view(torch.float32))
    less = (ONE + between - largest)[:, None]  # that of the exponent which dividing by the scale takes away
    linear = (blocks * (less + HALF).view(torch.float32) + 2.0).view(torch.int32)
    bits = torch.maximum(sizes + less, linear).view(-1)[:n]
    bits = bits + (1 << (CUT - 1) if random is None else (random >> (32 - CUT)).to(torch.int32))
    levels = bits >> CUT
    if unsigned:
        levels = torch.maximum(levels, sizes.view(-1)[:n].clamp(max=FIRST + 1))
    else:
        levels = levels & 127 | torch.where(torch.signbit(values), 128, 0)
    return (levels & 255).to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, unsigned: bool = False) -> torch.Tensor:
    """What `encode` made codes and scales of, rounded."""
    wide = codes.to(torch.int32)
    level = ((wide if unsigned else wide & 127) + FIRST << CUT).view(torch.float32)
    values = torch.minimum(level, 2.0 * level - 4.0) * scales.repeat_interleave(BLOCK)[: len(codes)]
    return values if unsigned else torch.where(wide > 127, -values, values)


def pieces(packed: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes and scales of a packed state of n elements."""
    return packed[:n], packed[scales_at(n) :].view(torch.float32)


def check_scales(name: str, packed: torch.Tensor) -> None:
    """Refuse a packed state whose scales are no powers of two, 0 or NaN, as those of development versions were once.

    Args:
        name: whose it is, for the message.
        packed: [packed_size(n)].

    Raises:
        ValueError: it would be read as other numbers than were saved.
    """
    blocks = -(-packed.numel() // (BLOCK + 4))
    scales = packed[packed.numel() - 4 * blocks :].view(torch.float32)
    mantissas, _ = torch.frexp(scales)
    if not bool(((mantissas == 0.5) | (scales == 0) | scales.isnan()).all()):
        raise ValueError(
            f"{name} is packed in 8 bits, but its scales are no powers of two: it is damaged, or of a version made "
            "before December 2026. Save it with state_dtype='float32' by the version that wrote it, or begin with new states"
        )


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
