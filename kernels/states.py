"""Allocate the states of rules: dtypes, shapes, and arenas shared by many weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, groupby, repeat
from typing import Any

import numpy as np
import torch

from . import host_memory, storage, streams
from .language import Rule, TensorRule
from .layouts import compute_dtype, dense_strides, first_alike, same_order

PACK_FROM = 4096  # elements; small tensors, such as biases and norms, save little memory and are sensitive to rounding
ALIGNMENT = 64  # bytes between the starts of two tensors of an arena: one vector register of any CPU, four of a GPU


def slot_dtypes(
    rule: Rule | TensorRule,
    weight_dtype: torch.dtype,
    state_dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a rule's states and per-tensor states for one weight.

    `state_dtype` is for the states that may have low precision. A rule of whole tensors needs `shape`.
    """
    dtype = compute_dtype(weight_dtype)
    if state_dtype is None or dtype != torch.float32:
        return (dtype,) * len(rule.slots)
    if isinstance(rule, TensorRule):
        assert shape is not None
        return tuple(state_dtype if narrow else dtype for narrow in rule.narrows(shape))
    return tuple(dtype if name in (*rule.full_precision, *rule.kept) else state_dtype for name in rule.slots)


def state_type(weight: torch.Tensor, state_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return `state_dtype`, or None if it is packed and the weight is small or not contiguous."""
    if state_dtype is None:
        return None
    packs = weight.numel() >= PACK_FROM and weight.is_contiguous()
    return None if storage.is_packed(state_dtype) and not packs else state_dtype


def slot_shapes(
    rule: Rule | TensorRule, shape: torch.Size, tensors: Sequence[torch.Tensor | torch.dtype]
) -> list[torch.Size]:
    """Return the shapes of states and per-tensor states for a weight of this shape, given these tensors or dtypes."""
    dtypes: list[Any] = [getattr(each, "dtype", each) for each in tensors]  # `check_tensors` rejects other objects
    return [
        torch.Size([storage.packed_size(shape.numel(), dtype)]) if dtype in storage.PACKED else unpacked
        for dtype, unpacked in zip(dtypes, rule.shapes(shape), strict=True)
    ]


def slots_on_host(rule: Rule | TensorRule, shape: torch.Size) -> list[bool]:
    """Return for each slot whether it is in memory of the host where states are: it has the weight's shape."""
    if isinstance(rule, Rule):
        return [True] * len(rule.state) + [False] * len(rule.kept)
    return [each == shape for each in rule.shapes(shape)]


@torch.inference_mode(False)  # the states outlive the step that makes them
def states_for(
    rule: Rule | TensorRule,
    weights: Sequence[torch.Tensor],
    state_dtype: torch.dtype | None = None,
    separate: bool = False,
    on_host: bool = False,
) -> list[tuple[torch.Tensor, ...]]:
    """Return new states of zeros for each weight, in the order of `rule.slots`, with the dtypes of `slot_dtypes`.

    Those of a weight's shape are slices of one arena or, if `separate`, each in memory of its own; for a GPU in memory of
    the host if `on_host`.
    """
    if isinstance(rule, Rule):
        columns: list[Any] = []
        for dtype, same in groupby(None if name in rule.full_precision else state_dtype for name in rule.state):
            columns += _columns(weights, len(list(same)), dtype, separate, on_host)
        columns += zip(*per_tensor_states(weights, len(rule.kept)), strict=True)
        return list(zip(*columns, strict=True)) or [()] * len(weights)
    states = []
    for weight in weights:
        shapes, narrows = rule.shapes(weight.shape), rule.narrows(weight.shape)
        full = [shape == weight.shape and not narrow for shape, narrow in zip(shapes, narrows, strict=True)]
        low = iter(*allocate_states([weight], sum(narrows), state_dtype, True, on_host))
        like = iter(*allocate_states([weight], sum(full), None, True, on_host))
        new = partial(torch.zeros, dtype=compute_dtype(weight.dtype), device=weight.device)
        rows = zip(shapes, narrows, full, strict=True)
        states.append(tuple(next(low) if narrow else next(like) if whole else new(shape) for shape, narrow, whole in rows))
    return states


@torch.inference_mode(False)
def per_tensor_states(weights: Sequence[torch.Tensor], n: int) -> list[tuple[torch.Tensor, ...]]:
    """Return `n` zeros without dimensions for each weight, in `compute_dtype`, rows of one array per device and dtype."""
    if not n:
        return [()] * len(weights)
    kinds = [(weight.device, compute_dtype(weight.dtype)) for weight in weights]
    rows = {
        (device, dtype): iter(torch.zeros(count, n, dtype=dtype, device=device).unbind())
        for (device, dtype), count in Counter(kinds).items()
    }
    return [next(rows[kind]).unbind() for kind in kinds]


@torch.inference_mode(False)
def allocate_states(
    weights: Sequence[torch.Tensor],
    n_states: int,
    dtype: torch.dtype | None = None,
    separate: bool = False,
    on_host: bool = False,
) -> list[tuple[torch.Tensor, ...]]:
    """Return `n_states` tensors of zeros for each weight, in its shape.

    One arena per device, dtype and state serves all weights (not if `separate`): few allocations, always aligned. The state
    of a dense weight has its strides, so both can be walked as one stretch of memory. Weights that compute in float32 get
    states of `dtype`, if it is given; others `compute_dtype`. Packed states (uint8, int8) are one-dimensional, except for
    weights that `state_type` excludes.
    """
    return list(zip(*_columns(weights, n_states, dtype, separate, on_host), strict=True)) or [()] * len(weights)


def copies_on_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return dense copies of tensors as tensors of this GPU in memory of the host, one arena for each dtype."""
    made: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        stacks = [([i], tensors[i].shape, dense_strides(tensors[i])) for i in same]
        made |= zip(same, (room for (room,) in _zeros(stacks, dtype, device, True, True)), strict=True)
    return [made[i].copy_(tensor) for i, tensor in enumerate(tensors)]


def _columns(
    weights: Sequence[torch.Tensor], n_states: int, dtype: torch.dtype | None, separate: bool, on_host: bool
) -> list[list[torch.Tensor]]:
    """Return for each state the tensors of all weights; weights of equal kinds are served together."""
    kinds: dict[Any, list[int]] = {}
    for i, like in enumerate(first_alike(weights)):
        kinds.setdefault(like, []).append(i)
    arenas: dict[Any, list[Any]] = {}  # by device and dtype: the members of a kind, and the layout of their states
    for i, members in kinds.items():
        weight = weights[i]
        kind = compute_dtype(weight.dtype)
        kind = (state_type(weight, dtype) if kind == torch.float32 else None) or kind
        layout: Any = weight.shape, dense_strides(weight)
        if storage.is_packed(kind):
            layout = (storage.packed_size(weight.numel(), kind),), (1,)
        arenas.setdefault((weight.device, kind), []).append((members, *layout))
    columns: list[list[Any]] = [[None] * len(weights) for _ in range(n_states)]
    for (device, kind), stacks in arenas.items():
        for column in columns:
            for (members, *_), states in zip(stacks, _zeros(stacks, kind, device, separate, on_host), strict=True):
                for i, state in zip(members, states, strict=True):
                    column[i] = state
    return columns


def _zeros(
    stacks: Sequence[Any], kind: torch.dtype, device: torch.device, separate: bool, on_host: bool
) -> list[Sequence[torch.Tensor]]:
    """Return for each (members, sizes, strides) as many zeros of this layout, in one arena or `separate`."""
    on_host = on_host and device.type == "cuda"  # there in one arena always: it is locked in memory, page by page
    if separate and not on_host:
        made: list[Any] = []
        for members, sizes, strides in stacks:
            like = torch.empty_strided(sizes, strides, dtype=kind, device=device)
            made.append([like, *map(torch.empty_like, repeat(like, len(members) - 1))])
        torch._foreach_zero_(list(chain.from_iterable(made)))
        return made
    step = ALIGNMENT // kind.itemsize
    rooms = [-(-math.prod(sizes) // step) * step for _, sizes, _ in stacks]
    *starts, end = accumulate((len(members) * room for (members, *_), room in zip(stacks, rooms, strict=True)), initial=0)
    arena = host_memory.zeros(end, kind, device) if on_host else torch.zeros(end, dtype=kind, device=device)
    return [
        arena.as_strided((len(members), *sizes), (room, *strides), start).unbind()
        for (members, sizes, strides), room, start in zip(stacks, rooms, starts, strict=True)
    ]


@torch.inference_mode(False)
def master_like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of this dtype in the weight's shape and, if it is dense, with its strides."""
    return torch.empty_strided(weight.shape, dense_strides(weight), dtype=dtype, device=weight.device).zero_()


def goes_with(tensor: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, on_host: bool = False) -> bool:
    """Return whether a state or master has the weight's device, this dtype and, if shapes agree, its order of elements.

    `on_host`: whether it must be in memory of the host, if the weight is on a GPU.
    """
    if tensor.device != weight.device or tensor.dtype != dtype:
        return False
    if tensor.device.type == "cuda" and tensor.numel() and host_memory.is_on_host(tensor) != on_host:
        return False
    if tensor.shape != weight.shape or (weight.is_contiguous() and tensor.stride() == weight.stride()):
        return True
    return same_order(weight.shape, tensor.stride(), dense_strides(weight))


class PerTensorStates:
    """The per-tensor states of a list of weights, tensors without dimensions, read and written together as an array.

    If all share a storage (`is_joined`), as `states_for` makes them, that takes one or two torch operations for any number
    of weights. Else it takes as few calls, but on a GPU one launch for about every 64 numbers.
    """

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]]) -> None:
        self._numbers = list(chain.from_iterable(rows))
        self._shape = len(rows), len(rows[0])
        first = self._numbers[0]
        memory, size = first.untyped_storage().data_ptr(), first.element_size()
        self.is_joined = all(number.untyped_storage().data_ptr() == memory for number in self._numbers)
        self._array: torch.Tensor | None = None
        if not self.is_joined:
            return
        places = np.array([number.storage_offset() for number in self._numbers]).reshape(self._shape)
        step = int(places[1, 0] - places[0, 0]) if len(rows) > 1 else len(rows[0])
        regular = places[0, 0] + np.arange(len(rows))[:, None] * step + np.arange(len(rows[0]))
        if step > 0 and (places == regular).all():
            self._array = first.as_strided(self._shape, (step, 1))
        else:  # another group has the numbers in between
            self._memory = first.as_strided((first.untyped_storage().nbytes() // size,), (1,), 0)
            self._places = streams.staged(torch.from_numpy(places), first.device).to(first.device, non_blocking=True)

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the states, [n_weights, n]."""
        if self._array is not None:
            return self._array[rows]
        if self.is_joined:
            return self._memory[self._places[rows]]
        return torch.stack(self._numbers).view(self._shape)[rows]

    def write(self, values: torch.Tensor) -> None:
        """Write the states, [n_weights, n]."""
        if self._array is not None:
            self._array.copy_(values)
        elif self.is_joined:
            self._memory[self._places] = values
        else:
            torch._foreach_copy_(self._numbers, list(values.flatten().unbind()))
