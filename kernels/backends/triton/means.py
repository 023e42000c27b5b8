"""Means over rows and columns: within a tile of a matrix, then over its tiles, and what finishes them.

A program sums rows and columns of one tile: of matrices with many columns a piece, in pieces.py, and of others some blocks
of [matrices, rows, columns] below each other. All sums of tiles are stored, and further kernels add them up in a fixed
order, so a step gives the same bits every time.
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
from .pieces import Walk, pieces_of, rows_for
from .reduce import spread
from .tile import compute_at, load_addresses, load_numbers

WIDTH = 128  # most columns of a block: 512 bytes of float32, so rows are read in long pieces
STEPS = 16  # blocks below each other that a program adds up before it stores sums of columns
TOGETHER = 32  # most sums of tiles that are loaded at once
ITEMS = 1024  # sums of tiles that a program loads at once
_ANY = tl.constexpr(1 << 60)  # offset of an element that is not there


class Block(NamedTuple):
    """The size of a block, powers of two, and the number of blocks of a program; a constant of its kernel."""

    matrices: int
    rows: int
    columns: int
    steps: int


class Finish(NamedTuple):
    """What finishes the means of rows, or of columns; a constant of its kernel.

    Attributes:
        averaged: for each value of the reduction whether it is averaged over these parts.
        kept: for each state whether it is one of these parts.
        results: for each result its row in the table of addresses; -1 for results of other parts.
        hyper: indices of hyper-parameters in their row.
        first: row of the table of addresses with the sizes of rows; the sizes of matrices follow.
    """

    averaged: tuple[bool, ...]
    kept: tuple[bool, ...]
    results: tuple[int, ...]
    hyper: tuple[int, ...]
    first: int
    of_rows: bool


def block_of(rows: int, columns: int, elements: int) -> Block:
    """Return the block of `elements` elements for matrices of this size: many small ones, or a piece of a large one."""
    width = min(triton.next_power_of_2(columns), WIDTH, elements)
    height = min(triton.next_power_of_2(rows), elements // width)
    if rows <= height and columns <= width:
        return Block(elements // (width * height), height, width, 1)
    return Block(1, elements // width, width, STEPS)


class TileSums:
    """The sums of all tiles of a reduction over rows and columns, and the tiles themselves.

    Attributes:
        tiles: for each kind of block the first matrix, row and column of each tile with its tensor, int32 [n_tiles, 4].
        pieces: for each walk of rows its pieces, as `pieces_of` returns them.
        addresses: of the sums of each value and tensor, then their numbers in a tile, int64 [2 * n_values, n_tensors].
        counts: for "row" and "column" the number of tiles that each row or column has a sum of, int64 [n_tensors].
    """

    def __init__(
        self,
        parts: Parts,
        walks: Sequence[Walk],
        reduction: Reduction,
        elements: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`elements` is the size of a block, `width` the columns of a piece."""
        tiles: dict[Block, list[np.ndarray]] = {}
        n_tensors = len(parts.sizes)
        self.counts = {"row": np.ones(n_tensors, dtype=np.int64), "column": np.ones(n_tensors, dtype=np.int64)}
        self.pieces = []
        for walk in walks:
            if walk.unit:
                sizes = parts.sizes[walk.tensors]
                height = rows_for(int(sizes.prod(axis=1).sum()), width)
                self.pieces.append((walk, pieces_of(parts, walk.tensors, height, width)))
                self.counts["row"][walk.tensors] = -(-sizes[:, COLUMNS] // width)
                self.counts["column"][walk.tensors] = -(-sizes[:, ROWS] // height)
                continue
            for t in walk.tensors:
                matrices, rows, columns = parts.sizes[t]
                if not matrices:
                    continue
                block = block_of(int(rows), int(columns), elements)
                steps = block.matrices, block.rows * block.steps, block.columns
                firsts = [np.arange(0, n, step) for n, step in zip((matrices, rows, columns), steps, strict=True)]
                self.counts["row"][t], self.counts["column"][t] = len(firsts[2]), len(firsts[1])
                grid = np.stack(np.meshgrid(*firsts, indexing="ij"), axis=-1).reshape(-1, 3)
                tiles.setdefault(block, []).append(np.insert(grid, 0, t, axis=1))
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
        first=first,
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
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "sizes", "tiles", "sums", "partials", "control"],
)
def means_kernel(
    addresses,  # this and the following arguments: as in update_kernel
    gradients,
    hyper,
    sizes,
    tiles,  # int32 [n_programs, 4]: tensor, and the first matrix, row and column
    sums,
    partials,  # int64 [n_values, n_tensors]: addresses of the sums of tiles
    n_tensors,
    control,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,  # Block
    OF_ROWS: tl.constexpr,  # for each value 1 if it is averaged over rows, 0 over columns
):
    n_tensors = n_tensors.to(tl.int64)
    tiles += 4 * tl.program_id(0).to(tl.int64)
    tensor, matrix = tl.load(tiles).to(tl.int64), tl.load(tiles + 1).to(tl.int64)
    row, column = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3).to(tl.int64)
    gradient, n = tl.load(gradients + tensor), tl.load(sizes + tensor)
    pointers = load_addresses(addresses + tensor, n_tensors, LAYOUT)
    hyper_row, sums_row = hyper + tensor * (1 + LAYOUT.n_hyper), sums + tensor * ARGUMENTS.n_sums
    numbers = load_numbers(hyper_row, sums_row, control, ARGUMENTS, LAYOUT)
    columns, size = pointers[LAYOUT.first_part], pointers[LAYOUT.first_part + 1]
    rows = size // columns
    matrices = tl.where(gradient != 0, n // size, 0)

    # Up to 3.6 Triton takes no attribute as a constant.
    SIZE: tl.constexpr = LAYOUT.block
    N_MATRICES: tl.constexpr = BLOCK.matrices
    N_ROWS: tl.constexpr = BLOCK.rows
    N_COLUMNS: tl.constexpr = BLOCK.columns
    local = tl.arange(0, SIZE)
    of_matrix = local // (N_ROWS * N_COLUMNS)
    of_row = local // N_COLUMNS % N_ROWS
    of_column = local % N_COLUMNS
    lines = tl.arange(0, N_MATRICES * N_ROWS)
    accumulators = ()
    for _ in tl.static_range(len(OF_ROWS)):
        accumulators = accumulators + (tl.zeros((SIZE,), LAYOUT.compute),)  # type: ignore[assignment]
    within = (of_matrix + matrix < matrices) & (of_column + column < columns)
    down = 0
    while (down < N_ROWS * BLOCK.steps) & (row + down < rows):
        top = row + down
        valid = within & (of_row + top < rows)
        base = (matrix * rows + top) * columns + column
        offsets = tl.where(valid, (of_matrix * rows + of_row) * columns + of_column, _ANY)
        b = matrix + of_matrix
        places = b * rows + top + of_row, b * columns + column + of_column, b
        values = compute_at(
            pointers, gradient, numbers, offsets, (base, _ANY, n), places, valid,
            FUNCTION, ARGUMENTS, LAYOUT,
        )  # fmt: skip
        added = ()
        for k in tl.static_range(len(OF_ROWS)):
            value = tl.where(valid, spread(values[k], local, LAYOUT.compute), 0.0)
            if OF_ROWS[k]:
                total = tl.sum(tl.reshape(value, (N_MATRICES * N_ROWS, N_COLUMNS)), axis=1)
                room = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(LAYOUT.compute))
                room += column // N_COLUMNS * (matrices * rows)
                i, of_lines = top + lines % N_ROWS, matrix + lines // N_ROWS
                tl.store(room + of_lines * rows + i, total, mask=(of_lines < matrices) & (i < rows))
                added = added + (accumulators[k],)  # type: ignore[assignment]
            else:
                added = added + (accumulators[k] + value,)  # type: ignore[assignment]
        accumulators = added
        down += N_ROWS
    across = tl.arange(0, N_MATRICES * N_COLUMNS)
    for k in tl.static_range(len(OF_ROWS)):
        if not OF_ROWS[k]:
            blocks = tl.reshape(accumulators[k], (N_MATRICES, N_ROWS, N_COLUMNS))
            total = tl.reshape(tl.sum(blocks, axis=1), (N_MATRICES * N_COLUMNS,))
            room = tl.load(partials + k * n_tensors + tensor).to(tl.pointer_type(LAYOUT.compute))
            room += row // (N_ROWS * BLOCK.steps) * (matrices * columns)
            j, of_sums = column + across % N_COLUMNS, matrix + across // N_COLUMNS
            tl.store(room + of_sums * columns + j, total, mask=(of_sums < matrices) & (j < columns))


