"""Gradient compression on the CPU: a loop, compiled by numba, that reads, sums, quantises and packs.

Imported when the cpu backend first compresses something. A piece of `PIECE` values goes through all stages while it is in
the first-level cache; each stage is a loop that vectorises. One function, compiled once, hands out the pieces, as in
backends/cpu/driver.py. The source text of the function that computes a piece is generated for each kind of job, and kept
with its compiled code in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from ..backends.cpu.disk_cache import compiling, engine_text, entry, import_generated
from ..backends.cpu.driver import call_address, pointer, take_ticket
from ..backends.cpu.intrinsics import bits_of_float, float_of_bits, jit, jit_exact, jit_separate, jit_sums, jit_variant, same
from ..backends.cpu.loops import compile_lock
from ..backends.cpu.low_precision import LOAD, MEMORY, STORE
from ..backends.cpu.ops import bind
from ..backends.cpu.threads import PARALLEL_FROM, run_threads
from .codecs import BLOCK, TILE, Job, mean_of_shares, share_of_largest

PIECE = 2 * TILE  # values that go through all stages together; one tile at the end of a chunk of odd tiles
SHARE = 32  # pieces that a thread takes at a time
_loops: dict[tuple[Any, ...], Any] = {}

# The places of a loop's arguments in an int64 array that the threads share: the next pieces to take, addresses, sizes, the
# bits of the code's parameter. backends/cpu/driver.py uses the same scheme.
TICKET, SOURCE, RESIDUAL, TARGET, N, CHUNK, SOURCE_SIZE, TARGET_SIZE = range(8)
PARAMETER, SEVERAL, WIDTH, ROOM, RANKS, AT_ONCE, COMPUTE = range(8, 15)


def run(job: Job) -> None:
    key = job.code.name, job.source.dtype, job.residual is not None, job.target.dtype, job.reads, job.writes
    with compile_lock:
        if key not in _loops:
            with compiling():
                _loops[key] = _compile(job)
    (address, call), room = _driver(), job.chunks * job.chunk
    tensors = [0 if tensor is None else tensor.data_ptr() for tensor in (job.source, job.residual, job.target)]
    strides = [tensor.stride(0) for tensor in (job.source, job.target)]
    parameter = int(np.float32(job.parameter).view(np.uint32))
    several = job.ranks if job.reads == "messages" else 1
    width = job.code.vote_bits(job.ranks) if "votes" in (job.reads, job.writes) else 0
    numbers = [job.n, job.chunk, *strides, parameter, several, width, room, job.ranks, PIECE, _loops[key].address]
    shared = np.array([0, *tensors, *numbers], dtype=np.int64)
    threads = min(torch.get_num_threads(), -(-room // (PIECE * SHARE))) if room >= PARALLEL_FROM else 1
    if threads > 1:
        run_threads(address, shared.ctypes.data, threads)
    else:
        call(shared.ctypes.data)


@cache
def _driver() -> tuple[int, Callable[[int], None]]:
    address = entry()(_drive).address
    return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _drive(shared):
    # Uses no constant of another file: numba's cache would not notice that it has changed.
    n, chunk, room, at_once = shared[N], shared[CHUNK], shared[ROOM], shared[AT_ONCE]
    scratch = np.empty(9 * at_once, np.uint8)  # a piece's values, float32, its votes, int32, and its codes, uint8
    j = take_ticket(shared)
    while j * at_once * SHARE < room:
        start, stop = j * at_once * SHARE, min((j + 1) * at_once * SHARE, room)
        while start < stop:
            m = min(at_once, stop - start, chunk - start % chunk)
            call_address(shared[COMPUTE], shared, scratch.ctypes.data, start, m, max(min(m, n - start), 0))
            start += m
        j = take_ticket(shared)


@jit
def _value_of_bits(bits):
    return float_of_bits(np.uint32(bits))


_LEAST, _INFINITE = np.int32(0x00800000), np.int32(0x7F800000)
_NONE, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)


@jit_exact
def _largest(x, first):
    bits = np.int32(0)
    for i in range(first, first + BLOCK):  # in the order of the bits, in which NaN is the largest
        bits = max(bits, np.int32(bits_of_float(x[i]) & np.uint32(0x7FFFFFFF)))
    if bits < _LEAST:
        return _NONE
    return float_of_bits(np.uint32(bits)) if bits < _INFINITE else _NAN


@jit
def _shrunk(largest):
    return _ONE / largest if largest > _NONE else largest


def _packing(bits: int) -> tuple[Any, Any]:
    """Return functions that pack n codes into bytes, the first code in the highest bits, and unpack them."""
    if bits == 8:

        @jit_separate
        def copy(codes, n, out):
            for i in range(n):
                out[i] = codes[i]

        return copy, copy
    per, wide, mask = 8 // bits, np.uint32(bits), np.uint32((1 << bits) - 1)

    @jit_variant(str(bits))
    def pack(codes, n, out):
        for j in range(n // per):
            byte = np.uint32(0)
            for k in range(per):
                byte = (byte << wide) | np.uint32(codes[per * j + k])
            out[j] = np.uint8(byte)

    @jit_variant(str(bits))
    def unpack(packed, n, codes):
        for j in range(n // per):
            byte = np.uint32(packed[j])
            for k in range(per):
                codes[per * j + k] = np.uint8((byte >> np.uint32(8 - bits * (k + 1))) & mask)

    return pack, unpack


PACKING = {bits: _packing(bits) for bits in (1, 2, 4, 8)}


def _compile(job: Job) -> Any:
    code, bits = job.code, job.code.bits
    source = _source(job)
    pack, unpack = PACKING[1 if "votes" in (job.reads, job.writes) and job.writes != "votes" else min(bits, 8)]
    bound = {
        name: None if f is None else bind(f, np.float32)
        for name, f in {
            "quantise": code.quantise, "value_of": code.value, "left_over": code.left, "vote": code.vote,
            "sum_of_votes": code.sum_of_votes, "share": share_of_largest, "mean": mean_of_shares,
        }.items()
    }  # fmt: skip
    kinds = {"source": job.source.dtype, "target": job.target.dtype}
    half = code.dtype or torch.float16
    names = bound | {
        "pack": pack,
        "pack_bits": PACKING[1][0],
        "unpack": unpack,
        "unpack_bits": PACKING[1][1],
        "largest": _largest,
        "shrink": _shrunk,
        "value_of_bits": _value_of_bits,
        "load_source": LOAD.get(kinds["source"], same),
        "store_target": STORE.get(kinds["target"], same),
        "load_half": LOAD[half],
        "store_half": STORE[half],
        "SOURCE": np.empty(0, dtype=MEMORY.get(kinds["source"], "u1")),
        "TARGET": np.empty(0, dtype=MEMORY.get(kinds["target"], "u1")),
        "FLOAT": np.empty(0, dtype=np.float32),
        "HALF": np.empty(0, dtype="u2"),
        "BYTE": np.empty(0, dtype="u1"),
        "INT": np.empty(0, dtype=np.int32),
        "float32": np.float32,
        "int32": np.int32,
        "uint8": np.uint8,
        "uint32": np.uint32,
        "ZERO": np.float32(0),
        "pointer": pointer,
        "jit_sums": jit_sums,
        "entry": entry(*[numba.types.int64] * 4),
    }
    # numba's cache does not see the functions that a cached one calls: everything that decides goes into the file name.
    files = [Path(__file__).with_name("codecs.py").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")]
    text = repr((source, code.name, str(kinds), *files, engine_text()))
    name = f"compress_{code.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return import_generated(name, source, names)


def _source(job: Job) -> str:
    """Return the source of the function that computes `m` values from `start` on; only the first `there` of them exist."""
    sums = _SUM_OF_SHARES if job.code.scaled_by == "mean" else ""
    return f'''"""Generated by tristep for gradient codes; safe to delete."""

{sums}
@entry
def compute(shared, scratch, start, m, there):
    source, residual, target = shared[{SOURCE}], shared[{RESIDUAL}], shared[{TARGET}]
    chunk, source_size, target_size, width = shared[{CHUNK}], shared[{SOURCE_SIZE}], shared[{TARGET_SIZE}], shared[{WIDTH}]
    parameter, ranks = value_of_bits(shared[{PARAMETER}]), float32(shared[{RANKS}])
    x, votes, codes = pointer(scratch, FLOAT), pointer(scratch + {4 * PIECE}, INT), pointer(scratch + {8 * PIECE}, BYTE)
    piece = start // chunk
    inside = start - piece * chunk
{textwrap.indent(_reading(job) + _writing(job), "    ")}'''


_SUM_OF_SHARES = f"""
@jit_sums
def sum_of_shares(x, first, shrunk):
    total = ZERO
    for i in range(first, first + {BLOCK}):
        total += share(x[i], shrunk)
    return total

