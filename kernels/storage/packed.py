"""Packed states: 8 or 4 bits for each element, and a float32 scale for each block of 128.

Sources: block-wise codes, Dettmers et al. (2022), "8-bit Optimizers via Block-wise Quantization"; 4 bits, Li, Chen & Zhu
(2023), "Memory Efficient Optimizers with 4-bit States".

A packed state of n elements is one row of bytes: the codes, zeros up to a multiple of 16, and a float32 scale per block. It
is a uint8 tensor with one code in each byte, or an int8 tensor with two codes in each byte, the first in the lower bits. A
code is a small floating-point number, with subnormal numbers (`CODES`): a sign and a magnitude, or, in states that are
never negative, a magnitude of one more bit. A scale is the smallest power of two that divides the block's largest absolute
value into the range of the codes, so the division is exact. Rounding is to nearest or stochastic. It works on the bits of
float32 numbers, which have the same order as the numbers (`encode`). For a code with m bits of mantissa and numbers up to
(2 - 2^-m) 2^p:

    v = |x| / scale, which is at most (2 - 2^-m) 2^p
    code = the larger of the bits of v and of (v + 4) / 2, cut after m bits of mantissa, minus the same bits of 2

All steps but the rounding are exact, and therefore the same on every backend. Decoded numbers are representable in bfloat16,
and encode to the same numbers again, though perhaps with other codes and half the scale. In a state that is never negative,
no normal number above zero becomes zero, because it may be a denominator.

The largest scale is 2^(128 - p): with it the codes from that of 2^p on are infinite. A block has it if one of its numbers
is not finite, or above (2 - 2^-m) 2^127. Infinities stay what they are, and NaN becomes one: a state has no code
for NaN, and the weight has become NaN in the same step. Other numbers stay finite: if none of the block is infinite,
they are cut, not rounded (at random by up to a code more), so that those above (2 - 2^-m) 2^127 become that or less. Only
next to an infinity these may be rounded to one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK = 128  # elements that share a scale: one GPU warp holds them, 4 per thread, and computes the scale by itself
LEAST, INFINITE = 27 << 23, 255 << 23  # bits of 2^-100, the lower limit in computing scales, and of infinity
AT_A_TIME = 1 << 22  # elements packed or unpacked at a time, since temporaries take several times their memory
ONE, HALF = 127 << 23, 126 << 23  # bits of 1 and of 1/2
PACKED = (torch.uint8, torch.int8)  # dtypes of packed states: 8 bits and 4 bits


class Code(NamedTuple):
    """The format of a code.

    Attributes:
        bits: the number of bits of a code.
        signed: whether one of them is a sign.
        mantissa: the number of bits of the mantissa.
    """

    bits: int
    signed: bool
    mantissa: int

    @property
    def most(self) -> int:
        """The largest code of a nonnegative number, which is also the mask of the magnitude's bits."""
        return (1 << self.bits - self.signed) - 1

    @property
    def powers(self) -> int:
        """The number of powers of two between a block's scale and its largest number: p."""
        return 1 << self.bits - self.signed - self.mantissa

    @property
    def cut(self) -> int:
        """The number of bits of a float32's mantissa that a code lacks."""
        return 23 - self.mantissa

    @property
    def first(self) -> int:
        """The upper bits of the float32 2.0 that correspond to code 0."""
        return 128 << self.mantissa


# By the state's dtype: the code for numbers of both signs, and the code for states that are never negative. Variances differ
# so much within a block that 4 bits are best spent on the exponent: with one bit of mantissa AdamW's loss on digits is 9 %
# above its loss with float32 states, with two bits 27 %, and with none it is not higher.
CODES = {
    torch.uint8: (Code(8, True, 4), Code(8, False, 4)),
    torch.int8: (Code(4, True, 1), Code(4, False, 0)),
}


def is_packed(tensor: torch.Tensor | torch.dtype | None) -> bool:
    """Return whether a state is packed, given the tensor or its dtype; False for None."""
    return getattr(tensor, "dtype", tensor) in PACKED


