"""Packed states: 8 or 4 bits for each element, and a float32 scale for each block of 128.

Source of blocks with a code each: Dettmers et al. (2022), "8-bit Optimizers via Block-wise Quantization"; of 4 bits: Li,
Chen & Zhu (2023), "Memory Efficient Optimizers with 4-bit States".

A packed state of n elements is one stretch of bytes: codes, zeros up to a multiple of 16, and the scale of each block as
float32. It is a uint8 tensor with a code in each byte, or an int8 tensor with two codes in each, the first one in the lower
bits. A code is a sign and a floating-point number, or, in states that are never negative, such a number of one more bit;
both have subnormal ones (`CODES`). A scale is the least power of two by which the block's largest absolute value can be
divided to become such a number, so that dividing is exact. Rounding is to the nearest or stochastic. It is done on the bits
of a float32 that are in the same order (`encode`), for a code with m bits of mantissa and numbers up to (2 - 2^-m) 2^p:

    v = |x| / scale, which is at most (2 - 2^-m) 2^p
    bits of v, or of (v + 4) / 2 if that is more; from the m-th bit of the mantissa on, less those of 2

All of that but the rounding is exact, and therefore the same on every backend. Numbers that were decoded are encoded as the
same numbers, though perhaps by other codes and half the scale, and are numbers of bfloat16, too. No normal number above zero
becomes zero in a state that is never negative: it may be in a denominator. Where one number of a block is not finite, or
above (2 - 2^-m) 2^127, all of them become NaN, and the codes mean nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK = 128  # elements that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone
LEAST, INFINITE = 27 << 23, 255 << 23  # bits of the exponent of 2^-100, to which scales are limited, and of infinity
AT_A_TIME = 1 << 22  # elements that are packed or unpacked at a time, since temporary tensors take several times their room
ONE, HALF = 127 << 23, 126 << 23  # bits of 1 and of 1/2
PACKED = (torch.uint8, torch.int8)  # types of packed states: of 8 bits and of 4


class Code(NamedTuple):
    """How a number is coded.

    Attributes:
        bits: of a code.
        signed: whether one of them is a sign.
        mantissa: bits of the mantissa.
    """

    bits: int
    signed: bool
    mantissa: int

    @property
    def most(self) -> int:
        """The largest code of a number that is not negative."""
        return (1 << self.bits - self.signed) - 1

    @property
    def powers(self) -> int:
        """The powers of two between a block's scale and its largest number."""
        return 1 << self.bits - self.signed - self.mantissa

    @property
    def cut(self) -> int:
        """Bits of a float32's mantissa that a code lacks."""
        return 23 - self.mantissa

    @property
    def first(self) -> int:
        """The bits that are left of 2, the number of code 0."""
        return 128 << self.mantissa


# By the type of the state, the codes of numbers of both signs, and of those that are never negative. Variances differ by so
# much within a block that 4 bits are best spent on the exponent: with a bit of mantissa AdamW's loss on digits is 9 % above
# that with float32, with two 27 %, with none it is not above.
CODES = {
    torch.uint8: (Code(8, True, 4), Code(8, False, 4)),
    torch.int8: (Code(4, True, 1), Code(4, False, 0)),
}


def is_packed(tensor: torch.Tensor | torch.dtype | None) -> bool:
    """Whether a state, or one of this type, is packed."""
    return getattr(tensor, "dtype", tensor) in PACKED


