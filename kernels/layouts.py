"""Types and strides: in which type a tensor is computed, and in which order its elements are walked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@cache
def compute_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """The type in which a rule computes and keeps its state: float64 for float64 weights, else float32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


@cache
def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have no float64, as Apple's."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense: without gaps or overlaps in memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether either strides give a tensor of this shape the same order of elements; axes of length 1 have none."""
    return strides == others or 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, others, strict=True))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it has no gaps, else those of C's order."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def is_wrapper(tensor: Any) -> bool:
    """Whether the tensor wraps others, as DTensors do, and has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)
