"""Load one block of a tile, apply the rule, and store it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ... import storage
from .memory import (
    has_packed,
    indices,
    is_packed,
    load,
    load_key,
    pack,
    put,
    random_words,
    rounded_to_24_bits,
    rounds_to,
    store,
    unpack,
    unpack_at,
)

# What a line of a piece is: a part of a row, rows of one matrix side by side, whole matrices side by side, or any elements.
PART, ROWS_OF_ONE, SEVERAL, FLAT = range(4)
_PART, _ROWS_OF_ONE, _SEVERAL, _FLAT = map(tl.constexpr, range(4))
_FULL, _SPLIT, _SPLIT8 = (tl.constexpr(int(storage.MasterKind[name])) for name in ("FULL", "SPLIT", "SPLIT8"))


class Layout(NamedTuple):
    """The storage formats that all tensors of a launch share; a constant of its kernel.

    Attributes:
        weight, gradient, compute: Triton's types of weights and gradients in memory, and of the arithmetic.
        states: the type of each state in memory; for packed states the type from `PACKED_TYPES`.
        changed: for each state whether the rule changes it.
        master: a `storage.MasterKind`.
        stochastic: 1 if everything in low precision is rounded stochastically, 2 if only packed states are, else 0.
        n_hyper: number of hyper-parameters in a row, after its first element, the gradient's factor.
        aligned: whether all addresses are multiples of 16 bytes.
        block: elements that a program updates at a time.
        tail: elements that it updates at a time where fewer than `block` are left.
        unit, line: as in `Walk` of pieces.py.
        group: neighbours of a line that a thread has.
        span: most rows, or matrices, that these are in, if a line has whole ones.
        parts: number of rows of the address table that `Parts` adds; 0 if the rule has no means.
        first_part: place of the first of these in what `load_addresses` returns.
    """

    weight: Any
    gradient: Any
    compute: Any
    states: tuple[Any, ...]
    changed: tuple[bool, ...]
    master: int
    stochastic: int
    n_hyper: int
    aligned: bool
    block: int
    tail: int
    unit: int
    line: int
    group: int
    span: int
    parts: int
    first_part: int


class Arguments(NamedTuple):
    """The arguments that a rule's function takes; a constant of its kernel.

    Attributes:
        states: indices of the function's states among the rule's.
        hyper, sums: indices of its hyper-parameters, and of the reduction's results that it takes, in their rows.
        n_sums: number of results in a row.
        scopes: for each result 0, or if it is a vector, whose index among the rule's is in `sums`, 1 for rows, 2 for
            columns, 3 for matrices. () if there are no vectors.
        counts_unchanged: whether its metric's last value counts the elements whose stored value has not changed.
    """

    states: tuple[int, ...]
    hyper: tuple[int, ...]
    sums: tuple[int, ...]
    n_sums: int
    scopes: tuple[int, ...]
    takes_index: bool
    counts_unchanged: bool


@triton.constexpr_function
def elements_of(LAYOUT, FULL):
    return LAYOUT.block if FULL else LAYOUT.tail


@triton.jit
def load_addresses(column, n_tensors, LAYOUT: tl.constexpr):
    # Addresses of the weight, the states and the master, and the rows of `Parts`. `column`: pointer to the tensor's column
    # of the address table.
    addresses = (tl.load(column),)
    for k in tl.static_range(len(LAYOUT.states) + (LAYOUT.master != 0) + LAYOUT.parts):
        addresses = addresses + (tl.load(column + (2 + k) * n_tensors),)  # type: ignore[assignment]
    return addresses


@triton.jit
def load_numbers(row, sums, control, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    # Returns the gradient's factor, the function's hyper-parameters and sums, and the key of stochastic rounding.
    rescale = tl.load(row)
    if control is not None:
        rescale *= tl.load(control).to(LAYOUT.compute)
    HYPER: tl.constexpr = ARGUMENTS.hyper  # up to 3.6 Triton accepts no attribute as a constexpr argument
    SUMS: tl.constexpr = ARGUMENTS.sums
    key = tl.full((), 0, tl.uint32)
    if LAYOUT.stochastic:
        key = load_key(row, LAYOUT.n_hyper)
    if len(ARGUMENTS.scopes) > 0:
        return rescale, _load_all(row, HYPER), _load_scalars(sums, ARGUMENTS), key
    else:
        return rescale, _load_all(row, HYPER), _load_all(sums, SUMS), key


@triton.jit
def _load_scalars(row, ARGUMENTS: tl.constexpr):
    # The results that are one for the tensor; 0 for vectors, of which lines have numbers.
    values = ()
    for k in tl.static_range(len(ARGUMENTS.scopes)):
        if ARGUMENTS.scopes[k] == 0:
            values = values + (tl.load(row + ARGUMENTS.sums[k]),)  # type: ignore[assignment]
        else:
            values = values + (0.0,)  # type: ignore[assignment]
    return values


@triton.jit
def places_in(piece, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    # Where in vectors of rows, columns and matrices the numbers of a line's elements are, from those of the first row, the
    # first matrix's first column, and the first matrix on; of rows and matrices, unless a line is flat, those of the first
    # neighbour that a thread has, as `_of_neighbours` says. `piece`: see pieces.py.
    if LAYOUT.line == _PART or len(ARGUMENTS.scopes) == 0:
        return ()
    else:
        columns, rows = piece[7], piece[8]
        across = piece[5].to(tl.int32) + tl.arange(0, LAYOUT.block)
        down = _quotient(across, columns, LAYOUT)
        if LAYOUT.line == _ROWS_OF_ONE:
            return _of_neighbours(columns, LAYOUT), across - down * columns.to(tl.int32)
        else:
            over = _quotient((piece[3] - piece[4] * rows).to(tl.int32) + down, rows, LAYOUT)
            column = across + (over - down) * columns.to(tl.int32)
            if LAYOUT.line == _SEVERAL:
                return _of_neighbours(columns, LAYOUT), column, _of_neighbours(rows * columns, LAYOUT)
            else:
                return down, column, over


@triton.jit
def _of_neighbours(size, LAYOUT: tl.constexpr):
    # Of the neighbours of each thread the first one's row, or matrix, of `size` elements; and how many are in it at most.
    GROUP: tl.constexpr = LAYOUT.group
    across, size = GROUP * tl.arange(0, LAYOUT.block // GROUP), size.to(tl.int32)
    first = _quotient(across, size, LAYOUT)
    return first, (first + 1) * size - across, size


@triton.jit
def _vector(addresses, k: tl.constexpr, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    return addresses[LAYOUT.first_part + 2 + ARGUMENTS.sums[k]].to(tl.pointer_type(LAYOUT.compute))


@triton.jit
def load_of_piece(sums, addresses, piece, places, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    # The results with the numbers that are the same in all lines of a piece: of its columns, and of its matrix.
    values, lanes = (), tl.arange(0, LAYOUT.block)
    for k in tl.static_range(len(ARGUMENTS.sums)):
        if len(ARGUMENTS.scopes) == 0 or ARGUMENTS.scopes[k] < 2 or LAYOUT.line >= _SEVERAL:
            values = values + (sums[k],)  # type: ignore[assignment]
        elif ARGUMENTS.scopes[k] == 3:
            values = values + (tl.load(_vector(addresses, k, ARGUMENTS, LAYOUT) + piece[4]),)  # type: ignore[assignment]
        else:
            vector = _vector(addresses, k, ARGUMENTS, LAYOUT) + piece[4] * piece[7]
            if LAYOUT.line == _ROWS_OF_ONE:
                vector += places[1]
            else:
                vector += piece[5]
                if LAYOUT.aligned:
                    vector = tl.multiple_of(vector, 16)
                vector += lanes
            values = values + (tl.load(vector, mask=lanes < piece[1], other=1.0),)  # type: ignore[assignment]
    return values


@triton.jit
def load_of_line(sums, addresses, piece, places, down, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    # The results with the numbers of a line: of its rows, and if these are of several matrices, of columns and matrices.
    values = ()
    for k in tl.static_range(len(ARGUMENTS.sums)):
        if len(ARGUMENTS.scopes) > 0 and ARGUMENTS.scopes[k] == 1:
            vector = _vector(addresses, k, ARGUMENTS, LAYOUT) + (piece[3] + down * piece[9])
            if LAYOUT.line == _PART:
                values = values + (tl.load(vector),)  # type: ignore[assignment]
            elif LAYOUT.line == _FLAT:
                values = values + (_load_each(vector, places[0], piece[1], LAYOUT),)  # type: ignore[assignment]
            else:
                values = values + (_load_for_neighbours(vector, places[0], piece[1], LAYOUT),)  # type: ignore[assignment]
        elif len(ARGUMENTS.scopes) > 0 and ARGUMENTS.scopes[k] > 1 and LAYOUT.line >= _SEVERAL:
            vector, matrix = _vector(addresses, k, ARGUMENTS, LAYOUT), piece[4] + down * piece[10]
            if ARGUMENTS.scopes[k] == 2:
                value = _load_each(vector + matrix * piece[7], places[1], piece[1], LAYOUT)
            elif LAYOUT.line == _FLAT:
                value = _load_each(vector + matrix, places[2], piece[1], LAYOUT)
            else:
                value = _load_for_neighbours(vector + matrix, places[2], piece[1], LAYOUT)
            values = values + (value,)  # type: ignore[assignment]
        else:
            values = values + (sums[k],)  # type: ignore[assignment]
    return values


@triton.jit
def _load_each(vector, places, width, LAYOUT: tl.constexpr):
    return tl.load(vector + places, mask=tl.arange(0, LAYOUT.block) < width, other=1.0)


@triton.jit
def _load_for_neighbours(vector, places, width, LAYOUT: tl.constexpr):
    # A thread loads one number of each row, or matrix, that its neighbours are in.
    GROUP: tl.constexpr = LAYOUT.group
    SPAN: tl.constexpr = LAYOUT.span
    first, end, size = places
    across, neighbours = GROUP * tl.arange(0, LAYOUT.block // GROUP), tl.arange(0, GROUP)
    values = tl.load(vector + first, mask=across < width, other=1.0)[:, None]
    for k in tl.static_range(1, SPAN):
        value = tl.load(vector + first + k, mask=(end < GROUP) & (across + end < width), other=1.0)
        values = tl.where(neighbours[None, :] < end[:, None], values, value[:, None])
        end += size
    return tl.reshape(values, (LAYOUT.block,))


@triton.jit
def _quotient(numbers, divisor, LAYOUT: tl.constexpr):
    # Quotients, rounded down, of whole numbers below twice the larger one of divisor and block. In float32 those of numbers
    # below 2^12 + 0.5 are wrong by less than they differ from any whole number by, and take 4 instructions instead of 20.
    # No branch, through which compilers would not bring the layout of what is loaded.
    quotient = ((numbers.to(tl.float32) + 0.5) * (1.0 / divisor.to(tl.float32))).to(tl.int32)
    return tl.where(divisor >= LAYOUT.block, (numbers >= divisor).to(tl.int32), quotient)


@triton.jit
def _load_all(row, PLACES: tl.constexpr):
    values = ()
    for k in tl.static_range(len(PLACES)):
        values = values + (tl.load(row + PLACES[k]),)  # type: ignore[assignment]
    return values


@triton.jit
def _load_states(addresses, at, offsets, tile, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    states = ()
    for k in tl.static_range(len(ARGUMENTS.states)):
        address = addresses[1 + ARGUMENTS.states[k]]
        if is_packed(LAYOUT.states[ARGUMENTS.states[k]]):
            state = unpack(address, at, offsets, tile, LAYOUT.states[ARGUMENTS.states[k]], FULL, LAYOUT.aligned)
        else:
            state = load(
                address, offsets, tile, LAYOUT.states[ARGUMENTS.states[k]], LAYOUT.compute, FULL, LAYOUT.aligned
            )  # fmt: skip
        states = states + (state,)  # type: ignore[assignment]
    return states


@triton.jit
def call(FUNCTION: tl.constexpr, w, g, states, hyper, sums, index, ARGUMENTS: tl.constexpr):
    if len(ARGUMENTS.sums) == 0 and not ARGUMENTS.takes_index:
        return FUNCTION(w, g, states, hyper)
    elif len(ARGUMENTS.sums) == 0:
        return FUNCTION(w, g, states, hyper, index)
    elif ARGUMENTS.takes_index:
        return FUNCTION(w, g, states, hyper, sums, index)
    else:
        return FUNCTION(w, g, states, hyper, sums)


@triton.jit
def load_inputs(addresses, gradient, rescale, at, tile, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # The gradient, multiplied, and the function's states.
    offsets = at + tl.arange(0, elements_of(LAYOUT, FULL))
    g = load(gradient, offsets, tile, LAYOUT.gradient, LAYOUT.compute, FULL, LAYOUT.aligned) * rescale
    return g, _load_states(addresses, at, offsets, tile, ARGUMENTS, LAYOUT, FULL)


@triton.jit
def load_weight(addresses, at, tile, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # The weight as stored: the weight, and its master if it has one.
    return _load_weight(addresses, at + tl.arange(0, elements_of(LAYOUT, FULL)), tile, LAYOUT, FULL)


@triton.jit
def _load_weight(addresses, offsets, tile, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    master = addresses[len(LAYOUT.states) + (LAYOUT.master != 0)]
    stored = (load(addresses[0], offsets, tile, LAYOUT.weight, LAYOUT.weight, FULL, LAYOUT.aligned),)
    if LAYOUT.master == _FULL:
        stored += (load(master, offsets, tile, LAYOUT.compute, LAYOUT.compute, FULL, LAYOUT.aligned),)  # type: ignore[assignment]
    elif LAYOUT.master == _SPLIT:
        stored += (load(master, offsets, tile, tl.int16, tl.int16, FULL, LAYOUT.aligned),)  # type: ignore[assignment]
    elif LAYOUT.master == _SPLIT8:
        stored += (load(master, offsets, tile, tl.int8, tl.int8, FULL, LAYOUT.aligned),)  # type: ignore[assignment]
    return stored


@triton.jit
def combined(stored, LAYOUT: tl.constexpr):
    # The weight that the rule sees, in the type of the arithmetic.
    w = stored[0].to(LAYOUT.compute)
    if LAYOUT.master == _FULL:  # holds unless the weight was written since the last step
        w = tl.where(rounds_to(stored[1], stored[0], LAYOUT.weight), stored[1], w)
    elif LAYOUT.master == _SPLIT:
        w = (w.to(tl.int32, bitcast=True) + stored[1].to(tl.int32)).to(LAYOUT.compute, bitcast=True)
    elif LAYOUT.master == _SPLIT8:
        w = (w.to(tl.int32, bitcast=True) + (stored[1].to(tl.int32) << 8)).to(LAYOUT.compute, bitcast=True)
    return w


@triton.jit
def compute_block(
    addresses,
    stored,
    gradient,
    numbers,
    at,
    tile,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    FULL: tl.constexpr,
):
    w = combined(stored, LAYOUT)
    g, states = load_inputs(addresses, gradient, numbers[0], at, tile, ARGUMENTS, LAYOUT, FULL)
    index = indices(at, tile, elements_of(LAYOUT, FULL))
    return call(FUNCTION, w, g, states, numbers[1], numbers[2], index, ARGUMENTS)


@triton.jit
def load_at(
    sums, addresses, places, offsets, FIRST: tl.constexpr, LAST: tl.constexpr, ARGUMENTS: tl.constexpr, LAYOUT: tl.constexpr
):
    # The results with the numbers of some scopes. `places`: for each of these the places in a vector, and which are there.
    values = ()
    for k in tl.static_range(len(ARGUMENTS.sums)):
        if len(ARGUMENTS.scopes) == 0 or ARGUMENTS.scopes[k] < FIRST or ARGUMENTS.scopes[k] > LAST:
            values = values + (sums[k],)  # type: ignore[assignment]
        else:
            place, there = places[ARGUMENTS.scopes[k] - FIRST]
            value = tl.load(_vector(addresses, k, ARGUMENTS, LAYOUT) + place, mask=there, other=1.0)
            values = values + (tl.broadcast_to(value, offsets.shape),)  # type: ignore[assignment]
    return values


@triton.jit
def compute_at(
    addresses,
    gradient,
    numbers,
    offsets,  # of elements in any order
    tile,  # as `load` takes it, with what says of each element whether it is there
    sums,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    w = combined(_load_weight(addresses, offsets, tile, LAYOUT, 3), LAYOUT)
    g = load(gradient, offsets, tile, LAYOUT.gradient, LAYOUT.compute, 3, LAYOUT.aligned) * numbers[0]
    states = ()
    for k in tl.static_range(len(ARGUMENTS.states)):
        address = addresses[1 + ARGUMENTS.states[k]]
        if is_packed(LAYOUT.states[ARGUMENTS.states[k]]):
            state = unpack_at(address, tile[0] + offsets, tile[1], tile[2], LAYOUT.states[ARGUMENTS.states[k]])
        else:
            state = load(
                address, offsets, tile, LAYOUT.states[ARGUMENTS.states[k]], LAYOUT.compute, 3, LAYOUT.aligned
            )  # fmt: skip
        states = states + (state,)  # type: ignore[assignment]
    return call(FUNCTION, w, g, states, numbers[1], sums, tile[0] + offsets, ARGUMENTS)


@triton.jit
def _store_weight(address, master, w, offsets, tile, words, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # Store the rounded weight, and in its master what rounding took off; see storage/master.py.
    if LAYOUT.master == _SPLIT:
        bits = w.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(tl.uint16)
        high = high.to(tl.bfloat16, bitcast=True)
        low = tl.where(nan, 0, bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        put(address, high, offsets, tile, LAYOUT.weight, FULL, LAYOUT.aligned)
        put(master, low, offsets, tile, tl.int16, FULL, LAYOUT.aligned)
        return high, low
    else:
        AT_RANDOM: tl.constexpr = LAYOUT.stochastic == 1
        SLOT: tl.constexpr = len(LAYOUT.states)
        bits = rounded_to_24_bits(w, AT_RANDOM, words, SLOT)
        high = ((bits + 0x8000) >> 16).to(tl.uint16)
        high = high.to(tl.bfloat16, bitcast=True)
        low = (bits >> 8).to(tl.uint8).to(tl.int8, bitcast=True)
        put(address, high, offsets, tile, LAYOUT.weight, FULL, LAYOUT.aligned)
        put(master, low, offsets, tile, tl.int8, FULL, LAYOUT.aligned)
        return high, low


@triton.jit
def _spread(value, offsets):
    # Expand to one number per element, also a constant. It adds -0.0, which changes no number, given by its bits: of the
    # number Triton 3.5 to 3.8 make 0.0, which turns -0.0 into 0.0 and takes an instruction.
    return value + tl.full(offsets.shape, -(1 << 31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_block(addresses, key, at, tile, w, states, LAYOUT: tl.constexpr, FULL: tl.constexpr):
    # Returns the weight as it is stored now, in the form of `load_weight`.
    offsets = at + tl.arange(0, elements_of(LAYOUT, FULL))
    if not FULL or has_packed(LAYOUT.states):
        tl.debug_barrier()  # until all have read what other threads are about to write: scales, and masked elements
    words = 0
    if LAYOUT.stochastic:
        words = random_words(key, at, tile, elements_of(LAYOUT, FULL), LAYOUT.unit == 1)
    if LAYOUT.master != 0 and LAYOUT.master != _FULL:
        stored = _store_weight(addresses[0], addresses[1 + len(LAYOUT.states)], w, offsets, tile, words, LAYOUT, FULL)
    else:
        AT_RANDOM: tl.constexpr = LAYOUT.stochastic == 1 and LAYOUT.master != _FULL and LAYOUT.weight == tl.bfloat16
        SLOT: tl.constexpr = len(LAYOUT.states)
        stored = (store(addresses[0], w, offsets, tile, LAYOUT.weight, FULL, LAYOUT.aligned, AT_RANDOM, words, SLOT),)
        if LAYOUT.master == _FULL:
            master = addresses[1 + len(LAYOUT.states)]
            stored += (store(master, w, offsets, tile, LAYOUT.compute, FULL, LAYOUT.aligned),)
    for k in tl.static_range(len(LAYOUT.states)):
        if LAYOUT.changed[k] and is_packed(LAYOUT.states[k]):
            pack(
                addresses[1 + k], _spread(states[k], offsets), at, offsets, tile,
                LAYOUT.states[k], FULL, LAYOUT.aligned, LAYOUT.stochastic > 0, words, k,
            )  # fmt: skip
        elif LAYOUT.changed[k]:
            store(
                addresses[1 + k], states[k], offsets, tile, LAYOUT.states[k], FULL, LAYOUT.aligned,
                LAYOUT.stochastic == 1 and LAYOUT.states[k] == tl.bfloat16, words, k,
            )  # fmt: skip
    return stored


@triton.jit
def count_unchanged(old, new, LAYOUT: tl.constexpr):
    # 1 for each element whose stored value is unchanged, compared as numbers: NaN counts as changed.
    return tl.where(combined(old, LAYOUT) == combined(new, LAYOUT), 1.0, 0.0)


@triton.jit
def fill_with_zeros(address, at, tile, LAYOUT: tl.constexpr):
    offsets = at + tl.arange(0, LAYOUT.block)
    zeros = tl.full(offsets.shape, 0.0, LAYOUT.gradient)
    if at + LAYOUT.block <= tile[1]:
        put(address, zeros, offsets, tile, LAYOUT.gradient, True, LAYOUT.aligned)
    else:
        put(address, zeros, offsets, tile, LAYOUT.gradient, False, LAYOUT.aligned)
