"""One tile of a tensor: loaded, computed with the rule, and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from ... import storage
from .memory import is_packed, load, load_key, pack, put, round_to, store, unpack

__all__ = ["compute_tile", "fill_with_zeros", "store_tile"]

_FULL, _SPLIT, _KAHAN = (
    tl.constexpr(int(kind)) for kind in (storage.MasterKind.FULL, storage.MasterKind.SPLIT, storage.MasterKind.KAHAN)
)
_SALT = tl.constexpr(storage.SALT)


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
        if is_packed(STATE_TYPES[STATES[k]]):
            state = unpack(address, start, offsets, n, STATE_TYPES[STATES[k]], FULL, ALIGNED)
        else:
            state = load(address, offsets, n, STATE_TYPES[STATES[k]], COMPUTE, FULL, ALIGNED)
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
def compute_tile(
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
    MASTER: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    hyper += tensor * (1 + N_HYPER)
    if MASTER == _FULL:
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        w = load(master, offsets, n, COMPUTE, COMPUTE, FULL, ALIGNED)
    else:
        w = load(tl.load(addresses + tensor), offsets, n, WEIGHT_TYPE, COMPUTE, FULL, ALIGNED)
        if MASTER == _SPLIT:
            master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
            low = load(master, offsets, n, tl.int16, tl.int32, FULL, ALIGNED)
            w = (w.to(tl.int32, bitcast=True) + low).to(COMPUTE, bitcast=True)
        elif MASTER == _KAHAN:
            master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
            w += load(master, offsets, n, WEIGHT_TYPE, COMPUTE, FULL, ALIGNED)
    g = load(gradient, offsets, n, GRADIENT_TYPE, COMPUTE, FULL, ALIGNED)
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
    master,
    w,
    offsets,
    n,
    WEIGHT_TYPE: tl.constexpr,
    MASTER: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # The weight, rounded, and alongside what that took off; see storage/master.py.
    if MASTER == _SPLIT:
        bits = w.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(tl.uint16)
        low = tl.where(nan, 0, bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        put(address, high.to(tl.bfloat16, bitcast=True), offsets, n, WEIGHT_TYPE, FULL, ALIGNED)
        put(master, low, offsets, n, tl.int16, FULL, ALIGNED)
    else:
        rounded = round_to(w, WEIGHT_TYPE)
        lost = w - rounded.to(w.dtype)
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)
        put(address, rounded, offsets, n, WEIGHT_TYPE, FULL, ALIGNED)
        put(master, round_to(lost, WEIGHT_TYPE), offsets, n, WEIGHT_TYPE, FULL, ALIGNED)


@triton.jit
def store_tile(
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
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    key = 0
    if STOCHASTIC:
        key = load_key(hyper + tensor * (1 + N_HYPER), N_HYPER)
    if MASTER == _FULL:
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        store(master, w, offsets, n, COMPUTE, FULL, ALIGNED)
    if MASTER == _SPLIT or MASTER == _KAHAN:  # noqa: SIM109  # the compiler knows no `in` of tuples
        master = tl.load(addresses + (2 + N_STATES) * n_tensors + tensor)
        _store_weight(tl.load(addresses + tensor), master, w, offsets, n, WEIGHT_TYPE, MASTER, FULL, ALIGNED)
    else:
        AT_RANDOM: tl.constexpr = STOCHASTIC == 1 and MASTER != _FULL and tl.bfloat16 == WEIGHT_TYPE
        store(tl.load(addresses + tensor), w, offsets, n, WEIGHT_TYPE, FULL, ALIGNED, AT_RANDOM, key)
    for k in tl.static_range(N_STATES):
        if CHANGED[k] and is_packed(STATE_TYPES[k]):
            pack(
                tl.load(addresses + (2 + k) * n_tensors + tensor), states[k] + tl.full(offsets.shape, -0.0, COMPUTE), start,
                offsets, n, STATE_TYPES[k], FULL, ALIGNED, STOCHASTIC > 0, key, (k + 1) * _SALT & 0xFFFFFFFF,
            )  # fmt: skip
        elif CHANGED[k]:
            store(
                tl.load(addresses + (2 + k) * n_tensors + tensor), states[k], offsets, n, STATE_TYPES[k], FULL, ALIGNED,
                STOCHASTIC == 1 and STATE_TYPES[k] == tl.bfloat16, key, (k + 1) * _SALT & 0xFFFFFFFF,
            )  # fmt: skip


@triton.jit
def fill_with_zeros(address, start, n, TYPE: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    offsets, zeros = start + tl.arange(0, TILE), tl.zeros((TILE,), dtype=TYPE)
    if start + TILE <= n:
        put(address, zeros, offsets, n, TYPE, True, ALIGNED)
    else:
        put(address, zeros, offsets, n, TYPE, False, ALIGNED)