def _bytes_of_codes(n: int, dtype: torch.dtype) -> int:
    return -(-n * CODES[dtype][0].bits // 8)


def scales_at(n: int, dtype: torch.dtype = torch.uint8) -> int:
    """Return the byte offset of the scales in a packed state of n elements."""
    return -(-_bytes_of_codes(n, dtype) // 16) * 16


def packed_size(n: int, dtype: torch.dtype = torch.uint8) -> int:
    """Return the size in bytes of a packed state of n elements."""
    return scales_at(n, dtype) + 4 * -(-n // BLOCK)


def encode(
    values: torch.Tensor, unsigned: bool = False, random: torch.Tensor | None = None, dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode numbers, and return the codes' bytes, uint8, and the blocks' scales, float32 [ceil(n / 128)].

    Args:
        values: the numbers, float32 [n].
        unsigned: use the code without a sign; negative numbers lose their sign.
        random: 32 random bits for each number, from `random_bits`, for stochastic rounding. Default: round to nearest.
        dtype: the dtype of the packed state: uint8 (8 bits) or int8 (4 bits).
    """
    code = CODES[dtype][unsigned]
    n, between, room = len(values), code.powers << 23, (1 << code.cut) - 1
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK).abs()
    sizes = blocks.view(torch.int32).clamp(max=INFINITE)  # in the order of the numbers; NaN counts as infinite
    # A block's largest number, rounded up by the bits that a code lacks before its exponent is taken.
    most = sizes.amax(dim=1)
    largest = ((most + room) & INFINITE).clamp(min=LEAST)
    scales = (largest - between).view(torch.float32)
    less = (ONE + between - largest)[:, None]  # added to a number's bits, divides it by the scale
    linear = (sizes.view(torch.float32) * (less + HALF).view(torch.float32) + 2.0).view(torch.int32)
    most_added = 1 << (code.cut - 1) if random is None else room
    saturates = (largest == INFINITE) & (most != INFINITE)
    less = less - torch.where(saturates, most_added, 0)[:, None]  # so that nothing is rounded to infinity
    bits = torch.maximum(sizes + less, linear).view(-1)[:n]
    bits = bits + (most_added if random is None else (random >> (32 - code.cut)).to(torch.int32))
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
    """Decode what `encode` returned to float32 numbers; their number `n` drops the padding of 4-bit codes."""
    code = CODES[dtype][unsigned]
    wide = codes.to(torch.int32)
    if code.bits == 4:
        wide = torch.stack([wide & 15, wide >> 4], dim=-1).view(-1)[:n]
    level = ((wide & code.most) + code.first << code.cut).view(torch.float32)
    values = torch.minimum(level, 2.0 * level - 4.0) * scales.repeat_interleave(BLOCK)[: len(wide)]
    return values if unsigned else torch.where(wide > code.most, -values, values)


def pieces(packed: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a packed state of n elements: the codes' bytes, uint8, and the scales, float32."""
    start = scales_at(n, packed.dtype)
    return packed.view(torch.uint8)[: _bytes_of_codes(n, packed.dtype)], packed[start:].view(torch.float32)


def check_scales(name: str, packed: torch.Tensor) -> None:
    """Raise ValueError if a scale of a packed state is not a power of two, 0 or NaN.

    Args:
        name: the name of the state, for the message.
        packed: the packed state, [packed_size(n)].

    Raises:
        ValueError: a scale has another value, so the state would be decoded to wrong numbers.
    """
    bits = CODES[packed.dtype][0].bits
    blocks = -(-packed.numel() // (BLOCK * bits // 8 + 4))
    scales = packed[packed.numel() - 4 * blocks :].view(torch.float32)
    mantissas, _ = torch.frexp(scales)
    if not bool(((mantissas == 0.5) | (scales == 0) | scales.isnan()).all()):
        raise ValueError(
            f"{name} is packed in {bits} bits, but its scales are no powers of two: it is damaged. Begin with new states"
        )


def unpacked(packed: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """Decode a packed state of a tensor of this shape, and return it as a float32 tensor."""
    n = shape.numel()
    return decode(*pieces(packed, n), unsigned, packed.dtype, n).view(shape)


def as_bfloat16(packed: torch.Tensor, shape: Any, unsigned: bool = False) -> torch.Tensor:
    """Decode a packed state of a tensor of this shape, and return it as a bfloat16 tensor, without rounding."""
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
    """Copy the state `old` of a tensor of this shape into `new`, converting between storage formats, and return `new`.

    States of the same dtype are copied bit by bit; numbers are rounded to nearest when they are packed.
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
