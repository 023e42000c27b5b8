"""Sums and maxima: within a tile, then over the tiles of each tensor or of all tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from .ops import maximum

_TOGETHER = tl.constexpr(4)  # elements of 32 bits that a thread loads at once


@triton.constexpr_function
def _is_in(k, numbers):
    return k in numbers


@triton.jit
def spread(value, offsets, COMPUTE: tl.constexpr):
    # Expand to one number per element, also a constant or a comparison.
    return value + tl.zeros_like(offsets).to(COMPUTE)


@triton.jit
def _reduced(values, LARGEST: tl.constexpr):
    # The sum, or the maximum of nonnegative values, which are ordered as their bits are, with NaN above all.
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
def new_accumulators(COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    # For each value the sums or maxima of each thread, which begin at 0.
    accumulators = ()
    for _ in tl.static_range(COUNT):
        accumulators = accumulators + (tl.zeros((LAYOUT.block // _TOGETHER,), LAYOUT.compute),)  # type: ignore[assignment]
    return accumulators


@triton.jit
def accumulate(accumulators, values, at, tile, LAYOUT: tl.constexpr, MAXIMA: tl.constexpr, FULL: tl.constexpr):
    # Add one more block's values. The elements that a thread has loaded at once are reduced first.
    offsets = at + tl.arange(0, LAYOUT.block)
    result = ()
    for k in tl.static_range(len(values)):
        value = spread(values[k], offsets, LAYOUT.compute)
        if not FULL:
            value = tl.where(offsets < tile[1], value, 0.0)
        value = tl.reshape(value, (LAYOUT.block // _TOGETHER, _TOGETHER))
        if _is_in(k, MAXIMA):
            result = result + (maximum(accumulators[k], tl.reduce(value, 1, maximum)),)  # type: ignore[assignment]
        else:
            result = result + (accumulators[k] + tl.sum(value, axis=1),)  # type: ignore[assignment]
    return result


@triton.jit
def store_partials(partials, accum, n_partials, SUMMED: tl.constexpr, MAXIMA: tl.constexpr):
    # Four sums at a time, because each reduction synchronizes the threads once.
    partials += tl.program_id(0)
    step = n_partials.to(tl.int64)
    for j in tl.static_range(len(SUMMED) // 4):
        a, b, c, d = tl.reduce(
            (accum[SUMMED[4 * j]], accum[SUMMED[4 * j + 1]], accum[SUMMED[4 * j + 2]], accum[SUMMED[4 * j + 3]]), 0, _plus_4
        )
        tl.store(partials + SUMMED[4 * j] * step, a)
        tl.store(partials + SUMMED[4 * j + 1] * step, b)
        tl.store(partials + SUMMED[4 * j + 2] * step, c)
        tl.store(partials + SUMMED[4 * j + 3] * step, d)
    if len(SUMMED) % 4 > 1:
        first: tl.constexpr = len(SUMMED) // 4 * 4
        a, b = tl.reduce((accum[SUMMED[first]], accum[SUMMED[first + 1]]), 0, _plus_2)
        tl.store(partials + SUMMED[first] * step, a)
        tl.store(partials + SUMMED[first + 1] * step, b)
    if len(SUMMED) % 2 == 1:
        last: tl.constexpr = SUMMED[len(SUMMED) - 1]
        tl.store(partials + last * step, tl.sum(accum[last], axis=0))
    for j in tl.static_range(len(MAXIMA)):
        tl.store(partials + MAXIMA[j] * step, _reduced(accum[MAXIMA[j]], True))


@triton.jit
def _total(partials, firsts, largest, n_partials, k, BLOCK: tl.constexpr):
    offsets = tl.load(firsts) + tl.arange(0, BLOCK)
    values = tl.load(partials + k * n_partials + offsets, mask=offsets < tl.load(firsts + 1), other=0.0)
    return tl.where(tl.load(largest + k) != 0, _reduced(values, True), _reduced(values, False))


# One program per tensor and value, because the next kernel waits for the totals. If there are more tiles than a program adds
# up, earlier launches have reduced them in pieces.
@triton.jit(
    do_not_specialize=["n_partials", "n_rows", "n_copies", "row_step", "value_step", "slot"],
    do_not_specialize_on_alignment=["partials", "firsts", "rows", "largest", "totals"],
)
def totals_kernel(
    partials,  # [n_values, n_partials]
    firsts,  # int64 [n_programs + 1]: index of each program's first partial
    rows,  # int64 [n_programs]: the row, in a slot of `totals`, of each program's results
    largest,  # int32 [n_values]: 1 for a maximum, 0 for a sum
    totals,  # [n_slots, n_rows, n_values]; for pieces [n_values, n_rows]
    n_partials,
    n_rows,
    n_copies,  # number of rows, beginning with that row, that receive a program's results
    row_step,
    value_step,
    slot,
    BLOCK: tl.constexpr,
):
    program, k = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = _total(partials, firsts + program, largest, n_partials, k, BLOCK).to(totals.dtype.element_ty)
    totals += slot.to(tl.int64) * n_rows * tl.num_programs(1) + k * value_step
    first = tl.load(rows + program)
    copied = 0
    while copied < n_copies:
        copies = copied + tl.arange(0, BLOCK).to(tl.int64)
        value = spread(total, copies, totals.dtype.element_ty)
        tl.store(totals + (first + copies) * row_step, value, mask=copies < n_copies)
        copied += BLOCK


# One program per tensor, or one for all: adds up as `totals_kernel` does, and stores what the reduction's `finish` returns.
@triton.jit(
    do_not_specialize=["n_partials", "n_copies", "n_tensors"],
    do_not_specialize_on_alignment=[
        "partials", "firsts", "rows", "largest", "results", "gradients", "hyper", "kept", "skipped",
    ],
)  # fmt: skip
def finish_sums_kernel(
    partials,  # this and the following arguments: as of totals_kernel
    firsts,
    rows,
    largest,
    results,  # [n_tensors, n_results]: further columns are not written
    n_partials,
    n_copies,
    gradients,
    hyper,
    kept,  # int64 [n_kept, n_tensors]: addresses of the states
    skipped,  # float32 [1]: not 0 if states stay as they are
    n_tensors,
    FUNCTION: tl.constexpr,
    N_VALUES: tl.constexpr,
    N_KEPT: tl.constexpr,  # states
    N_OWN: tl.constexpr,  # numbers that FUNCTION returns
    N_RESULTS: tl.constexpr,  # of a row of `results`
    HYPER: tl.constexpr,  # the columns of the hyper-parameters that FUNCTION gets
    N_HYPER: tl.constexpr,  # of a row
    OF_ALL: tl.constexpr,  # whether the sums are of all tensors; then the first with a gradient has the hyper-parameters
    COPIES: tl.constexpr,  # rows that are stored at a time
    BLOCK: tl.constexpr,
):
    n_partials, n_tensors = n_partials.to(tl.int64), n_tensors.to(tl.int64)
    program = tl.program_id(0)
    first = tl.load(rows + program)
    tensor = first
    if OF_ALL:
        at, tensor = tl.full((), 0, tl.int64), n_tensors
        while at < n_tensors:
            tensors = at + tl.arange(0, COPIES)
            is_active = tl.load(gradients + tensors, mask=tensors < n_tensors, other=0) != 0
            tensor = tl.minimum(tensor, tl.min(tl.where(is_active, tensors, n_tensors), axis=0))
            at += COPIES
        n_copies = tl.where(tensor < n_tensors, n_copies, 0)
        tensor = tl.minimum(tensor, n_tensors - 1)
    n_copies = tl.where(tl.load(gradients + tensor) != 0, n_copies, 0)
    TYPE: tl.constexpr = hyper.dtype.element_ty
    values, states, numbers = (), (), ()
    for k in tl.static_range(N_VALUES):
        values = values + (_total(partials, firsts + program, largest, n_partials, k, BLOCK),)  # type: ignore[assignment]
    for k in tl.static_range(N_KEPT):
        states = states + (tl.load(tl.load(kept + k * n_tensors + tensor).to(tl.pointer_type(TYPE))),)  # type: ignore[assignment]
    for k in tl.static_range(len(HYPER)):
        numbers = numbers + (tl.load(hyper + tensor * N_HYPER + HYPER[k]),)  # type: ignore[assignment]
    new = FUNCTION(values, states, numbers)
    n_changed = tl.where(tl.load(skipped) == 0.0, n_copies, 0)
    tl.debug_barrier()  # all warps load the states
    copied = 0
    while copied < n_copies:
        copies = copied + tl.arange(0, COPIES)
        places = first + copies
        for k in tl.static_range(N_OWN):
            value = spread(new[k], copies, TYPE)
            tl.store(results + places * N_RESULTS + k, value, mask=copies < n_copies)
            if k < N_KEPT:
                addresses = tl.load(kept + k * n_tensors + places, mask=copies < n_changed, other=0)
                tl.store(addresses.to(tl.pointer_type(TYPE)), value, mask=copies < n_changed)
        copied += COPIES
