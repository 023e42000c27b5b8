"""How each storage format is read and written; see the storage package for the formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ... import storage
from .intrinsics import bits_of_float, float_of_bits, float_of_half, half_of_float, jit, jit_exact, jit_variant

__all__ = [
    "LOAD",
    "MEMORY",
    "PACKING",
    "STORE",
    "high_bits",
    "joined",
    "key_of",
    "load_bfloat16",
    "lost_bfloat16",
    "lost_float16",
    "low_bits",
    "store_at_random",
    "store_bfloat16",
]


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
_NAN_ABOVE, _POSITIVE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


@jit
def key_of(low, high, salt):
    return np.uint32(np.uint32(low) + (np.uint32(high) << np.uint32(16)) + np.uint32(salt))


@jit
def _random(key, index):
    h = np.uint32(np.uint32(np.uint32(index) * _H0) ^ key)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * _H1)
    return np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * _H2)


@jit
def store_at_random(value, key, index, shift):
    random = (_random(key, index) >> np.uint32(shift)) & np.uint32(0xFFFF)
    bits = bits_of_float(np.float32(value))
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    cut = np.uint32(bits + random) >> np.uint32(16)
    return np.uint16(nan if (bits & _POSITIVE) > _NAN_ABOVE else cut)


# A weight and what is stored alongside: the bits that the weight lacks, or what rounding took off; see storage/master.py.
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


@jit
def _lost(value, rounded):
    lost = np.float32(value) - rounded
    return lost if np.abs(lost) < np.float32(np.inf) else np.float32(0)


@jit
def lost_bfloat16(value, rounded):
    # Non-finite values become 0 by a mask: a second select next to that of the first rounding halves the loop's speed.
    bits = bits_of_float(np.float32(value) - load_bfloat16(rounded))
    finite = np.uint32(np.int32(np.int32(bits & _POSITIVE) - np.int32(_NAN_ABOVE)) >> np.int32(31))
    bits = bits & finite
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def lost_float16(value, rounded):
    return _store_float16(_lost(value, _load_float16(rounded)))


def _packing(unsigned: bool) -> tuple[Any, Any, Any]:
    """How packed states are read and written, to the nearest or at random; see storage/packed.py."""
    block, cut = storage.BLOCK, np.int32(storage.CUT)
    levels = np.int32(storage.LEVELS[unsigned])
    base = np.int32((127 << 23 >> storage.CUT) - storage.LEVELS[unsigned])
    zero, stretch = np.float32(storage.zero_level(unsigned)), storage.stretch(unsigned)
    range_, half, top = np.float32(1) - zero, np.int32(1 << (storage.CUT - 1)), base + levels
    none, least, infinite, nan = np.float32(0), np.int32(0x00800000), np.int32(0x7F800000), np.float32(np.nan)
    kind = "unsigned" if unsigned else "signed"

    @jit_exact
    def unpack_block(codes, scale, values):
        for i in range(codes.size):
            code = np.int32(codes[i])
            size = code if unsigned else code & np.int32(127)
            number = (float_of_bits(np.uint32((size + base) << cut)) - zero) * stretch * scale
            sign = np.uint32(0 if unsigned else (code & np.int32(128)) << np.int32(24))
            values[i] = float_of_bits(bits_of_float(number) | sign)

    @jit_exact
    def largest(values):
        bits = np.int32(0)
        for i in range(values.size):  # in the order of the bits, in which NaN is the largest
            bits = max(bits, np.int32(bits_of_float(values[i]) & _POSITIVE))
        return bits

    @jit_exact
    def pack_level(number, level):
        code = np.int32(level - base)
        if unsigned:
            code = np.int32(max(code, np.int32(number != none)))
        else:
            code |= np.int32(bits_of_float(number) >> np.uint32(24)) & np.int32(128)
        return np.uint8(code if level <= top else np.int32(0))

    @jit_exact
    def pack_block(values, codes, shrunk, key, shift, start):
        for i in range(codes.size):
            level = min(np.int32(bits_of_float(np.abs(values[i] * shrunk) + zero)), infinite)  # of some NaN it is more
            codes[i] = pack_level(values[i], np.int32(level + half) >> cut)

    @jit_exact
    def pack_block_at_random(values, codes, shrunk, key, shift, start):
        for i in range(codes.size):
            level = min(np.int32(bits_of_float(np.abs(values[i] * shrunk) + zero)), infinite)
            random = ((_random(key, start + i) >> np.uint32(shift)) & np.uint32(0xFFFF)) << np.uint32(3)
            codes[i] = pack_level(values[i], np.int32(level + np.int32(random & np.uint32(0x7FFF0) | np.uint32(8))) >> cut)

    def packing(pack_one):
        @jit_variant(f"{kind}_{pack_one.py_func.__name__}")
        def pack(values, codes, scales, key, shift, start):
            for k in range(scales.size):
                piece = slice(k * block, min(k * block + block, codes.size))
                bits = largest(values[piece])
                scale = float_of_bits(np.uint32(bits)) if bits >= least else none
                shrunk = range_ / scale if bits >= least and bits < infinite else none
                scales[k] = scale if bits < infinite else nan
                pack_one(values[piece], codes[piece], shrunk, key, shift, start + k * block)

        return pack

    @jit_variant(kind)
    def unpack(codes, scales, values):
        for k in range(scales.size):
            piece = slice(k * block, min(k * block + block, codes.size))
            unpack_block(codes[piece], scales[k], values[piece])

    return unpack, packing(pack_block), packing(pack_block_at_random)


PACKING = tuple(map(_packing, (False, True)))
# How each type is stored, read and written.
MEMORY = {torch.float64: "f8", torch.float32: "f4", torch.float16: "u2", torch.bfloat16: "u2"}
LOAD = {torch.float16: _load_float16, torch.bfloat16: load_bfloat16}
STORE = {torch.float16: _store_float16, torch.bfloat16: store_bfloat16}
