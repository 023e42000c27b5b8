"""TensorTable: where the tensors of one launch lie, how long they are, their hyper-parameters and their tiles.

Every engine works from the same table, so that one native call or one GPU launch serves any number of tensors.
The arrays here are on the host; what a GPU needs of them is copied by `gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .language import Rule, TensorRule

__all__ = ["TensorTable", "allocate_states", "compute_dtype", "is_dense", "is_wrapper", "states_for"]

WEIGHT, GRADIENT, FIRST_STATE = 0, 1, 2  # rows of `addresses`; the states follow, and last the master weights if any
ALIGNMENT = 64  # bytes between the starts of two tensors of an arena: one vector register of any CPU, four of a GPU


def compute_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """The type in which a rule computes and keeps its state: float64 for float64 weights, else float32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its stretch of memory without gaps or overlaps, in whatever order of dimensions."""
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


def is_wrapper(tensor: Any) -> bool:
    """Whether the tensor is made of others, as those of a sharded model are, and has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def states_for(rule: Rule | TensorRule, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Zeros for all that a rule keeps of each weight, in the order of `rule.slots`."""
    if isinstance(rule, Rule) and not rule.kept:
        return allocate_states(weights, len(rule.state))
    shapes = [rule.shapes(weight.shape) for weight in weights]
    states = []
    for weight, row in zip(weights, shapes, strict=True):
        like = iter(*allocate_states([weight], sum(shape == weight.shape for shape in row)))
        new = partial(torch.zeros, dtype=compute_dtype(weight.dtype), device=weight.device)
        states.append(tuple(next(like) if shape == weight.shape else new(shape) for shape in row))
    return states


def allocate_states(weights: Sequence[torch.Tensor], n_states: int) -> list[tuple[torch.Tensor, ...]]:
    """Zeros in the shape of each weight, `n_states` times.

    One arena per device, type and state serves all weights: few allocations, always aligned. A dense weight's state
    has the weight's strides, so that both can be walked as one stretch of memory.
    """
    states: list[list[torch.Tensor]] = [[] for _ in weights]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, weight in enumerate(weights):
        kinds.setdefault((weight.device, compute_dtype(weight.dtype)), []).append(i)
    for (device, dtype), members in kinds.items():
        step = ALIGNMENT // dtype.itemsize
        starts = np.cumsum([0] + [-(-weights[i].numel() // step) * step for i in members])
        for _ in range(n_states):
            arena = torch.zeros(int(starts[-1]), dtype=dtype, device=device)
            for i, start in zip(members, starts, strict=False):
                weight = weights[i]
                flat = arena[int(start) : int(start) + weight.numel()]
                if weight.is_contiguous() or not is_dense(weight):
                    states[i].append(flat.view(weight.shape))
                else:
                    states[i].append(flat.as_strided(weight.shape, weight.stride()))
    return [tuple(row) for row in states]


class TensorTable:
    """One group of tensors that share device, rule and types. Built once; gradients and hyper-parameters change.

    Args:
        rule: the update rule.
        weights: dense tensors, all of one type and device, walked in memory order.
        gradients_dtype: the type of all gradients.
        states: for each weight the rule's state tensors, with the weight's strides, in `compute_dtype`; then the numbers
            that it keeps.
        masters: for each weight its copy in `compute_dtype`, which is then what the rule reads; or None.
        tile: elements per tile.
        aligned: whether every address is a multiple of 16 bytes.

    Attributes:
        addresses: int64 [2 + n_states (+ 1 with masters), n_tensors]; a gradient address of 0 skips the tensor.
        sizes: int64 [n_tensors], elements.
        hyper: float32 or float64 [n_tensors, 1 + n_hyper]: rescale_grad, then the rule's own.
        tiles: int32 [n_tiles, 2]: tensor, and which of its tiles.
        gradients: for each tensor None where it is skipped, else a function that gives its gradient: the table keeps no
            gradient alive.
    """

    def __init__(
        self,
        rule: Rule | TensorRule,
        weights: Sequence[torch.Tensor],
        gradients_dtype: torch.dtype,
        states: Sequence[tuple[torch.Tensor, ...]],
        masters: Sequence[torch.Tensor] | None,
        tile: int,
        aligned: bool,
    ) -> None:
        self.rule = rule
        self.weights = list(weights)
        self.states = list(states)
        self.masters = None if masters is None else list(masters)
        self.gradients: list[Callable[[], torch.Tensor | None] | None] = [None] * len(weights)
        self.device = weights[0].device
        self.weight_dtype = weights[0].dtype
        self.gradient_dtype = gradients_dtype
        self.dtype = compute_dtype(self.weight_dtype)
        self.tile = tile
        self.aligned = aligned

        n, n_states = len(weights), len(rule.state)
        self.addresses = np.zeros((FIRST_STATE + n_states + (masters is not None), n), dtype=np.int64)
        self.addresses[WEIGHT] = [weight.data_ptr() for weight in weights]
        for k in range(n_states):
            self.addresses[FIRST_STATE + k] = [row[k].data_ptr() for row in states]
        if masters is not None:
            self.addresses[-1] = [master.data_ptr() for master in masters]
        self.sizes = np.array([weight.numel() for weight in weights], dtype=np.int64)
        self.hyper = np.zeros((n, 1 + len(rule.hyper)), dtype=np.float64 if self.dtype == torch.float64 else np.float32)
        counts = -(-self.sizes // tile)
        owner = np.repeat(np.arange(n), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        self.tiles = np.stack([owner, np.arange(len(owner)) - first], axis=1).astype(np.int32)
        self.n_elements = int(self.sizes.sum())

    def room_for_sums(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For each of the rule's reductions room for what it sums up, and for what the rule gets of it.

        Both are [n_tensors, n] in the table's type on its device, and one and the same where the sums are all that it gets.
        """

        def room(width: int) -> torch.Tensor:
            return torch.zeros(len(self.weights), width, dtype=self.dtype, device=self.device)

        totals = [room(reduction.n_values) for reduction in self.rule.reductions]
        sums = [
            total if reduction.finished is None and not reduction.passes_on else room(reduction.n_results)
            for total, reduction in zip(totals, self.rule.reductions, strict=True)
        ]
        return totals, sums