@triton.jit(
    do_not_specialize=["n_tensors"],
    do_not_specialize_on_alignment=["addresses", "gradients", "hyper", "chunks", "partials", "kept", "skipped"],
)
def finish_kernel(
    addresses,
    gradients,
    hyper,
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
    columns, size = tl.load(addresses + FINISH.first * n_tensors), tl.load(addresses + (FINISH.first + 1) * n_tensors)
    items = first + tl.arange(0, ITEMS)
    inside = items < n_active
    hyper += tensor * N_HYPER
    TYPE: tl.constexpr = hyper.dtype.element_ty
    divisor = (columns if FINISH.of_rows else size // columns).to(TYPE)
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


@triton.jit(do_not_specialize=["n_tensors"], do_not_specialize_on_alignment=["addresses", "chunks"])
def means_of_rows_kernel(
    addresses,
    sizes,
    chunks,  # int64 [n_programs, 2]: tensor, first matrix
    n_tensors,
    FIRST: tl.constexpr,  # row of the table of addresses with the sizes of rows
    FROM: tl.constexpr,  # rows of the table with the vectors of rows
    TO: tl.constexpr,  # and with those of matrices, which get their means
    TYPE: tl.constexpr,
    MATRICES: tl.constexpr,
    ROWS: tl.constexpr,
):
    n_tensors = n_tensors.to(tl.int64)
    chunks += 2 * tl.program_id(0).to(tl.int64)
    tensor, matrix = tl.load(chunks), tl.load(chunks + 1) + tl.arange(0, MATRICES)
    addresses += tensor
    columns, size = tl.load(addresses + FIRST * n_tensors), tl.load(addresses + (FIRST + 1) * n_tensors)
    rows, matrices = size // columns, tl.load(sizes + tensor) // size
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