"""


def _bytes(message: str, bits: int) -> str:
    return f"pointer({message} + inside * {bits} // 8, BYTE)"


def _scales(message: str, bits: int) -> str:
    return f"pointer({message} + chunk * {bits} // 8 + inside // {BLOCK} * 4, FLOAT)"


def _plane(message: str) -> str:
    return f"pointer({message} + k * (chunk // 8) + inside // 8, BYTE)"


def _reading(job: Job) -> str:
    """Return the lines that fill x, or count votes."""
    code, bits = job.code, job.code.bits
    if job.reads == "values":
        return """\
values = pointer(source + start * SOURCE.itemsize, SOURCE)
for i in range(there):
    x[i] = load_source(values[i])
for i in range(there, m):
    x[i] = ZERO
"""
    if job.reads == "votes":
        return f"""\
for i in range(m):
    votes[i] = 0
for k in range(width):
    unpack_bits({_plane("source + piece * source_size")}, m, codes)
    for i in range(m):
        votes[i] += int32(uint32(codes[i]) << uint32(k))
for i in range(m):
    x[i] = sum_of_votes(float32(votes[i]), ranks, parameter)
"""
    message = "source + (piece + r) * source_size"
    if job.writes == "votes":
        return f"""\
for i in range(m):
    votes[i] = 0
