"""Means over rows and columns: within a tile of a matrix, then over its tiles, and what finishes them.

A program of one warp, in which no threads wait for each other, sums rows and columns of one tile: of matrices with wide rows
a piece, in pieces.py, and of others some blocks of [matrices, rows, columns] below each other. All sums of tiles are stored,
and further kernels add them up in a fixed order, so a step gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ...language import Reduction
from ...parts import COLUMNS, MATRICES, ROWS, Parts, walked_as
from .pieces import Walk, lines_for, pieces_of, times_for
from .reduce import spread
from .tile import PART, compute_at, load_addresses, load_at, load_numbers

ELEMENTS = 256  # of a block: 8 of a thread
WIDTH = 128  # most columns of a block: 512 bytes of float32, so rows are read in long pieces
BLOCKS = 16  # most blocks of a program
TOGETHER = 32  # most sums of tiles that are loaded at once
ITEMS = 1024  # sums of tiles that a program loads at once


class Block(NamedTuple):
    """The size of a block, powers of two; a constant of its kernel.

    Attributes:
        several: whether a block has all rows and columns of its matrices.
        unit: what the numbers of columns are multiples of, if then rows begin at multiples of 16 bytes; else 1.
    """

    matrices: int
    rows: int
    columns: int
    several: bool
    unit: int


class Finish(NamedTuple):
    """What finishes the means of rows, or of columns; a constant of its kernel.

    Attributes:
        averaged: for each value of the reduction whether it is averaged over these parts.
        kept: for each state whether it is one of these parts.
        results: for each result its row in the table of addresses; -1 for results of other parts.
        hyper: indices of hyper-parameters in their row.
    """

    averaged: tuple[bool, ...]
    kept: tuple[bool, ...]
    results: tuple[int, ...]
    hyper: tuple[int, ...]
    of_rows: bool


def block_of(rows: int, columns: int, unit: int) -> Block:
    """Return the block for matrices of this size: many small ones, or a piece of a large one."""
    width = min(triton.next_power_of_2(columns), WIDTH)
    height = min(triton.next_power_of_2(rows), ELEMENTS // width)
    if rows <= height and columns <= width:
        return Block(ELEMENTS // (width * height), height, width, True, unit)
    return Block(1, ELEMENTS // width, width, False, unit)


class TileSums:
    """The sums of all tiles of a reduction over rows and columns, and the tiles themselves.

    Attributes:
        tiles: for each kind of block what `means_kernel` is told of each tile, int32 [n_tiles, 6].
        pieces: for each walk of rows its pieces, as `pieces_of` returns them.
        addresses: of the sums of each value and tensor, then their numbers in a tile, int64 [2 * n_values, n_tensors].
        counts: for "row" and "column" the number of tiles that each row or column has a sum of, int64 [n_tensors].
    """

    def __init__(
        self,
        parts: Parts,
        walks: Sequence[Walk],
        reduction: Reduction,
        width: int,
        unit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`width` is that of a piece's lines; `unit` has 16 bytes, or is 1 if addresses are no multiples of 16."""
        tiles: dict[Block, list[np.ndarray]] = {}
        n_tensors = len(parts.sizes)
        self.counts = {"row": np.ones(n_tensors, dtype=np.int64), "column": np.ones(n_tensors, dtype=np.int64)}
        self.pieces = []
        for walk in walks:
            if walk.line == PART:
                sizes = parts.sizes[walk.tensors]
                height = lines_for(int(sizes.prod(axis=1).sum()), width, walk.line)
                self.pieces.append((walk, pieces_of(parts, walk, height, width)))
                self.counts["row"][walk.tensors] = -(-sizes[:, COLUMNS] // width)
                self.counts["column"][walk.tensors] = -(-sizes[:, ROWS] // height)
                continue
            for t in walk.tensors:
                size = parts.sizes[t]
                if not size[MATRICES]:
                    continue
                block = block_of(int(size[ROWS]), int(size[COLUMNS]), 1 if size[COLUMNS] % unit else unit)
                steps, onwards = np.array(block[:3]), MATRICES if block.several else ROWS
                steps[onwards] *= times_for(int(size.prod()), ELEMENTS, BLOCKS)
                self.counts["row"][t], self.counts["column"][t] = -(-size[[COLUMNS, ROWS]] // steps[[COLUMNS, ROWS]])
                grid = np.meshgrid(*map(np.arange, (0, 0, 0), size, steps), indexing="ij")
                firsts = [each.ravel() for each in grid]
                blocks = -(-np.minimum(size[onwards] - firsts[onwards], steps[onwards]) // block[onwards])
                table = np.broadcast_arrays(t, *firsts, blocks, firsts[ROWS] // steps[ROWS])
                tiles.setdefault(block, []).append(np.stack(table, axis=1))
        self.tiles = {block: np.concatenate(pieces).astype(np.int32) for block, pieces in tiles.items()}
        self.addresses = np.zeros((2 * reduction.n_values, n_tensors), dtype=np.int64)
        self._rooms = []
        for k, scope in enumerate(map(walked_as, reduction.scope)):
            sizes = -(-parts.counts[scope] * self.counts[scope] // 4) * 4  # so that 4 are stored at once
            self._rooms.append(torch.empty(int(sizes.sum()), dtype=dtype, device=device))
            self.addresses[k] = self._rooms[-1].data_ptr() + (np.cumsum(sizes) - sizes) * dtype.itemsize
            self.addresses[reduction.n_values + k] = parts.counts[scope]


def chunks_of(counts: np.ndarray, items: int, *columns: np.ndarray) -> np.ndarray:
    """Return for all chunks of `items` items the tensor, the first item, and the tensor's numbers in `columns`, int64."""
    n = -(-counts // items)
    tensors = np.repeat(np.arange(len(counts)), n)
    firsts = (np.arange(len(tensors)) - np.repeat(np.cumsum(n) - n, n)) * items
    return np.stack([tensors, firsts, *(column[tensors] for column in columns)], axis=1).astype(np.int64)


def finish_of(reduction: Reduction, hyper: tuple[str, ...], first: int, scope: str) -> Finish:
    n_before, scopes = len(reduction.vectors), list(map(walked_as, reduction.own_scopes))
    return Finish(
        averaged=tuple(walked_as(of) == scope for of in reduction.scope),
        kept=tuple(of == scope for of in scopes[: len(reduction.kept)]),
        results=tuple(first + 2 + n_before + k if of == scope else -1 for k, of in enumerate(scopes)),
        hyper=tuple(1 + hyper.index(name) for name in reduction.finish_hyper),
        of_rows=scope == "row",
    )


def sizes_of_means(parts: Parts, elements: int) -> tuple[np.ndarray, int, int]:
    """Return chunks of matrices whose rows' states are averaged, and the matrices and rows of a block."""
    rows = min(triton.next_power_of_2(int(parts.sizes[:, ROWS].max(initial=1))), elements)
    return chunks_of(parts.sizes[:, MATRICES], elements // rows), elements // rows, rows


def together_for(tiles: TileSums, scope: str) -> int:
    """Return how many sums of tiles a program loads at once of each row or column."""
    return min(triton.next_power_of_2(int(tiles.counts[scope].max(initial=1))), TOGETHER)


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=[
        "addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "shapes", "control",
    ],
)  # fmt: skip
def means_kernel(
    addresses,  # this and the following arguments: as in means_pieces_kernel
    gradients,
    hyper,
    sizes,
    tiles,  # int32 [n_programs, 6]: tensor, first matrix, row and column, blocks, and which sums of columns these are
    sums,
    partials,
    n_tensors,
    shapes,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,  # Block
    OF_ROWS: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    tiles += 6 * tl.program_id(0).to(tl.int64)
    tensor, matrix = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64)
    row, column = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3).to(tl.int64)
    n_blocks, strip = tl.load(tiles + 4), tl.load(tiles + 5)
    gradient, n = tl.load(gradients + tensor), tl.load(sizes + tensor)
    n_blocks = tl.where(gradient != 0, n_blocks, 0)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    shapes += 3 * tensor
    matrices, rows, columns = tl.load(shapes), tl.load(shapes + 1), tl.load(shapes + 2)
    # Up to 3.6 Triton takes no attribute as a constant.
    N_MATRICES: tl.constexpr = BLOCK.matrices
    N_ROWS: tl.constexpr = BLOCK.rows
    N_COLUMNS: tl.constexpr = BLOCK.columns
    UNIT: tl.constexpr = BLOCK.unit
    columns, column = tl.multiple_of(columns, UNIT), tl.multiple_of(column, N_COLUMNS)
    lines, across = tl.arange(0, N_MATRICES * N_ROWS), tl.arange(0, N_COLUMNS)
    b, i = lines // N_ROWS, lines % N_ROWS
    is_column = across < (columns - column).to(tl.int32)
    offsets = (b * rows + i)[:, None] * columns + across[None, :]
    rooms, accumulators = (), ()
    for k in tl.static_range(len(OF_ROWS)):
        room = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(LAYOUT.compute))
        count = tl.load(partials + (len(OF_ROWS) + k) * n_tensors + tensor)
        rooms = rooms + (room + count * (column // N_COLUMNS if OF_ROWS[k] else strip),)  # type: ignore[assignment]
        accumulators = accumulators + (tl.zeros((N_MATRICES * N_ROWS, N_COLUMNS), LAYOUT.compute),)  # type: ignore[assignment]
    of_tile = numbers[2]
    if not BLOCK.several:
        one, of_columns = tl.full((1, 1), 0, tl.int32), (matrix * columns + column + across)[None, :]
        of_tile = load_at(
            of_tile, pointers, ((of_columns, is_column[None, :]), (matrix + one, one == 0)), offsets, 2, 3, ARGUMENTS, LAYOUT
        )
    block = 0
    while block < n_blocks:
        is_row = (b < (matrices - matrix).to(tl.int32)) & (i < (rows - row).to(tl.int32))
        of_rows, valid = (matrix + b) * rows + (row + i), is_row[:, None] & is_column[None, :]
        of_row = (of_rows[:, None], is_row[:, None])
        if BLOCK.several:
            of_matrix = (matrix + b)[:, None]
            places = of_row, (of_matrix * columns + across[None, :], valid), (of_matrix, is_row[:, None])
            sums_at = load_at(of_tile, pointers, places, offsets, 1, 3, ARGUMENTS, LAYOUT)
        else:
            sums_at = load_at(of_tile, pointers, (of_row,), offsets, 1, 1, ARGUMENTS, LAYOUT)
        tile = (matrix * rows + row) * columns + column, valid, n
        values = compute_at(pointers, gradient, numbers, offsets, tile, sums_at, FUNCTION, ARGUMENTS, LAYOUT)
        added = ()
        for k in tl.static_range(len(OF_ROWS)):
            value = tl.where(valid, spread(values[k], offsets, LAYOUT.compute), 0.0)
            if OF_ROWS[k]:
                tl.store(rooms[k] + of_rows, tl.sum(value, axis=1), mask=is_row)
                added = added + (accumulators[k],)  # type: ignore[assignment]
            elif BLOCK.several:
                _store_columns(rooms[k], value, matrix, matrices, column, columns, BLOCK)
                added = added + (accumulators[k],)  # type: ignore[assignment]
            else:
                added = added + (accumulators[k] + value,)  # type: ignore[assignment]
        accumulators = added
        if BLOCK.several:
            matrix += N_MATRICES
        else:
            row += N_ROWS
        block += 1
    if not BLOCK.several:
        for k in tl.static_range(len(OF_ROWS)):
            if not OF_ROWS[k]:
                _store_columns(rooms[k], accumulators[k], matrix, matrices, column, columns, BLOCK)


@triton.jit
def _store_columns(room, value, matrix, matrices, column, columns, BLOCK: tl.constexpr):
    # Add a block up over the rows of each matrix.
    N_COLUMNS: tl.constexpr = BLOCK.columns
    total = tl.sum(tl.reshape(value, (BLOCK.matrices, BLOCK.rows, N_COLUMNS)), axis=1)
    sums = tl.arange(0, BLOCK.matrices * N_COLUMNS)
    b, j = matrix + sums // N_COLUMNS, column + sums % N_COLUMNS
    total = tl.reshape(total, (BLOCK.matrices * N_COLUMNS,))
    tl.store(room + b * columns + j, total, mask=(b < matrices) & (j < columns))


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "shapes", "chunks", "partials", "kept", "skipped"],
)
def finish_kernel(
    addresses,
    gradients,
    hyper,
    shapes,  # as in means_pieces_kernel
    chunks,  # int64 [n_programs, 4]: tensor, first row or column, and of the tensor their number and that of their sums
    partials,  # int64 [n_values, n_tensors]: addresses of the sums of tiles
    kept,  # int64 [n_kept, n_tensors]: addresses of the states
    skipped,  # float32 [1]: not 0 if states stay as they are
    n_tensors,
    FUNCTION: tl.constexpr,  # or None: the means are the results
    FINISH: tl.constexpr,  # Finish
    N_HYPER: tl.constexpr,  # of a row
    TOGETHER: tl.constexpr,
    ITEMS: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    chunks += 4 * tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(chunks), tl.load(chunks + 1)
    n, n_sums = tl.load(chunks + 2), tl.load(chunks + 3)
    n_active = tl.where(tl.load(gradients + tensor) != 0, n, 0)
    addresses += tensor
    items = first + tl.arange(0, ITEMS)
    inside = items < n_active
    hyper += tensor * N_HYPER
    TYPE: tl.constexpr = hyper.dtype.element_ty
    divisor = tl.load(shapes + 3 * tensor + (2 if FINISH.of_rows else 1)).to(TYPE)
    means = ()
    for k in tl.static_range(len(FINISH.averaged)):
        if FINISH.averaged[k]:
            sums = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(TYPE))
            total = tl.zeros((ITEMS,), TYPE)
            at = tl.full((), 0, tl.int64)
            while at < n_sums:
                tiles = at + tl.arange(0, TOGETHER)
                mask = (tiles[:, None] < n_sums) & inside[None, :]
                total += tl.sum(tl.load(sums + tiles[:, None] * n + items[None, :], mask=mask, other=0.0), axis=0)
                at += TOGETHER
            means = means + (total / divisor,)  # type: ignore[assignment]
        else:
            means = means + (0.0,)  # type: ignore[assignment]
    states = ()
    for k in tl.static_range(len(FINISH.kept)):
        if FINISH.kept[k]:
            state = tl.load(kept + k * n_tensors + tensor).to(tl.pointer_type(TYPE)) + items
            states = states + (tl.load(state, mask=inside, other=0.0),)  # type: ignore[assignment]
        else:
            states = states + (0.0,)  # type: ignore[assignment]
    if FUNCTION is None:
        results = means
    else:
        numbers = ()
        for k in tl.static_range(len(FINISH.hyper)):
            numbers = numbers + (tl.load(hyper + FINISH.hyper[k]),)  # type: ignore[assignment]
        results = FUNCTION(means, states, numbers)
    changed = items < tl.where(tl.load(skipped) == 0.0, n_active, 0)
    tl.debug_barrier()  # of few items each warp loads every state, and one stores it
    for k in tl.static_range(len(FINISH.results)):
        if FINISH.results[k] >= 0:
            vector = tl.load(addresses + FINISH.results[k] * n_tensors).to(tl.pointer_type(TYPE))
            tl.store(vector + items, results[k], mask=inside)
            if k < len(FINISH.kept):
                state = tl.load(kept + k * n_tensors + tensor).to(tl.pointer_type(TYPE)) + items
                tl.store(state, results[k], mask=changed)


@triton.jit(do_not_specialize=["n_tensors"], do_not_specialize_on_alignment=["addresses", "shapes", "chunks"])
def means_of_rows_kernel(
    addresses,
    shapes,
    chunks,  # int64 [n_programs, 2]: tensor, first matrix
    n_tensors,
    FROM: tl.constexpr,  # rows of the table of addresses with the vectors of rows
    TO: tl.constexpr,  # and with those of matrices, which get their means
    TYPE: tl.constexpr,
    MATRICES: tl.constexpr,
    ROWS: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    chunks += 2 * tl.program_id(0).to(tl.int64)
    tensor, matrix = tl.load(chunks), tl.load(chunks + 1) + tl.arange(0, MATRICES)
    addresses += tensor
    matrices, rows = tl.load(shapes + 3 * tensor), tl.load(shapes + 3 * tensor + 1)
    for k in tl.static_range(len(FROM)):
        vector = tl.load(addresses + FROM[k] * n_tensors).to(tl.pointer_type(TYPE))
        total = tl.zeros((MATRICES,), TYPE)
        at = tl.full((), 0, tl.int64)
        while at < rows:
            i = at + tl.arange(0, ROWS)
            mask = (matrix[:, None] < matrices) & (i[None, :] < rows)
            total += tl.sum(tl.load(vector + matrix[:, None] * rows + i[None, :], mask=mask, other=0.0), axis=1)
            at += ROWS
        means = tl.load(addresses + TO[k] * n_tensors).to(tl.pointer_type(TYPE))
        tl.store(means + matrix, total / rows.to(TYPE), mask=matrix < matrices)
