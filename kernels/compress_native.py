"""Gradient codes on the CPU: the loop that reads values or messages, adds, quantises, packs, compiled by numba.

Imported only when the cpu engine first codes something. A piece of `PIECE` values goes through all stages while it lies in
the first-level cache, each stage a loop that vectorises. As in native.py the text of the loop is generated for each kind of
job and kept, with its compiled code, in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from .compress import BLOCK, TILE, Code, Job, mean_of_shares, share_of_largest
from .native import (
    _LOAD,
    _MEMORY,
    _STORE,
    PARALLEL_FROM,
    _bits_of_float,
    _compile_lock,
    _entry,
    _float_of_bits,
    _for_type,
    _import_generated,
    _jit,
    _jit_apart,
    _jit_exact,
    _jit_sums,
    _jit_variant,
    _pointer,
    _run_threads,
    _same,
    _take_ticket,
    _words,
)

__all__ = ["run"]

PIECE = 2 * TILE  # values that go through all stages together, or a tile, where chunks end so
SHARE = 32  # pieces that a thread takes at a time
_loops: dict[tuple[Any, ...], Any] = {}


def run(job: Job) -> None:
    """Do the job, on several threads where there is work enough."""
    key = job.code.name, job.source.dtype, job.residual is not None, job.target.dtype, job.reads, job.writes
    with _compile_lock:
        if key not in _loops:
            loop = _compile(job)
            _loops[key] = loop, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop.address)
    (loop, call), room = _loops[key], job.chunks * job.chunk
    # What the threads share: the next piece to take, addresses, sizes, and the bits of the parameter.
    tensors = [0 if tensor is None else tensor.data_ptr() for tensor in (job.source, job.residual, job.target)]
    strides = [tensor.stride(0) for tensor in (job.source, job.target)]
    parameter = int(np.float32(job.parameter).view(np.uint32))
    several = job.ranks if job.reads == "messages" else 1
    width = job.code.vote_bits(job.ranks) if "votes" in (job.reads, job.writes) else 0
    numbers = [job.n, job.chunk, *strides, parameter, several, width, room, job.ranks]
    shared = np.array([0, *tensors, *numbers], dtype=np.int64)
    threads = min(torch.get_num_threads(), -(-room // (PIECE * SHARE))) if room >= PARALLEL_FROM else 1
    if threads > 1:
        _run_threads(loop.address, shared.ctypes.data, threads)
    else:
        call(shared.ctypes.data)


@_jit
def _value_of_bits(bits):
    return _float_of_bits(np.uint32(bits))


_LEAST, _INFINITE = np.int32(0x00800000), np.int32(0x7F800000)
_NONE, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)


@_jit_exact
def _largest(x):
    bits = np.int32(0)
    for i in range(x.size):  # in the order of the bits, in which NaN is the largest
        bits = max(bits, np.int32(_bits_of_float(x[i]) & np.uint32(0x7FFFFFFF)))
    if bits < _LEAST:
        return _NONE
    return _float_of_bits(np.uint32(bits)) if bits < _INFINITE else _NAN


@_jit
def _shrunk(largest):
    return _ONE / largest if largest > _NONE else largest


def _packing(bits: int) -> tuple[Any, Any]:
    """Functions that pack codes into bytes, the first in the highest bits, and back."""
    if bits == 8:

        @_jit_apart
        def copy(codes, out):
            for i in range(out.size):  # as a slice, numba compiles messages for shapes that differ, for two seconds
                out[i] = codes[i]

        return copy, copy
    per, wide, mask = 8 // bits, np.uint32(bits), np.uint32((1 << bits) - 1)

    @_jit_variant(str(bits))
    def pack(codes, out):
        for j in range(out.size):
            byte = np.uint32(0)
            for k in range(per):
                byte = (byte << wide) | np.uint32(codes[per * j + k])
            out[j] = np.uint8(byte)

    @_jit_variant(str(bits))
    def unpack(packed, codes):
        for j in range(packed.size):
            byte = np.uint32(packed[j])
            for k in range(per):
                codes[per * j + k] = np.uint8((byte >> np.uint32(8 - bits * (k + 1))) & mask)

    return pack, unpack


_PACKING = {bits: _packing(bits) for bits in (1, 2, 4, 8)}


@_jit_apart
def _plane(votes, k, bits):
    for i in range(votes.size):
        bits[i] = np.uint8((np.uint32(votes[i]) >> np.uint32(k)) & np.uint32(1))


@_jit_apart
def _add_plane(bits, k, votes):
    for i in range(votes.size):
        votes[i] += np.int32(np.uint32(bits[i]) << np.uint32(k))


def _compile(job: Job) -> Any:
    code, bits = job.code, job.code.bits
    source = _source(job)
    pack, unpack = _PACKING[1 if "votes" in (job.reads, job.writes) and job.writes != "votes" else min(bits, 8)]
    scalar = np.float32
    bound = {
        name: None if f is None else f.bind("numba float32", _words, _for_type(scalar))
        for name, f in {
            "quantise": code.quantise, "value_of": code.value, "left_over": code.left, "vote": code.vote,
            "sum_of_votes": code.sum_of_votes, "share": share_of_largest, "mean": mean_of_shares,
        }.items()
    }  # fmt: skip
    kinds = {"source": job.source.dtype, "target": job.target.dtype}
    half = code.dtype or torch.float16
    names = bound | {
        "pack": pack,
        "pack_bits": _PACKING[1][0],
        "unpack": unpack,
        "unpack_bits": _PACKING[1][1],
        "plane": _plane,
        "add_plane": _add_plane,
        "largest": _largest,
        "shrink": _shrunk,
        "value_of_bits": _value_of_bits,
        "load_source": _LOAD.get(kinds["source"], _same),
        "store_target": _STORE.get(kinds["target"], _same),
        "load_half": _LOAD[half],
        "store_half": _STORE[half],
        "SOURCE": np.empty(0, dtype=_MEMORY.get(kinds["source"], "u1")),
        "TARGET": np.empty(0, dtype=_MEMORY.get(kinds["target"], "u1")),
        "FLOAT": np.empty(0, dtype=np.float32),
        "HALF": np.empty(0, dtype="u2"),
        "BYTE": np.empty(0, dtype="u1"),
        "empty": np.empty,
        "float32": np.float32,
        "int32": np.int32,
        "uint8": np.uint8,
        "ZERO": np.float32(0),
        "pointer": _pointer,
        "carray": numba.carray,
        "take_ticket": _take_ticket,
        "jit": _jit_apart,
        "jit_sums": _jit_sums,
        "entry": _entry(fastmath={"contract"}),
    }
    # numba's cache does not see the functions that a cached one calls: everything that decides goes into the file name.
    files = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("compress.py", "native.py")]
    text = repr((source, code.name, str(kinds), *files, Path(__file__).read_text(encoding="utf-8")))
    name = f"compress_{code.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    module = _import_generated(name, source, names)
    if module is None:  # no folder to write to: compile in memory, every time anew
        exec(compile(source, f"<tristep {name}>", "exec"), names)
        return names["run"]
    return module.run


def _source(job: Job) -> str:
    """The text of the loop; the functions that take arrays are those that vectorise."""
    return f'''"""Generated by tristep for gradient codes; safe to delete."""

{_functions(job.code)}

@entry
def run(shared):
    what = carray(shared, 13)
    source, residual, target, n, chunk = what[1], what[2], what[3], what[4], what[5]
    source_size, target_size, several, width, room = what[6], what[7], what[9], what[10], what[11]
    parameter, ranks = value_of_bits(what[8]), float32(what[12])
    x, codes, votes = empty({PIECE}, float32), empty({PIECE}, uint8), empty({PIECE}, int32)
    j = take_ticket(shared)
    while j * {PIECE * SHARE} < room:
        start, stop = j * {PIECE * SHARE}, min(j * {PIECE * SHARE} + {PIECE * SHARE}, room)
        while start < stop:
            piece = start // chunk
            inside = start - piece * chunk
            m = min({PIECE}, stop - start, chunk - inside)
            there = max(min(m, n - start), 0)
{_indented(_reading(job))}
{_indented(_writing(job))}
            start += m
        j = take_ticket(shared)
'''


def _indented(text: str) -> str:
    return "\n".join("            " + line for line in text.splitlines())


def _bytes(message: str, bits: int) -> str:
    return f"carray(pointer({message} + inside * {bits} // 8, BYTE), m * {bits} // 8)"


def _scales(message: str, bits: int) -> str:
    return f"carray(pointer({message} + chunk * {bits} // 8 + inside // {BLOCK} * 4, FLOAT), m // {BLOCK})"


def _halves(message: str) -> str:
    return f"carray(pointer({message} + inside * 2, HALF), m)"


def _reading(job: Job) -> str:
    code, bits = job.code, job.code.bits
    if job.reads == "values":
        return """values = carray(pointer(source + start * SOURCE.itemsize, SOURCE), there)
