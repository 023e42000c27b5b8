"""TensorTable: pointers, sizes, hyper-parameters and tiles of the tensors of one launch.

Every backend works from the same table, so that one native call or one GPU launch serves any number of tensors.
The arrays here are on the host; what a GPU needs of them is copied by `backends/triton/upload.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from . import storage
from .language import Rule, TensorRule
from .layouts import compute_dtype

__all__ = ["FIRST_STATE", "GRADIENT", "WEIGHT", "TensorTable", "addresses_of", "tiles_of"]

WEIGHT, GRADIENT, FIRST_STATE = 0, 1, 2  # rows of `addresses`; the states follow, and last the master weights if any


class TensorTable:
    """One group of tensors that share device, rule and types. Built once; gradients and hyper-parameters change.

    Args:
        rule: the update rule.
        weights: dense tensors, all of one type and device, walked in memory order.
        gradients_dtype: the type of all gradients.
        states: for each weight the rule's state tensors, with the weight's strides, each slot of one type, `compute_dtype`
            or bfloat16, or packed; then the numbers that it keeps.
        masters: for each weight what is stored alongside, its copy in `compute_dtype` or another of storage/master.py, of
            one type; or None.
        tile: elements per tile.
        aligned: whether every address is a multiple of 16 bytes.
        seed: whether bfloat16 and packed states are rounded at random, and by which seed.
        stacked: whether all of these are stacks of tensors, by their first axis; for backends that work on addresses only.

    Attributes:
        addresses: int64 [2 + n_states (+ 1 with masters), n_tensors]; a gradient address of 0 skips the tensor.
        sizes: int64 [n_tensors], elements.
        storage: how weights and states are stored.
        hyper: float32 or float64 [n_tensors, 1 + n_hyper]: rescale_grad, then the rule's own; after these, where rounding is
            stochastic, the two halves of a key.
        tiles: int32 [n_tiles, 2]: tensor, and which of its tiles.
        grad_scale_and_skip: float32 [2] on the device, or None: a factor for gradients in addition to rescale_grad, and
            whether (not 0) the step is skipped. To be set, if at all, before a backend takes the table.
        zero_grads: whether gradients become zeros; also to be set before that.
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
        seed: int | storage.CodesOnly | None = None,
        stacked: bool = False,
    ) -> None:
        self.rule = rule
        self.weights = list(weights)
        self.states = list(states)
        self.masters = None if masters is None else list(masters)
        self.device = weights[0].device
        self.weight_dtype = weights[0].dtype
        self.gradient_dtype = gradients_dtype
        self.dtype = compute_dtype(self.weight_dtype)
        self.tile = tile
        self.aligned = aligned
        self.grad_scale_and_skip: torch.Tensor | None = None
        self.zero_grads = False

        n, n_states = sum(map(len, weights)) if stacked else len(weights), len(rule.state)
        self.gradients: list[Callable[[], torch.Tensor | None] | None] = [None] * n
        self.addresses = np.zeros((FIRST_STATE + n_states + (masters is not None), n), dtype=np.int64)
        self.addresses[WEIGHT] = addresses_of(weights, stacked)
        for k in range(n_states):
            self.addresses[FIRST_STATE + k] = addresses_of([row[k] for row in states], stacked)
        if masters is not None:
            self.addresses[-1] = addresses_of(masters, stacked)
        self.sizes = np.array([weight.numel() for weight in weights], dtype=np.int64)
        if stacked:
            lengths = list(map(len, weights))
            self.sizes = np.repeat(self.sizes // lengths, lengths)
        types = [tensor.dtype for tensor in states[0][:n_states]] if states else []
        self.storage = storage.of_tensors(self.weight_dtype, types, None if masters is None else masters[0].dtype, seed)
        width = 1 + len(rule.hyper) + 2 * self.storage.stochastic
        self.hyper = np.zeros((n, width), dtype=np.float64 if self.dtype == torch.float64 else np.float32)
        self._packed = struct.Struct(f"{width}{self.hyper.dtype.char}").pack
        self._hyper_bytes = self.hyper.data.cast("B") if n else memoryview(bytearray())
        self.tiles = tiles_of(self.sizes, tile)
        self.n_elements = int(self.sizes.sum())

    def fill(self, row: list[float]) -> None:
        """As `hyper[:] = row`. For many tensors of few elements NumPy's own way takes a tenth of a step."""
        try:
            self._hyper_bytes[:] = self._packed(*row) * len(self.sizes)
        except OverflowError:  # a number beyond float32, which becomes infinite
            self.hyper[:] = row

    def room_for_sums(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For each of the rule's reductions room for what it sums up, and for what the rule gets of it.

        Both are [n_tensors, n] in the table's type on its device, and one and the same where the sums are all that it gets.
        """

        def room(width: int) -> torch.Tensor:
            return torch.zeros(len(self.sizes), width, dtype=self.dtype, device=self.device)

        totals = [room(reduction.n_values) for reduction in self.rule.reductions]
        sums = [
            total if reduction.finished is None and not reduction.feeds_next else room(reduction.n_results)
            for total, reduction in zip(totals, self.rule.reductions, strict=True)
        ]
        return totals, sums


def tiles_of(sizes: np.ndarray, tile: int) -> np.ndarray:
    """All tiles of tensors of these sizes, int32 [n_tiles, 2]: tensor, and which of its tiles."""
    counts = -(-sizes // tile)
    owner = np.repeat(np.arange(len(sizes)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owner, np.arange(len(owner)) - first], axis=1).astype(np.int32)


def addresses_of(tensors: Sequence[torch.Tensor], stacked: bool) -> list[int] | np.ndarray:
    """The addresses of the tensors, or, if they are stacks, of what is in them."""
    if not stacked:
        return [tensor.data_ptr() for tensor in tensors]
    steps = [np.arange(len(each)) * (each.stride(0) * each.element_size()) for each in tensors]
    return np.concatenate([each.data_ptr() + step for each, step in zip(tensors, steps, strict=True)])