def _bytes_of_codes(n: int, dtype: torch.dtype) -> int:
    return -(-n * CODES[dtype][0].bits // 8)


def scales_at(n: int, dtype: torch.dtype = torch.uint8) -> int:
    """The byte at which the scales of a packed state of n elements begin."""
    return -(-_bytes_of_codes(n, dtype) // 16) * 16


def packed_size(n: int, dtype: torch.dtype = torch.uint8) -> int:
    """The bytes of a packed state of n elements."""
    return scales_at(n, dtype) + 4 * -(-n // BLOCK)


def encode(
    values: torch.Tensor, unsigned: bool = False, random: torch.Tensor | None = None, dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers, [n], as the bytes of their codes and the scales of their blocks: uint8, float32 [ceil(n / 128)].

    Args:
        values: the numbers.
        unsigned: whether they are never negative; the sign of those that are is lost then.
        random: 32 bits for each, as `random_bits` gives them, by which they are rounded; by default to the nearest.
        dtype: that of the packed state.
    """
    code = CODES[dtype][unsigned]
    n, between, room = len(values), code.powers << 23, (1 << code.cut) - 1
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK).abs()
    sizes = blocks.view(torch.int32)  # in the order of the numbers, with NaN above all
    # A block's largest, with room for rounding it up to a number of the code before the bits of its exponent are taken.
    largest = ((sizes.amax(dim=1).clamp(max=INFINITE) + room) & INFINITE).clamp(min=LEAST)
    scales = torch.where(largest == INFINITE, torch.nan, (largest - between).view(torch.float32))
    less = (ONE + between - largest)[:, None]  # that of the exponent which dividing by the scale takes away
    linear = (blocks * (less + HALF).view(torch.float32) + 2.0).view(torch.int32)
    bits = torch.maximum(sizes + less, linear).view(-1)[:n]
    bits = bits + (1 << (code.cut - 1) if random is None else (random >> (32 - code.cut)).to(torch.int32))
    levels = bits >> code.cut
    if unsigned:
        levels = torch.maximum(levels, sizes.view(-1)[:n].clamp(max=code.first + 1)) & code.most
    else:
        levels = levels & code.most | torch.where(torch.signbit(values), code.most + 1, 0)
    if code.bits == 4:
        pairs = torch.nn.functional.pad(levels, (0, n % 2)).view(-1, 2)
        levels = pairs[:, 0] | pairs[:, 1] << 4
    return levels.to(torch.uint8), scales


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    unsigned: bool = False,
    dtype: torch.dtype = torch.uint8,
    n: int | None = None,
) -> torch.Tensor:
    """The numbers, of which `encode` made these bytes and scales, rounded; `n` of them, by default as many as there are."""
    code = CODES[dtype][unsigned]
    wide = codes.to(torch.int32)
    if code.bits == 4:
        wide = torch.stack([wide & 15, wide >> 4], dim=-1).view(-1)[:n]
    level = ((wide & code.most) + code.first << code.cut).view(torch.float32)
    values = torch.minimum(level, 2.0 * level - 4.0) * scales.repeat_interleave(BLOCK)[: len(wide)]
    return values if unsigned else torch.where(wide > code.most, -values, values)


def pieces(packed: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the bytes of codes and of the scales of a packed state of n elements."""
    start = scales_at(n, packed.dtype)
    return packed.view(torch.uint8)[: _bytes_of_codes(n, packed.dtype)], packed[start:].view(torch.float32)


def check_scales(name: str, packed: torch.Tensor) -> None:
    """Refuse a packed state whose scales are no powers of two, 0 or NaN, as those of development versions were once.

    Args:
        name: whose it is, for the message.
        packed: [packed_size(n)].

    Raises:
        ValueError: it would be read as other numbers than were saved.
    """
    bits = CODES[packed.dtype][0].bits
    blocks = -(-packed.numel() // (BLOCK * bits // 8 + 4))
    scales = packed[packed.numel() - 4 * blocks :].view(torch.float32)
    mantissas, _ = torch.frexp(scales)
    if not bool(((mantissas == 0.5) | (scales == 0) | scales.isnan()).all()):
        raise ValueError(
            f"{name} is packed in {bits} bits, but its scales are no powers of two: it is damaged, or of a version made "
            "before December 2026. Save it with state_dtype='float32' by the version that wrote it, or begin with new states"
        )


def unpacked(packed: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """The numbers of a packed state of a tensor of this shape, float32."""
    n = shape.numel()
    return decode(*pieces(packed, n), unsigned, packed.dtype, n).view(shape)


def as_bfloat16(packed: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """The numbers of a packed state of a tensor of this shape, exactly."""
    n = shape.numel()
    (codes, scales), bits = pieces(packed, n), CODES[packed.dtype][unsigned].bits
    values = torch.empty(n, dtype=torch.bfloat16, device=packed.device)
    for start in range(0, n, AT_A_TIME):
        part = values[start : start + AT_A_TIME]
        stop = start + len(part)
        code, scale = codes[start * bits // 8 : -(-stop * bits // 8)], scales[start // BLOCK : -(-stop // BLOCK)]
        part.copy_(decode(code, scale, unsigned, packed.dtype, len(part)))
    return values.view(shape)


def copy(new: torch.Tensor, old: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """Put a state of a tensor of this shape into another one, which may be stored in another way, and return that.

    Numbers that are packed alike are copied as they are; what is packed is rounded to the nearest.
    """
    if new.dtype == old.dtype or not (is_packed(new) or is_packed(old)):
        return new.copy_(old)
    if is_packed(old):
        old = unpacked(old, shape, unsigned)
    if not is_packed(new):
        return new.copy_(old)
    flat, bits = old.detach().contiguous().view(-1), CODES[new.dtype][unsigned].bits
    codes, scales = pieces(new, shape.numel())
    for start in range(0, len(flat), AT_A_TIME):
        code, scale = encode(flat[start : start + AT_A_TIME].to(torch.float32), unsigned, dtype=new.dtype)
        codes[start * bits // 8 :][: len(code)] = code
        scales[start // BLOCK :][: len(scale)] = scale
    return new
