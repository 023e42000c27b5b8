"""How weights and states lie in memory in fewer bits than the arithmetic has, in torch's operations.

The types of the tensors say which way it is, so that nothing else has to be handed on. A state may be bfloat16 where the
arithmetic is float32, or packed, in uint8: a byte for each element and a number for each block of 128. What stands beside a
16-bit weight in the place of a master copy may be

- its type's full width: the weight as the rule knows it, whose rounding the weight is;
- int16, beside bfloat16: the bits that the weight lacks, so that both together are that copy;
- the weight's own type: what rounding took off the weight, itself rounded (Kahan's compensation).

Source of the second: Rae et al. (2021), "Scaling Language Models", appendix C, and the split weights of FlashOptim; of the
third: Kahan (1965), "Further remarks on reducing truncation errors"; of stochastic rounding: Gupta et al. (2015), "Deep
Learning with Limited Numerical Precision"; of blocks with a code each: Dettmers et al. (2022), "8-bit Optimizers via
Block-wise Quantization".

A packed state of n elements is one stretch of bytes: n codes, zeros up to a multiple of 16, and the largest absolute value
of each block as float32. Their numbers lie as closely as those of a floating-point type with 4 bits of mantissa, down to
1/256 of the block's largest, or 2^-16 in states that are never negative, and evenly below that. So a code is what a few
operations on a float32's bits leave of it (`encode`), alike on every engine:

    y = |x| (1 - c) / largest + c     in [c, 1], where c has the bits of code 0
    code = bits of y, rounded to the nearest, or at random, at the 4th bit of the mantissa; less those of c

A number that was decoded is encoded as what it was, also at random. No number above zero becomes zero in a state that is
never negative: it may stand under a fraction line. Where one number of a block is not finite, all of them are NaN then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "BLOCK",
    "COMPENSATION",
    "CUT",
    "FULL",
    "HASH",
    "LEVELS",
    "NONE",
    "REMAINDER",
    "SALT",
    "CodesOnly",
    "Storage",
    "beside",
    "combined",
    "copy",
    "decode",
    "encode",
    "keys",
    "kind_of",
    "of_tensors",
    "packed_size",
    "parted",
    "pieces",
    "random_bits",
    "rounded_at_random",
    "scales_at",
    "stretch",
    "unpacked",
    "zero_level",
]

NONE, FULL, REMAINDER, COMPENSATION = range(4)  # what stands beside a weight
_WORD = 0xFFFFFFFF

# A multiplication spreads the elements, two more and three shifts mix them with the key (the constants are those of
# Ettinger's "lowbias32"). Philox would need 50 instructions for each element, which is more than most rules have.
HASH = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
SALT = 0x85EBCA6B  # by which the keys of a tensor's states differ

BLOCK = 128  # elements that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone
CUT = 19  # bits of a float32's mantissa that a code lacks
# The largest code, apart from a sign in the eighth bit, of states of either sign and of those that are never negative.
LEVELS = 127, 255


class CodesOnly(NamedTuple):
    """A seed by which packed states alone are rounded at random, and all else to the nearest."""

    seed: int


class Storage:
    """What a table's tensors are stored as.

    Attributes:
        states: the type of each of the rule's states.
        beside: what stands beside the weights: NONE, FULL, REMAINDER or COMPENSATION.
        stochastic: whether packed states are rounded at random, and what is stored as bfloat16, but for a weight with
            something beside it.
        codes_only: whether only packed states are.
    """

    def __init__(
        self, states: tuple[torch.dtype, ...], beside: int = NONE, stochastic: bool = False, codes_only: bool = False
    ) -> None:
        self.states, self.beside, self.stochastic, self.codes_only = states, beside, stochastic, codes_only

    def __repr__(self) -> str:
        return f"Storage({self.states!r}, {self.beside!r}, {self.stochastic!r}, {self.codes_only!r})"

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


def keys(seed: int | CodesOnly, updates: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each tensor, by the number of its update and its place, a key of 32 bits: [n, 2], the low and the high half.

    Halves, because they travel among hyper-parameters, which may be float32.
    """
    seed = seed.seed if isinstance(seed, CodesOnly) else seed
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


def of_tensors(weight: torch.dtype, states: Any, beside: torch.dtype | None, seed: int | CodesOnly | None) -> Storage:
    """The storage of tensors of these types."""
    kind = kind_of(weight, beside)
    assert kind is not None
    states, codes_only = tuple(states), isinstance(seed, CodesOnly)
    some = torch.bfloat16 in states or (weight == torch.bfloat16 and kind == NONE)
    stochastic = seed is not None and (torch.uint8 in states or (some and not codes_only))
    return Storage(states, kind, stochastic, stochastic and codes_only)


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
    shrunk = torch.where(scales > 0, (1 - zero_level(unsigned)) / scales, 0.0)
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
