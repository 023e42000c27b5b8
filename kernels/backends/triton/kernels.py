"""The generic kernels: load, rescale, rule or reduction, store; one program per tile, block by block, whatever the rule."""

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
    # The tensor, its gradient, what `load` has to know of the tile: where it begins, its elements and those of the tensor.
    tiles += 2 * tl.program_id(0).to(tl.int64)
    size = blocks.to(tl.int64) * LAYOUT.block
    tensor, first = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * size
    gradient, n = tl.load(gradients + tensor), tl.load(sizes + tensor)
    left = tl.minimum(n - first, size).to(tl.int32)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    return tensor, gradient, (first, tl.where(stepping, left, 0), n), left


# Compiled once, whatever the number of tensors, on which the alignment of `hyper` and of `sums` depends too.
@triton.jit(
    do_not_specialize=["n_tensors", "blocks"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def update_kernel(
    addresses,  # int64 [rows, n_tensors]
    gradients,  # int64 [n_tensors]; 0 skips the tensor
    hyper,  # compute type [n_tensors, 1 + n_hyper]
    sizes,  # int64 [n_tensors]
    tiles,  # int32 [n_programs, 2]
    sums,  # compute type [n_tensors, n_sums]
    partials,  # compute type [n_values, n_programs]: the metric's values of each program
    n_tensors,
    blocks,  # of a tile
    control,  # float32 [2], `grad_scale_and_skip` of `Launch`; or None
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,  # Arguments
    LAYOUT: tl.constexpr,  # Layout
    SUMMED: tl.constexpr,  # which values of the metric, if there is one, are added up
    MAXIMA: tl.constexpr,  # and of which the maximum is taken
    ZERO: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)  # and so all products that are offsets, which may be beyond 2^31
    tensor, gradient, tile, left = _tile_of(tiles, gradients, sizes, control, blocks, LAYOUT)
    own = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    row, given = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * len(ARGUMENTS.sums)
    numbers = load_numbers(row, given, control, ARGUMENTS, LAYOUT)
    found = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    at = 0
    while at < tile[1]:  # the interpreter of Triton 3.6 knows no range() of loaded numbers
        if at + LAYOUT.block <= tile[1]:
            old = load_weight(own, at, tile, LAYOUT, True)
            new = compute_block(own, old, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, True)
            stored = store_block(own, numbers[3], at, tile, new[0], new[1], LAYOUT, True)
            if ARGUMENTS.counts_unchanged:
                values = new[2] + (count_unchanged(old, stored, LAYOUT),)
                found = accumulate(found, values, at, tile, LAYOUT, MAXIMA, True)
            elif len(SUMMED) + len(MAXIMA) > 0:
                found = accumulate(found, new[2], at, tile, LAYOUT, MAXIMA, True)
        else:
            old = load_weight(own, at, tile, LAYOUT, False)
            new = compute_block(own, old, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, False)
            stored = store_block(own, numbers[3], at, tile, new[0], new[1], LAYOUT, False)
            if ARGUMENTS.counts_unchanged:
                values = new[2] + (count_unchanged(old, stored, LAYOUT),)
                found = accumulate(found, values, at, tile, LAYOUT, MAXIMA, False)
            elif len(SUMMED) + len(MAXIMA) > 0:
                found = accumulate(found, new[2], at, tile, LAYOUT, MAXIMA, False)
        at += LAYOUT.block
    store_partials(partials, found, SUMMED, MAXIMA)
    if ZERO:
        if gradient != 0:
            tl.debug_barrier()  # all threads of the tile have read theirs
            at = 0
            while at < left:
                fill_with_zeros(gradient, at, (tile[0], left, tile[2]), LAYOUT)
                at += LAYOUT.block


@triton.jit(
    do_not_specialize=["n_tensors", "blocks"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def sums_kernel(
    addresses,  # as in update_kernel, as all that follow
    gradients,
    hyper,
    sizes,
    tiles,
    sums,
    partials,  # compute type [N_VALUES, n_programs]: what each program found
    n_tensors,
    blocks,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,  # which values are added up: all, or none
    MAXIMA: tl.constexpr,  # and of which the maximum is taken
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, tile, _ = _tile_of(tiles, gradients, sizes, control, blocks, LAYOUT)
    own = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    row, given = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * len(ARGUMENTS.sums)
    numbers = load_numbers(row, given, control, ARGUMENTS, LAYOUT)
    found = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    at = 0
    while at < tile[1]:
        if at + LAYOUT.block <= tile[1]:
            stored = load_weight(own, at, tile, LAYOUT, True)
            values = compute_block(own, stored, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, True)
            found = accumulate(found, values, at, tile, LAYOUT, MAXIMA, True)
        else:
            stored = load_weight(own, at, tile, LAYOUT, False)
            values = compute_block(own, stored, gradient, numbers, at, tile, FUNCTION, ARGUMENTS, LAYOUT, False)
            found = accumulate(found, values, at, tile, LAYOUT, MAXIMA, False)
        at += LAYOUT.block
    store_partials(partials, found, SUMMED, MAXIMA)
