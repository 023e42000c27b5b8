"""The generic GPU kernel: load, rescale, rule, store; one launch per table, whatever the rule and the number of tensors.

Imported only when a rule first runs on the triton engine. With TRITON_INTERPRET=1 it works on CPU tensors.

Two things make every access 128 bits wide: the hint that addresses are multiples of 16 bytes, and a branch for full
tiles, which need no mask (a hint alone leaves all accesses scalar).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from . import random, storage
from .language import Measure, Reduction, Rule
from .measures import Measured, Measurements, measured
from .storage import Storage
from .table import GRADIENT, Recording, TensorTable, slot_dtypes

__all__ = ["TritonUpdate", "compile_for", "launch_options"]

TILE = 1024  # elements of one program
TOTALS = 4096  # tiles whose measurements are added up at a time
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FULL, _REMAINDER, _COMPENSATION = map(tl.constexpr, (storage.FULL, storage.REMAINDER, storage.COMPENSATION))
_H0, _H1, _H2 = map(tl.constexpr, storage.HASH)
_SALT = tl.constexpr(storage.SALT)
_BLOCK, _CUT, _HALF = map(tl.constexpr, (storage.BLOCK, storage.CUT, 1 << (storage.CUT - 1)))
# Of packed states, which go by tl.int8, or by tl.uint8 where they are never negative; see storage.py.
_LEVELS, _UNSIGNED_LEVELS = map(tl.constexpr, storage.LEVELS)
_ZERO, _UNSIGNED_ZERO = (tl.constexpr(storage.zero_level(unsigned)) for unsigned in (False, True))
_STRETCH, _UNSIGNED_STRETCH = (tl.constexpr(float(storage.stretch(unsigned))) for unsigned in (False, True))


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


_S0, _S1, _S2, _S3, _S4 = map(tl.constexpr, random.SINE)
_L0, _L1, _L2, _L3 = map(tl.constexpr, random.LOGARITHM)
_ROOT_HALF, _LOG2 = tl.constexpr(random.ROOT_HALF), tl.constexpr(random.LOG2)


@triton.jit
def _normal(key0, key1, index):
    low = index.to(tl.uint32)
    seed = key0.to(tl.uint64) | (key1.to(tl.uint64) << 32)
    first, second, _, _ = tl.philox(seed, low, (index >> 32).to(tl.uint32), low * 0, low * 0)
    bits = (((first >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    logarithm = exponent.to(tl.float32) * _LOG2 + s * (_L0 + square * (_L1 + square * (_L2 + square * _L3)))
    radius = tl.sqrt(-2.0 * logarithm)
    x = tl.abs((second >> 8).to(tl.float32) * 5.9604644775390625e-08 - 0.5) - 0.25
    square = x * x
    return radius * x * (_S0 + square * (_S1 + square * (_S2 + square * (_S3 + square * _S4))))


# What rules get for `tl`: Triton's own words, except for those that would drop a NaN. They are looked up anew every time,
# because the interpreter exchanges them while a kernel runs.
_words = types.ModuleType("tristep_words")
vars(_words).update(maximum=_maximum, minimum=_minimum, normal=_normal, __getattr__=partial(getattr, tl))


def _compiled(fn: types.FunctionType) -> Any:
    fn.__globals__["_language"] = tl  # the interpreter insists on seeing it
    return triton.jit(fn)


@triton.jit
def _load(address, offsets, n, TYPE: tl.constexpr, COMPUTE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=offsets < n)
    return value.to(COMPUTE)


@triton.constexpr_function  # of another function Triton 3.5 and 3.6 know the value too late: they compile both branches
def _is_packed(TYPE):
    return TYPE in (tl.uint8, tl.int8)


@triton.jit
def _scales(address, n):
    return (address + (n + 15) // 16 * 16).to(tl.pointer_type(tl.float32))


@triton.jit
def _unpack(address, start, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0] // _BLOCK
    code = _load(address, offsets, n, tl.uint8, tl.int32, FULL, ALIGNED)
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
def _pack(
    address, value, start, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr, key, SALT: tl.constexpr,
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
        random = (_random(key, offsets, SALT) >> 13) & 0x7FFF0
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
    _put(address, code.to(tl.uint8), offsets, n, tl.uint8, FULL, ALIGNED)
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
def _rounded(value, TYPE: tl.constexpr):
    if tl.bfloat16 == TYPE:
        return _round_to_bfloat16(value)
    else:
        return value.to(TYPE)


@triton.jit
def _key(row, N_HYPER: tl.constexpr):
    # It travels as the last two hyper-parameters.
    low = tl.load(row + N_HYPER - 1).to(tl.int32)
    return (low | (tl.load(row + N_HYPER).to(tl.int32) << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def _random(key, index, SALT: tl.constexpr):
    h = (index.to(tl.uint32) * _H0) ^ (key + SALT)
    h = (h ^ (h >> 16)) * _H1
    return (h ^ (h >> 15)) * _H2


@triton.jit
def _round_at_random(value, key, index, SALT: tl.constexpr):
    h = _random(key, index, SALT)
    bits = value.to(tl.uint32, bitcast=True)
    nan = (bits >> 16) | 0x40
    cut = (bits + (h >> 16)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, cut).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _put(address, value, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < n)


@triton.jit
def _store(
    address, value, offsets, n, TYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    AT_RANDOM: tl.constexpr = False, key=None, SALT: tl.constexpr = 0,
):  # fmt: skip
    if AT_RANDOM:
        _put(address, _round_at_random(value, key, offsets, SALT), offsets, n, TYPE, FULL, ALIGNED)
    else:
        _put(address, _rounded(value, TYPE), offsets, n, TYPE, FULL, ALIGNED)


@triton.jit
def _load_states(
    addresses,
    tensor,
    n_tensors,
    start,
    offsets,
    n,
    STATES: tl.constexpr,
    STATE_TYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    states = ()
    for k in tl.static_range(len(STATES)):
        address = tl.load(addresses + (2 + STATES[k]) * n_tensors + tensor)
        if _is_packed(STATE_TYPES[STATES[k]]):
            state = _unpack(address, start, offsets, n, STATE_TYPES[STATES[k]], FULL, ALIGNED)
        else:
            state = _load(address, offsets, n, STATE_TYPES[STATES[k]], COMPUTE, FULL, ALIGNED)
        states = states + (state,)  # type: ignore[assignment]
    return states


@triton.jit
def _load_numbers(row, COLUMNS: tl.constexpr):
    values = ()
    for k in tl.static_range(len(COLUMNS)):
        values = values + (tl.load(row + COLUMNS[k]),)  # type: ignore[assignment]
    return values


@triton.jit
def _call(FUNCTION: tl.constexpr, EXTRAS: tl.constexpr, w, g, states, hyper, sums, index):
    if EXTRAS == 0:
        return FUNCTION(w, g, states, hyper)
    elif EXTRAS == 1:
        return FUNCTION(w, g, states, hyper, sums)
    elif EXTRAS == 2:
        return FUNCTION(w, g, states, hyper, index)
    else:
        return FUNCTION(w, g, states, hyper, sums, index)


@triton.jit
def _compute_tile(
    addresses,
    gradient,
    hyper,
    sums,
    tensor,
    n_tensors,
    start,
    offsets,
    n,
    control,
    FUNCTION: tl.constexpr,
    EXTRAS: tl.constexpr,
    STATES: tl.constexpr,
    HYPER: tl.constexpr,
    SUMS: tl.constexpr,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STATE_TYPES: tl.constexpr,
    BESIDE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    hyper += tensor * (1 + N_HYPER)
    if BESIDE == _FULL:
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        w = _load(master, offsets, n, COMPUTE, COMPUTE, FULL, ALIGNED)
    else:
        w = _load(tl.load(addresses + tensor), offsets, n, WEIGHT_TYPE, COMPUTE, FULL, ALIGNED)
        if BESIDE == _REMAINDER:
            beside = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
            low = _load(beside, offsets, n, tl.int16, tl.int32, FULL, ALIGNED)
            w = (w.to(tl.int32, bitcast=True) + low).to(COMPUTE, bitcast=True)
        elif BESIDE == _COMPENSATION:
            beside = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
            w += _load(beside, offsets, n, WEIGHT_TYPE, COMPUTE, FULL, ALIGNED)
    g = _load(gradient, offsets, n, GRADIENT_TYPE, COMPUTE, FULL, ALIGNED)
    rescale = tl.load(hyper)
    if control is not None:
        rescale *= tl.load(control).to(COMPUTE)
    g *= rescale
    states = _load_states(addresses, tensor, n_tensors, start, offsets, n, STATES, STATE_TYPES, COMPUTE, FULL, ALIGNED)
    numbers = _load_numbers(sums + tensor * len(SUMS), SUMS)
    return _call(FUNCTION, EXTRAS, w, g, states, _load_numbers(hyper, HYPER), numbers, offsets)


@triton.jit
def _store_weight(
    address,
    beside,
    w,
    offsets,
    n,
    WEIGHT_TYPE: tl.constexpr,
    BESIDE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # The weight, rounded, and beside it what that took off; see storage.py.
    if BESIDE == _REMAINDER:
        bits = w.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(tl.uint16)
        low = tl.where(nan, 0, bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        _put(address, high.to(tl.bfloat16, bitcast=True), offsets, n, WEIGHT_TYPE, FULL, ALIGNED)
        _put(beside, low, offsets, n, tl.int16, FULL, ALIGNED)
    else:
        rounded = _rounded(w, WEIGHT_TYPE)
        lost = w - rounded.to(w.dtype)
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)
        _put(address, rounded, offsets, n, WEIGHT_TYPE, FULL, ALIGNED)
        _put(beside, _rounded(lost, WEIGHT_TYPE), offsets, n, WEIGHT_TYPE, FULL, ALIGNED)


@triton.jit
def _store_tile(
    addresses,
    hyper,
    tensor,
    n_tensors,
    start,
    offsets,
    n,
    w,
    states,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    CHANGED: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STATE_TYPES: tl.constexpr,
    BESIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    key = 0
    if STOCHASTIC:
        key = _key(hyper + tensor * (1 + N_HYPER), N_HYPER)
    if BESIDE == _FULL:
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        _store(master, w, offsets, n, COMPUTE, FULL, ALIGNED)
    if BESIDE == _REMAINDER or BESIDE == _COMPENSATION:  # noqa: SIM109  # the compiler knows no `in` of tuples
        beside = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        _store_weight(tl.load(addresses + tensor), beside, w, offsets, n, WEIGHT_TYPE, BESIDE, FULL, ALIGNED)
    else:
        AT_RANDOM: tl.constexpr = STOCHASTIC == 1 and BESIDE != _FULL and tl.bfloat16 == WEIGHT_TYPE
        _store(tl.load(addresses + tensor), w, offsets, n, WEIGHT_TYPE, FULL, ALIGNED, AT_RANDOM, key)
    for k in tl.static_range(N_STATES):
        if CHANGED[k] and _is_packed(STATE_TYPES[k]):
            _pack(
                tl.load(addresses + (2 + k) * n_tensors + tensor), states[k] + tl.full(offsets.shape, -0.0, COMPUTE), start,
                offsets, n, STATE_TYPES[k], FULL, ALIGNED, STOCHASTIC > 0, key, (k + 1) * _SALT & 0xFFFFFFFF,
            )  # fmt: skip
        elif CHANGED[k]:
            _store(
                tl.load(addresses + (2 + k) * n_tensors + tensor), states[k], offsets, n, STATE_TYPES[k], FULL, ALIGNED,
                STOCHASTIC == 1 and STATE_TYPES[k] == tl.bfloat16, key, (k + 1) * _SALT & 0xFFFFFFFF,
            )  # fmt: skip


@triton.jit
def _fill_with_zeros(address, start, n, TYPE: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    offsets, zeros = start + tl.arange(0, TILE), tl.zeros((TILE,), dtype=TYPE)
    if start + TILE <= n:
        _put(address, zeros, offsets, n, TYPE, True, ALIGNED)
    else:
        _put(address, zeros, offsets, n, TYPE, False, ALIGNED)


# Compiled once, whatever the number of tensors, on which the alignment of `hyper` and of `sums` depends too.
@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def _update_kernel(
    addresses,  # int64 [rows, n_tensors]
    gradients,  # int64 [n_tensors]; 0 skips the tensor
    hyper,  # compute type [n_tensors, 1 + N_HYPER]
    sizes,  # int64 [n_tensors]
    tiles,  # int32 [n_programs, 2]
    sums,  # compute type [n_tensors, len(SUMS)]
    partials,  # compute type [n_values, n_programs]: what each program measured
    n_tensors,
    control,  # float32 [2], see TensorTable; or None
    FUNCTION: tl.constexpr,
    EXTRAS: tl.constexpr,
    STATES: tl.constexpr,
    HYPER: tl.constexpr,
    SUMS: tl.constexpr,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STATE_TYPES: tl.constexpr,
    BESIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    CHANGED: tl.constexpr,
    SUMMED: tl.constexpr,  # which values of the measure, if there is one, are added up
    MAXIMA: tl.constexpr,  # and of which the maximum is taken
    ZERO: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)  # and so all products that are offsets, which may be beyond 2^31
    tiles += 2 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * TILE
    gradient = tl.load(gradients + tensor)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    if stepping:
        n = tl.load(sizes + tensor)
        offsets = start + tl.arange(0, TILE)
        if start + TILE <= n:
            new = _compute_tile(
                addresses, gradient, hyper, sums, tensor, n_tensors, start, offsets, n, control, FUNCTION, EXTRAS, STATES,
                HYPER, SUMS, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, STATE_TYPES, BESIDE, True, ALIGNED,
            )  # fmt: skip
            _store_tile(
                addresses, hyper, tensor, n_tensors, start, offsets, n, new[0], new[1], N_STATES, N_HYPER, CHANGED,
                WEIGHT_TYPE, COMPUTE, STATE_TYPES, BESIDE, STOCHASTIC, True, ALIGNED,
            )  # fmt: skip
            if len(SUMMED) + len(MAXIMA) > 0:
                _store_partials(partials, new[2], offsets, n, COMPUTE, SUMMED, MAXIMA, True)
        else:
            new = _compute_tile(
                addresses, gradient, hyper, sums, tensor, n_tensors, start, offsets, n, control, FUNCTION, EXTRAS, STATES,
                HYPER, SUMS, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, STATE_TYPES, BESIDE, False, ALIGNED,
            )  # fmt: skip
            _store_tile(
                addresses, hyper, tensor, n_tensors, start, offsets, n, new[0], new[1], N_STATES, N_HYPER, CHANGED,
                WEIGHT_TYPE, COMPUTE, STATE_TYPES, BESIDE, STOCHASTIC, False, ALIGNED,
            )  # fmt: skip
            if len(SUMMED) + len(MAXIMA) > 0:
                _store_partials(partials, new[2], offsets, n, COMPUTE, SUMMED, MAXIMA, False)
    elif control is not None:
        if len(SUMMED) + len(MAXIMA) > 0:  # of a step that is left out nothing is to be found
            for k in tl.static_range(len(SUMMED) + len(MAXIMA)):
                tl.store(partials + k * tl.num_programs(0).to(tl.int64) + tl.program_id(0), 0.0)
    if ZERO:
        if gradient != 0:
            tl.debug_barrier()  # all threads of the tile have read theirs
            _fill_with_zeros(gradient, start, tl.load(sizes + tensor), GRADIENT_TYPE, TILE, ALIGNED)


@triton.jit
def _spread(value, offsets, COMPUTE: tl.constexpr):
    # One number for each element, of a constant or a comparison too.
    return value + tl.zeros_like(offsets).to(COMPUTE)


@triton.jit
def _gathered(values, LARGEST: tl.constexpr):
    # The sum; or the maximum of values that are 0 or more, which are in the order of their bits, with NaN above all.
    if LARGEST:
        if values.dtype == tl.float64:
            bits = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        else:
            bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, axis=0).to(values.dtype, bitcast=True)
    else:
        return tl.sum(values, axis=0)


@triton.jit
def _plus_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _plus_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _masked(value, offsets, n, COMPUTE: tl.constexpr, FULL: tl.constexpr):
    value = _spread(value, offsets, COMPUTE)
    if not FULL:
        value = tl.where(offsets < n, value, 0.0)
    return value


@triton.jit
def _store_partials(
    partials,
    values,
    offsets,
    n,
    COMPUTE: tl.constexpr,
    SUMMED: tl.constexpr,
    MAXIMA: tl.constexpr,
    FULL: tl.constexpr,
):
    # Four sums at a time: what takes long is that threads wait for each other, once for each time.
    partials += tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64)
    for j in tl.static_range(len(SUMMED) // 4):
        a = _masked(values[SUMMED[4 * j]], offsets, n, COMPUTE, FULL)
        b = _masked(values[SUMMED[4 * j + 1]], offsets, n, COMPUTE, FULL)
        c = _masked(values[SUMMED[4 * j + 2]], offsets, n, COMPUTE, FULL)
        d = _masked(values[SUMMED[4 * j + 3]], offsets, n, COMPUTE, FULL)
        a, b, c, d = tl.reduce((a, b, c, d), 0, _plus_4)
        tl.store(partials + SUMMED[4 * j] * step, a)
        tl.store(partials + SUMMED[4 * j + 1] * step, b)
        tl.store(partials + SUMMED[4 * j + 2] * step, c)
        tl.store(partials + SUMMED[4 * j + 3] * step, d)
    if len(SUMMED) % 4 > 1:
        first: tl.constexpr = len(SUMMED) // 4 * 4
        a = _masked(values[SUMMED[first]], offsets, n, COMPUTE, FULL)
        b = _masked(values[SUMMED[first + 1]], offsets, n, COMPUTE, FULL)
        a, b = tl.reduce((a, b), 0, _plus_2)
        tl.store(partials + SUMMED[first] * step, a)
        tl.store(partials + SUMMED[first + 1] * step, b)
    if len(SUMMED) % 2 == 1:
        last: tl.constexpr = SUMMED[len(SUMMED) - 1]
        tl.store(partials + last * step, tl.sum(_masked(values[last], offsets, n, COMPUTE, FULL), axis=0))
    for j in tl.static_range(len(MAXIMA)):
        value = _masked(values[MAXIMA[j]], offsets, n, COMPUTE, FULL)
        tl.store(partials + MAXIMA[j] * step, _gathered(value, True))


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def _sums_kernel(
    addresses,  # as in _update_kernel, as all that follow
    gradients,
    hyper,
    sizes,
    tiles,
    sums,
    partials,  # compute type [N_VALUES, n_programs]: what each program found
    n_tensors,
    control,
    FUNCTION: tl.constexpr,
    EXTRAS: tl.constexpr,
    STATES: tl.constexpr,
    HYPER: tl.constexpr,
    SUMS: tl.constexpr,
    N_STATES: tl.constexpr,
    N_HYPER: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STATE_TYPES: tl.constexpr,
    BESIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    N_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)  # and so all products that are offsets, which may be beyond 2^31
    tiles += 2 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * TILE
    gradient = tl.load(gradients + tensor)
    partials += tl.program_id(0)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    if stepping:
        n = tl.load(sizes + tensor)
        offsets = start + tl.arange(0, TILE)
        if start + TILE <= n:
            values = _compute_tile(
                addresses, gradient, hyper, sums, tensor, n_tensors, start, offsets, n, control, FUNCTION, EXTRAS, STATES,
                HYPER, SUMS, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, STATE_TYPES, BESIDE, True, ALIGNED,
            )  # fmt: skip
            for k in tl.static_range(N_VALUES):
                value = _spread(values[k], offsets, COMPUTE)
                tl.store(partials + k * tl.num_programs(0).to(tl.int64), _gathered(value, LARGEST))
        else:
            values = _compute_tile(
                addresses, gradient, hyper, sums, tensor, n_tensors, start, offsets, n, control, FUNCTION, EXTRAS, STATES,
                HYPER, SUMS, N_STATES, N_HYPER, WEIGHT_TYPE, GRADIENT_TYPE, COMPUTE, STATE_TYPES, BESIDE, False, ALIGNED,
            )  # fmt: skip
            for k in tl.static_range(N_VALUES):
                value = tl.where(offsets < n, _spread(values[k], offsets, COMPUTE), 0.0)
                tl.store(partials + k * tl.num_programs(0).to(tl.int64), _gathered(value, LARGEST))
    else:
        for k in tl.static_range(N_VALUES):
            tl.store(partials + k * tl.num_programs(0).to(tl.int64), 0.0)


@triton.jit(do_not_specialize=["n_tiles", "n_tensors"], do_not_specialize_on_alignment=["partials", "firsts", "totals"])
def _totals_kernel(
    partials,  # [N_VALUES, n_tiles]
    firsts,  # int64 [n_programs + 1]: where each tensor's tiles begin; or where all begin and end, for one program
    totals,  # [n_tensors, N_VALUES]
    n_tiles,
    n_tensors,
    N_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts + tensor)
    end = tl.load(firsts + tensor + 1)
    for k in tl.static_range(N_VALUES):
        total = tl.zeros((BLOCK,), dtype=totals.dtype.element_ty)
        start = first
        while start < end:  # the interpreter of Triton 3.6 knows no range() of loaded numbers
            offsets = start + tl.arange(0, BLOCK)
            value = tl.load(partials + k * n_tiles.to(tl.int64) + offsets, mask=offsets < end, other=0.0)
            if LARGEST:
                total = _maximum(total, value)
            else:
                total += value
            start += BLOCK
        total = _gathered(total, LARGEST)
        if TOGETHER:
            row = 0
            while row < n_tensors:
                rows = row + tl.arange(0, BLOCK).to(tl.int64)
                tl.store(totals + rows * N_VALUES + k, _spread(total, rows, totals.dtype.element_ty), mask=rows < n_tensors)
                row += BLOCK
        else:
            tl.store(totals + tensor * N_VALUES + k, total)


# One program for each tensor and value, since all that a tensor's tiles have found waits for it.
@triton.jit(
    do_not_specialize=["n_tiles", "n_rows", "slot"],
    do_not_specialize_on_alignment=["partials", "firsts", "rows", "largest", "ring"],
)
def _measured_kernel(
    partials,  # [n_values, n_tiles]
    firsts,  # int64 [n_tensors + 1]: where each tensor's tiles begin
    rows,  # int64 [n_tensors]: each tensor's row in a slot of the ring
    largest,  # int32 [n_values]: 1 for a maximum, 0 for a sum
    ring,  # [n_slots, n_rows, n_values]
    n_tiles,
    n_rows,
    slot,
    BLOCK: tl.constexpr,
):
    tensor, k = tl.program_id(0), tl.program_id(1)
    start = tl.load(firsts + tensor)
    end = tl.load(firsts + tensor + 1)
    partials += k.to(tl.int64) * n_tiles
    total = tl.zeros((BLOCK,), dtype=partials.dtype.element_ty)
    most = total
    while start < end:
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(partials + offsets, mask=offsets < end, other=0.0)
        total += value
        most = _maximum(most, value)
        start += BLOCK
    found = tl.where(tl.load(largest + k) != 0, _gathered(most, True), _gathered(total, False))
    place = (slot.to(tl.int64) * n_rows + tl.load(rows + tensor)) * tl.num_programs(1) + k
    tl.store(ring + place, found.to(ring.dtype.element_ty))


def launch_options(
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    dtype: torch.dtype,
    n_states: int,
    n_sums: int = 0,
    stored: Storage | None = None,
) -> dict[str, Any]:
    """Options of the compiler: 8 elements a thread, or 4.

    Mixed widths get 4, or layouts would be exchanged through shared memory; and so do rules of more than two states, or
    sums, those that they get or that are found of them, which with 8 need 72 registers a thread instead of 48.

    Nothing is fused, as on the CPU: of two products in a sum the compiler would fuse this or that one, and a step that is
    measured would differ in its last bits from one that is not. Memory, not arithmetic, is what a step waits for.
    """
    kinds = weight_dtype, gradient_dtype, dtype, *(() if stored is None else stored.states)
    mixed = len({kind.itemsize for kind in kinds}) > 1
    return {"num_warps": 8 if mixed or max(n_states, n_sums) > 2 else 4, "enable_fp_fusion": False}


def _n_states(function: Rule | Reduction | Measured) -> int:
    return len(function.used if isinstance(function, Rule) else function.state)


def _n_sums(function: Rule | Reduction | Measured) -> int:
    return max(function.n_numbers, len(function.measure.names) if isinstance(function, Measured) else 0)


def _gathered_by(function: Rule | Measured, how: str) -> tuple[int, ...]:
    """Which values of its measure, if it has one, are gathered in this way."""
    return tuple(k for k, by in enumerate(function.measure.by) if by == how) if isinstance(function, Measured) else ()


def _written(function: Rule | Measured, rule: Rule) -> dict[str, Any]:
    """The constants that say what the update kernel writes."""
    return {"CHANGED": _changed(rule), "SUMMED": _gathered_by(function, "sum"), "MAXIMA": _gathered_by(function, "max")}


def _changed(rule: Rule) -> tuple[bool, ...]:
    return tuple(name in rule.changed for name in rule.state)


def _constants(
    function: Rule | Reduction | Measured,
    rule: Rule,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    dtype: torch.dtype,
    stored: Storage,
    aligned: bool,
) -> dict[str, Any]:
    return {
        "FUNCTION": function.bind("triton", _words, _compiled),
        "EXTRAS": (function.n_numbers > 0) + 2 * ("index" in function.extras),
        "STATES": tuple(rule.state.index(name) for name in function.state),
        "HYPER": tuple(1 + rule.hyper.index(name) for name in function.own_hyper),
        "SUMS": tuple(range(function.n_numbers)),
        "N_STATES": len(rule.state),
        "N_HYPER": len(rule.hyper) + 2 * stored.stochastic,
        "WEIGHT_TYPE": _TYPES[weight_dtype],
        "GRADIENT_TYPE": _TYPES[gradient_dtype],
        "COMPUTE": _TYPES[dtype],
        "STATE_TYPES": tuple(
            (tl.uint8 if name in rule.unsigned else tl.int8) if kind == torch.uint8 else _TYPES[kind]
            for name, kind in zip(rule.state, stored.states, strict=True)
        ),
        "BESIDE": stored.beside,
        "STOCHASTIC": stored.stochastic + stored.codes_only,  # 1: all that is stored in fewer bits, 2: packed states only
        "ALIGNED": aligned,
        "TILE": TILE,
    }


class TritonUpdate:
    """Runs one table on a GPU: keeps its arrays on the device, copies over what changed, launches once."""

    looks_at_tensors = multiplies_on_host = False  # but at memory, and on the device

    def __init__(self, table: TensorTable) -> None:
        assert isinstance(table.rule, Rule)
        self.table, self._rule = table, table.rule
        self._upload = _Uploader(table)
        self._addresses = self._to_device(table.addresses)
        self._sent: bytes | None = None
        self._sizes = self._to_device(table.sizes)
        self._tiles = self._to_device(table.tiles)
        self.totals, self.sums = table.room_for_sums()
        self._elsewhere = table.device.type == "cuda" and torch.cuda.device_count() > 1
        self._n_tiles = len(table.tiles)
        self._update = self._launcher(_update_kernel, self._rule)
        self._measured: tuple[torch.Tensor, _Launch, _Launch] | None = None
        self._measure = [self._sums_launcher(stage) for stage in range(len(self._rule.reductions))]

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Work on other weights from now on, those at the table's addresses."""
        now = self.table.addresses.tobytes()
        if weights and now != self._sent:
            self._addresses.copy_(torch.from_numpy(self.table.addresses), non_blocking=True)
            self._sent = now

    def measure(self, stage: int) -> None:
        """Launch the rule's reduction of this number; its results are then in `totals`, of shape [n_tensors, n_values].

        Those of one over all tensors are the same in each row.
        """
        with self._device():
            self._upload()
            if not self._n_tiles:
                self.totals[stage].zero_()  # they may have been added to those of other tensors
                return
            for launch in self._measure[stage]:
                launch()

    def upload(self) -> None:
        """Copy over what has changed, on the current stream."""
        with self._device():
            self._upload()

    def __call__(self) -> None:
        """Launch on the current stream of the table's device. Never waits for the device."""
        if not self._n_tiles:
            return
        if self._elsewhere:
            with self._device():
                self._upload()
                self._update()
        else:
            self._upload()
            self._update()

    def measured(self, into: Measurements, rows: np.ndarray) -> None:
        """As a call, and put what is measured meanwhile into these rows of the present slot: one more launch."""
        with self._device():
            ring = into.ring(self.table.device)
            if self._measured is None or self._measured[0] is not ring:
                self._measured = ring, *self._measured_launchers(into.measure, ring, rows)
            _, update, totals = self._measured
            if self._n_tiles:
                self._upload()
                update()
            totals(into.slot)

    @property
    def hyper(self) -> torch.Tensor:
        """The hyper-parameters as they are on the device since the last upload, [n_tensors, n]."""
        return self._upload.hyper.view(self.table.hyper.shape)

    def _device(self) -> Any:
        return torch.cuda.device(self.table.device) if self._elsewhere else nullcontext()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.table.device, copy=True)

    def _launcher(
        self, kernel: Any, function: Rule | Reduction | Measured, partials: tuple[torch.Tensor, ...] = ()
    ) -> _Launch:
        table = self.table
        sums = self._upload.hyper if function.numbers_from is None else self.sums[function.numbers_from]
        partials = partials or (self._upload.hyper,)  # a pointer that nothing is done with
        arguments = (self._addresses, self._upload.gradients, self._upload.hyper, self._sizes, self._tiles, sums, *partials)
        types = table.weight_dtype, table.gradient_dtype, table.dtype
        constants = _constants(function, self._rule, *types, table.storage, table.aligned)
        if isinstance(function, Reduction):
            constants |= {"N_VALUES": function.n_values, "LARGEST": function.by == "max"}
        else:
            constants |= _written(function, self._rule) | {"ZERO": table.zero_grads}
        options = launch_options(*types, _n_states(function), _n_sums(function), table.storage)
        return _Launch(kernel, self._n_tiles, (*arguments, len(table.sizes), table.control), constants, options)

    def _sums_launcher(self, stage: int) -> tuple[_Launch, _Launch]:
        table, reduction = self.table, self._rule.reductions[stage]
        n_tensors, n_values = self.totals[stage].shape
        partials = torch.zeros(n_values, self._n_tiles, dtype=table.dtype, device=table.device)
        together = reduction.over == "all"
        bounds = [0, n_tensors] if together else np.arange(n_tensors + 1)
        firsts = self._to_device(np.searchsorted(table.tiles[:, 0], bounds).astype(np.int64))
        return (
            self._launcher(_sums_kernel, reduction, (partials,)),
            _Launch(
                _totals_kernel,
                1 if together else n_tensors,
                (partials, firsts, self.totals[stage], self._n_tiles, n_tensors),
                {"N_VALUES": n_values, "LARGEST": reduction.by == "max", "TOGETHER": together, "BLOCK": 1024},
                {"enable_fp_fusion": False},
            ),
        )

    def _measured_launchers(self, measure: Measure, ring: torch.Tensor, rows: np.ndarray) -> tuple[_Launch, _Launch]:
        table = self.table
        function, (_, n_rows, n_values) = measured(self._rule, measure), ring.shape
        partials = torch.zeros(n_values, max(self._n_tiles, 1), dtype=table.dtype, device=table.device)
        firsts = np.searchsorted(table.tiles[:, 0], np.arange(len(rows) + 1)).astype(np.int64)
        largest = np.array([by == "max" for by in measure.by], dtype=np.int32)
        arrays = (self._to_device(array) for array in (firsts, rows.astype(np.int64), largest))
        arguments = (partials, *arrays, ring, partials.shape[1], n_rows)
        return (
            self._launcher(_update_kernel, function, (partials,)),
            _Launch(
                _measured_kernel,
                (len(rows), n_values),
                arguments,
                {"BLOCK": TOTALS},
                {"num_warps": 8, "enable_fp_fusion": False},
            ),
        )


