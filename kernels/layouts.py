"""Dtypes of the arithmetic and strides of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter, eq
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_KINDS: tuple[Callable[[Any], Any], ...] = (type, *map(attrgetter, ("dtype", "device", "shape")), torch.Tensor.stride)
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # asked first, because there are many


@cache
def compute_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule computes and keeps its states: float64 for float64 weights, else float32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


@cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device without float64, such as Apple's MPS."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has neither gaps nor overlaps in memory, in any order of dimensions."""
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


def same_order(shape: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether both strides order the elements of this shape in the same way; axes of length 1 do not count."""
    return strides == other or 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, other, strict=True))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense, else the strides of C order."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def is_wrapper(tensor: Any) -> bool:
    """Return whether the tensor wraps other tensors, as a DTensor does, and has no memory itself."""
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def wrappers(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that wrap other tensors."""
    kinds = set(map(type, tensors)).difference(_PLAIN)
    return [tensor for tensor in tensors if type(tensor) in kinds and is_wrapper(tensor)] if kinds else []


def first_alike(*columns: Sequence[Any], also: Sequence[Any] = ()) -> list[int]:
    """Return for each row of tensors the first row of the same kinds, which pass the same checks; None is a kind, too.

    `also`: other things that must be equal.
    """
    n = len(columns[0])
    first: dict[Any, int] = {}
    try:
        kinds = [kind for column in columns for kind in _kinds(column)] + ([also] if also else [])
        if not kinds:
            return [0] * n
        return [first.setdefault(each, i) for i, each in enumerate(zip(*kinds, strict=True))]
    except (AttributeError, RuntimeError, TypeError):  # not a tensor, or a tensor without strides
        return list(range(n))


def _kinds(tensors: Sequence[Any]) -> list[Iterable[Any]]:
    """Return in what these tensors differ: for each such property, its values."""
    if (types := set(map(type, tensors))) and type(None) not in types:
        return [map(kind, tensors) for kind in _KINDS if not all(map(eq, map(kind, tensors), repeat(kind(tensors[0]))))]
    if len(types) < 2:  # None for all
        return []
    return [(None if each is None else tuple(kind(each) for kind in _KINDS) for each in tensors)]
