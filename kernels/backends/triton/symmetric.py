"""Products of matrices that are symmetric, such as X X^T: blocks on and above the diagonal are computed, and mirrored.

Imported only where it is used, since it imports triton. With TRITON_INTERPRET=1 it works on CPU tensors.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from ... import streams
from .compile import options_of, target_of
from .launch import KernelCall
from .memory import round_to


class Tile(NamedTuple):
    """What a program computes at a time."""

    block: int  # rows and columns of the result
    depth: int  # products of each sum between two loads
    threads: int
    stages: int  # loads under way, each into shared memory of its own

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.stages * 2 * self.block * self.depth * 2


# The first that fits into shared memory is taken where none can be timed. All of them add up in the same order.
TILES = (Tile(128, 64, 256, 3), Tile(128, 64, 256, 4), Tile(128, 64, 128, 4), Tile(64, 64, 128, 4))
BAND = 8  # columns of blocks that are computed at about the same time, because they share factors in the GPU's cache
TIMED = 5  # launches of each tile
MOST = 2**31  # elements that 32 bits can number
# Triton before 3.7 made no fence between copies to shared memory and products by tensor cores of Hopper and Blackwell, which
# read it through another proxy. On Hopper we make it; in loops for Blackwell these versions compile no such instruction.
UNFENCED = triton.__version__.startswith(("3.5.", "3.6."))

_calls: dict[Any, KernelCall] = {}


def symmetric_product(
    added: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return beta added + alpha left right, which must be symmetric, in the dtype of `left`, summed in float32.

    Elements above the diagonal are computed and mirrored, so the result is exactly symmetric. It is rounded once, as
    `torch.baddbmm` rounds.

    Args:
        added: contiguous symmetric matrices of the result's shape, or None for none.
        left: [n, m, k] or [m, k], bfloat16 or float16, with any strides. It is fastest if m, k and the strides are
            multiples of 16.
        right: [n, k, m] or [k, m], of the same dtype.
        beta: factor of `added`.
        alpha: factor of the product.
        out: contiguous memory for the result; no other argument may share it. Default: new memory.

    Raises:
        TypeError: a dtype is another one.
        ValueError: a matrix has too many elements for addresses of 32 bits.
    """
    if out is None:
        out = left.new_empty((*left.shape[:-1], right.shape[-1]))
    if not out.numel():
        return out
    tensors = (left, right, out) if added is None else (left, right, out, added)
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    key = left.device, left.dtype, added is None, left.shape, left.stride(), right.stride(), is_aligned
    with streams.on_device(left.device):
        call = _calls.get(key) or _call_for(key, tensors, float(beta), float(alpha))
        call(left, right, added, out, float(beta), float(alpha))
    return out


def _call_for(key: Any, tensors: tuple[torch.Tensor, ...], beta: float, alpha: float) -> KernelCall:
    """Return the launch for such tensors with the fastest tile, or, while a graph is captured, with the first."""
    left, right, out, *added = tensors
    for tensor in tensors:
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != left.dtype:
            raise TypeError(f"{tensor.dtype}: factors and result must be torch.bfloat16, or all torch.float16")
    sizes = [size + 2 * TILES[0].block for size in (*left.shape[-2:], right.shape[-1])]  # with what is masked
    for factor, (rows, columns) in ((left, sizes[:2]), (right, sizes[1:]), (out, sizes[::2])):
        if rows * abs(factor.stride(-2)) + columns * abs(factor.stride(-1)) >= MOST:
            raise ValueError(f"matrices of {tuple(factor.shape[-2:])}: too large for addresses of 32 bits, use torch.matmul")
    calls = [_made(tile, left, right) for tile in _tiles_of(left.device)]
    if len(calls) > 1 and streams.is_asynchronous(left.device):
        if streams.is_capturing(left.device):
            return calls[0]
        arguments = left, right, added[0] if added else None, out, beta, alpha
        calls.sort(key=lambda call: _time_of(call, arguments))
    _calls[key] = calls[0]
    return calls[0]


def _made(tile: Tile, left: torch.Tensor, right: torch.Tensor) -> KernelCall:
    *stack, rows, depth = left.shape
    strides = [(0, *factor.stride())[-3:] for factor in (left, right)]
    programs = math.prod(stack) * n_programs(rows, tile.block)
    given = constants_and_options(tile, rows, depth, target_of(left.device))
    return KernelCall(symmetric_kernel, programs, (rows, depth, *strides[0], *strides[1]), *given)


