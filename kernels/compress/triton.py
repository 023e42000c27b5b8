"""The GPU kernel of gradient compression: one pass that reads, sums, quantises and packs, and updates the residual.

Imported when the triton backend first compresses something. With TRITON_INTERPRET=1 it works on CPU tensors. Values are
accessed 128 bits at a time, because full tiles need no mask. Each thread stores one byte of a tile's codes, so that a warp
fills whole sectors of 32 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import streams
from ..backends.triton.compile import options_of, target_of
from ..backends.triton.memory import round_to
from ..backends.triton.ops import TYPES, bind
from ..backends.triton.start import unhooked
from .codecs import BLOCK, TILE, Job, mean_of_shares, share_of_largest

_BLOCK = tl.constexpr(BLOCK)


def run(job: Job) -> None:
    """Run the job on the current stream of its tensors' device."""
    sizes = job.source.stride(0), job.target.stride(0)  # unused for values, where it is 1
    with streams.on_device(job.source.device), unhooked():
        _kernel[(job.chunks * (job.chunk // TILE),)](
            job.source, job.residual, job.target, job.n, job.chunk, *sizes, float(job.parameter), job.ranks,
            **_constants(job), **options_of(THREADS, target_of(job.source.device)),
        )  # fmt: skip


THREADS = 256  # per program, 4 values each


def _constants(job: Job) -> dict[str, Any]:
    code = job.code
    functions = {
        "QUANTISE": code.quantise, "VALUE": code.value, "LEFT": code.left, "VOTE": code.vote, "SUM": code.sum_of_votes,
        "SHARE": share_of_largest, "MEAN": mean_of_shares,
    }  # fmt: skip
    bound = {name: None if f is None else bind(f) for name, f in functions.items()}
    return bound | {
        "BITS": code.bits,
        "SCALED": {None: 0, "largest": 1, "mean": 2}[code.scaled_by],
        "TYPE": None if code.dtype is None else TYPES[code.dtype],
        "WIDTH": code.vote_bits(job.ranks) if "votes" in (job.reads, job.writes) else 0,
        "READS": job.reads,
        "WRITES": job.writes,
        "SEVERAL": job.reads == "messages" and job.ranks > 1,
        "TILE": TILE,
    }


def compile_for(target: Any, job: Job) -> Any:
    """Compile the kernel of a job for a `triton.backends.compiler.GPUTarget`, without a GPU, to inspect its code."""
    from triton.compiler import ASTSource

    pointer = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8"}
    signature = {"source": pointer[job.source.dtype], "residual": "*fp32", "target": pointer[job.target.dtype]}
    signature |= dict.fromkeys(("n", "chunk", "source_size", "target_size"), "i32") | {"parameter": "fp32", "ranks": "i32"}
    constants = _constants(job)
    if job.residual is None:
        constants["residual"] = None
    signature |= dict.fromkeys(constants, "constexpr")
    # Specialized as for separately allocated buffers of more than a few chunks: pointers and sizes are multiples of 16.
    multiples = ("source", "residual", "target", "chunk", "source_size", "target_size")
    places = {name: (place,) for place, name in enumerate(_kernel.arg_names)}
    attrs = {places[name]: [["tt.divisibility", 16]] for name in multiples if signature[name] != "constexpr"}
    source = ASTSource(_kernel, signature, constants, attrs)
    return triton.compile(source, target=target, options=options_of(THREADS, target))


@triton.jit
def _packed(codes, BITS: tl.constexpr):
    # The first code goes into the highest bits of a byte.
    PER: tl.constexpr = 8 // BITS
    if PER == 1:
        return codes.to(tl.uint8)
    else:
        groups = tl.reshape(codes, (codes.shape[0] // PER, PER))
        shifts = (PER - 1 - tl.arange(0, PER)) * BITS
        return tl.sum(groups << shifts[None, :], axis=1).to(tl.uint8)


@triton.jit
def _unpacked(place, BITS: tl.constexpr, TILE: tl.constexpr):
    PER: tl.constexpr = 8 // BITS
    if PER == 1:
        return tl.load(place + tl.arange(0, TILE)).to(tl.int32)
    else:
        packed = tl.load(place + tl.arange(0, TILE // PER)).to(tl.int32)
        shifts = (PER - 1 - tl.arange(0, PER)) * BITS
        return tl.reshape((packed[:, None] >> shifts[None, :]) & ((1 << BITS) - 1), (TILE,))


@triton.jit
def _spread(scale, TILE: tl.constexpr):
    return tl.reshape(tl.broadcast_to(scale[:, None], (TILE // _BLOCK, _BLOCK)), (TILE,))


@triton.jit
def _scales(message, inside, chunk, BITS: tl.constexpr, TILE: tl.constexpr):
    place = (message + chunk * BITS // 8).to(tl.pointer_type(tl.float32))
    return place + inside // _BLOCK + tl.arange(0, TILE // _BLOCK)


@triton.jit
def _values(
    message, inside, chunk, parameter,
    VALUE: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if TYPE is not None:
        return tl.load(message.to(tl.pointer_type(TYPE)) + inside + tl.arange(0, TILE)).to(tl.float32)
    else:
        codes = _unpacked(message + inside * BITS // 8, BITS, TILE).to(tl.float32)
        if SCALED:
            scale = tl.load(_scales(message, inside, chunk, BITS, TILE))
            return VALUE(codes, parameter, _spread(scale, TILE))
        else:
            return VALUE(codes, parameter, 0.0)


@triton.jit
def _largest(x):
    # The largest magnitude of each block, from the bits, which are in the same order, with NaN above all.
    blocks = tl.reshape(x, (x.shape[0] // _BLOCK, _BLOCK))
    bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(bits < 0x00800000, 0.0, tl.where(bits < 0x7F800000, largest, float("nan")))


@triton.jit
def _put_message(
    x, message, residual, offsets, inside, n, chunk, parameter,
    QUANTISE: tl.constexpr, VALUE: tl.constexpr, LEFT: tl.constexpr, SHARE: tl.constexpr, MEAN: tl.constexpr,
    BITS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr, FULL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if TYPE is not None:
        rounded = round_to(x, TYPE)
        value = rounded.to(tl.float32)
        tl.store(message.to(tl.pointer_type(TYPE)) + inside + tl.arange(0, TILE), rounded)
    else:
        if SCALED:
            largest = _largest(x)
            one = tl.full(largest.shape, 1.0, tl.float32)
            shrunk = tl.where(largest > 0.0, tl.div_rn(one, tl.where(largest > 0.0, largest, one)), largest)
            if SCALED == 2:
                shares = SHARE(x, _spread(shrunk, TILE))
                scale = MEAN(tl.sum(tl.reshape(shares, (TILE // _BLOCK, _BLOCK)), axis=1), largest)
            else:
                scale = largest
            tl.store(_scales(message, inside, chunk, BITS, TILE), scale)
            codes = QUANTISE(x, parameter, _spread(shrunk, TILE))
            value = VALUE(codes, parameter, _spread(scale, TILE))
        else:
            codes = QUANTISE(x, parameter, 0.0)
            if not FULL:
                codes = tl.where(offsets < n, codes, 0.0)
            value = VALUE(codes, parameter, 0.0)
        PER: tl.constexpr = 8 // BITS
        place = message + inside * BITS // 8 + tl.arange(0, TILE // PER)
        tl.store(place, _packed(codes.to(tl.int32), BITS))
    if residual is not None:
        left = LEFT(x, value)
        if FULL:
            tl.store(residual + offsets, left)
        else:
            tl.store(residual + offsets, left, mask=offsets < n)


@triton.jit
def _tile(
    source, residual, target, start, n, chunk, source_size, target_size, parameter, ranks,
    QUANTISE: tl.constexpr, VALUE: tl.constexpr, LEFT: tl.constexpr, VOTE: tl.constexpr, SUM: tl.constexpr,
    SHARE: tl.constexpr, MEAN: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    WIDTH: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr, SEVERAL: tl.constexpr, FULL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    piece = start // chunk
    inside = start - piece * chunk
    offsets = start + tl.arange(0, TILE)
    if READS == "values":
        if FULL:
            x = tl.load(source + offsets).to(tl.float32)
        else:
            x = tl.load(source + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    elif READS == "votes":
        votes = tl.zeros((TILE,), tl.int32)
        for k in tl.static_range(WIDTH):
            plane = source + piece * source_size + k * (chunk // 8) + inside // 8
            votes |= _unpacked(plane, 1, TILE) << k
        x = SUM(votes.to(tl.float32), ranks.to(tl.float32), parameter)
    else:
        message = source + piece * source_size
        if WRITES == "votes":
            x = VOTE(_unpacked(message + inside * BITS // 8, BITS, TILE).to(tl.float32))
        else:
            x = _values(message, inside, chunk, parameter, VALUE, BITS, SCALED, TYPE, TILE)
        if SEVERAL:
            for _ in range(1, ranks):
                message += source_size
                if WRITES == "votes":
                    x += VOTE(_unpacked(message + inside * BITS // 8, BITS, TILE).to(tl.float32))
                else:
                    x += _values(message, inside, chunk, parameter, VALUE, BITS, SCALED, TYPE, TILE)
    if WRITES == "votes":
        votes = x.to(tl.int32)
        for k in tl.static_range(WIDTH):
            plane = target + piece * target_size + k * (chunk // 8) + inside // 8
            tl.store(plane + tl.arange(0, TILE // 8), _packed((votes >> k) & 1, 1))
    elif WRITES == "values":
        value = round_to(x, target.dtype.element_ty)
        if FULL:
            tl.store(target + offsets, value)
        else:
            tl.store(target + offsets, value, mask=offsets < n)
    else:
        if residual is not None:
            if FULL:
                x += tl.load(residual + offsets)
            else:
                x += tl.load(residual + offsets, mask=offsets < n, other=0.0)
        if not FULL:
            x = tl.where(offsets < n, x, 0.0)
        _put_message(
            x, target + piece * target_size, residual, offsets, inside, n, chunk, parameter,
            QUANTISE, VALUE, LEFT, SHARE, MEAN, BITS, SCALED, TYPE, FULL, TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ranks"])
def _kernel(
    source, residual, target, n, chunk, source_size, target_size, parameter, ranks,
    QUANTISE: tl.constexpr, VALUE: tl.constexpr, LEFT: tl.constexpr, VOTE: tl.constexpr, SUM: tl.constexpr,
    SHARE: tl.constexpr, MEAN: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    WIDTH: tl.constexpr, READS: tl.constexpr, WRITES: tl.constexpr, SEVERAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    start, chunk = tl.program_id(0).to(tl.int64) * TILE, chunk.to(tl.int64)
    if start + TILE <= n:
        _tile(
            source, residual, target, start, n, chunk, source_size, target_size, parameter, ranks, QUANTISE, VALUE, LEFT,
            VOTE, SUM, SHARE, MEAN, BITS, SCALED, TYPE, WIDTH, READS, WRITES, SEVERAL, True, TILE,
        )  # fmt: skip
    else:
        _tile(
            source, residual, target, start, n, chunk, source_size, target_size, parameter, ranks, QUANTISE, VALUE, LEFT,
            VOTE, SUM, SHARE, MEAN, BITS, SCALED, TYPE, WIDTH, READS, WRITES, SEVERAL, False, TILE,
        )  # fmt: skip
