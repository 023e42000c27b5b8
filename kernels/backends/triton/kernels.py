"""The generic kernels: load, rescale, rule or reduction, store; one program per tile, whatever the rule."""

from __future__ import annotations

import triton
import triton.language as tl

from .reduce import gathered, spread, store_partials
from .tile import compute_tile, fill_with_zeros, store_tile

__all__ = ["sums_kernel", "update_kernel"]


# Compiled once, whatever the number of tensors, on which the alignment of `hyper` and of `sums` depends too.
@triton.jit(
    do_not_specialize=["n_tensors"],
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
    control,  # float32 [2], `grad_scale_and_skip` of TensorTable; or None
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,  # Arguments
    LAYOUT: tl.constexpr,  # Layout
    SUMMED: tl.constexpr,  # which values of the metric, if there is one, are added up
    MAXIMA: tl.constexpr,  # and of which the maximum is taken
    ZERO: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)  # and so all products that are offsets, which may be beyond 2^31
    tiles += 2 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * LAYOUT.tile
    gradient = tl.load(gradients + tensor)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    if stepping:
        n = tl.load(sizes + tensor)
        offsets = start + tl.arange(0, LAYOUT.tile)
        column, row, own = addresses + tensor, hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * len(ARGUMENTS.sums)
        if start + LAYOUT.tile <= n:
            new = compute_tile(
                column, n_tensors, gradient, row, own, control, start, offsets, n, FUNCTION, ARGUMENTS, LAYOUT, True
            )  # fmt: skip
            store_tile(column, n_tensors, row, start, offsets, n, new[0], new[1], LAYOUT, True)
            if len(SUMMED) + len(MAXIMA) > 0:
                store_partials(partials, new[2], offsets, n, LAYOUT.compute, SUMMED, MAXIMA, True)
        else:
            new = compute_tile(
                column, n_tensors, gradient, row, own, control, start, offsets, n, FUNCTION, ARGUMENTS, LAYOUT, False
            )  # fmt: skip
            store_tile(column, n_tensors, row, start, offsets, n, new[0], new[1], LAYOUT, False)
            if len(SUMMED) + len(MAXIMA) > 0:
                store_partials(partials, new[2], offsets, n, LAYOUT.compute, SUMMED, MAXIMA, False)
    elif control is not None:
        if len(SUMMED) + len(MAXIMA) > 0:  # the metrics of a skipped step are 0
            for k in tl.static_range(len(SUMMED) + len(MAXIMA)):
                tl.store(partials + k * tl.num_programs(0).to(tl.int64) + tl.program_id(0), 0.0)
    if ZERO:
        if gradient != 0:
            tl.debug_barrier()  # all threads of the tile have read theirs
            fill_with_zeros(gradient, start, tl.load(sizes + tensor), LAYOUT)


@triton.jit(
    do_not_specialize=["n_tensors"],
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
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    N_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)  # and so all products that are offsets, which may be beyond 2^31
    tiles += 2 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64) * LAYOUT.tile
    gradient = tl.load(gradients + tensor)
    partials += tl.program_id(0)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    if stepping:
        n = tl.load(sizes + tensor)
        offsets = start + tl.arange(0, LAYOUT.tile)
        column, row, own = addresses + tensor, hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * len(ARGUMENTS.sums)
        if start + LAYOUT.tile <= n:
            values = compute_tile(
                column, n_tensors, gradient, row, own, control, start, offsets, n, FUNCTION, ARGUMENTS, LAYOUT, True
            )  # fmt: skip
            for k in tl.static_range(N_VALUES):
                value = spread(values[k], offsets, LAYOUT.compute)
                tl.store(partials + k * tl.num_programs(0).to(tl.int64), gathered(value, LARGEST))
        else:
            values = compute_tile(
                column, n_tensors, gradient, row, own, control, start, offsets, n, FUNCTION, ARGUMENTS, LAYOUT, False
            )  # fmt: skip
            for k in tl.static_range(N_VALUES):
                value = tl.where(offsets < n, spread(values[k], offsets, LAYOUT.compute), 0.0)
                tl.store(partials + k * tl.num_programs(0).to(tl.int64), gathered(value, LARGEST))
    else:
        for k in tl.static_range(N_VALUES):
            tl.store(partials + k * tl.num_programs(0).to(tl.int64), 0.0)
