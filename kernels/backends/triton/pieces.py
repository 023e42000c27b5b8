"""The kernels of rules with means for matrices of wide rows: a program goes down a piece of a matrix, row by row.

A row has one place in the vectors of rows and of matrices, so their numbers are scalars of a row, and a piece's columns are
the same in all of its rows, so theirs are loaded once. No element is divided to find its row, and no threads wait for each
other in the loop. Other matrices are walked by the kernels of kernels.py and means.py, in blocks that hold several rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from ...parts import COLUMNS, MATRICES, ROWS, Parts
from .memory import has_packed, indices
from .reduce import accumulate, new_accumulators, spread, store_partials
from .tile import (
    call,
    combined,
    count_unchanged,
    fill_with_zeros,
    load_addresses,
    load_inputs,
    load_numbers,
    load_of_columns,
    load_of_row,
    load_weight,
    store_block,
)

LEAST_COLUMNS = 128  # of a matrix that is walked in pieces: with fewer most threads would have nothing to do
WIDEST = 256  # columns of a piece
MOST_ROWS, LEAST_ROWS = 64, 8  # its rows
ENOUGH = 2048  # programs, as in compile.py


class Walk(NamedTuple):
    """Tensors of a launch that are walked alike.

    Attributes:
        tensors: their indices, in order.
        unit: 0 if tiles are walked element by element; for pieces of rows what their numbers of columns are multiples of.
        aligned: whether all tiles, or all rows, begin at multiples of 16 bytes.
    """

    tensors: np.ndarray
    unit: int
    aligned: bool


def walks_of(parts: Parts, aligned: bool, unit: int, packed: bool, stochastic: bool) -> list[Walk]:
    """Return how the tensors of a launch are walked.

    Args:
        aligned: whether all addresses are multiples of 16 bytes.
        unit: elements of the narrowest type in 16 bytes.
        packed: whether a state is packed, in blocks of which no piece has a part.
        stochastic: whether random numbers are drawn, always for four neighbours at once.
    """
    columns = parts.sizes[:, COLUMNS]
    multiple = WIDEST if packed else 4 if stochastic else 1
    wide = (columns >= LEAST_COLUMNS) & (columns % multiple == 0)
    whole = wide & (columns % unit == 0) & aligned
    chosen = [(whole, unit, True), (wide & ~whole, 1, False), (~wide, 0, aligned)]
    return [Walk(np.flatnonzero(which), unit, aligned) for which, unit, aligned in chosen if which.any()]


def rows_for(elements: int, width: int) -> int:
    """Return the rows of a piece of `width` columns, of so many elements: fewer where programs would be few."""
    rows = MOST_ROWS
    while rows > LEAST_ROWS and elements < ENOUGH * rows * width:
        rows //= 2
    return rows


def pieces_of(parts: Parts, tensors: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Return all pieces, int32 [n_pieces, 6].

    They are the tensor, the first row among those of all matrices, the matrix, the first column, the number of rows, and the
    number of the piece from its matrix's top.
    """
    pieces = [np.empty((0, 6), dtype=np.int64)]
    for t in tensors:
        n, height, columns = (int(parts.sizes[t, k]) for k in (MATRICES, ROWS, COLUMNS))
        grid = np.meshgrid(np.arange(n), np.arange(-(-height // rows)), np.arange(0, columns, width), indexing="ij")
        matrix, strip, column = (each.ravel() for each in grid)
        top = strip * rows
        table = [np.full_like(top, t), matrix * height + top, matrix, column, np.minimum(height - top, rows), strip]
        pieces.append(np.stack(table, axis=1))
    return np.concatenate(pieces).astype(np.int32)


@triton.constexpr_function
def _fullness(LAYOUT):
    # As `load` takes it. Packed states are in pieces without a part that is not there.
    return 1 if has_packed(LAYOUT.states) else 2 if LAYOUT.unit % 4 == 0 else 0


@triton.jit
def _piece_of(pieces, gradients, sizes, columns_of, control, LAYOUT: tl.constexpr):
    # Returns the tensor, its gradient's address, the piece, its number of rows, 0 if the step is skipped, that number in any
    # case, and the piece's number. A piece: offset of its first element, columns, the tensor's elements, first row, matrix,
    # first column, and the matrix's columns.
    pieces += 6 * tl.program_id(0).to(tl.int64)
    tensor, row, matrix = tl.load(pieces).to(tl.int64), tl.load(pieces + 1).to(tl.int64), tl.load(pieces + 2).to(tl.int64)
    column, rows, strip = tl.load(pieces + 3).to(tl.int64), tl.load(pieces + 4), tl.load(pieces + 5)
    gradient, n, columns = tl.load(gradients + tensor), tl.load(sizes + tensor), tl.load(columns_of + tensor)
    UNIT: tl.constexpr = LAYOUT.unit  # up to 3.6 Triton accepts no attribute as a constexpr argument
    width = tl.multiple_of(tl.minimum(columns - column, LAYOUT.block).to(tl.int32), UNIT)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    piece = row * columns + column, width, n, row, matrix, column, columns
    return tensor, gradient, piece, tl.where(stepping, rows, 0), rows, strip


@triton.jit
def _load_rows(
    pointers,
    gradient,
    numbers,
    sums,
    piece,
    down,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    COUNT: tl.constexpr,
):
    # For each row its tile, the weight as stored, and the function's gradient, states and sums. All is loaded before
    # anything is computed or stored, so that loads of several rows are in flight.
    FULL: tl.constexpr = _fullness(LAYOUT)
    loaded = ()
    for k in tl.static_range(COUNT):
        tile = piece[0] + piece[6] * (down + k), piece[1], piece[2]
        stored = load_weight(pointers, 0, tile, LAYOUT, FULL)
        g, states = load_inputs(pointers, gradient, numbers[0], 0, tile, ARGUMENTS, LAYOUT, FULL)
        of_row = load_of_row(sums, pointers, piece[3] + down + k, ARGUMENTS, LAYOUT)
        loaded = loaded + ((tile, stored, g, states, of_row),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _computed(row, numbers, FUNCTION: tl.constexpr, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    tile, stored, g, states, sums = row
    if LAYOUT.unit % 4 == 0:
        index = indices(0, tile, LAYOUT.block)
    else:
        index = tile[0] + tl.arange(0, LAYOUT.block)
    return call(FUNCTION, combined(stored, LAYOUT), g, states, numbers[1], sums, index, ARGUMENTS)


@triton.jit
def _masked(accumulators, width, LAYOUT: tl.constexpr):
    # Without what lanes beyond the piece's columns have added up; see `accumulate`.
    FULL: tl.constexpr = _fullness(LAYOUT)
    result = ()
    for k in tl.static_range(len(accumulators)):
        if FULL == 2:
            firsts = tl.arange(0, accumulators[k].shape[0]) * (LAYOUT.block // accumulators[k].shape[0])
            result = result + (tl.where(firsts < width, accumulators[k], 0.0),)  # type: ignore[assignment]
        else:
            result = result + (accumulators[k],)  # type: ignore[assignment]
    return result


@triton.jit
def _update_rows(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    piece,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MAXIMA: tl.constexpr,
    COUNT: tl.constexpr,
):
    FULL: tl.constexpr = _fullness(LAYOUT)
    rows = _load_rows(pointers, gradient, numbers, sums, piece, down, ARGUMENTS, LAYOUT, COUNT)
    for k in tl.static_range(COUNT):
        new = _computed(rows[k], numbers, FUNCTION, ARGUMENTS, LAYOUT)
        at = tl.full((), 0, tl.int32)
        stored = store_block(pointers, numbers[3], at, rows[k][0], new[0], new[1], LAYOUT, FULL)
        if ARGUMENTS.counts_unchanged:
            values = new[2] + (count_unchanged(rows[k][1], stored, LAYOUT),)
            accumulators = accumulate(accumulators, values, 0, rows[k][0], LAYOUT, MAXIMA, FULL)
        elif len(accumulators) > 0:
            accumulators = accumulate(accumulators, new[2], 0, rows[k][0], LAYOUT, MAXIMA, FULL)
    return accumulators


@triton.jit(
    do_not_specialize=["n_tensors", "n_partials"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "columns_of", "control",
    ],
)  # fmt: skip
def update_pieces_kernel(
    addresses,  # this and the following arguments: as in update_kernel
    gradients,
    hyper,
    sizes,
    pieces,  # int32 [n_programs, 6], as `pieces_of` returns them
    sums,
    partials,
    n_tensors,
    n_partials,
    columns_of,  # int64 [n_tensors]
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,
    MAXIMA: tl.constexpr,
    AT_ONCE: tl.constexpr,  # rows
    ZERO: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, piece, n_rows, in_any_case, _ = _piece_of(pieces, gradients, sizes, columns_of, control, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    of_columns = load_of_columns(numbers[2], pointers, piece, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    down = 0
    while down + AT_ONCE <= n_rows:
        accumulators = _update_rows(
            pointers, gradient, numbers, of_columns, accumulators, piece, down,
            FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, AT_ONCE,
        )  # fmt: skip
        down += AT_ONCE
    while down < n_rows:
        accumulators = _update_rows(
            pointers, gradient, numbers, of_columns, accumulators, piece, down, FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, 1
        )
        down += 1
    store_partials(partials, _masked(accumulators, piece[1], LAYOUT), n_partials, SUMMED, MAXIMA)
    if ZERO:
        if gradient != 0:
            tl.debug_barrier()  # until all threads have read their gradients
            down = 0
            while down < in_any_case:
                tile = piece[0] + piece[6] * down, piece[1], piece[2]
                fill_with_zeros(gradient, 0, tile, LAYOUT)
                down += 1


@triton.jit(
    do_not_specialize=["n_tensors", "n_partials"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "columns_of", "control",
    ],
)  # fmt: skip
def sums_pieces_kernel(
    addresses,  # this and the following arguments: as in update_pieces_kernel
    gradients,
    hyper,
    sizes,
    pieces,
    sums,
    partials,
    n_tensors,
    n_partials,
    columns_of,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,
    MAXIMA: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, piece, n_rows, _, _ = _piece_of(pieces, gradients, sizes, columns_of, control, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    of_columns = load_of_columns(numbers[2], pointers, piece, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    down = 0
    while down + AT_ONCE <= n_rows:
        accumulators = _sum_rows(
            pointers, gradient, numbers, of_columns, accumulators, piece, down,
            FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, AT_ONCE,
        )  # fmt: skip
        down += AT_ONCE
    while down < n_rows:
        accumulators = _sum_rows(
            pointers, gradient, numbers, of_columns, accumulators, piece, down, FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, 1
        )
        down += 1
    store_partials(partials, _masked(accumulators, piece[1], LAYOUT), n_partials, SUMMED, MAXIMA)


@triton.jit
def _sum_rows(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    piece,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MAXIMA: tl.constexpr,
    COUNT: tl.constexpr,
):
    FULL: tl.constexpr = _fullness(LAYOUT)
    rows = _load_rows(pointers, gradient, numbers, sums, piece, down, ARGUMENTS, LAYOUT, COUNT)
    for k in tl.static_range(COUNT):
        values = _computed(rows[k], numbers, FUNCTION, ARGUMENTS, LAYOUT)
        accumulators = accumulate(accumulators, values, 0, rows[k][0], LAYOUT, MAXIMA, FULL)
    return accumulators


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "columns_of", "control",
    ],
)  # fmt: skip
def means_pieces_kernel(
    addresses,  # this and the following arguments: as in update_pieces_kernel
    gradients,
    hyper,
    sizes,
    pieces,
    sums,
    partials,  # int64 [2 * n_values, n_tensors]: addresses of the sums of pieces, then how many there are of each number
    n_tensors,
    columns_of,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_ROWS: tl.constexpr,  # for each value 1 if it is averaged over rows, 0 over columns
    AT_ONCE: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    # A skipped step needs the sums, too: what it must not change is up to the kernels after it.
    tensor, gradient, piece, n_rows, _, strip = _piece_of(pieces, gradients, sizes, columns_of, None, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    of_columns = load_of_columns(numbers[2], pointers, piece, ARGUMENTS, LAYOUT)
    BLOCK: tl.constexpr = LAYOUT.block
    rooms, accumulators = (), ()
    for k in tl.static_range(len(OF_ROWS)):
        room = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(LAYOUT.compute))
        count = tl.load(partials + (len(OF_ROWS) + k) * n_tensors + tensor)
        if OF_ROWS[k]:
            rooms = rooms + (room + piece[5] // LAYOUT.block * count + piece[3],)  # type: ignore[assignment]
        else:
            rooms = rooms + (room + strip * count + piece[4] * piece[6] + piece[5],)  # type: ignore[assignment]
        accumulators = accumulators + (tl.zeros((BLOCK,), LAYOUT.compute),)  # type: ignore[assignment]
    down = 0
    while down + AT_ONCE <= n_rows:
        accumulators = _mean_rows(
            pointers, gradient, numbers, of_columns, accumulators, rooms, piece, down,
            FUNCTION, ARGUMENTS, LAYOUT, OF_ROWS, AT_ONCE,
        )  # fmt: skip
        down += AT_ONCE
    while down < n_rows:
        accumulators = _mean_rows(
            pointers, gradient, numbers, of_columns, accumulators, rooms, piece, down,
            FUNCTION, ARGUMENTS, LAYOUT, OF_ROWS, 1,
        )  # fmt: skip
        down += 1
    columns = tl.arange(0, LAYOUT.block)
    for k in tl.static_range(len(OF_ROWS)):
        if not OF_ROWS[k]:
            room = tl.multiple_of(rooms[k], 16) if LAYOUT.aligned else rooms[k]
            tl.store(room + columns, accumulators[k], mask=columns < piece[1])


@triton.jit
def _mean_rows(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    rooms,
    piece,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_ROWS: tl.constexpr,
    COUNT: tl.constexpr,
):
    columns = tl.arange(0, LAYOUT.block)
    rows = _load_rows(pointers, gradient, numbers, sums, piece, down, ARGUMENTS, LAYOUT, COUNT)
    for i in tl.static_range(COUNT):
        values, added = _computed(rows[i], numbers, FUNCTION, ARGUMENTS, LAYOUT), ()
        for k in tl.static_range(len(OF_ROWS)):
            value = spread(values[k], columns, LAYOUT.compute)
            if OF_ROWS[k]:
                tl.store(rooms[k] + down + i, tl.sum(tl.where(columns < piece[1], value, 0.0), axis=0))
                added = added + (accumulators[k],)  # type: ignore[assignment]
            else:
                added = added + (accumulators[k] + value,)  # type: ignore[assignment]
        accumulators = added
    return accumulators
