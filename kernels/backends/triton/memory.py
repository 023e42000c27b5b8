"""Loads and stores of a tile in each storage format, and rounding. See the storage package for the formats.

Two things make every access 128 bits wide: the hint that addresses are multiples of 16 bytes, and a branch for full
tiles, which need no mask (a hint alone leaves all accesses scalar).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import storage

__all__ = ["is_packed", "load", "load_key", "pack", "put", "round_to", "store", "unpack"]

_H0, _H1, _H2 = map(tl.constexpr, storage.HASH)
_SALT = tl.constexpr(storage.SALT)
_BLOCK, _CUT, _HALF = map(tl.constexpr, (storage.BLOCK, storage.CUT, 1 << (storage.CUT - 1)))
# Of packed states, which go by tl.int8, or by tl.uint8 where they are never negative; see storage/packed.py.
_LEVELS, _UNSIGNED_LEVELS = map(tl.constexpr, storage.LEVELS)
_ZERO, _UNSIGNED_ZERO = (tl.constexpr(storage.zero_level(unsigned)) for unsigned in (False, True))
_STRETCH, _UNSIGNED_STRETCH = (tl.constexpr(float(storage.stretch(unsigned))) for unsigned in (False, True))


@triton.jit
def load(address, offsets, n, TYPE: tl.constexpr, COMPUTE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=offsets < n)
    return value.to(COMPUTE)


@triton.constexpr_function  # of another function Triton 3.5 and 3.6 know the value too late: they compile both branches
def is_packed(TYPE):
    return TYPE in (tl.uint8, tl.int8)


@triton.jit
def _scales(address, n):
    return (address + (n + 15) // 16 * 16).to(tl.pointer_type(tl.float32))


@triton.jit
def unpack(address, start, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0] // _BLOCK
    code = load(address, offsets, n, tl.uint8, tl.int32, FULL, ALIGNED)
    if tl.uint8 == TYPE:
        bits = (code + (127 * 16 - _UNSIGNED_LEVELS)) << _CUT
        size = (bits.to(tl.float32, bitcast=True) - _UNSIGNED_ZERO) * _UNSIGNED_STRETCH
    else:
        bits = ((code & 127) + (127 * 16 - _LEVELS)) << _CUT
        size = (bits.to(tl.float32, bitcast=True) - _ZERO) * _STRETCH
        sign = (code & 128) << 24
        size = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    rows = start // _BLOCK + tl.arange(0, ROWS)
    if FULL:
        scale = tl.load(_scales(address, n) + rows)
    else:
        scale = tl.load(_scales(address, n) + rows, mask=rows * _BLOCK < n, other=0.0)
    return tl.reshape(tl.reshape(size, (ROWS, _BLOCK)) * scale[:, None], (offsets.shape[0],))


@triton.jit
def pack(
    address, value, start, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr, key, SLOT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = offsets.shape[0] // _BLOCK
    if not FULL:
        value = tl.where(offsets < n, value, 0.0)
    LEVELS: tl.constexpr = _UNSIGNED_LEVELS if tl.uint8 == TYPE else _LEVELS
    ZERO: tl.constexpr = _UNSIGNED_ZERO if tl.uint8 == TYPE else _ZERO
    BASE: tl.constexpr = 127 * 16 - LEVELS
    blocks = tl.reshape(value, (ROWS, _BLOCK))
    # Among the bits of the sizes, which are in the same order, NaN is the largest.
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    scale = tl.where(largest < 0x00800000, 0.0, tl.where(largest < 0x7F800000, scale, float("nan")))
    shrunk = tl.where(scale > 0.0, tl.div_rn(1.0 - ZERO, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    bits = (tl.abs(blocks * shrunk[:, None]) + ZERO).to(tl.int32, bitcast=True)
    bits = tl.reshape(bits, (offsets.shape[0],))
    if AT_RANDOM:
        random = (_random(key, offsets, SLOT) << 3) & 0x7FFF0
        bits = (bits + (random.to(tl.int32) | 8)) >> _CUT
    else:
        bits = (bits + _HALF) >> _CUT
    code = bits - BASE
    if tl.uint8 == TYPE:
        code = tl.where((code == 0) & (value != 0.0), 1, code)
    else:
        code |= (value.to(tl.int32, bitcast=True) >> 24) & 128
    # Without a sign, since a GPU's own NaN, 0x7fffffff, has become negative.
    code = tl.where(bits.to(tl.uint32, bitcast=True) > BASE + LEVELS, 0, code)
    put(address, code.to(tl.uint8), offsets, n, tl.uint8, FULL, ALIGNED)
    rows = start // _BLOCK + tl.arange(0, ROWS)
    if FULL:
        tl.store(_scales(address, n) + rows, scale)
    else:
        tl.store(_scales(address, n) + rows, scale, mask=rows * _BLOCK < n)


@triton.jit
def _round_to_bfloat16(value):
    # In integers, to the nearest and to even, because the interpreter's own conversion truncates.
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
def load_key(row, N_HYPER: tl.constexpr):
    # It travels as the last two hyper-parameters.
    low = tl.load(row + N_HYPER - 1).to(tl.int32)
    return (low | (tl.load(row + N_HYPER).to(tl.int32) << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def _random(key, index, SLOT: tl.constexpr):
    # 16 bits: the compiler computes the hash of two slots once. As `random_bits` of storage/low_precision.py.
    h = (index.to(tl.uint32) * _H0) ^ (key + (SLOT // 2 * _SALT & 0xFFFFFFFF))
    h = (h ^ (h >> 16)) * _H1
    h = (h ^ (h >> 15)) * _H2
    return h >> 16 if SLOT % 2 == 0 else h & 0xFFFF


@triton.jit
def _round_at_random(value, key, index, SLOT: tl.constexpr):
    bits = value.to(tl.uint32, bitcast=True)
    nan = (bits >> 16) | 0x40
    cut = (bits + _random(key, index, SLOT)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, cut).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def put(address, value, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < n)


@triton.jit
def store(
    address, value, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr = False, key=None, SLOT: tl.constexpr = 0,
):  # fmt: skip
    if AT_RANDOM:
        put(address, _round_at_random(value, key, offsets, SLOT), offsets, n, TYPE, FULL, ALIGNED)
    else:
        put(address, round_to(value, TYPE), offsets, n, TYPE, FULL, ALIGNED)
