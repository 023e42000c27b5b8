"""`Launch`: the tensors that one native call or GPU launch updates. They share device, types and rule.

Every backend works from the same addresses, sizes, hyper-parameters and tiles, so that one call serves any number of
tensors. The arrays here are on the host; `backends/triton/upload.py` copies them to a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import Any

import numpy as np
import torch

from . import storage, streams
from .guards import Reference
from .language import Rule, StagedRule, TensorRule
from .layouts import compute_dtype, dense_strides, is_dense, same_order
from .metrics import MetricsBuffer
from .parts import Parts
from .states import PerTensorStates

WEIGHT, GRADIENT, FIRST_STATE = 0, 1, 2  # rows of `addresses`; the states follow, then the masters if any, then `Parts`
_data_ptr, _is_neg = torch.Tensor.data_ptr, torch.Tensor.is_neg


class Launch:
    """Tensors that share device, rule and types, updated together. Made once; gradients and hyper-parameters change.

    Weights with gaps, and weights whose strides no longer match their states, are updated in a dense copy that is written
    back. A backend's subclass defines `tile_for`, `_prepare` and the methods that compute.

    Args:
        states: for each weight the rule's state tensors, then its per-tensor states; one dtype for each slot.
        masters: all of one dtype, `compute_dtype` or another of storage/master.py; None if there are no masters.
        aligned: whether every address is a multiple of 16 bytes.
        seed: seed for rounding bfloat16 and packed states stochastically; None rounds to nearest.
        grad_scale_and_skip: as in `Update`; float32 [2] or None.
        indices: indices of these weights in their `Update`; default: all.
        rows: rows of these weights in the update's hyper-parameters, gradient addresses and offsets.
        names: names of the hyper-parameters in these rows; default: the rule's.
        rng_offsets: random-number offsets of all weights of the update.
        starts: the addresses of the weights, of anything, of the states and of the masters, int64 [.., n_tensors], if known.
        alike: for each weight the first one that has the strides and shape of it, as have the states; default: itself.

    Attributes:
        weights: dense tensors, walked in memory order; the states have the same strides.
        addresses: int64 [2 + n_states (+ 1 with masters), n_tensors]; a gradient address of 0 skips the tensor. The rows of
            `Parts.addresses` follow if there are any.
        parts: the rows, columns or slices that the rule's means are over; None for a rule without means.
        sizes: int64 [n_tensors], numbers of elements.
        hyper: float32 or float64 [n_tensors, 1 + n_hyper (+ 2)]: rescale_grad, the rule's hyper-parameters and, if rounding
            is stochastic, the two halves of a key.
        tiles: int32 [n_tiles, 2]: index of the tensor, index of the tile in it.
        gradients: for each tensor a function that returns its gradient, or None if it is skipped. Holds no gradient alive.
        totals: for each reduction of the rule the values that it summed, [n_tensors, n_values], in the arithmetic's type, on
            the device. For a reduction over all tensors the rows are equal. Means are in `parts`.
        sums: for each reduction the numbers that the rule receives, [n_tensors, n_results], without those that are vectors;
            the same tensor as in `totals` if the rule receives the sums alone.
        numbers: for each reduction its `PerTensorStates`, or None if it keeps nothing.
        skipped: float32 [1], not 0 if what reductions keep stays because the step is skipped.
    """

    engine: str | None = None  # that the user has asked for; a rule of whole tensors may use it or not
    looks_at_tensors = False  # whether it computes on tensors rather than on addresses
    may_raise = False  # whether the rule may raise for the values of tensors
    finishes_sums = False  # whether `run_finished` can be called
    multiplies_on_host = False  # whether the factor in grad_scale_and_skip is multiplied into `hyper`

    @torch.inference_mode(False)  # what is made here outlives the step
    def __init__(
        self,
        rule: Rule | TensorRule,
        weights: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
        masters: Sequence[torch.Tensor] | None,
        gradient_dtype: torch.dtype,
        aligned: bool,
        seed: int | storage.CodesOnly | None = None,
        grad_scale_and_skip: torch.Tensor | None = None,
        zero_grads: bool = False,
        indices: Sequence[int] | None = None,
        rows: slice | np.ndarray = slice(None),
        names: tuple[str, ...] | None = None,
        rng_offsets: np.ndarray | None = None,
        starts: np.ndarray | None = None,
        alike: Sequence[int] | None = None,
    ) -> None:
        self.rule: Any = rule  # a Rule or a TensorRule, by the subclass
        self.seed, self.zero_grads, self.aligned = seed, zero_grads, aligned
        self.originals, self.masters = list(weights), None if masters is None else list(masters)
        self.states = [row[: len(rule.slots)] for row in states]
        self.indices = range(len(weights)) if indices is None else indices
        self.rows: Any = rows
        self._rng_offsets = None if rng_offsets is None else rng_offsets[rows]
        self.device, self.weight_dtype, self.gradient_dtype = weights[0].device, weights[0].dtype, gradient_dtype
        self.dtype = compute_dtype(self.weight_dtype)
        self._given_scale_and_skip = self.grad_scale_and_skip = grad_scale_and_skip
        if grad_scale_and_skip is not None:
            self.grad_scale_and_skip = grad_scale_and_skip.to(self.device)
        self._columns: list[int] | None = None  # the update's hyper-parameters that the rule needs, if not all
        if names is not None and rule.hyper != names:
            self._columns = [0, *(1 + names.index(name) for name in rule.hyper)]
            self._columns += [] if seed is None else [1 + len(names)]

        types, n_states = [tensor.dtype for tensor in states[0][: len(rule.state)]], len(rule.state)
        # Elements are walked in the order of the states and masters; packed states have C's order. A rule of whole tensors
        # keeps each tensor's own order.
        like = [k for k, dtype in enumerate(types) if dtype not in storage.PACKED] if isinstance(rule, Rule) else []
        if like or masters is not None:
            in_order = [row[like[0]] for row in states] if like else self.masters or []
        elif types and isinstance(rule, Rule):
            in_order = [torch.empty(weight.shape, device="meta") for weight in weights]
        else:
            in_order = [each if is_dense(each) else torch.empty(each.shape, device="meta") for each in weights]
        self.copied = _not_in_order(weights, in_order, range(len(weights)) if alike is None else alike)
        self.weights = list(weights)
        for k in self.copied:
            empty = partial(torch.empty_strided, dtype=self.weight_dtype, device=self.device)
            self.weights[k] = empty(weights[k].shape, in_order[k].stride())
        self.sources: list[tuple[torch.Tensor, Any]] = []  # dense copies; functions that return the gradients

        n_rows = len(weights)
        self.gradients: list[Callable[[], torch.Tensor | None] | None] = [None] * n_rows
        self.parts = Parts(rule, weights, self.states, self.dtype) if isinstance(rule, Rule) and rule.parts else None
        self.addresses = np.zeros((FIRST_STATE + n_states + (masters is not None), n_rows), dtype=np.int64)
        if starts is None:
            self.addresses[WEIGHT] = _addresses_of(weights)
            for k in range(n_states):
                self.addresses[FIRST_STATE + k] = _addresses_of([row[k] for row in states])
            if masters is not None:
                self.addresses[-1] = _addresses_of(masters)
        else:
            self.addresses[:] = starts
        for k in self.copied:
            self.addresses[WEIGHT, k] = self.weights[k].data_ptr()
        if self.parts is not None:
            self.addresses = np.concatenate([self.addresses, self.parts.addresses()])
        self.sizes = np.array(list(map(torch.Tensor.numel, weights)), dtype=np.int64)
        self.n_elements = int(self.sizes.sum())
        self.tile = self.tile_for(self.n_elements, any(kind in storage.PACKED for kind in types))
        self.tiles = tiles_of(self.sizes, self.tile)
        self.storage = storage.of_tensors(self.weight_dtype, types, None if masters is None else masters[0].dtype, seed)
        self.width = 1 + len(rule.hyper)  # without the keys that may follow
        width = self.width + 2 * self.storage.stochastic
        self.hyper = np.zeros((n_rows, width), dtype=np.float64 if self.dtype == torch.float64 else np.float32)
        self._packed_row = struct.Struct(f"{width}{self.hyper.dtype.char}").pack
        self._hyper_bytes = self.hyper.data.cast("B") if self.hyper.size else memoryview(bytearray())

        self.totals = [self._room(0 if reduction.op == "mean" else reduction.n_values) for reduction in rule.reductions]
        self.sums = [
            total if reduction.finished is None and not reduction.feeds_next else self._room(reduction.n_scalar_results)
            for total, reduction in zip(self.totals, rule.reductions, strict=True)
        ]
        self.numbers: list[PerTensorStates | None] = []
        for reduction in rule.reductions:
            numbers = [row[n_states : n_states + len(reduction.kept)] for row in self.states]
            self.numbers.append(PerTensorStates(numbers) if reduction.kept and reduction.op != "mean" else None)
            n_states += len(reduction.kept)
        self.skipped = torch.zeros(1, device=self.device)
        self._active: tuple[list[bool], torch.Tensor] | None = None
        self._prepare()

    # Defined by each backend.

    @staticmethod
    def tile_for(elements: int, packed: bool = False) -> int:
        """Return the tile size, in elements, for a launch of `elements` elements; `packed`: whether a state is packed."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Compile kernels and allocate buffers; called at the end of `__init__`."""
        raise NotImplementedError

    def compute(self) -> None:
        """Update the weights with the present addresses and hyper-parameters."""
        raise NotImplementedError

    def compute_ahead(self) -> None:
        """Compute new values without writing them, if `may_raise`; the next `compute` writes them."""

    def graph_form(self) -> Any:
        """Return what a CUDA graph of this launch keeps of the present numbers, to be compared; None for nothing."""
        return None

    def unconditional(self) -> Callable[[], None]:
        """Return what `compute` calls where no step is skipped and gradients have no scale."""
        return self.compute

    def compute_with_metric(self, into: MetricsBuffer, rows: np.ndarray) -> None:
        """Update the weights and write the values of the metric of `into` to these rows of its current slot."""
        raise NotImplementedError

    def run_reduction(self, stage: int) -> None:
        """Run reduction number `stage` of the rule and write its results to `totals[stage]`."""
        raise NotImplementedError

    def run_finished(self, stage: int) -> None:
        """Run reduction number `stage`, and write what its `finish` makes of the sums to `sums[stage]` and the states."""
        raise NotImplementedError

    def hyper_on_device(self) -> torch.Tensor:
        """Return `hyper`, [n_tensors, width]."""
        return torch.from_numpy(self.hyper).to(self.device)

    def upload(self) -> None:
        """Copy the tables that have changed to the device, on the current stream."""

    def replace_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Use other weights, of the same sizes and at `addresses`, in a launch without masters."""

    # Common to all backends.

    def bind(
        self,
        gradients: Sequence[torch.Tensor | None],
        pointers: np.ndarray,
        references: Sequence[Any],
        alike: Sequence[int],
    ) -> None:
        """Bind the gradients of the update, or None, at `pointers`, by weak references; copy them where not dense.

        `alike`: for each weight of this launch the first one whose strides it has, as has its gradient.
        """
        given = gradients if isinstance(self.rows, slice) else [gradients[i] for i in self.indices]
        self.gradients = list(references) if isinstance(self.rows, slice) else [references[i] for i in self.indices]
        self.sources, missing = [], [k for k, gradient in enumerate(given) if gradient is None]
        present: list[Any] = list(given)
        for k in missing:
            present[k] = self.weights[k]
        self.addresses[GRADIENT] = pointers[self.rows]
        for k in _not_in_order(present, self.weights, alike):
            gradient, order = present[k], self.weights[k].stride()
            with torch.inference_mode(False):
                dense = torch.empty_strided(gradient.shape, order, dtype=gradient.dtype, device=gradient.device)
            self.sources.append((dense, self.gradients[k]))
            self.addresses[GRADIENT, k], self.gradients[k] = dense.data_ptr(), partial(itself, dense)
        for k in missing:
            self.addresses[GRADIENT, k], self.gradients[k] = 0, None

    def rebind(self, pointers: np.ndarray | None, references: Sequence[Reference | None]) -> None:
        """Take new addresses, 0 for a missing gradient; the gradients must differ from the bound ones in nothing else.

        None: the addresses are those of before.
        """
        if pointers is not None:
            self.addresses[GRADIENT] = pointers[self.rows]
        self.gradients = list(references) if isinstance(self.rows, slice) else [references[i] for i in self.indices]

    def run(self, hyper: np.ndarray | list[float], into: MetricsBuffer | None = None) -> None:
        """Take one step of a rule without reductions, with hyper-parameters as for `write_hyper`."""
        if self.sources or self.copied:
            with torch.no_grad():
                self.begin(hyper)
                self.run_rule(into)
                self.end()
        else:
            self.write_hyper(hyper)
            if into is None:
                self.compute()
            else:
                self.run_rule(into)

    def run_rule(self, into: MetricsBuffer | None) -> None:
        if into is None:
            self.compute()
            return
        active = self.addresses[GRADIENT] != 0
        for k in np.flatnonzero(self.sizes == 0):  # empty tensors may have no address
            active[k] = self.gradients[k] is not None
        rows: Any = self._rng_offsets
        self.compute_with_metric(into, rows)
        into.mark(rows[active])

    def write_hyper(self, hyper: np.ndarray | list[float]) -> None:
        """Write hyper-parameters, the update's array or one row for all, and make keys for stochastic rounding."""
        if self._columns is not None:
            hyper = [hyper[k] for k in self._columns] if isinstance(hyper, list) else hyper[:, self._columns]
        if isinstance(hyper, list):
            try:  # for many tensors of few elements NumPy's own way takes a tenth of a step
                self._hyper_bytes[:] = self._packed_row(*hyper) * len(self.sizes)
            except OverflowError:  # a number beyond float32, which becomes infinite
                self.hyper[:] = hyper
        else:
            values, width = hyper[self.rows], self.width
            self.hyper[:, :width] = values[:, :width]
            if self.storage.stochastic:
                self.hyper[:, width:] = storage.keys(self.seed, values[:, width], self._rng_offsets)  # type: ignore[arg-type]
        if self._given_scale_and_skip is not None:
            local: Any = self.grad_scale_and_skip
            if local is not self._given_scale_and_skip:  # the given tensor is on another device
                local.copy_(self._given_scale_and_skip, non_blocking=True)
            self.multiply_on_host()

    def multiply_on_host(self) -> None:
        if self.multiplies_on_host and self.grad_scale_and_skip is not None:
            self.hyper[:, 0] *= self.grad_scale_and_skip.numpy()[0]

    def begin(self, hyper: np.ndarray | list[float]) -> None:
        """Write hyper-parameters and fill the dense copies, before reductions and rule."""
        self.write_hyper(hyper)
        for dense, gradient in self.sources:
            dense.copy_(gradient())
        for k in self.copied:
            self.weights[k].copy_(self.originals[k])

    def end(self) -> None:
        """Copy dense copies back to their weights and zero gradients that were copied, after the rule."""
        for k in self.copied:
            if self.gradients[k] is not None:
                self.originals[k].copy_(self.weights[k])
        if self.zero_grads:
            for _, gradient in self.sources:
                gradient().zero_()

    def zero_gradients(self) -> None:
        for bound in self.gradients:
            if bound is not None and (gradient := bound()) is not None:
                gradient.zero_()

    def release(self) -> None:
        """Drop all references to weights and gradients, until `replace_weights`."""
        self.weights, self.originals, self.gradients = [], [], []
        self.replace_weights([])

    @cached_property
    def rows_on_device(self) -> slice | torch.Tensor:
        return self.rows if isinstance(self.rows, slice) else torch.from_numpy(self.rows).to(self.device)

    def active_on_device(self) -> torch.Tensor:
        """Return whether each tensor has a gradient."""
        active = [gradient is not None for gradient in self.gradients]
        if self._active is None or active != self._active[0]:
            staged = streams.staged(torch.tensor(active, device="cpu"), self.device)
            self._active = active, staged.to(self.device, non_blocking=True)
        return self._active[1]

    def kept_addresses(self, stage: int) -> np.ndarray:
        """Return the addresses of the states that a reduction keeps, int64 [n_kept, n_tensors]."""
        reductions = self.rule.reductions
        first = len(self.rule.state) + sum(len(reduction.kept) for reduction in reductions[:stage])
        slots = range(first, first + len(reductions[stage].kept))
        return np.array([_addresses_of([row[k] for row in self.states]) for k in slots], dtype=np.int64)

    def _room(self, width: int) -> torch.Tensor:
        return torch.zeros(len(self.sizes), width, dtype=self.dtype, device=self.device)


