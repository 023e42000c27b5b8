"""The compiled loop that hands out the tiles of a launch to the function that computes a tile, and sums over tiles.

It is compiled once and cached on disk. numba's cache does not notice changes in other files, so all the code that is
compiled here is in this file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from .disk_cache import cached, compiling

TILE = 65536  # elements of one call of the inner loop, and the unit of work of a thread
# The places of a loop's arguments in an int64 array that the threads share: first the next tile to take, then the addresses
# and widths of the arrays, the size of a piece, and the address of the function that computes a piece.
TICKET, ADDRESSES, GRADIENTS, SIZES, HYPER, TILES, SUMS, PARTIALS, PARTS = range(9)
N_TENSORS, N_HYPER, N_SUMS, N_VALUES, N_TILES, N_BLOCK, COMPUTE = range(9, 16)
TOTALS, LARGEST, TOGETHER, IS_DOUBLE = ADDRESSES, SIZES, HYPER, SUMS  # places of `adder`'s own arguments
INT64, FLOAT64, FLOAT32 = (np.empty(0, dtype=kind) for kind in (np.int64, np.float64, np.float32))


@intrinsic
def pointer(typingctx, address, like):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(like.dtype)(address, like), codegen


@intrinsic
def take_ticket(typingctx, counter):
    """Atomically increment the number at this address, and return its old value."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return numba.types.int64(numba.types.CPointer(numba.types.int64)), codegen


@intrinsic
def call_address(typingctx, address, shared, tensor, tile, start, n):
    """Call the C function at this address with the numbers that follow."""

    def codegen(context, builder, signature, args):
        kinds = [argument.type for argument in args[1:]]
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(function, args[1:])
        return context.get_dummy_value()

    int64 = numba.types.int64
    return numba.types.void(int64, numba.types.CPointer(int64), int64, int64, int64, int64), codegen


@cache
def driver() -> tuple[int, Callable[[int], None]]:
    """Return the loop over the tiles: its address, and a Python callable that takes the address of its arguments.

    It is called through ctypes, because numba's own calls take longer to pass their arguments than a small launch runs.
    """
    shared = numba.types.CPointer(numba.types.int64)
    with compiling():
        address = cached(numba.cfunc, numba.types.void(shared), error_model="numpy")(_drive).address
    return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _drive(shared):
    # No constant of another file is used here, since numba's cache would not notice that it has changed.
    gradients = pointer(shared[GRADIENTS], INT64)
    tiles, partials = pointer(shared[TILES], INT64), pointer(shared[PARTIALS], FLOAT64)
    n_values, block = shared[N_VALUES], shared[N_BLOCK]
    j = take_ticket(shared)
    while j < shared[N_TILES]:
        t = tiles[3 * j]
        if gradients[t] != 0:
            for k in range(n_values):
                partials[j * n_values + k] = 0.0
            end = tiles[3 * j + 2]
            for start in range(tiles[3 * j + 1], end, block):
                call_address(shared[COMPUTE], shared, t, j, start, min(block, end - start))
        j = take_ticket(shared)


@cache
def adder() -> Callable[[int], None]:
    """Return the loop that adds up the results of tiles, called as `driver`'s is."""
    with compiling():
        compiled = cached(numba.cfunc, numba.types.void(numba.types.CPointer(numba.types.int64)), error_model="numpy")
        address = compiled(_add_up).address
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _add_up(shared):
    # Writes to `totals` the sums, or maxima, over the tiles of each tensor, or of all tensors if they are added up together.
    # Tiles are added in their order. Tensors without a gradient count as 0.
    gradients, tiles = pointer(shared[GRADIENTS], INT64), pointer(shared[TILES], INT64)
    partials, largest = pointer(shared[PARTIALS], FLOAT64), pointer(shared[LARGEST], INT64)
    n_rows, n_values = shared[N_TENSORS], shared[N_VALUES]
    found = np.zeros(n_rows * n_values)
    for j in range(shared[N_TILES]):
        t = tiles[3 * j]
        if gradients[t] != 0:
            for k in range(n_values):
                at, value = k if shared[TOGETHER] else t * n_values + k, partials[j * n_values + k]
                found[at] = np.maximum(found[at], value) if largest[k] else found[at] + value
    for i in range(n_rows):
        for k in range(n_values):
            value = found[k if shared[TOGETHER] else i * n_values + k]
            if shared[IS_DOUBLE]:
                pointer(shared[TOTALS], FLOAT64)[i * n_values + k] = value
            else:
                pointer(shared[TOTALS], FLOAT32)[i * n_values + k] = np.float32(value)
