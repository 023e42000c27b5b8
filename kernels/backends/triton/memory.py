"""Loads and stores of a tile in each storage format, and rounding. See the storage package for the formats.

Two things make every access 128 bits wide: the hint that addresses are multiples of 16 bytes, and a branch for full
blocks, which need no mask (a hint alone leaves all accesses scalar).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import storage

_H0, _H1, _H2 = map(tl.constexpr, storage.HASH)
_NEXT, _NEXT2 = (tl.constexpr(storage.multiplier(0, element)) for element in (1, 2))
# By a packed state's dtype: the types that stand for it in kernels, signed and nonnegative: (u)int8 for codes of 8 bits,
# (u)int16 for codes of 4 bits. See storage/packed.py.
PACKED_TYPES = {torch.uint8: (tl.int8, tl.uint8), torch.int8: (tl.int16, tl.uint16)}
_BLOCK = tl.constexpr(storage.BLOCK)
_LEAST, _INFINITE, _ONE, _HALF = map(tl.constexpr, (storage.LEAST, storage.INFINITE, storage.ONE, storage.HALF))
_LARGEST_POWER = tl.constexpr(2.0**127)
# For these types, in this order: `cut`, `powers` and `most` of their codes.
_CUT, _POWERS, _MOST = (
    tl.constexpr(tuple(getattr(code, name) for kind in PACKED_TYPES for code in storage.CODES[kind]))
    for name in ("cut", "powers", "most")
)


@triton.constexpr_function
def _multiplier(first, slot):  # `multiplier` of storage/low_precision.py, which Triton cannot call
    return pow(first, 4 * slot, 1 << 32)


@triton.jit
def _pointers(address, offsets, tile, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE)) + tile[0]
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offsets


@triton.jit
def load(address, offsets, tile, TYPE: tl.constexpr, COMPUTE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    # `tile`: index of its first element in the tensor, its number of elements, the tensor's; `offsets` count from the tile.
    # `FULL`: whether all elements are there; 2 if not, and their number is known to be a multiple of what a thread accesses;
    # 3 if instead of the number `tile` has for each whether it is there.
    pointers = _pointers(address, offsets, tile, TYPE, ALIGNED)
    if FULL == 1:
        value = tl.load(pointers)
    elif FULL == 3:
        value = tl.load(pointers, mask=tile[1])
    else:
        value = tl.load(pointers, mask=offsets < tile[1])
    return value.to(COMPUTE)


@triton.constexpr_function  # from any other function Triton 3.5 and 3.6 get the value too late: they compile both branches
def is_packed(TYPE):
    return TYPE in (tl.uint8, tl.int8, tl.uint16, tl.int16)


@triton.constexpr_function
def has_packed(types):
    return tl.uint8 in types or tl.int8 in types or tl.uint16 in types or tl.int16 in types


@triton.constexpr_function
def _for_type(numbers, TYPE):
    return numbers[0 if tl.int8 == TYPE else 1 if tl.uint8 == TYPE else 2 if tl.int16 == TYPE else 3]


@triton.constexpr_function
def _shifted(number, by):  # the interpreter cannot shift an integer by a constant
    return number << by if by >= 0 else number >> -by


@triton.constexpr_function
def _signed(most, cut):  # mask of a code's bits in a float32 and of its sign, as int32
    return (most << cut) - (1 << 31)


@triton.jit
def _scales(address, rows, tile, TYPE: tl.constexpr):
    # Shifted as integers, so that the compiler does not see that they are contiguous: it would give several to one thread,
    # although different threads compute the scales.
    if tl.int16 == TYPE or tl.uint16 == TYPE:
        codes = (tile[2] + 1) // 2
    else:
        codes = tile[2]
    first = address + (codes + 15) // 16 * 16 + tile[0] // _BLOCK * 4
    return (first + rows * 4).to(tl.pointer_type(tl.float32))


@triton.jit
def _load_codes(address, at, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    if tl.int16 == TYPE or tl.uint16 == TYPE:
        PAIRS: tl.constexpr = offsets.shape[0] // 2
        halves = tile[0] // 2, (tile[1] + 1) // 2
        pairs = load(address, at // 2 + tl.arange(0, PAIRS), halves, tl.uint8, tl.int32, FULL, ALIGNED)
        return tl.reshape(tl.join(pairs & 15, pairs >> 4), (2 * PAIRS,))
    else:
        return load(address, offsets, tile, tl.uint8, tl.int32, FULL, ALIGNED)


@triton.jit
def _put_codes(address, code, at, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    if tl.int16 == TYPE or tl.uint16 == TYPE:
        PAIRS: tl.constexpr = offsets.shape[0] // 2
        halves = tile[0] // 2, (tile[1] + 1) // 2
        first, second = tl.split(tl.reshape(code, (PAIRS, 2)))
        pairs = ((first & 15) | (second << 4)).to(tl.uint8)
        put(address, pairs, at // 2 + tl.arange(0, PAIRS), halves, tl.uint8, FULL, ALIGNED)
    else:
        put(address, code.to(tl.uint8), offsets, tile, tl.uint8, FULL, ALIGNED)


@triton.jit
def unpack(address, at, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0] // _BLOCK
    CUT: tl.constexpr = _for_type(_CUT, TYPE)
    MOST: tl.constexpr = _for_type(_MOST, TYPE)
    SIGNED: tl.constexpr = tl.int8 == TYPE or tl.int16 == TYPE
    code = _load_codes(address, at, offsets, tile, TYPE, FULL, ALIGNED)
    # A code is a float32 with a short exponent. Shifted into place, it is subnormal exactly where the code is, and 2^128
    # times too small. Float32 has no 2^128, so multiply by 2^127 here, and by 2 with the scale.
    if SIGNED:
        BITS: tl.constexpr = 8 if tl.int8 == TYPE else 4
        bits = ((code << (32 - BITS)) >> (32 - BITS - CUT)) & _signed(MOST, CUT)  # the shift has copied the sign
    else:
        bits = code << CUT
    level = bits.to(tl.float32, bitcast=True) * _LARGEST_POWER
    scales = _scales(address, at // _BLOCK + tl.arange(0, ROWS), tile, TYPE)
    if FULL:
        scale = tl.load(scales)
    else:
        scale = tl.load(scales, mask=at + tl.arange(0, ROWS) * _BLOCK < tile[1], other=0.0)
    return tl.reshape(tl.reshape(level, (ROWS, _BLOCK)) * (2.0 * scale)[:, None], (offsets.shape[0],))


@triton.jit
def unpack_at(address, places, valid, n, TYPE: tl.constexpr):
    # The elements at any places of a packed state of `n` elements, decoded as `unpack` does.
    CUT: tl.constexpr = _for_type(_CUT, TYPE)
    MOST: tl.constexpr = _for_type(_MOST, TYPE)
    SIGNED: tl.constexpr = tl.int8 == TYPE or tl.int16 == TYPE
    codes = address.to(tl.pointer_type(tl.uint8))
    if tl.int16 == TYPE or tl.uint16 == TYPE:
        code = tl.load(codes + places // 2, mask=valid, other=0).to(tl.int32)
        code = tl.where(places % 2 == 0, code & 15, code >> 4)
        room = ((n + 1) // 2 + 15) // 16 * 16
    else:
        code = tl.load(codes + places, mask=valid, other=0).to(tl.int32)
        room = (n + 15) // 16 * 16
    if SIGNED:
        BITS: tl.constexpr = 8 if tl.int8 == TYPE else 4
        bits = ((code << (32 - BITS)) >> (32 - BITS - CUT)) & _signed(MOST, CUT)
    else:
        bits = code << CUT
    scales = (address + room).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + places // _BLOCK, mask=valid, other=0.0)
    return bits.to(tl.float32, bitcast=True) * _LARGEST_POWER * (2.0 * scale)


@triton.jit
def pack(
    address, value, at, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr, words, SLOT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = offsets.shape[0] // _BLOCK
    CUT: tl.constexpr = _for_type(_CUT, TYPE)
    ROOM: tl.constexpr = _shifted(1, CUT) - 1
    BETWEEN: tl.constexpr = _shifted(_for_type(_POWERS, TYPE), 23)
    if not FULL:
        value = tl.where(offsets < tile[1], value, 0.0)
    NEAREST: tl.constexpr = _shifted(1, CUT - 1)
    magnitude = tl.minimum(tl.abs(value), float("inf"))  # of NaN, infinity: this minimum is the operand that is a number
    sizes = magnitude.to(tl.int32, bitcast=True)  # in the order of the magnitudes
    most = tl.max(tl.reshape(sizes, (ROWS, _BLOCK)), axis=1)
    largest = tl.maximum((most + ROOM) & _INFINITE, _LEAST)
    scale = (largest - BETWEEN).to(tl.float32, bitcast=True)
    less = (_ONE + BETWEEN) - largest
    inverse = (less + _HALF).to(tl.float32, bitcast=True)
    # Where a finite number is above those of codes, what rounding adds at most is taken off first: it must not get infinite.
    saturates = (largest == _INFINITE) & (most != _INFINITE)
    less = tl.where(saturates, (_ONE + BETWEEN - _INFINITE) - (ROOM if AT_RANDOM else NEAREST), less)
    linear = tl.fma(tl.reshape(magnitude, (ROWS, _BLOCK)), inverse[:, None], 2.0).to(tl.int32, bitcast=True)
    level = tl.maximum(tl.reshape(sizes, (ROWS, _BLOCK)) + less[:, None], linear)
    level = tl.reshape(level, (offsets.shape[0],)).to(tl.uint32, bitcast=True)
    if AT_RANDOM:
        level += (words * _multiplier(_NEXT, SLOT)) >> (32 - CUT)
    else:
        level += NEAREST
    if tl.int8 == TYPE:
        code = ((level >> CUT) & 127) | ((value.to(tl.uint32, bitcast=True) >> 24) & 128)
    elif tl.int16 == TYPE:
        code = ((level >> CUT) & 7) | ((value.to(tl.uint32, bitcast=True) >> 28) & 8)
    else:
        LEAST_CODE: tl.constexpr = _shifted(128 << 23, 0 - CUT) + 1
        code = tl.maximum(level >> CUT, tl.minimum(sizes.to(tl.uint32, bitcast=True), LEAST_CODE))
    _put_codes(address, code, at, offsets, tile, TYPE, FULL, ALIGNED)
    # One store for all of them, which the compiler brings together in shared memory. If each warp stored those that it has
    # computed, they would write parts of one sector one after the other: up to 1.5 times the time of a step on an H200.
    rows = tl.arange(0, ROWS)
    scales = _scales(address, at // _BLOCK + rows, tile, TYPE)
    if FULL:
        tl.store(scales, scale)
    else:
        tl.store(scales, scale, mask=at + rows * _BLOCK < tile[1])


@triton.jit
def _round_to_bfloat16(value):
    # To nearest even, in integers, because the interpreter's own conversion truncates.
    bits = value.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to(value, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        return _round_to_bfloat16(value)
    else:
        return value.to(TYPE)


@triton.jit
def rounds_to(master, weight, TYPE: tl.constexpr):
    # Whether a full master rounds to its weight; see storage/master.py.
    if tl.bfloat16 == TYPE:
        bits = weight.to(tl.float32).to(tl.uint32, bitcast=True)
        return (master.to(tl.uint32, bitcast=True) - bits + 0x8000 <= 0x10000) & (master == master)
    elif tl.float16 == TYPE:
        return master.to(tl.float16).to(tl.uint16, bitcast=True) == weight.to(tl.uint16, bitcast=True)
    else:
        return master.to(TYPE) == weight


@triton.jit
def load_key(row, N_HYPER: tl.constexpr):
    # The last two hyper-parameters are the key's halves.
    low = tl.load(row + N_HYPER - 1).to(tl.int32)
    return (low | (tl.load(row + N_HYPER).to(tl.int32) << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def indices(at, tile, BLOCK: tl.constexpr):
    # Indices of the elements in the tensor, written so that the compiler sees which of them differ in the last 2 bits only.
    # Addresses are not computed from them, because the compiler would see less of their contiguity.
    local = tl.arange(0, BLOCK)
    return ((tile[0] + at) // 4 + local // 4) * 4 + local % 4


@triton.jit
def random_words(key, at, tile, BLOCK: tl.constexpr, ANYWHERE: tl.constexpr):
    # `random_bits` of storage/low_precision.py without the slot's factor. The compiler computes the hash once for 4 elements
    # of a thread, and the multipliers are constants, unless a tile may begin anywhere.
    local = tl.arange(0, BLOCK)
    if ANYWHERE:
        index = tile[0] + at + local
        group, local = (index >> 2).to(tl.uint32), (index & 3).to(tl.int32)
    else:
        group = (tile[0] >> 2).to(tl.uint32) + (at >> 2).to(tl.uint32) + (local >> 2).to(tl.uint32)
    h = (group * _H0) ^ key
    h = (h ^ (h >> 16)) * _H1
    h = (h ^ (h >> 15)) * _H2
    h *= tl.where(local % 2 != 0, _NEXT, 1).to(tl.uint32)
    return h * tl.where(local // 2 % 2 != 0, _NEXT2, 1).to(tl.uint32)


@triton.jit
def _round_at_random(value, random):
    # NaN is truncated, not rounded: arithmetic sets the highest bit of its mantissa, which stays.
    random = tl.where(value == value, random, 0)
    cut = (value.to(tl.uint32, bitcast=True) + (random >> 16)) >> 16
    return cut.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def rounded_to_24_bits(value, AT_RANDOM: tl.constexpr, words, SLOT: tl.constexpr):
    # Returns bits, of which the caller drops the lowest 8; a NaN loses its lower bits. See storage/master.py.
    bits = value.to(tl.uint32, bitcast=True)
    if AT_RANDOM:
        rounded = bits + ((words * _multiplier(_NEXT, SLOT)) >> 24)
    else:
        rounded = bits + 0x80
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits | 0x400000) & 0xFFFF0000, rounded)


@triton.jit
def put(address, value, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    # Without the hint of alignment neighbouring threads store neighbouring elements, which is better for partial blocks, but
    # takes more registers for elements of fewer than 32 bits.
    pointers = _pointers(address, offsets, tile, TYPE, ALIGNED and (FULL != 0 or TYPE.primitive_bitwidth < 32))
    if FULL == 1:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=offsets < tile[1])


@triton.jit
def store(
    address, value, offsets, tile, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr = False, words=None, SLOT: tl.constexpr = 0,
):  # fmt: skip
    # Returns the values as stored.
    if AT_RANDOM:
        stored = _round_at_random(value, words * _multiplier(_NEXT, SLOT))
    else:
        stored = round_to(value, TYPE)
    put(address, stored, offsets, tile, TYPE, FULL, ALIGNED)
    return stored