def constants_and_options(tile: Tile, rows: int, depth: int, target: GPUTarget) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kernel's constants, in argument order, and the compiler's options."""
    constants = {
        "BLOCK": tile.block,
        "DEPTH": tile.depth,
        "BAND": BAND,
        "WHOLE": rows % tile.block == depth % tile.depth == 0,
        "FENCED": UNFENCED and target.backend == "cuda" and target.arch == 90,
        "WIDE": triton.knobs.runtime.interpret,
    }
    return constants, options_of(tile.threads, target) | {"num_stages": tile.stages}


def n_programs(rows: int, block: int) -> int:
    """Return the number of blocks on and above the diagonal of a matrix with so many rows and columns."""
    blocks = -(-rows // block)
    return blocks * (blocks + 1) // 2


@cache
def works_on(device: torch.device) -> bool:
    """Return whether the GPU multiplies both types by tensor cores, in the order that the compiler must keep."""
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8 and not (UNFENCED and torch.version.hip is None and major in (10, 11))


@cache
def _tiles_of(device: torch.device) -> tuple[Tile, ...]:
    """Return the tiles to choose from: those that fit into shared memory, the first where nothing can be timed."""
    if not streams.is_asynchronous(device):
        return TILES[:1]
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return tuple(tile for tile in TILES if tile.shared <= shared)


def _time_of(call: KernelCall, arguments: tuple[Any, ...]) -> float:
    """Return the time of some launches, which compute the same; infinity if the GPU lacks what they need."""
    try:
        call(*arguments)  # compiles it
    except triton.OutOfResources:
        return math.inf
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMED):
        call(*arguments)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@triton.jit
def _place_of(program, blocks, BAND: tl.constexpr):
    # Returns the block's row and column. The triangle is folded to a rectangle: what is below the diagonal there is the
    # triangle's end, turned by half a circle. Bands of the rectangle's columns come one after the other.
    even = 1 - blocks % 2
    height, width = blocks + even, (blocks + 1) // 2
    first = program // (height * BAND) * BAND
    n = tl.minimum(width - first, BAND)
    inside = program - first * height
    i, j = first + inside % n, inside // n - even
    folded = j < i
    return tl.where(folded, blocks - even - i, i), tl.where(folded, blocks - 1 - even - j, j)


@triton.jit
def _fence(number):
    tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [number], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(pointers, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def symmetric_kernel(
    rows,  # of the result, and its columns
    depth,  # products of each sum
    left_stack,  # strides, in elements
    left_row,
    left_column,
    right_stack,
    right_row,
    right_column,
    left,  # [n, rows, depth]
    right,  # [n, depth, rows]
    added,  # [n, rows, rows], contiguous; or None
    out,  # [n, rows, rows], contiguous
    beta,
    alpha,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    WHOLE: tl.constexpr,  # whether rows and depth are multiples of BLOCK and DEPTH
    FENCED: tl.constexpr,  # whether to put a fence between copies to shared memory and products
    WIDE: tl.constexpr,  # whether to multiply in float32: the interpreter would multiply the bits of a bfloat16
):
    blocks = tl.cdiv(rows, BLOCK)
    programs = blocks * (blocks + 1) // 2
    matrix = (tl.program_id(0) // programs).to(tl.int64)
    i, j = _place_of(tl.program_id(0) % programs, blocks, BAND)
    along, inner = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    upper, lower = i * BLOCK + along, j * BLOCK + along
    # 64 bits for where a matrix begins, 32 bits inside of it.
    left += matrix * left_stack
    right += matrix * right_stack
    of_left = upper[:, None] * left_row + inner[None, :] * left_column
    of_right = inner[:, None] * right_row + lower[None, :] * right_column
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = inner < depth - start
        a = _load(left + of_left, (upper < rows)[:, None] & inside[None, :], WHOLE)
        b = _load(right + of_right, inside[:, None] & (lower < rows)[None, :], WHOLE)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if FENCED:
            _fence(start)
        total = tl.dot(a, b, total)
        left += DEPTH * left_column
        right += DEPTH * right_row
    total *= alpha
    place, mirrored = upper[:, None] * rows + lower[None, :], lower[:, None] * rows + upper[None, :]
    inside = (upper < rows)[:, None] & (lower < rows)[None, :]
    if added is not None:
        total += beta * _load(added + matrix * rows * rows + place, inside, WHOLE).to(tl.float32)
    value = round_to(total, out.dtype.element_ty)
    out += matrix * rows * rows
    if i == j:
        _store(out + place, tl.where(along[:, None] <= along[None, :], value, tl.trans(value)), inside, WHOLE)
    else:
        _store(out + place, value, inside, WHOLE)
        _store(out + mirrored, tl.trans(value), (lower < rows)[:, None] & (upper < rows)[None, :], WHOLE)
