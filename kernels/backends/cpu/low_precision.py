"""Load and store numbers in each storage format of the storage package, in loops compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ... import storage
from .intrinsics import bits_of_float, float_of_bits, float_of_half, half_of_float, jit, jit_exact, jit_variant


@jit
def load_bfloat16(bits):
    return float_of_bits(np.uint32(bits) << np.uint32(16))


@jit
def store_bfloat16(value):
    # To the nearest and to even, NaN kept a NaN; the same integers as on the GPU.
    bits = bits_of_float(np.float32(value))
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else nearest)


@jit
def _load_float16(bits):
    return float_of_half(bits)


@jit
def _store_float16(value):
    return half_of_float(np.float32(value))


_H0, _H1, _H2 = map(np.uint32, storage.HASH)
_NAN_ABOVE, _POSITIVE, _ONE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF), np.uint32(1)


@jit
def key_of(low, high):
    return np.uint32(np.uint32(low) + (np.uint32(high) << np.uint32(16)))


@jit
def _random(key, start, i, multipliers):
    # Of the element so far behind `start`, a multiple of 4. In 32 bits, of which a vector has twice as many numbers.
    group = np.uint32(np.uint32(np.int64(start) >> 2) + (np.uint32(i) >> np.uint32(2)))
    h = np.uint32(np.uint32(group * _H0) ^ key)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * _H1)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * _H2)
    first, second, third, fourth = multipliers
    odd, above = np.uint32(i) & np.uint32(1), np.uint32(i) & np.uint32(2)
    lower, upper = (second if odd else first), (fourth if odd else third)
    return np.uint32(h * np.uint32(upper if above else lower))


@jit
def store_at_random(value, key, start, i, multipliers):
    random = _random(key, start, i, multipliers) >> np.uint32(16)
    bits = bits_of_float(np.float32(value))
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    cut = np.uint32(bits + random) >> np.uint32(16)
    return np.uint16(nan if (bits & _POSITIVE) > _NAN_ABOVE else cut)


# Whether a full master rounds to its weight; see storage/master.py.
@jit
def _rounds_to_float16(master, bits):
    return _store_float16(master) == bits


@jit
def _rounds_to_bfloat16(master, bits):
    less = bits_of_float(np.float32(master)) - (np.uint32(bits) << np.uint32(16)) + np.uint32(0x8000)
    return np.uint32(less) <= np.uint32(0x10000) and master == master


@jit
def equal(master, weight):
    return master == weight


# A weight and its master: the bits that the weight lacks, or its rounding error; see storage/master.py.
@jit
def joined(high, low):
    return float_of_bits(np.uint32((np.uint32(high) << np.uint32(16)) + np.uint32(np.int32(np.int16(low)))))


@jit
def high_bits(value):
    bits = bits_of_float(np.float32(value))
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.uint16(nan if (bits & _POSITIVE) > _NAN_ABOVE else np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))


@jit
def low_bits(value):
    bits = bits_of_float(np.float32(value))
    return np.uint16(np.uint32(0) if (bits & _POSITIVE) > _NAN_ABOVE else bits & np.uint32(0xFFFF))


# The same with a master of 8 bits; "24" are the bits of a float32, rounded to the upper 24; the lower 8 are not used.
@jit
def joined24(high, low):
    return float_of_bits(np.uint32((np.uint32(high) << np.uint32(16)) + np.uint32(np.int32(np.int8(low)) << np.int32(8))))


@jit
def _bits24(value, cut):
    bits = bits_of_float(np.float32(value))
    nan = ((bits >> np.uint32(16)) | np.uint32(0x40)) << np.uint32(16)
    return np.uint32(nan if (bits & _POSITIVE) > _NAN_ABOVE else np.uint32(bits + cut))


@jit
def nearest24(value):
    return _bits24(value, np.uint32(0x80))


@jit
def at_random24(value, key, start, i, multipliers):
    return _bits24(value, _random(key, start, i, multipliers) >> np.uint32(24))


@jit
def high_of24(bits):
    return np.uint16(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))


@jit
def low_of24(bits):
    return np.uint8((bits >> np.uint32(8)) & np.uint32(0xFF))


def _packing(dtype: torch.dtype, unsigned: bool) -> tuple[Any, Any, Any]:
    """Return functions that unpack states, pack them rounded to nearest, and pack them rounded stochastically."""
    code = storage.CODES[dtype][unsigned]
    block, cut, first, most = storage.BLOCK, np.uint32(code.cut), np.uint32(code.first), np.uint32(code.most)
    nearest, room = np.uint32(1 << (code.cut - 1)), np.int32((1 << code.cut) - 1)
    least, infinite, one, half = map(np.int32, (storage.LEAST, storage.INFINITE, storage.ONE, storage.HALF))
    between, two, four = np.int32(code.powers << 23), np.float32(2), np.float32(4)
    to_sign, in_pairs, surplus = np.uint32(32 - code.bits), code.bits == 4, np.uint32(32 - code.cut)
    kind = f"{'unsigned' if unsigned else 'signed'}_{code.bits}"

    @jit_exact
    def code_of(codes, i):
        if in_pairs:
            return (np.uint32(codes[i >> 1]) >> np.uint32((i & 1) << 2)) & np.uint32(15)
        return np.uint32(codes[i])

    @jit_exact
    def unpack_block(codes, scale, values):
        for i in range(values.size):
            each = code_of(codes, i)
            level = float_of_bits(np.uint32(((each & most) + first) << cut))
            linear = two * level - four
            number = (linear if linear < level else level) * scale
            sign = np.uint32(0 if unsigned else (each & (most + _ONE)) << to_sign)
            values[i] = float_of_bits(bits_of_float(number) | sign)

    @jit_exact
    def largest(values):
        bits = np.int32(0)
        for i in range(values.size):  # in the order of the bits, in which NaN is the largest
            bits = max(bits, np.int32(bits_of_float(values[i]) & _POSITIVE))
        return min(bits, infinite)

    @jit_exact
    def pack_number(number, less, inverse, cut_at):
        size = min(np.int32(bits_of_float(number) & _POSITIVE), infinite)
        linear = np.int32(bits_of_float(float_of_bits(np.uint32(size)) * inverse + two))
        level = np.uint32(np.uint32(max(np.int32(size + less), linear)) + cut_at) >> cut
        if unsigned:
            return np.uint8(max(level, min(np.uint32(size), np.uint32(first + _ONE))) & most)
        return np.uint8((level & most) | ((bits_of_float(number) >> to_sign) & (most + _ONE)))

    @jit_exact
    def to_nearest(key, start, i, multipliers):
        return nearest

    @jit_exact
    def at_random(key, start, i, multipliers):
        return _random(key, start, i, multipliers) >> surplus

    def packing(cut_of, most_added):
        @jit_exact
        def pack_block(values, codes, less, saturates, key, multipliers, start):
            inverse = float_of_bits(np.uint32(less + half))
            less = np.int32(less - (most_added if saturates else 0))  # so that nothing is rounded to infinity
            if in_pairs:
                for i in range(0, values.size, 2):
                    pair = pack_number(values[i], less, inverse, cut_of(key, start, i, multipliers))
                    if i + 1 < values.size:
                        other = pack_number(values[i + 1], less, inverse, cut_of(key, start, i + 1, multipliers))
                        pair |= np.uint8(other << np.uint8(4))
                    codes[i >> 1] = pair
            else:
                for i in range(codes.size):
                    codes[i] = pack_number(values[i], less, inverse, cut_of(key, start, i, multipliers))

        @jit_variant(f"{kind}_{cut_of.py_func.__name__}")
        def pack(values, codes, scales, key, multipliers, start):
            for k in range(scales.size):
                piece = slice(k * block, min(k * block + block, values.size))
                coded = slice(piece.start >> 1, (piece.stop + 1) >> 1) if in_pairs else piece
                size = largest(values[piece])
                exponent = max(np.int32(size + room) & infinite, least)
                scales[k] = float_of_bits(np.uint32(exponent - between))
                less, saturates = np.int32(one + between - exponent), exponent == infinite and size != infinite
                pack_block(values[piece], codes[coded], less, saturates, key, multipliers, start + k * block)

        return pack

    @jit_variant(kind)
    def unpack(codes, scales, values):
        for k in range(scales.size):
            piece = slice(k * block, min(k * block + block, values.size))
            coded = slice(piece.start >> 1, (piece.stop + 1) >> 1) if in_pairs else piece
            unpack_block(codes[coded], scales[k], values[piece])

    return unpack, packing(to_nearest, np.int32(nearest)), packing(at_random, room)


# By the state's dtype and whether it is never negative: functions that unpack, pack to nearest, and pack stochastically.
PACKING = {(dtype, unsigned): _packing(dtype, unsigned) for dtype in storage.PACKED for unsigned in (False, True)}
# By dtype: its type in memory, and the functions that load and store it.
MEMORY = {torch.float64: "f8", torch.float32: "f4", torch.float16: "u2", torch.bfloat16: "u2"}
LOAD = {torch.float16: _load_float16, torch.bfloat16: load_bfloat16}
STORE = {torch.float16: _store_float16, torch.bfloat16: store_bfloat16}
ROUNDS_TO = {torch.float16: _rounds_to_float16, torch.bfloat16: _rounds_to_bfloat16}
