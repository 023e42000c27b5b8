"""TensorTable: where the tensors of one launch lie, how long they are, their hyper-parameters and their tiles.

Every engine works from the same table, so that one native call or one GPU launch serves any number of tensors.
The arrays here are on the host; what a GPU needs of them is copied by `gpu.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import storage
from .language import Rule, TensorRule

__all__ = [
    "Recording",
    "TensorTable",
    "allocate_states",
    "as_rows",
    "compute_dtype",
    "goes_with",
    "is_dense",
    "is_wrapper",
    "kept_numbers",
    "same_order",
    "slot_dtypes",
    "slot_shapes",
    "stacked_zeros",
    "state_type",
    "states_for",
    "widest",
]

WEIGHT, GRADIENT, FIRST_STATE = 0, 1, 2  # rows of `addresses`; the states follow, and last the master weights if any
PACK_FROM = 4096  # elements; in smaller tensors there is little to be saved, and as a rule much to be lost: biases, norms
ALIGNMENT = 64  # bytes between the starts of two tensors of an arena: one vector register of any CPU, four of a GPU


def compute_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """The type in which a rule computes and keeps its state: float64 for float64 weights, else float32."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


@cache
def widest(device_type: str) -> torch.dtype:
    """float64, or float32 on devices that have no float64, as Apple's."""
    try:
        torch.zeros((), dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


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


def same_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether either strides give a tensor of this shape the same order of elements; axes of length 1 have none."""
    return strides == others or 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, others, strict=True))


def goes_with(tensor: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a state or master has the weight's device and this type, and, if of its shape, its order of elements."""
    if tensor.device != weight.device or tensor.dtype != dtype:
        return False
    return tensor.shape != weight.shape or same_order(weight.shape, tensor.stride(), dense_strides(weight))


def is_wrapper(tensor: Any) -> bool:
    """Whether the tensor is made of others, as those of a sharded model are, and has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def slot_dtypes(
    rule: Rule | TensorRule, weight_dtype: torch.dtype, state_dtype: torch.dtype | None = None
) -> tuple[torch.dtype, ...]:
    """The types of all that a rule keeps of a weight, whose states are to be stored in `state_dtype` where they may be."""
    dtype = compute_dtype(weight_dtype)
    if state_dtype is None or dtype != torch.float32 or not isinstance(rule, Rule):
        return (dtype,) * len(rule.slots)
    return tuple(dtype if name in (*rule.exact, *rule.kept) else state_dtype for name in rule.slots)


def state_type(weight: torch.Tensor, state_dtype: torch.dtype | None) -> torch.dtype | None:
    """`state_dtype`, or None for a weight whose states are not packed: one of few elements or not in C's order."""
    packs = weight.numel() >= PACK_FROM and weight.is_contiguous()
    return None if state_dtype == torch.uint8 and not packs else state_dtype


def slot_shapes(
    rule: Rule | TensorRule, shape: torch.Size, tensors: Sequence[torch.Tensor | torch.dtype]
) -> list[torch.Size]:
    """The shapes of all that a rule keeps of a weight of this shape, in tensors like these or of these types."""
    return [
        torch.Size([storage.packed_size(shape.numel())]) if getattr(kind, "dtype", kind) == torch.uint8 else each
        for kind, each in zip(tensors, rule.shapes(shape), strict=True)
    ]


@torch.inference_mode(False)  # they outlive the step that makes them
def states_for(
    rule: Rule | TensorRule, weights: Sequence[torch.Tensor], state_dtype: torch.dtype | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """Zeros for all that a rule keeps of each weight, in the order of `rule.slots`; types as those of `slot_dtypes`."""
    if state_dtype is not None and isinstance(rule, Rule):
        return _in_fewer_bits(rule, weights, state_dtype)
    if isinstance(rule, Rule):
        states = allocate_states(weights, len(rule.state))
        return [row + kept for row, kept in zip(states, kept_numbers(weights, len(rule.kept)), strict=True)]
    shapes = [rule.shapes(weight.shape) for weight in weights]
    states = []
    for weight, row in zip(weights, shapes, strict=True):
        like = iter(*allocate_states([weight], sum(shape == weight.shape for shape in row)))
        new = partial(torch.zeros, dtype=compute_dtype(weight.dtype), device=weight.device)
        states.append(tuple(next(like) if shape == weight.shape else new(shape) for shape in row))
    return states


def _in_fewer_bits(rule: Rule, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    columns = [allocate_states(weights, 1, None if name in rule.exact else dtype) for name in rule.state]
    kept = kept_numbers(weights, len(rule.kept))
    return [tuple(row[0] for row in rows[:-1]) + rows[-1] for rows in zip(*columns, kept, strict=True)]


@torch.inference_mode(False)
def kept_numbers(weights: Sequence[torch.Tensor], n: int) -> list[tuple[torch.Tensor, ...]]:
    """`n` zeros without dimensions for each weight, in `compute_dtype`: rows of one array for each device and type."""
    kinds = [(weight.device, compute_dtype(weight.dtype)) for weight in weights]
    arrays = {
        (device, dtype): torch.zeros(kinds.count((device, dtype)), n, dtype=dtype, device=device) for device, dtype in kinds
    }
    rows = {kind: iter(array.unbind()) for kind, array in arrays.items()}
    return [next(rows[kind]).unbind() for kind in kinds] if n else [()] * len(weights)


def as_rows(numbers: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor | None:
    """The array whose rows these numbers are, as `states_for` makes them, [n, k]; None if they are of no such array."""
    first = numbers[0][0]
    k, size, start = len(numbers[0]), first.element_size(), first.data_ptr()
    step = numbers[1][0].data_ptr() - start if len(numbers) > 1 else k * size
    places = [start + i * step + j * size for i in range(len(numbers)) for j in range(k)]
    flat = [number for row in numbers for number in row]
    memory = first.untyped_storage().data_ptr()
    fits = step >= k * size and step % size == 0 and [number.data_ptr() for number in flat] == places
    if not fits or any(number.untyped_storage().data_ptr() != memory for number in flat):
        return None
    return first.as_strided((len(numbers), k), (step // size, 1))


@torch.inference_mode(False)
def allocate_states(
    weights: Sequence[torch.Tensor], n_states: int, dtype: torch.dtype | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """Zeros in the shape of each weight, `n_states` times, in `compute_dtype`, or in `dtype` where that is float32.

    With uint8 they are packed, of one dimension, where `state_type` says so.
    One arena per device, type and state serves all weights: few allocations, always aligned. A dense weight's state
    has the weight's strides, so that both can be walked as one stretch of memory.
    """
    states: list[list[torch.Tensor]] = [[] for _ in weights]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, weight in enumerate(weights):
        kind = compute_dtype(weight.dtype)
        narrow = state_type(weight, dtype) if kind == torch.float32 else None
        kinds.setdefault((weight.device, narrow or kind), []).append(i)
    for (device, kind), members in kinds.items():
        step, packed = ALIGNMENT // kind.itemsize, kind == torch.uint8
        sizes = [storage.packed_size(weights[i].numel()) if packed else weights[i].numel() for i in members]
        starts = np.cumsum([0] + [-(-size // step) * step for size in sizes])
        for _ in range(n_states):
            arena = torch.zeros(int(starts[-1]), dtype=kind, device=device)
            for i, start, size in zip(members, starts, sizes, strict=False):
                weight = weights[i]
                flat = arena[int(start) : int(start) + size]
                if packed:
                    states[i].append(flat)
                elif weight.is_contiguous() or not is_dense(weight):
                    states[i].append(flat.view(weight.shape))
                else:
                    states[i].append(flat.as_strided(weight.shape, weight.stride()))
    return [tuple(row) for row in states]


def stacked_zeros(n: int, like: torch.Tensor) -> torch.Tensor:
    """As `allocate_states` of `n` weights that are all like this one, in one tensor."""
    kind = compute_dtype(like.dtype)
    step = ALIGNMENT // kind.itemsize
    room = -(-like.numel() // step) * step
    arena = torch.zeros(n * room, dtype=kind, device=like.device)
    return arena.as_strided((n, *like.shape), (room, *dense_strides(like)))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it has no gaps, else those of C's order."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


class Recording:
    """What is launched while a CUDA graph is recorded. What changes from step to step is not copied into the graph then.

    Attributes:
        current: the recording that is going on.
        general: whether rules must be those that are right at every step, as in a graph and before it is recorded.
        updates: each `Update` that has been run, with what it is to work on again.
        owners: for each step that was taken a function that tells whether it can be taken in the same way again, and one
            that does all of it that the host does.
    """

    current: ClassVar[Recording | None] = None
    general: ClassVar[bool] = False

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.owners: list[tuple[Callable[[], bool], Callable[[], None]]] = []


class TensorTable:
    """One group of tensors that share device, rule and types. Built once; gradients and hyper-parameters change.

    Args:
        rule: the update rule.
        weights: dense tensors, all of one type and device, walked in memory order.
        gradients_dtype: the type of all gradients.
        states: for each weight the rule's state tensors, with the weight's strides, each slot of one type, `compute_dtype`
            or bfloat16, or packed in uint8; then the numbers that it keeps.
        masters: for each weight what stands beside it, its copy in `compute_dtype` or another of those of storage.py, of
            one type; or None.
        tile: elements per tile.
        aligned: whether every address is a multiple of 16 bytes.
        seed: whether bfloat16 and packed states are rounded at random, and by which seed.
        stacked: whether all of these are stacks of tensors, by their first axis; for engines that look at memory only.

    Attributes:
        addresses: int64 [2 + n_states (+ 1 with masters), n_tensors]; a gradient address of 0 skips the tensor.
        sizes: int64 [n_tensors], elements.
        storage: how weights and states are stored.
        hyper: float32 or float64 [n_tensors, 1 + n_hyper]: rescale_grad, then the rule's own; after these, where rounding is
            stochastic, the two halves of a key.
        tiles: int32 [n_tiles, 2]: tensor, and which of its tiles.
        control: float32 [2] on the device, or None: a factor for gradients besides rescale_grad, and whether (not 0)
            all is to be left as it is. To be set, if at all, before an engine takes the table.
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
        self.control: torch.Tensor | None = None
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
        counts = -(-self.sizes // tile)
        owner = np.repeat(np.arange(n), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        self.tiles = np.stack([owner, np.arange(len(owner)) - first], axis=1).astype(np.int32)
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
            total if reduction.finished is None and not reduction.passes_on else room(reduction.n_results)
            for total, reduction in zip(totals, self.rule.reductions, strict=True)
        ]
        return totals, sums


def addresses_of(tensors: Sequence[torch.Tensor], stacked: bool) -> list[int] | np.ndarray:
    """Where the tensors lie, or, if they are stacks, what is in them."""
    if not stacked:
        return [tensor.data_ptr() for tensor in tensors]
    steps = [np.arange(len(each)) * (each.stride(0) * each.element_size()) for each in tensors]
    return np.concatenate([each.data_ptr() + step for each, step in zip(tensors, steps, strict=True)])
