"""Products of a matrix with its own transpose on a GPU: half of the blocks are computed, each is written twice.

Imported only where it is used, since it imports triton. With TRITON_INTERPRET=1 it works on CPU tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from ... import streams
from .compile import options_of, target_of
from .memory import round_to

ROWS, DEPTH = 128, 64  # rows of each factor in a block; columns of both that are multiplied at a time
BAND = 8  # rows of blocks that are computed at about the same time, because they share factors in the GPU's L2 cache


def symmetric_product(
    x: torch.Tensor, *, added: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """Return alpha x x^T + beta added, in the dtype of `x`, summed in float32.

    Args:
        x: [n, rows, columns] or [rows, columns], bfloat16 or float16, with any strides. It is fastest if strides, rows and
            columns are multiples of 16.
        added: symmetric matrices of the result's shape and the dtype of `x`. Default: None, nothing is added.
        alpha: factor of the product. Default: 1.
        beta: factor of `added`. Default: 1.

    Raises:
        TypeError: `x` has another dtype, whose digits tensor cores would not keep.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"x is {x.dtype}: must be torch.bfloat16 or torch.float16")
    stack = x if x.dim() == 3 else x[None]
    n, rows, columns = stack.shape
    out = torch.empty(n, rows, rows, dtype=x.dtype, device=x.device)
    third = out if added is None else added.view(out.shape)
    if out.numel():
        pairs = block_pairs(-(-rows // ROWS), x.device, streams.current(x.device))
        with streams.on_device(x.device):
            symmetric_kernel[(len(pairs), n)](
                stack, third, out, pairs, rows, columns, *stack.stride(), *third.stride(), float(alpha), float(beta),
                ROWS=ROWS, DEPTH=DEPTH, ADDED=added is not None, WIDE=triton.knobs.runtime.interpret,
                **options_for(target_of(x.device), _shared_memory(x.device)),
            )  # fmt: skip
    return out if x.dim() == 3 else out[0]


def options_for(target: GPUTarget, shared: int) -> dict[str, Any]:
    """Return the compiler options for a GPU with at most `shared` bytes of shared memory for each program.

    Each stage of the pipeline but one keeps a block of both factors in shared memory.
    """
    stages = 1 + shared // (2 * ROWS * DEPTH * 2)
    return options_of(256, target) | {"num_stages": max(1, min(stages, 4))}


@cache
def _shared_memory(device: torch.device) -> int:
    if triton.knobs.runtime.interpret:
        return 0
    with streams.on_device(device):
        driver = triton.runtime.driver.active
        return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


@cache
def block_pairs(n: int, device: torch.device, stream: Any = None) -> torch.Tensor:
    """Return row and column of each block on and below the diagonal, int32 [n (n + 1) / 2, 2], band by band.

    The cache has an entry for each stream, because the copy on another stream might not have finished.
    """
    i, j = np.tril_indices(n)
    order = np.lexsort((i, j, i // BAND))
    pairs = torch.from_numpy(np.stack([i, j], axis=1)[order].astype(np.int32))
    return streams.staged(pairs, device).to(device, non_blocking=True)


@triton.jit
def symmetric_kernel(
    x,  # [n, rows, columns]
    added,  # [n, rows, rows]
    out,  # [n, rows, rows], contiguous
    pairs,  # int32 [n_programs, 2]
    rows,
    columns,
    x_stack,  # strides
    x_row,
    x_column,
    added_stack,
    added_row,
    added_column,
    alpha,
    beta,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ADDED: tl.constexpr,
    WIDE: tl.constexpr,
):
    pair = pairs + 2 * tl.program_id(0).to(tl.int64)
    stack = tl.program_id(1).to(tl.int64)
    i, j = tl.load(pair), tl.load(pair + 1)
    left = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    right = j.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    depth, step = tl.arange(0, DEPTH).to(tl.int64), tl.full((), DEPTH, tl.int64)
    x += stack * x_stack
    first = x + left[:, None] * x_row + depth[None, :] * x_column
    second = x + right[None, :] * x_row + depth[:, None] * x_column
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for start in range(0, columns, DEPTH):
        inside = depth < columns - start
        a = tl.load(first, mask=(left < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(second, mask=(right < rows)[None, :] & inside[:, None], other=0.0)
        if WIDE:  # the interpreter would multiply the bits of a bfloat16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        first += step * x_column
        second += step * x_column
    total *= alpha
    inside = (left < rows)[:, None] & (right < rows)[None, :]
    if ADDED:
        place = added + stack * added_stack + left[:, None] * added_row + right[None, :] * added_column
        total += beta * tl.load(place, mask=inside, other=0.0).to(tl.float32)
    value = round_to(total, out.dtype.element_ty)
    out += stack * rows * rows
    tl.store(out + left[:, None] * rows + right[None, :], value, mask=inside)
    if i != j:
        place = out + right[:, None] * rows + left[None, :]
        tl.store(place, tl.trans(value), mask=(right < rows)[:, None] & (left < rows)[None, :])
