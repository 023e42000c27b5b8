"""One tile of a tensor: loaded, computed with the rule, and stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ... import storage
from .memory import is_packed, load, load_key, pack, put, round_to, store, unpack

__all__ = ["Arguments", "Layout", "compute_tile", "fill_with_zeros", "store_tile"]

_FULL, _SPLIT, _KAHAN = (
    tl.constexpr(int(kind)) for kind in (storage.MasterKind.FULL, storage.MasterKind.SPLIT, storage.MasterKind.KAHAN)
)


class Layout(NamedTuple):
    """What all tensors of a launch have in common: a constant of its kernel.

    Attributes:
        weight, gradient, compute: Triton's types of weights and gradients in memory, and of the arithmetic.
        states: the type of each state in memory; uint8 and int8 are those of packed ones, unsigned and signed.
        changed: for each state whether the rule changes it.
        master: a `storage.MasterKind`.
        stochastic: 1 if all that is stored in low precision is rounded stochastically, 2 if packed states only.
        n_hyper: the hyper-parameters of a row, its first element aside.
        aligned: whether all addresses are multiples of 16 bytes.
        tile: elements of one program.
    """

    weight: Any
    gradient: Any
    compute: Any
    states: tuple[Any, ...]
    changed: tuple[bool, ...]
    master: int
    stochastic: int
    n_hyper: int
    aligned: bool
    tile: int


class Arguments(NamedTuple):
    """Which arguments a rule's function takes: a constant of its kernel.

    Attributes:
        states, hyper, sums: the places of its states, and of numbers in their rows: hyper-parameters, and results of a
            reduction.
        takes_index: whether it takes the elements' indices.
    """

    states: tuple[int, ...]
    hyper: tuple[int, ...]
    sums: tuple[int, ...]
    takes_index: bool


@triton.jit
def _load_states(column, n_tensors, start, offsets, n, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    states = ()
    for k in tl.static_range(len(ARGUMENTS.states)):
        address = tl.load(column + (2 + ARGUMENTS.states[k]) * n_tensors)
        if is_packed(LAYOUT.states[ARGUMENTS.states[k]]):
            state = unpack(address, start, offsets, n, LAYOUT.states[ARGUMENTS.states[k]], FULL, LAYOUT.aligned)
        else:
            state = load(
                address, offsets, n, LAYOUT.states[ARGUMENTS.states[k]], LAYOUT.compute, FULL, LAYOUT.aligned
            )  # fmt: skip
        states = states + (state,)  # type: ignore[assignment]
    return states


@triton.jit
def _load_numbers(row, PLACES: tl.constexpr):
    values = ()
    for k in tl.static_range(len(PLACES)):
        values = values + (tl.load(row + PLACES[k]),)  # type: ignore[assignment]
    return values


@triton.jit
def _call(FUNCTION: tl.constexpr, w, g, states, hyper, sums, index, ARGUMENTS: tl.constexpr):
    if len(ARGUMENTS.sums) == 0 and not ARGUMENTS.takes_index:
        return FUNCTION(w, g, states, hyper)
    elif len(ARGUMENTS.sums) == 0:
        return FUNCTION(w, g, states, hyper, index)
    elif ARGUMENTS.takes_index:
        return FUNCTION(w, g, states, hyper, sums, index)
    else:
        return FUNCTION(w, g, states, hyper, sums)


@triton.jit
def compute_tile(
    column,
    n_tensors,
    gradient,
    row,
    sums,
    control,
    start,
    offsets,
    n,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    FULL: tl.constexpr,
):
    # `column`: of the tensor in the table of addresses; `row`, `sums`: its hyper-parameters and results of a reduction.
    if LAYOUT.master == _FULL:
        master = tl.load(column + (2 + len(LAYOUT.states)) * n_tensors)
        w = load(master, offsets, n, LAYOUT.compute, LAYOUT.compute, FULL, LAYOUT.aligned)
    else:
        w = load(tl.load(column), offsets, n, LAYOUT.weight, LAYOUT.compute, FULL, LAYOUT.aligned)
        if LAYOUT.master == _SPLIT:
            master = tl.load(column + (2 + len(LAYOUT.states)) * n_tensors)
            low = load(master, offsets, n, tl.int16, tl.int32, FULL, LAYOUT.aligned)
            w = (w.to(tl.int32, bitcast=True) + low).to(LAYOUT.compute, bitcast=True)
        elif LAYOUT.master == _KAHAN:
            master = tl.load(column + (2 + len(LAYOUT.states)) * n_tensors)
            w += load(master, offsets, n, LAYOUT.weight, LAYOUT.compute, FULL, LAYOUT.aligned)
    g = load(gradient, offsets, n, LAYOUT.gradient, LAYOUT.compute, FULL, LAYOUT.aligned)
    rescale = tl.load(row)
    if control is not None:
        rescale *= tl.load(control).to(LAYOUT.compute)
    g *= rescale
    states = _load_states(column, n_tensors, start, offsets, n, ARGUMENTS, LAYOUT, FULL)
    HYPER: tl.constexpr = ARGUMENTS.hyper  # up to 3.6 Triton takes no attribute for a constant argument
    SUMS: tl.constexpr = ARGUMENTS.sums
    hyper, numbers = _load_numbers(row, HYPER), _load_numbers(sums, SUMS)
    return _call(FUNCTION, w, g, states, hyper, numbers, offsets, ARGUMENTS)


@triton.jit
def _store_weight(address, master, w, offsets, n, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # The weight, rounded, and alongside what that took off; see storage/master.py.
    if LAYOUT.master == _SPLIT:
        bits = w.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(tl.uint16)
        low = tl.where(nan, 0, bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        put(address, high.to(tl.bfloat16, bitcast=True), offsets, n, LAYOUT.weight, FULL, LAYOUT.aligned)
        put(master, low, offsets, n, tl.int16, FULL, LAYOUT.aligned)
    else:
        rounded = round_to(w, LAYOUT.weight)
        lost = w - rounded.to(w.dtype)
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)
        put(address, rounded, offsets, n, LAYOUT.weight, FULL, LAYOUT.aligned)
        put(master, round_to(lost, LAYOUT.weight), offsets, n, LAYOUT.weight, FULL, LAYOUT.aligned)


@triton.jit
def store_tile(column, n_tensors, row, start, offsets, n, w, states, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # `column`, `row`: as for compute_tile.
    key = 0
    if LAYOUT.stochastic:
        key = load_key(row, LAYOUT.n_hyper)
    if LAYOUT.master == _FULL:
        master = tl.load(column + (2 + len(LAYOUT.states)) * n_tensors)
        store(master, w, offsets, n, LAYOUT.compute, FULL, LAYOUT.aligned)
    if LAYOUT.master == _SPLIT or LAYOUT.master == _KAHAN:  # the compiler knows no `in` of tuples
        master = tl.load(column + (2 + len(LAYOUT.states)) * n_tensors)
        _store_weight(tl.load(column), master, w, offsets, n, LAYOUT, FULL)
    else:
        AT_RANDOM: tl.constexpr = LAYOUT.stochastic == 1 and LAYOUT.master != _FULL and LAYOUT.weight == tl.bfloat16
        store(tl.load(column), w, offsets, n, LAYOUT.weight, FULL, LAYOUT.aligned, AT_RANDOM, key, len(LAYOUT.states))
    for k in tl.static_range(len(LAYOUT.states)):
        if LAYOUT.changed[k] and is_packed(LAYOUT.states[k]):
            pack(
                tl.load(column + (2 + k) * n_tensors), states[k] + tl.full(offsets.shape, -0.0, LAYOUT.compute), start,
                offsets, n, LAYOUT.states[k], FULL, LAYOUT.aligned, LAYOUT.stochastic > 0, key, k,
            )  # fmt: skip
        elif LAYOUT.changed[k]:
            store(
                tl.load(column + (2 + k) * n_tensors), states[k], offsets, n, LAYOUT.states[k], FULL, LAYOUT.aligned,
                LAYOUT.stochastic == 1 and LAYOUT.states[k] == tl.bfloat16, key, k,
            )  # fmt: skip


@triton.jit
def fill_with_zeros(address, start, n, LAYOUT: tl.constexpr):
    offsets = start + tl.arange(0, LAYOUT.tile)
    zeros = tl.full(offsets.shape, 0.0, LAYOUT.gradient)
    if start + LAYOUT.tile <= n:
        put(address, zeros, offsets, n, LAYOUT.gradient, True, LAYOUT.aligned)
    else:
        put(address, zeros, offsets, n, LAYOUT.gradient, False, LAYOUT.aligned)