def group_keys(
    rule: Rule | TensorRule,
    first: Sequence[int],
    addresses: np.ndarray,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    states: Sequence[tuple[torch.Tensor, ...]],
    masters: Sequence[torch.Tensor | None],
) -> list[tuple[Any, ...]]:
    """Return for each weight what it must share with others of a launch: device, dtypes, alignment, rule, and `in_matrices`.

    `first` has for each weight the first one that is alike in all but its `addresses`, which have a row for the weights, the
    gradients, each slot of the rule, and the masters.
    """
    if not len(first):  # a rank may have no tensor, and then there are no columns of states
        return []
    # Numbers for each tensor are not vectors. A tensor whose strides differ from the weight's is copied to aligned memory.
    aligned = np.bitwise_or.reduce(addresses[[*range(FIRST_STATE + len(rule.state)), -1]]) & 15 == 0
    keys: dict[Any, tuple[Any, ...]] = {}
    for i, is_aligned in set(zip(first, aligned.tolist(), strict=True)):
        weight, gradient, master = weights[i], gradients[i], masters[i]
        rule_of_shape = rule.rule_for(weight.shape)
        keys[i, is_aligned] = (
            weight.device,
            weight.dtype,
            weight.dtype if gradient is None else gradient.dtype,
            (*(state.dtype for state in states[i][: len(rule.state)]), None if master is None else master.dtype),
            # torch takes any address
            is_aligned or (isinstance(rule_of_shape, TensorRule) and not isinstance(rule_of_shape, StagedRule)),
            rule_of_shape,
            in_matrices(rule, weight, states[i][: len(rule.state)]),
        )
    return [keys[kind] for kind in zip(first, aligned.tolist(), strict=True)]