for r in range(shared[{SEVERAL}]):
    unpack({_bytes(message, bits)}, m, codes)
    for i in range(m):
        votes[i] += int32(vote(float32(codes[i])))
"""
    if code.dtype is not None:
        opened = f"halves = pointer({message} + inside * 2, HALF)"
        each = _set_or_add("m", "load_half(halves[i])")
    elif code.scaled_by:
        opened = f"unpack({_bytes(message, bits)}, m, codes)\n    scales = {_scales(message, bits)}"
        each = f"""\
for b in range(m // {BLOCK}):
    scale = scales[b]
{textwrap.indent(_set_or_add(f"b * {BLOCK}, (b + 1) * {BLOCK}", "value_of(float32(codes[i]), parameter, scale)"), "    ")}"""
    else:
        opened = f"unpack({_bytes(message, bits)}, m, codes)"
        each = _set_or_add("m", "value_of(float32(codes[i]), parameter, ZERO)")
    return f"for r in range(shared[{SEVERAL}]):\n    {opened}\n{textwrap.indent(each, '    ')}"


def _set_or_add(range_: str, value: str) -> str:
    """Return the lines that set x to the value for the first message, and add the value to x for the others."""
    return f"""\
if r == 0:
    for i in range({range_}):
        x[i] = {value}
else:
    for i in range({range_}):
        x[i] = x[i] + {value}
"""


def _writing(job: Job) -> str:
    """Return the lines that write x, or votes, to the target, and update the residual."""
    code, bits = job.code, job.code.bits
    if job.writes == "values":
        return """\
values = pointer(target + start * TARGET.itemsize, TARGET)
for i in range(there):
    values[i] = store_target(x[i])
"""
    message = "target + piece * target_size"
    if job.writes == "votes":
        return f"""\
for k in range(width):
    for i in range(m):
        codes[i] = uint8((uint32(votes[i]) >> uint32(k)) & uint32(1))
    pack_bits(codes, m, {_plane(message)})
"""
    text = ""
    if job.residual is not None:
        text += """\
left = pointer(residual + start * 4, FLOAT)
for i in range(there):
    x[i] = x[i] + left[i]
"""
    text += "for i in range(there, m):\n    x[i] = ZERO\n"

    def coded(first: str, last: str, lines: str, left: str) -> str:
        """Return loops that run `lines` for each value and store the residual `left` of each value that exists."""
        if job.residual is None:
            return f"for i in range({first}, {last}):{lines}\n"
        return f"""\
for i in range({first}, min(max(there, {first}), {last})):{lines}
    left[i] = {left}
for i in range(min(max(there, {first}), {last}), {last}):{lines}
"""

    if code.dtype is not None:
        text += f"halves = pointer({message} + inside * 2, HALF)\n"
        lines = "\n    half = store_half(x[i])\n    halves[i] = half"
        return text + coded("0", "m", lines, "left_over(x[i], load_half(half))")
    scale, shrunk = ("scale", "shrunk") if code.scaled_by else ("ZERO", "ZERO")
    lines = f"\n    code = quantise(x[i], parameter, {shrunk})\n    codes[i] = uint8(int32(code))"
    left = f"left_over(x[i], value_of(code, parameter, {scale}))"
    if code.scaled_by:
        scaled = "mean(sum_of_shares(x, first, shrunk), most)" if code.scaled_by == "mean" else "most"
        text += f"""\
scales = {_scales(message, bits)}
for b in range(m // {BLOCK}):
    first = b * {BLOCK}
    most = largest(x, first)
    shrunk = shrink(most)
    scale = {scaled}
    scales[b] = scale
{textwrap.indent(coded("first", f"first + {BLOCK}", lines, left), "    ")}"""
    else:
        text += coded("0", "m", lines, left) + "for i in range(there, m):\n    codes[i] = 0\n"
    return f"{text}pack(codes, m, {_bytes(message, bits)})\n"
