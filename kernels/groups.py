"""Tensors that go into one launch: those of one device and of the same types, aligned or not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from . import storage
from .backends import engine_for, executor_for
from .guards import Reference
from .language import Rule, TensorRule
from .layouts import dense_strides, same_order
from .metrics import MetricsBuffer
from .reduction_states import ReductionStates
from .table import GRADIENT, TensorTable, addresses_of

__all__ = ["Group", "GroupArguments", "group_key", "itself"]

_data_ptr = torch.Tensor.data_ptr


class GroupArguments(NamedTuple):
    """What an `Update` was given; see there. States and masters are aliases of those given.

    Attributes:
        hyper: names of the hyper-parameters in its rows.
    """

    hyper: tuple[str, ...]
    weights: list[torch.Tensor]
    states: list[tuple[torch.Tensor, ...]]
    masters: list[torch.Tensor | None]
    engine: str | None
    seed: int | storage.CodesOnly | None
    rng_offsets: np.ndarray
    grad_scale_and_skip: torch.Tensor | None
    zero_grads: bool
    stacked: bool


class Group:
    """Tensors that go into one launch.

    Weights with gaps, and weights that have got other strides than their states since these were made, are updated in a
    dense copy, which is then written back.
    """

    @torch.inference_mode(False)  # what is made here outlives the step
    def __init__(self, owner: GroupArguments, key: Any, indices: list[int]) -> None:
        device, _, gradient_dtype, types, aligned, rule = key
        has_masters = types[-1] is not None
        self.indices = indices
        counts = list(map(len, owner.weights)) if owner.stacked else [1] * len(owner.weights)
        self.rows: Any = slice(None)  # of `hyper`
        if len(indices) < len(owner.weights):
            every = np.repeat(np.arange(len(counts)), counts)
            self.rows = np.flatnonzero(np.isin(every, indices))
        stops = np.cumsum([counts[i] for i in indices]).tolist()
        self._spans = [slice(stop - counts[i], stop) for i, stop in zip(indices, stops, strict=True)]  # of each in the table
        # Of `hyper`, where the rule does not need all.
        self._columns: list[int] | None = None
        if rule.hyper != owner.hyper:
            self._columns = [0, *(1 + owner.hyper.index(name) for name in rule.hyper)]
            self._columns += [] if owner.seed is None else [1 + len(owner.hyper)]
        self._seed, self._rng_offsets, self._first = owner.seed, owner.rng_offsets[self.rows], int(owner.stacked)
        self.originals = [owner.weights[i] for i in indices]
        masters = [owner.masters[i] for i in indices] if has_masters else None
        states = [owner.states[i][: len(rule.slots)] for i in indices]
        n = len(rule.state) if isinstance(rule, Rule) else 0  # whole tensors keep the order they have
        strides = [_strides(owner.weights[i], owner.states[i][:n], owner.masters[i], owner.stacked) for i in indices]
        self.copied = [k for k, weight in enumerate(self.originals) if _needs_copy(weight, strides[k], self._first)]
        weights = list(self.originals)
        for k in self.copied:
            weights[k] = torch.empty_strided(weights[k].shape, strides[k], dtype=weights[k].dtype, device=device)
        make = executor_for(engine_for(rule, device, owner.engine), isinstance(rule, TensorRule))
        kinds = gradient_dtype, states, masters
        tile = make.tile_for(sum(weight.numel() for weight in weights))
        self.table = TensorTable(rule, weights, *kinds, tile, aligned, owner.seed, owner.stacked)  # type: ignore[arg-type]
        self._grad_scale_and_skip, self.table.zero_grads = owner.grad_scale_and_skip, owner.zero_grads
        if owner.grad_scale_and_skip is not None:
            self.table.grad_scale_and_skip = owner.grad_scale_and_skip.to(device)
        self.execute = make(self.table)
        self.sources: list[tuple[torch.Tensor, Any]] = []  # dense copies, and functions giving what to copy
        self.reduction_states = ReductionStates(self.table, self.execute)

    def bind(self, gradients: Sequence[torch.Tensor | None], references: Sequence[Any]) -> None:
        table, stacked = self.table, bool(self._first)
        self.sources, table.gradients = [], []
        for i, weight, span in zip(self.indices, table.weights, self._spans, strict=True):
            gradient, bound = gradients[i], references[i]
            if gradient is not None and _needs_copy(gradient, weight.stride(), self._first):
                with torch.inference_mode(False):
                    dense = torch.empty_strided(weight.shape, weight.stride(), dtype=gradient.dtype, device=gradient.device)
                self.sources.append((dense, bound))
                gradient, bound = dense, partial(itself, dense)
            table.gradients += [None if gradient is None else bound] * (span.stop - span.start)
            table.addresses[GRADIENT, span] = 0 if gradient is None else addresses_of([gradient], stacked)

    def rebind(self, pointers: np.ndarray, references: Sequence[Reference | None]) -> None:
        """As `bind`, for gradients that differ from the bound ones in their pointers only, or are missing."""
        self.table.addresses[GRADIENT] = pointers[self.rows]
        self.table.gradients = list(references) if isinstance(self.rows, slice) else [references[i] for i in self.indices]

    def run(self, hyper: np.ndarray | list[float], into: MetricsBuffer | None = None) -> None:
        if self.sources or self.copied:
            with torch.no_grad():
                self.begin(hyper)
                self.execute_rule(into)
                self.end()
        else:
            self.write_hyper(hyper)
            self.execute_rule(into)

    def execute_rule(self, into: MetricsBuffer | None) -> None:
        """Update the weights and, where it is asked for, compute the metric in the same pass."""
        if into is None:
            self.execute()
            return
        active = self.table.addresses[GRADIENT] != 0
        for k in np.flatnonzero(self.table.sizes == 0):  # these may have no address
            active[k] = self.table.gradients[k] is not None
        self.execute.update_with_metrics(into, self._rng_offsets)
        into.mark(self._rng_offsets[active])

    def write_hyper(self, hyper: np.ndarray | list[float]) -> None:
        """Put the hyper-parameters, or one row of them for all, into the table, and keys where rounding is stochastic."""
        if self._columns is not None:
            hyper = [hyper[k] for k in self._columns] if isinstance(hyper, list) else hyper[:, self._columns]
        if isinstance(hyper, list):
            self.table.fill(hyper)
        elif self._seed is None:
            self.table.hyper[:] = hyper[self.rows]
        else:
            self._write_hyper_and_keys(hyper, self._seed)
        if self._grad_scale_and_skip is not None:
            self._write_grad_scale(self._grad_scale_and_skip)

    def _write_grad_scale(self, grad_scale_and_skip: torch.Tensor) -> None:
        own: Any = self.table.grad_scale_and_skip
        if own is not grad_scale_and_skip:  # on another device
            own.copy_(grad_scale_and_skip, non_blocking=True)
        if self.execute.multiplies_on_host:
            self.table.hyper[:, 0] *= own.numpy()[0]

    def _write_hyper_and_keys(self, hyper: np.ndarray, seed: int | storage.CodesOnly) -> None:
        table = self.table
        values, width = hyper[self.rows], 1 + len(table.rule.hyper)
        table.hyper[:, :width] = values[:, :width]
        if table.storage.stochastic:
            table.hyper[:, width:] = storage.keys(seed, values[:, width], self._rng_offsets)

    def begin(self, hyper: np.ndarray | list[float]) -> None:
        """Hyper-parameters, and dense copies of what has other strides: before reductions and rule."""
        table = self.table
        self.write_hyper(hyper)
        for dense, gradient in self.sources:
            dense.copy_(gradient())
        for k in self.copied:
            table.weights[k].copy_(self.originals[k])

    def end(self) -> None:
        """Everything after the weights have been updated."""
        for k in self.copied:
            if self.table.gradients[self._spans[k].start] is not None:
                self.originals[k].copy_(self.table.weights[k])
        if self.table.zero_grads:
            for _, gradient in self.sources:
                gradient().zero_()

    @cached_property
    def rows_on_device(self) -> slice | torch.Tensor:
        """Which of the weights it has, to index a tensor on their device."""
        return self.rows if isinstance(self.rows, slice) else torch.from_numpy(self.rows).to(self.table.device)


def _strides(
    weight: torch.Tensor, states: Sequence[torch.Tensor], master: torch.Tensor | None, stacked: bool = False
) -> tuple[int, ...]:
    """Those in which the weight's elements are walked: its states' and master's, its own if it has neither and no gaps.

    Packed states are in C's order. In a stack there are no gaps in what is stacked, which `check_stack` has seen to.
    """
    for companion in (*(state for state in states if not storage.is_packed(state)), master):
        if companion is not None:
            return companion.stride()
    if stacked:
        return weight.stride()
    return torch.empty(weight.shape, device="meta").stride() if states else dense_strides(weight)


def _needs_copy(tensor: torch.Tensor, strides: tuple[int, ...], first: int) -> bool:
    """Whether the tensor is stored in another order than that of these strides, those of the axes from `first` on."""
    return tensor.is_neg() or not same_order(tensor.shape[first:], tensor.stride()[first:], strides[first:])


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def group_key(
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    states: tuple[torch.Tensor, ...],
    master: torch.Tensor | None,
    stacked: bool,
) -> tuple[Any, ...]:
    tensors = [weight, *states] + ([] if gradient is None else [gradient]) + ([] if master is None else [master])
    # Strides other than the weight's mean that a fresh copy is made, and fresh memory is aligned.
    aligned = not reduce(operator.or_, map(_data_ptr, tensors)) & 15
    if stacked:
        aligned &= all(each.stride(0) * each.element_size() % 16 == 0 for each in tensors)
    return (
        weight.device,
        weight.dtype,
        weight.dtype if gradient is None else gradient.dtype,
        (*(state.dtype for state in states), None if master is None else master.dtype),
        aligned,
    )