def in_matrices(rule: Rule | TensorRule, weight: torch.Tensor, states: Sequence[torch.Tensor]) -> bool:
    """Return whether engines can walk a weight matrix by matrix, if its rule has means over parts of them.

    They walk memory, so its elements must be in C's order, or have gaps, as then they are copied.
    """
    if rule.rule_for(weight.shape).parts is None:
        return True
    order = torch.empty(weight.shape, device="meta").stride()
    # States of another shape than the weight's are those of the parts, or have no elements.
    parts_are_dense = all(state.is_contiguous() for state in states if state.shape != weight.shape)
    return parts_are_dense and same_order(weight.shape, dense_strides(weight), order)


def tiles_of(sizes: np.ndarray, tile: int) -> np.ndarray:
    """Return int32 [n_tiles, 2]: index of the tensor, index of the tile in it."""
    counts = -(-sizes // tile)
    tensor = np.repeat(np.arange(len(sizes)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([tensor, np.arange(len(tensor)) - first], axis=1).astype(np.int32)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; with `partial`, a reference that keeps it alive."""
    return tensor


def _addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(_data_ptr, tensors))


def _not_in_order(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], alike: Sequence[int]) -> list[int]:
    """Return the places of tensors that cannot be walked in the order that others of their shapes have.

    `alike` has for each the first one with equal strides, whose other one has equal strides, too.
    """
    odd = set(compress(range(len(tensors)), map(_is_neg, tensors)))
    kinds = {k for k in set(alike) if not same_order(tensors[k].shape, tensors[k].stride(), others[k].stride())}
    return sorted(odd.union(k for k, like in enumerate(alike) if like in kinds) if kinds else odd)
