"""The kernels of all rules: load, rescale, apply a rule or a reduction, store. One program per tile, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from .reduce import accumulate, new_accumulators, store_partials
from .tile import (
    compute_block,
    count_unchanged,
    fill_with_zeros,
    load_addresses,
    load_numbers,
    load_weight,
    store_block,
)


@triton.jit
def _tile_of(tiles, gradients, sizes, control, blocks, LAYOUT: tl.constexpr):
    # Returns the tensor's index, its gradient's address, `tile` as `load` takes it, with 0 elements if the step is skipped,
    # and the number of elements in any case.
    tiles += 2 * tl.program_id(0).to(tl.int64)
    size = blocks.to(tl.int64) * LAYOUT.block
    tensor, first = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * size
    gradient, n = tl.load(gradients + tensor), tl.load(sizes + tensor)
    left = tl.minimum(n - first, size).to(tl.int32)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    return tensor, gradient, (first, tl.where(stepping, left, 0), n), left


@triton.jit
def _update_block(
    pointers,
    gradient,
    numbers,
    accumulators,
    at,
    tile,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MAXIMA: tl.constexpr,
    FULL: tl.constexpr,
):
    # Returns the accumulators with the block's values of the metric, if there is one.
    old = load_weight(pointers, at, tile, LAYOUT, FULL)
    new = compute_block(pointers, old, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, FULL)
    stored = store_block(pointers, numbers[3], at, tile, new[0], new[1], LAYOUT, FULL)
    if ARGUMENTS.counts_unchanged:
        values = new[2] + (count_unchanged(old, stored, LAYOUT),)
        return accumulate(accumulators, values, at, tile, LAYOUT, MAXIMA, FULL)
    elif len(accumulators) > 0:
        return accumulate(accumulators, new[2], at, tile, LAYOUT, MAXIMA, FULL)
    else:
        return accumulators


# Compiled once for any number of tensors, which also determines the alignment of `hyper` and `sums`.
@triton.jit(
    do_not_specialize=["n_tensors", "n_partials", "blocks"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def update_kernel(
    addresses,  # int64 [rows, n_tensors]
    gradients,  # int64 [n_tensors]; 0 skips the tensor
    hyper,  # compute type [n_tensors, 1 + n_hyper]
    sizes,  # int64 [n_tensors]
    tiles,  # int32 [n_programs, 2]
    sums,  # compute type [n_tensors, n_sums]
    partials,  # compute type [n_values, n_partials]: the metric's values of each program, from this launch's first on
    n_tensors,
    n_partials,  # programs of this launch and of others for the same reduction or metric
    blocks,  # per tile
    control,  # float32 [2], `grad_scale_and_skip` of `Launch`; or None
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,  # Arguments
    LAYOUT: tl.constexpr,  # Layout
    SUMMED: tl.constexpr,  # indices of the metric's values that are added up; () without a metric
    MAXIMA: tl.constexpr,  # indices of those that are reduced to the maximum
    ZERO: tl.constexpr,  # whether to fill the gradients with zeros
):
    n_tensors = n_tensors.to(tl.int64)  # makes offsets int64, which may exceed 2^31
    tensor, gradient, tile, left = _tile_of(tiles, gradients, sizes, control, blocks, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    at = 0
    while at < tile[1]:  # no range(): the interpreter of Triton 3.6 does not accept loaded numbers in it
        if at + LAYOUT.block <= tile[1]:
            accumulators = _update_block(
                pointers, gradient, numbers, accumulators, at, tile, FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, True
            )
            at += LAYOUT.block
        else:
            accumulators = _update_block(
                pointers, gradient, numbers, accumulators, at, tile, FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, False
            )
            at += LAYOUT.tail
    store_partials(partials, accumulators, n_partials, SUMMED, MAXIMA)
    if ZERO:
        if gradient != 0:
            tl.debug_barrier()  # until all threads have read their gradients
            at = 0
            while at < left:
                fill_with_zeros(gradient, at, (tile[0], left, tile[2]), LAYOUT)
                at += LAYOUT.block


@triton.jit(
    do_not_specialize=["n_tensors", "n_partials", "blocks"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def sums_kernel(
    addresses,  # this and the following arguments: as in update_kernel
    gradients,
    hyper,
    sizes,
    tiles,
    sums,
    partials,  # compute type [n_values, n_partials]: each program's results
    n_tensors,
    n_partials,
    blocks,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,  # indices of the values that are added up: all or none
    MAXIMA: tl.constexpr,  # indices of the values that are reduced to the maximum
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, tile, _ = _tile_of(tiles, gradients, sizes, control, blocks, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    at = 0
    while at < tile[1]:
        if at + LAYOUT.block <= tile[1]:
            stored = load_weight(pointers, at, tile, LAYOUT, True)
            values = compute_block(pointers, stored, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, True)
            accumulators = accumulate(accumulators, values, at, tile, LAYOUT, MAXIMA, True)
        else:
            stored = load_weight(pointers, at, tile, LAYOUT, False)
            values = compute_block(pointers, stored, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, False)
            accumulators = accumulate(accumulators, values, at, tile, LAYOUT, MAXIMA, False)
        at += LAYOUT.block
    store_partials(partials, accumulators, n_partials, SUMMED, MAXIMA)
