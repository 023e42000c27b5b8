"""Means over rows and columns on the CPU: how tensors are divided for them, and the loop that finishes them.

Tiles have whole rows. The loop over a tile sums its rows, and its columns as far as it has them; a second loop, over whole
matrices, adds up the sums of columns, turns sums into means, and finishes these.
"""

from __future__ import annotations

import numpy as np

from ...language import Reduction, Rule
from ...language.reduction import ElementwiseFunction
from ...launch import FIRST_STATE
from ...parts import COLUMNS, ROWS, Parts, walked_as
from .driver import ADDRESSES, HYPER, N_HYPER, N_TENSORS, PARTS, TILE, TILES

# Sums of columns are written once for each tile, which costs little for 16 rows, and more than 1,024 would be inexact.
LEAST_ROWS, MOST_ROWS = 16, 1024
ROW_SUMS, COLUMN_SUMS, KEPT, UNITS, SKIPPED = range(5)  # places in `MeansOnCpu.addresses`


class MeansOnCpu:
    """The sums of a reduction over rows and columns.

    Attributes:
        spans: the tensor and the first and last element of each tile, int64 [n_tiles, 3].
        units: the same of each run of whole matrices that is finished at a time.
        addresses: where the loops find these tables, int64 [5]: addresses of the sums of rows [n_values, n_tensors]; of the
            sums of columns [n_tiles, n_values]; of the states [n_kept, n_tensors]; the first tile and the number of tiles of
            each unit; and `Launch.skipped`.
    """

    def __init__(self, parts: Parts, stage: int, reduction: Reduction, kept: np.ndarray, skipped: np.ndarray) -> None:
        scopes = list(map(walked_as, reduction.scope))
        least = LEAST_ROWS if "column" in scopes else 1
        spans, units, tiles_of_units = [], [], []
        n_tiles = 0
        for t, (matrices, rows, columns) in enumerate(parts.sizes):
            size, most = rows * columns, min(max(TILE // columns, least), MOST_ROWS)
            if not matrices:
                continue
            if rows <= most:  # whole matrices
                step = max(TILE // size, 1) * size
                starts = np.arange(0, matrices * size, step)
                ends = np.minimum(starts + step, matrices * size)
                units.append(np.stack([np.full(len(starts), t), starts, ends], axis=1))
                tiles_of_units.append(np.stack([n_tiles + np.arange(len(starts)), np.ones(len(starts), int)], axis=1))
            else:
                within = np.arange(0, size, most * columns)
                of_matrix = np.arange(matrices) * size
                starts = (of_matrix[:, None] + within).ravel()
                ends = (of_matrix[:, None] + np.minimum(within + most * columns, size)).ravel()
                units.append(np.stack([np.full(matrices, t), of_matrix, of_matrix + size], axis=1))
                firsts = n_tiles + np.arange(matrices) * len(within)
                tiles_of_units.append(np.stack([firsts, np.full(matrices, len(within))], axis=1))
            spans.append(np.stack([np.full(len(starts), t), starts, ends], axis=1))
            n_tiles += len(starts)
        nothing = np.zeros((0, 3), dtype=np.int64)
        self.spans, self.units = (np.concatenate([nothing, *each]).astype(np.int64) for each in (spans, units))
        self._units = np.concatenate([nothing[:, :2], *tiles_of_units]).astype(np.int64)

        means, n_tensors = parts.means[stage], len(parts.sizes)
        rows_of = [
            parts.addresses_in(*pair) if pair[1] == "row" else np.zeros(n_tensors)
            for pair in zip(means, scopes, strict=True)
        ]
        self._rows = np.stack(rows_of).astype(np.int64)
        self._columns = np.zeros((n_tiles, len(scopes)), dtype=np.int64)
        tensors, starts, ends = self.spans.T
        sizes, columns = parts.sizes[tensors, ROWS] * parts.sizes[tensors, COLUMNS], parts.sizes[tensors, COLUMNS]
        self._partials = []
        divided = np.repeat(self._units[:, 1] > 1, self._units[:, 1])  # whether a tile is a piece of a matrix
        for k, (mean, scope) in enumerate(zip(means, scopes, strict=True)):
            if scope == "column":
                width = mean.element_size()
                self._columns[:, k] = parts.addresses_in(mean, scope)[tensors] + starts // sizes * columns * width
                room = np.empty(int(columns[divided].sum()), dtype=mean.numpy().dtype)
                places = np.cumsum(columns * divided) - columns * divided
                self._columns[divided, k] = room.ctypes.data + places[divided] * width
                self._partials.append(room)
        tables = (self._rows, self._columns, kept, self._units, skipped)
        self._tables = tables  # kept alive
        self.addresses = np.array([table.ctypes.data for table in tables], dtype=np.int64)


def table(place: int) -> str:
    """Return the expression for one of the tables of `MeansOnCpu.addresses`."""
    return f"pointer(pointer(shared[{PARTS}], INT64)[{place}], INT64)"


def vector(place: int, rule: Rule, master: bool) -> str:
    """Return the expression for the address of tensor `t` in vector `place` of `Parts`, in the table of addresses."""
    return f"addresses[{first_row(rule, master) + 2 + place} * shared[{N_TENSORS}] + t]"


def first_row(rule: Rule, master: bool) -> int:
    """Return the row of the table of addresses where those of `Parts` begin."""
    return FIRST_STATE + len(rule.state) + master


def sum_lines(reduction: Reduction) -> list[str]:
    """Return the lines that add the values `each` of an element to the sums of its row and its column."""
    scopes = enumerate(map(walked_as, reduction.scope))
    return [f"a{k} += each[{k}]" if of == "row" else f"c{k}[i + shift - base] += each[{k}]" for k, of in scopes]


def loop_by_rows(function: ElementwiseFunction, lines: list[str], row: int, at_lead: bool) -> str:
    """Return the loop over the elements, row by row, for means or for a function that gets vectors.

    `lines`, for one element, take the numbers of its column themselves. `row` is that of `first_row`. With `at_lead` the
    first `lead` elements only complete a block of packed states.
    """
    text = [
        f"columns = addresses[{row} * shared[{N_TENSORS}] + t]",
        f"size = addresses[{row + 1} * shared[{N_TENSORS}] + t]",
        f"at = {'lead' if at_lead else 0}",
        "row, matrix = (start + at) // columns, (start + at) // size",
        "row_end, matrix_end = (row + 1) * columns - start, (matrix + 1) * size - start",
    ]
    begin = [
        f"sum{k} = v{k}[{'matrix' if scope == 'matrix' else 'row'}]"
        for k, (scope, _) in enumerate(function.numbers)
        if scope not in ("tensor", "column")
    ]
    end = []
    if isinstance(function, Reduction) and function.op == "mean":
        scopes = list(map(walked_as, function.scope))
        of_rows, of_columns = ([k for k, of in enumerate(scopes) if of == scope] for scope in ("row", "column"))
        text += [f"r{k} = pointer({table(ROW_SUMS)}[{k} * shared[{N_TENSORS}] + t], REAL)" for k in of_rows]
        begin += [f"a{k} = ZERO" for k in of_rows]
        end = [f"r{k}[row] = a{k} if start + at == row * columns else r{k}[row] + a{k}" for k in of_rows]
        if of_columns:  # the sums of a tile's columns begin with those of its first matrix
            tile = f"pointer(shared[{TILES}], INT64)"
            text += [f"first, last = {tile}[3 * j + 1], {tile}[3 * j + 2] - 1", "base = first // size * columns"]
            for k in of_columns:
                text.append(f"c{k} = pointer({table(COLUMN_SUMS)}[j * {len(scopes)} + {k}], REAL)")
                text.append("for i in range((last // size + 1) * columns - base if start + at == first else 0):")
                text.append(f"    c{k}[i] = ZERO")
    text += ["while at < n:"]
    inner = ["stop = min(n, row_end)", "shift = start - row * columns + matrix * columns", *begin]
    inner += ["for i in range(at, stop):", *(f"    {line}" for line in lines), *end]
    inner += ["at, row, row_end = stop, row + 1, row_end + columns"]
    inner += ["if at == matrix_end:", "    matrix, matrix_end = matrix + 1, matrix_end + size"]
    return "\n".join(f"    {line}" for line in (*text, *(f"    {line}" for line in inner)))


def finish_source(reduction: Reduction, rule: Rule, master: bool) -> str:
    """Return the source of the function that finishes the means of whole matrices, `n` elements from `start` on."""
    row = first_row(rule, master)
    results = [walked_as(scope) for scope in reduction.own_scopes]
    n_before, n_kept = len(reduction.vectors), len(reduction.kept)
    given = "".join(f"\n    h{k} = hyper[{1 + rule.hyper.index(name)}]" for k, name in enumerate(reduction.finish_hyper))
    given += "".join(f"\n    v{k} = pointer({vector(n_before + k, rule, master)}, REAL)" for k in range(len(results)))
    given += "".join(f"\n    kept{k} = pointer({table(KEPT)}[{k} * shared[{N_TENSORS}] + t], REAL)" for k in range(n_kept))
    scopes = list(map(walked_as, reduction.scope))
    given += "".join(
        f"\n    r{k} = pointer({table(ROW_SUMS)}[{k} * shared[{N_TENSORS}] + t], REAL)"
        for k, scope in enumerate(scopes)
        if scope == "row"
    )
    hyper = "".join(f"h{k}, " for k in range(len(reduction.finish_hyper)))

    def lines(scope: str, sums: str, divisor: str, place: str, indent: str) -> str:
        mean = [f"{sums.format(k)} / {divisor}, " if of == scope else "ZERO, " for k, of in enumerate(scopes)]
        of_kept = zip(range(n_kept), results, strict=False)
        kept = [f"kept{k}[{place}], " if of == scope else "ZERO, " for k, of in of_kept]
        text = [f"new = ({''.join(mean)})"]
        if reduction.finished is not None:
            text = [f"new = function(({''.join(mean)}), ({''.join(kept)}), ({hyper}))"]
        for k in range(len(results) - len(reduction.means)):
            if results[k] == scope:
                text.append(f"v{k}[{place}] = new[{k}]")
                if k < n_kept:
                    text.append(f"kept{k}[{place}] = kept{k}[{place}] if skipped else new[{k}]")
        if scope == "row":
            text += [f"total{m} += new[{reduction.kept.index(name)}]" for m, name in enumerate(reduction.means)]
        return "".join(f"\n{indent}{line}" for line in text)

    source = f'''"""Generated by tristep from reduction {reduction.name}; safe to delete."""


@entry
def compute(shared, t, j, start, n):
    addresses = pointer(shared[{ADDRESSES}], INT64)
    hyper = pointer(shared[{HYPER}] + t * shared[{N_HYPER}] * REAL.itemsize, REAL)
    columns = addresses[{row} * shared[{N_TENSORS}] + t]
    size = addresses[{row + 1} * shared[{N_TENSORS}] + t]
    rows = size // columns
    first, end = start // size, (start + n) // size
    skipped = pointer(pointer(shared[{PARTS}], INT64)[{SKIPPED}], FLAG)[0] != 0
    n_rows, n_columns = real(rows), real(columns){given}'''
    if "row" in scopes:
        n_means = len(reduction.means)
        source += "\n    for b in range(first, end):"
        source += "".join(f"\n        total{m} = ZERO" for m in range(n_means))
        source += "\n        for i in range(b * rows, (b + 1) * rows):"
        source += lines("row", "r{0}[i]", "n_columns", "i", " " * 12)
        source += "".join(f"\n        v{len(results) - n_means + m}[b] = total{m} / n_rows" for m in range(n_means))
    if "column" in scopes:
        of_columns = [k for k, scope in enumerate(scopes) if scope == "column"]
        source += f"\n    units, tables = {table(UNITS)}, {table(COLUMN_SUMS)}"
        source += "\n    tile, n_tiles = units[2 * j], units[2 * j + 1]"
        for k in of_columns:
            source += f"\n    c{k} = pointer(tables[tile * {len(scopes)} + {k}], REAL)"
            source += f"""
    for other in range(tile + 1, tile + n_tiles):
        more = pointer(tables[other * {len(scopes)} + {k}], REAL)
        for i in range(columns):
            c{k}[i] += more[i]"""
        source += "\n    at = first * columns"
        source += "\n    for i in range((end - first) * columns):"
        source += lines("column", "c{0}[i]", "n_rows", "at + i", " " * 8)
    return source + "\n"


def finish_of_sums(reduction: Reduction, rule: Rule) -> str:
    """Return the source of the function that finishes the sums of tensor `t`, for all tensors if they are of all."""
    hyper = "".join(f"hyper[{1 + rule.hyper.index(name)}], " for name in reduction.finish_hyper)
    sums = "".join(f"totals[{k}], " for k in range(reduction.n_values))
    kept = "".join(f"pointer(kept[{k} * shared[{N_TENSORS}] + t], REAL)[0], " for k in range(len(reduction.kept)))
    lines = [f"results[i * {reduction.n_scalar_results} + {k}] = new[{k}]" for k in range(reduction.n_own_results)]
    lines.append("if not skipped:")
    lines += [f"    pointer(kept[{k} * shared[{N_TENSORS}] + i], REAL)[0] = new[{k}]" for k in range(len(reduction.kept))]
    tensors = f"range(shared[{N_TENSORS}])" if reduction.scope == "global" else "range(t, t + 1)"
    return f'''"""Generated by tristep from reduction {reduction.name}; safe to delete."""


@entry
def compute(shared, t, j, start, n):
    hyper = pointer(shared[{HYPER}] + t * shared[{N_HYPER}] * REAL.itemsize, REAL)
    tables = pointer(shared[{PARTS}], INT64)
    totals = pointer(tables[0] + t * {reduction.n_values} * REAL.itemsize, REAL)
    results, kept = pointer(tables[1], REAL), pointer(tables[2], INT64)
    skipped = pointer(tables[3], FLAG)[0] != 0
    new = function(({sums}), ({kept}), ({hyper}))
    for i in {tensors}:
        {(chr(10) + " " * 8).join(lines)}
'''
