"""The kernels of rules with means: a program goes down a piece of a tensor, line by line.

A line of a matrix of wide rows is a part of a row. Its place in the vectors of rows and of matrices is one, so their numbers
are scalars of a line; a piece's columns are the same in all of its lines, so their numbers are loaded once. Of narrow
matrices several rows, or several matrices, stand side by side in a line. Which of the line's numbers an element takes is the
same in all lines of a piece, so no element is divided to find them in the loop, and no threads wait for each other. A piece
of one line may begin and end anywhere in its tensor, as blocks of packed states need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from ...parts import COLUMNS, MATRICES, ROWS, Parts
from .memory import has_packed, indices
from .reduce import accumulate, new_accumulators, spread, store_partials
from .tile import (
    FLAT,
    PART,
    ROWS_OF_ONE,
    SEVERAL,
    call,
    combined,
    count_unchanged,
    fill_with_zeros,
    load_addresses,
    load_inputs,
    load_numbers,
    load_of_line,
    load_of_piece,
    load_weight,
    places_in,
    store_block,
)

LEAST_COLUMNS = 128  # of a row that is wide: with fewer most threads would have nothing to do
WIDEST = 256  # elements of a line in a wide row
STACKED = 1024  # elements of a line of several rows; 8 always fit, which begin and end at multiples of 16 bytes
MOST_LINES, LEAST_LINES = 64, 8  # of a piece
ENOUGH = 2048  # programs, as in compile.py


class Walk(NamedTuple):
    """Tensors of a launch that are walked alike.

    Attributes:
        tensors: their indices, in order.
        unit: 0 if tiles are walked element by element; for pieces what the lengths of lines are multiples of.
        aligned: whether all tiles, or all lines, begin at multiples of 16 bytes.
        line: what a line is; see tile.py.
        columns: the fewest columns of a row.
    """

    tensors: np.ndarray
    unit: int
    aligned: bool
    line: int = PART
    columns: int = 0


def walks_of(parts: Parts, aligned: bool, unit: int, packed: bool) -> list[Walk]:
    """Return how the tensors of a launch are walked.

    Args:
        aligned: whether all addresses are multiples of 16 bytes.
        unit: elements of the narrowest type in 16 bytes.
        packed: whether a state is packed, in blocks which begin at multiples of their size in a tensor.
    """
    columns, totals = parts.sizes[:, COLUMNS], parts.sizes.prod(axis=1)
    sizes = parts.sizes[:, ROWS] * columns
    kinds = (
        (PART, (columns >= LEAST_COLUMNS) & (columns % (WIDEST if packed else 1) == 0), columns),
        (FLAT, packed, totals),
        (SEVERAL, (parts.sizes[:, MATRICES] > 1) & (sizes * _units(sizes, unit) <= STACKED), totals),
        (ROWS_OF_ONE, True, sizes),
    )
    walks, left = [], np.ones(len(sizes), dtype=bool)
    for line, which, lengths in kinds:
        whole = aligned & (packed | (lengths % unit == 0))
        for chosen, of, begins_aligned in ((left & which & whole, unit, True), (left & which & ~whole, 1, False)):
            if chosen.any():
                walks.append(Walk(np.flatnonzero(chosen), of, begins_aligned, line, int(columns[chosen].min())))
        left &= ~np.asarray(which)
    return walks


def _units(sizes: np.ndarray | int, unit: int) -> Any:
    """Return the least numbers of things of these sizes whose lengths together are multiples of a unit."""
    return unit // np.gcd(sizes, unit)


def lines_for(elements: int, width: int, line: int) -> int:
    """Return the lines of a piece, of at most `width` elements."""
    return times_for(elements, width, MOST_LINES, 1 if line == SEVERAL else LEAST_LINES)


def times_for(elements: int, each: int, most: int, least: int = 1) -> int:
    """Return how many times a program walks `each` of so many elements: fewer where programs would be few."""
    times = most
    while times > least and elements < ENOUGH * times * each:
        times //= 2
    return times


def pieces_of(parts: Parts, walk: Walk, lines: int, width: int) -> np.ndarray:
    """Return all pieces, int32 [n_pieces, 9].

    They are the tensor, the first row among those of all matrices, the matrix, the first column, the number of lines, the
    number of the piece from its matrix's top, the elements of a line, and by how many rows and matrices lines differ.
    """
    pieces = [np.empty((0, 9), dtype=np.int64)]
    for t in walk.tensors:
        n, height, columns = (int(parts.sizes[t, k]) for k in (MATRICES, ROWS, COLUMNS))
        size = height * columns
        table: list[Any]
        if walk.line == PART:
            grid = np.meshgrid(np.arange(n), np.arange(-(-height // lines)), np.arange(0, columns, width), indexing="ij")
            matrix, strip, column = (each.ravel() for each in grid)
            top = strip * lines
            length, rows, matrices = np.minimum(columns - column, width), 1, 0
            table = [matrix * height + top, matrix, column, np.minimum(height - top, lines), strip, length, rows, matrices]
        elif walk.line == ROWS_OF_ONE:
            first, side, down = _stacked(height, width // columns, int(_units(columns, walk.unit)), lines)
            matrix, k = (each.ravel() for each in np.meshgrid(np.arange(n), np.arange(len(first)), indexing="ij"))
            table = [matrix * height + first[k], matrix, 0, down[k], 0, side[k] * columns, side[k], 0]
        elif walk.line == SEVERAL:
            first, side, down = _stacked(n, width // size, int(_units(size, walk.unit)), lines)
            table = [first * height, first, 0, down, 0, side * size, side * height, side]
        else:
            first = np.arange(0, n * size, width)
            row = first // columns
            table = [row, first // size, first - row * columns, 1, 0, np.minimum(n * size - first, width), 0, 0]
        pieces.append(np.stack(np.broadcast_arrays(t, *table), axis=1))
    return np.concatenate(pieces).astype(np.int32)


def _stacked(count: int, most: int, unit: int, lines: int) -> tuple[np.ndarray, ...]:
    """Return of pieces of `count` things the first thing, those side by side in a line, and the number of lines.

    In a line are at most `most` things, a multiple of `unit` of them unless it is the last one.
    """
    side = most // unit * unit
    first = np.arange(0, count - count % side, side * lines)
    down = np.minimum((count - first) // side, lines)
    sides = np.full_like(first, side)
    if count % side:
        first, sides, down = (np.append(*pair) for pair in ((first, count - count % side), (sides, count % side), (down, 1)))
    return first, sides, down


@triton.constexpr_function
def _fullness(LAYOUT, LEFT=False):
    # As `load` takes it. Packed states are in lines without a part that is not there, but for a tensor's last one.
    if has_packed(LAYOUT.states):
        return 0 if LEFT and LAYOUT.line != PART else 1
    return 2 if LAYOUT.unit % 4 == 0 else 0


@triton.constexpr_function
def _may_be_left(LAYOUT, AT_ONCE):
    # Whether lines may be left that are walked one at a time, or are not full where they must be.
    return AT_ONCE > 1 or (has_packed(LAYOUT.states) and LAYOUT.line != PART)


@triton.jit
def _piece_of(pieces, gradients, sizes, shapes, control, LAYOUT: tl.constexpr):
    # Returns the tensor, its gradient's address, the piece, its number of lines, 0 if the step is skipped, that number in
    # any case, and the piece's number. A piece: offset of its first element, elements of a line, the tensor's elements,
    # first row, matrix, first column, elements between lines, columns and rows of a matrix, rows and matrices between lines.
    pieces += 9 * tl.program_id(0).to(tl.int64)
    tensor, row, matrix = tl.load(pieces).to(tl.int64), tl.load(pieces + 1).to(tl.int64), tl.load(pieces + 2).to(tl.int64)
    column, lines, strip = tl.load(pieces + 3).to(tl.int64), tl.load(pieces + 4), tl.load(pieces + 5)
    width, rows, matrices = tl.load(pieces + 6), tl.load(pieces + 7), tl.load(pieces + 8)
    gradient, n = tl.load(gradients + tensor), tl.load(sizes + tensor)
    height, columns = tl.load(shapes + 3 * tensor + 1), tl.load(shapes + 3 * tensor + 2)
    UNIT: tl.constexpr = LAYOUT.unit  # up to 3.6 Triton accepts no attribute as a constexpr argument
    if not has_packed(LAYOUT.states):
        width = tl.multiple_of(width, UNIT)
    stepping = gradient != 0
    if control is not None:
        stepping &= tl.load(control + 1) == 0.0
    stride = columns if LAYOUT.line == 0 else width.to(tl.int64)
    piece = row * columns + column, width, n, row, matrix, column, stride, columns, height, rows, matrices
    return tensor, gradient, piece, tl.where(stepping, lines, 0), lines, strip


@triton.jit
def _whole(lines, piece, LAYOUT: tl.constexpr):
    # The lines without a part that is not there, where packed states need that.
    if has_packed(LAYOUT.states) and LAYOUT.line != 0:
        return tl.where(piece[1] == LAYOUT.block, lines, 0)
    else:
        return lines


@triton.jit
def _load_lines(
    pointers,
    gradient,
    numbers,
    sums,
    piece,
    places,
    down,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    COUNT: tl.constexpr,
    FULL: tl.constexpr,
):
    # For each line its tile, the weight as stored, and the function's gradient, states and sums. All is loaded before
    # anything is computed or stored, so that loads of several lines are in flight.
    loaded = ()
    for k in tl.static_range(COUNT):
        tile = piece[0] + piece[6] * (down + k), piece[1], piece[2]
        stored = load_weight(pointers, 0, tile, LAYOUT, FULL)
        g, states = load_inputs(pointers, gradient, numbers[0], 0, tile, ARGUMENTS, LAYOUT, FULL)
        of_line = load_of_line(sums, pointers, piece, places, down + k, ARGUMENTS, LAYOUT)
        loaded = loaded + ((tile, stored, g, states, of_line),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _computed(line, numbers, FUNCTION: tl.constexpr, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    tile, stored, g, states, sums = line
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
def _update_lines(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    piece,
    places,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MAXIMA: tl.constexpr,
    COUNT: tl.constexpr,
    FULL: tl.constexpr,
):
    lines = _load_lines(pointers, gradient, numbers, sums, piece, places, down, ARGUMENTS, LAYOUT, COUNT, FULL)
    for k in tl.static_range(COUNT):
        new = _computed(lines[k], numbers, FUNCTION, ARGUMENTS, LAYOUT)
        at = tl.full((), 0, tl.int32)
        stored = store_block(pointers, numbers[3], at, lines[k][0], new[0], new[1], LAYOUT, FULL)
        if ARGUMENTS.counts_unchanged:
            values = new[2] + (count_unchanged(lines[k][1], stored, LAYOUT),)
            accumulators = accumulate(accumulators, values, 0, lines[k][0], LAYOUT, MAXIMA, FULL)
        elif len(accumulators) > 0:
            accumulators = accumulate(accumulators, new[2], 0, lines[k][0], LAYOUT, MAXIMA, FULL)
    return accumulators


@triton.jit(
    do_not_specialize=["n_tensors", "n_partials"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "shapes", "control",
    ],
)  # fmt: skip
def update_pieces_kernel(
    addresses,  # this and the following arguments: as in update_kernel
    gradients,
    hyper,
    sizes,
    pieces,  # int32 [n_programs, 9], as `pieces_of` returns them
    sums,
    partials,
    n_tensors,
    n_partials,
    shapes,  # int64 [n_tensors, 3]: matrices, their rows, their columns
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,
    MAXIMA: tl.constexpr,
    AT_ONCE: tl.constexpr,  # lines
    ZERO: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, piece, n_lines, in_any_case, _ = _piece_of(pieces, gradients, sizes, shapes, control, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    places = places_in(piece, ARGUMENTS, LAYOUT)
    of_piece = load_of_piece(numbers[2], pointers, piece, places, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    down = 0
    while down + AT_ONCE <= _whole(n_lines, piece, LAYOUT):
        accumulators = _update_lines(
            pointers, gradient, numbers, of_piece, accumulators, piece, places, down,
            FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, AT_ONCE, _fullness(LAYOUT),
        )  # fmt: skip
        down += AT_ONCE
    if _may_be_left(LAYOUT, AT_ONCE):
        while down < n_lines:
            accumulators = _update_lines(
                pointers, gradient, numbers, of_piece, accumulators, piece, places, down,
                FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, 1, _fullness(LAYOUT, True),
            )  # fmt: skip
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
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "shapes", "control",
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
    shapes,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SUMMED: tl.constexpr,
    MAXIMA: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    tensor, gradient, piece, n_lines, _, _ = _piece_of(pieces, gradients, sizes, shapes, control, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    places = places_in(piece, ARGUMENTS, LAYOUT)
    of_piece = load_of_piece(numbers[2], pointers, piece, places, ARGUMENTS, LAYOUT)
    accumulators = new_accumulators(len(SUMMED) + len(MAXIMA), LAYOUT)
    down = 0
    while down + AT_ONCE <= _whole(n_lines, piece, LAYOUT):
        accumulators = _sum_lines(
            pointers, gradient, numbers, of_piece, accumulators, piece, places, down,
            FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, AT_ONCE, _fullness(LAYOUT),
        )  # fmt: skip
        down += AT_ONCE
    if _may_be_left(LAYOUT, AT_ONCE):
        while down < n_lines:
            accumulators = _sum_lines(
                pointers, gradient, numbers, of_piece, accumulators, piece, places, down,
                FUNCTION, ARGUMENTS, LAYOUT, MAXIMA, 1, _fullness(LAYOUT, True),
            )  # fmt: skip
            down += 1
    store_partials(partials, _masked(accumulators, piece[1], LAYOUT), n_partials, SUMMED, MAXIMA)


@triton.jit
def _sum_lines(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    piece,
    places,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MAXIMA: tl.constexpr,
    COUNT: tl.constexpr,
    FULL: tl.constexpr,
):
    lines = _load_lines(pointers, gradient, numbers, sums, piece, places, down, ARGUMENTS, LAYOUT, COUNT, FULL)
    for k in tl.static_range(COUNT):
        values = _computed(lines[k], numbers, FUNCTION, ARGUMENTS, LAYOUT)
        accumulators = accumulate(accumulators, values, 0, lines[k][0], LAYOUT, MAXIMA, FULL)
    return accumulators


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "pieces", "sums", "partials", "shapes", "control",
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
    shapes,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_ROWS: tl.constexpr,  # for each value 1 if it is averaged over rows, 0 over columns
    AT_ONCE: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    # A skipped step needs the sums, too: what it must not change is up to the kernels after it.
    tensor, gradient, piece, n_lines, _, strip = _piece_of(pieces, gradients, sizes, shapes, None, LAYOUT)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    places = places_in(piece, ARGUMENTS, LAYOUT)
    of_piece = load_of_piece(numbers[2], pointers, piece, places, ARGUMENTS, LAYOUT)
    BLOCK: tl.constexpr = LAYOUT.block
    rooms, accumulators = (), ()
    for k in tl.static_range(len(OF_ROWS)):
        room = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(LAYOUT.compute))
        count = tl.load(partials + (len(OF_ROWS) + k) * n_tensors + tensor)
        if OF_ROWS[k]:
            rooms = rooms + (room + piece[5] // LAYOUT.block * count + piece[3],)  # type: ignore[assignment]
        else:
            rooms = rooms + (room + strip * count + piece[4] * piece[7] + piece[5],)  # type: ignore[assignment]
        accumulators = accumulators + (tl.zeros((BLOCK,), LAYOUT.compute),)  # type: ignore[assignment]
    down = 0
    while down + AT_ONCE <= _whole(n_lines, piece, LAYOUT):
        accumulators = _mean_lines(
            pointers, gradient, numbers, of_piece, accumulators, rooms, piece, places, down,
            FUNCTION, ARGUMENTS, LAYOUT, OF_ROWS, AT_ONCE, _fullness(LAYOUT),
        )  # fmt: skip
        down += AT_ONCE
    if _may_be_left(LAYOUT, AT_ONCE):
        while down < n_lines:
            accumulators = _mean_lines(
                pointers, gradient, numbers, of_piece, accumulators, rooms, piece, places, down,
                FUNCTION, ARGUMENTS, LAYOUT, OF_ROWS, 1, _fullness(LAYOUT, True),
            )  # fmt: skip
            down += 1
    columns = tl.arange(0, LAYOUT.block)
    for k in tl.static_range(len(OF_ROWS)):
        if not OF_ROWS[k]:
            room = tl.multiple_of(rooms[k], 16) if LAYOUT.aligned else rooms[k]
            tl.store(room + columns, accumulators[k], mask=columns < piece[1])


@triton.jit
def _mean_lines(
    pointers,
    gradient,
    numbers,
    sums,
    accumulators,
    rooms,
    piece,
    places,
    down,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    FULL: tl.constexpr,
):
    columns = tl.arange(0, LAYOUT.block)
    lines = _load_lines(pointers, gradient, numbers, sums, piece, places, down, ARGUMENTS, LAYOUT, COUNT, FULL)
    for i in tl.static_range(COUNT):
        values, added = _computed(lines[i], numbers, FUNCTION, ARGUMENTS, LAYOUT), ()
        for k in tl.static_range(len(OF_ROWS)):
            value = spread(values[k], columns, LAYOUT.compute)
            if OF_ROWS[k]:
                tl.store(rooms[k] + down + i, tl.sum(tl.where(columns < piece[1], value, 0.0), axis=0))
                added = added + (accumulators[k],)  # type: ignore[assignment]
            else:
                added = added + (accumulators[k] + value,)  # type: ignore[assignment]
        accumulators = added
    return accumulators