load_values(values, x[:m])"""
    if job.reads == "votes":
        return """votes[:m] = 0
for k in range(width):
    packed = carray(pointer(source + piece * source_size + k * (chunk // 8) + inside // 8, BYTE), m // 8)
    unpack_bits(packed, codes[:m])
    add_plane(codes[:m], k, votes[:m])
add_up_votes(votes[:m], ranks, parameter, x[:m])"""
    message = "source + (piece + r) * source_size"
    if job.writes == "votes":
        each = f"unpack({_bytes(message, bits)}, codes[:m])\n    count(codes[:m], votes[:m])"
        return f"votes[:m] = 0\nfor r in range(several):\n    {each}"
    if code.dtype is not None:
        each = f"add_halves({_halves(message)}, x[:m], r == 0)"
    else:
        scales = _scales(message, bits) if code.scaled_by else "x[:0]"
        each = f"unpack({_bytes(message, bits)}, codes[:m])\n    add_values(codes[:m], {scales}, parameter, x[:m], r == 0)"
    return f"for r in range(several):\n    {each}"


def _writing(job: Job) -> str:
    code, bits = job.code, job.code.bits
    if job.writes == "values":
        return """values = carray(pointer(target + start * TARGET.itemsize, TARGET), there)
store_values(x[:m], values)"""
    message = "target + piece * target_size"
    if job.writes == "votes":
        return f"""for k in range(width):
    plane(votes[:m], k, codes[:m])
    pack_bits(codes[:m], carray(pointer({message} + k * (chunk // 8) + inside // 8, BYTE), m // 8))"""
    kept = f"carray(pointer(residual + start * 4, FLOAT), {'there' if job.residual is not None else 0})"
    lines = [f"left = {kept}", "add_residual(left, x[:m])", "x[there:m] = ZERO"]
    if code.dtype is not None:
        lines.append(f"put_halves(x[:m], {_halves(message)}, left)")
    else:
        scales = _scales(message, bits) if code.scaled_by else "x[:0]"
        lines.append(f"code_values(x[:m], {scales}, parameter, codes[:m], left)")
        if not code.scaled_by:
            lines.append("codes[there:m] = 0")
        lines.append(f"pack(codes[:m], {_bytes(message, bits)})")
    return "\n".join(lines)


def _functions(code: Code) -> str:
    """The loops over values."""
    if code.dtype is not None:
        return _VALUES + _OF_HALVES
    text = _VALUES + (_OF_SCALED if code.scaled_by else _OF_CODES)
    if code.vote is not None:
        text += _OF_VOTES
    return text.replace("SCALE_OF_BLOCK", "mean_of" if code.scaled_by == "mean" else "largest_of").replace(
        "PER_SCALE", str(BLOCK)
    )


_VALUES = """
@jit
def load_values(values, x):
    for i in range(values.size):
        x[i] = load_source(values[i])
    x[values.size:] = ZERO


@jit
def store_values(x, values):
    for i in range(values.size):
        values[i] = store_target(x[i])


@jit
def add_residual(left, x):
    for i in range(left.size):
        x[i] = x[i] + left[i]
"""

_OF_HALVES = """

@jit
def add_halves(halves, x, first):
    if first:
        for i in range(x.size):
            x[i] = load_half(halves[i])
    else:
        for i in range(x.size):
            x[i] = x[i] + load_half(halves[i])


@jit
def put_halves(x, halves, left):
    for i in range(left.size):
        half = store_half(x[i])
        halves[i] = half
        left[i] = left_over(x[i], load_half(half))
    for i in range(left.size, x.size):
        halves[i] = store_half(x[i])
"""

_OF_CODES = """

@jit
def add_values(codes, scales, parameter, x, first):
    if first:
        for i in range(x.size):
            x[i] = value_of(float32(codes[i]), parameter, ZERO)
    else:
        for i in range(x.size):
            x[i] = x[i] + value_of(float32(codes[i]), parameter, ZERO)


@jit
def code_values(x, scales, parameter, codes, left):
    for i in range(left.size):
        code = quantise(x[i], parameter, ZERO)
        codes[i] = uint8(int32(code))
        left[i] = left_over(x[i], value_of(code, parameter, ZERO))
    for i in range(left.size, x.size):
        codes[i] = uint8(int32(quantise(x[i], parameter, ZERO)))
"""

_OF_SCALED = """

@jit
def add_block(codes, scale, parameter, x, first):
    if first:
        for i in range(x.size):
            x[i] = value_of(float32(codes[i]), parameter, scale)
    else:
        for i in range(x.size):
            x[i] = x[i] + value_of(float32(codes[i]), parameter, scale)


@jit
def add_values(codes, scales, parameter, x, first):
    for b in range(scales.size):
        piece = slice(b * PER_SCALE, (b + 1) * PER_SCALE)
        add_block(codes[piece], scales[b], parameter, x[piece], first)


@jit_sums
def sum_of_shares(x, shrunk):
    total = ZERO
    for i in range(x.size):
        total += share(x[i], shrunk)
    return total


@jit
def largest_of(x, most, shrunk):
    return most


@jit
def mean_of(x, most, shrunk):
    return mean(sum_of_shares(x, shrunk), most)


@jit
def code_block(x, scale, shrunk, parameter, codes, left):
    for i in range(left.size):
        code = quantise(x[i], parameter, shrunk)
        codes[i] = uint8(int32(code))
        left[i] = left_over(x[i], value_of(code, parameter, scale))
    for i in range(left.size, x.size):
        codes[i] = uint8(int32(quantise(x[i], parameter, shrunk)))


@jit
def code_values(x, scales, parameter, codes, left):
    for b in range(scales.size):
        piece = slice(b * PER_SCALE, (b + 1) * PER_SCALE)
        most = largest(x[piece])
        shrunk = shrink(most)
        scales[b] = SCALE_OF_BLOCK(x[piece], most, shrunk)
        code_block(x[piece], scales[b], shrunk, parameter, codes[piece], left[piece])
"""

_OF_VOTES = """

@jit
def count(codes, votes):
    for i in range(votes.size):
        votes[i] += int32(vote(float32(codes[i])))


@jit
def add_up_votes(votes, ranks, parameter, x):
    for i in range(votes.size):
        x[i] = sum_of_votes(float32(votes[i]), ranks, parameter)
"""