class _Launch:
    """One kernel with arguments that stay what they are, whatever the contents of the tensors among them.

    The last ones before the constants may be given at each call.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        arguments: Any,
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        self._first = partial(kernel[self._grid], *arguments, **constants, **options)
        self._again: Any = None
        self._arguments, self._rest = tuple(arguments), tuple(constants.values())

    def __call__(self, *last: int) -> None:
        if self._again is not None:
            self._again(*last, *self._rest)
        else:
            kernel = self._first(*last)
            # The arguments stay, so nothing is left for the JIT's launcher to find out every time, which takes it 20 µs.
            if isinstance(kernel, CompiledKernel):
                if not last:
                    self._arguments, self._rest = self._arguments + self._rest, ()
                self._again = partial(kernel[self._grid], *self._arguments)


class _Uploader:
    """Keeps what may change from step to step, gradients' addresses and hyper-parameters, as it is in the table.

    It is one buffer and one asynchronous copy out of a ring of page-locked buffers, so the host never waits, unless it is
    a whole ring ahead of the device.

    Attributes:
        gradients: int64 [n_tensors], on the device.
        hyper: [n_tensors, 1 + n_hyper] in the table's type, on the device.
    """

    RING = 8

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._split = table.addresses[GRADIENT].nbytes
        size = self._split + table.hyper.nbytes
        pinned = table.device.type == "cuda" and torch.cuda.is_available()
        self._ring = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(self.RING)]
        self._views = [buffer.numpy().data for buffer in self._ring]
        arrays = (table.addresses[GRADIENT], table.hyper)
        self._now = [array.data.cast("B") for array in arrays if array.size]
        self._events = [torch.cuda.Event() for _ in range(self.RING)] if pinned else None
        self._slot = 0
        self._sent: bytes | None = None
        self._device = torch.empty(size, dtype=torch.uint8, device=table.device)
        self.gradients = self._device[: self._split].view(torch.int64)
        self.hyper = self._device[self._split :].view(table.dtype)

    def __call__(self) -> None:
        """Copy over what changed since the last call, if anything did, on the current stream."""
        if Recording.current is not None:
            return
        if self._events is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step is being captured in a CUDA graph, which would take the same rates and counts at every replay: use "
                "capture(function) of the Trainer, or of the optimizer of tristep.optim, which keeps them live"
            )
        now = b"".join(self._now)
        if now == self._sent:
            return
        slot, self._slot = self._slot, (self._slot + 1) % self.RING
        if self._events is not None:
            self._events[slot].synchronize()  # of a copy that is a whole ring old: over, in practice
        self._views[slot][:] = now
        self._device.copy_(self._ring[slot], non_blocking=True)
        if self._events is not None:
            self._events[slot].record()
        self._sent = now


def compile_for(
    target: Any,
    rule: Rule,
    weight_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype = torch.float32,
    masters: bool | torch.dtype = False,
    aligned: bool = True,
    stage: int | None = None,
    state_dtype: torch.dtype | None = None,
    stochastic: bool = False,
    measure: Measure | None = None,
    control: bool = False,
    zero_grads: bool = False,
) -> Any:
    """The compiled kernel of a rule for a `triton.backends.compiler.GPUTarget`; needs no GPU. For looking at its code.

    With `stage` it is that of the rule's reduction of this number, with `measure` one that measures. `masters` may be the
    type of what stands beside weights.
    """
    from triton.compiler import ASTSource

    dtype = torch.float64 if weight_dtype == torch.float64 else torch.float32
    real = {torch.float32: "*fp32", torch.float64: "*fp64"}[dtype]
    function: Any = rule if stage is None else rule.reductions[stage]
    function = function if measure is None else measured(rule, measure)
    beside = (dtype if masters else None) if isinstance(masters, bool) else masters
    states = slot_dtypes(rule, weight_dtype, state_dtype)[: len(rule.state)]
    stored = storage.of_tensors(weight_dtype, states, beside, 0 if stochastic else None)
    constants = _constants(function, rule, weight_dtype, gradient_dtype, dtype, stored, aligned)
    signature = {"addresses": "*i64", "gradients": "*i64", "hyper": real, "sizes": "*i64", "tiles": "*i32", "sums": real}
    signature["partials"] = real
    if isinstance(function, Reduction):
        constants |= {"N_VALUES": function.n_values, "LARGEST": function.by == "max"}
    else:
        constants |= _written(function, rule) | {"ZERO": zero_grads}
    signature |= {"n_tensors": "i32", "control": "*fp32"}
    constants |= {} if control else {"control": None}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = _update_kernel if stage is None else _sums_kernel
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    options = launch_options(weight_dtype, gradient_dtype, dtype, _n_states(function), _n_sums(function), stored)
    return triton.compile(source, target=target, options=options)
