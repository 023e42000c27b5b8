"""Check weights, states and gradients that are passed to an `Update`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from . import storage
from .language import Rule, TensorRule
from .layouts import compute_dtype, dense_strides, is_wrapper, same_order
from .messages import instance
from .states import slot_shapes

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IN_PLACE_OF_MASTERS = {  # by the weight's dtype: dtypes of split masters, in place of a full copy
    weight: [kind for kind in (torch.int16, torch.int8) if storage.kind_of(weight, kind) is not None] for weight in DTYPES
}


def one_of_each_storage(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> list[torch.Tensor]:
    """Return of the tensors that have elements, at these addresses, one in each storage."""
    offsets: list[Any] = list(map(torch.Tensor.storage_offset, tensors))
    storages = addresses
    if any(offsets):  # of the storage, without an object for it, which would stay alive
        sizes = map(torch.Tensor.element_size, tensors)
        storages = [address - offset * size for address, offset, size in zip(addresses, offsets, sizes, strict=True)]
    found = dict(zip(storages, zip(tensors, addresses, strict=True), strict=True))
    return [tensor for tensor, address in found.values() if address]


def check_tensors(rule: Rule | TensorRule, name: str, weight: Any, states: Sequence[Any], master: Any) -> None:
    _check_plain(name, weight)
    check_not_inference(name, weight)
    if len(states) != len(rule.slots):
        raise ValueError(
            f"the state of {name} has {len(states)} tensors: rule {rule.name!r} has {len(rule.slots)} "
            f"({', '.join(rule.slots) or 'none'})"
        )
    _check_overlap(name, weight)
    strides = dense_strides(weight)
    for slot, (tensor, shape), types in zip(
        (*rule.slots, "master"),
        companions_of(rule, weight, states, master),
        allowed_types(rule, weight.dtype, weight.shape),
        strict=False,
    ):
        instance(f"{slot} of {name}", tensor, torch.Tensor, "a tensor")
        is_packed = slot != "master" and tensor.dtype in storage.PACKED  # one-dimensional
        if tensor.dtype not in types or tensor.device != weight.device or tensor.shape != shape:
            plain = [kind for kind in types if slot == "master" or not storage.is_packed(kind)]
            allowed = [tensor.dtype] if is_packed and tensor.dtype in types else plain
            words = f"is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            words += f": must be {' or '.join(map(str, allowed))} {tuple(shape)} on {weight.device}"
        elif is_packed and not weight.is_contiguous():
            words = f"is packed, so the weight must be contiguous: it has strides {weight.stride()}"
        elif is_packed and tensor.data_ptr() % 4:
            words = (
                f"is packed and begins {tensor.data_ptr() % 4} bytes after a multiple of 4: must begin at one, as float32 "
            )
            words += "scales are in it; use .clone()"
        elif shape == weight.shape and tensor.stride() != strides and not same_order(shape, tensor.stride(), strides):
            words = f"has strides {tensor.stride()}: must have {strides}, the weight's"
        else:
            continue
        raise ValueError(f"{slot} of {name} {words}")


def check_not_inference(name: str, weight: torch.Tensor) -> None:
    if weight.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), where autograd is not told of changes: make it outside"
        )


def allowed_types(rule: Rule | TensorRule, weight: torch.dtype, shape: torch.Size) -> tuple[tuple[torch.dtype, ...], ...]:
    """Return for each slot of a rule, and last for the master, the allowed dtypes, the default first."""
    usual = (compute_dtype(weight),)
    if usual[0] == torch.float64:
        return (usual,) * (len(rule.slots) + 1)
    low = (*usual, torch.bfloat16, *storage.PACKED)
    narrows = rule.narrows(shape) if isinstance(rule, TensorRule) else [True] * len(rule.state)
    return (
        *(low if narrow else usual for narrow in narrows),
        *[usual] * len(rule.kept),
        (*usual, *_IN_PLACE_OF_MASTERS[weight]),
    )


def companions_of(
    rule: Rule | TensorRule, weight: torch.Tensor, states: Sequence[torch.Tensor], master: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Size]]:
    """Return a weight's states, per-tensor states and master, each with the shape that it must have."""
    pairs = list(zip(states, slot_shapes(rule, weight.shape, states), strict=True))
    return pairs if master is None else [*pairs, (master, weight.shape)]


def addresses_of(names: Iterable[str], tensors: Sequence[Any]) -> list[int]:
    """Return the addresses of tensors, 0 for None, after `check_memory`."""
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if 0 not in addresses:
            return addresses
    except (RuntimeError, TypeError):  # a tensor without memory, or None
        pass
    return [0 if tensor is None else check_memory(name, tensor) for name, tensor in zip(names, tensors, strict=True)]


def check_memory(name: str, tensor: Any) -> int:
    """Return a tensor's address. Raise TypeError or ValueError for one that has elements but no memory."""
    if not (isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided):
        return 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if address or not tensor.numel() or tensor.device.type == "meta":  # no meta tensor has memory
        return address
    if is_wrapper(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, made of other tensors: rule updates take plain ones")
    raise ValueError(
        f"{name} has no memory: it has been freed (untyped_storage().resize_(0)), is of a class that only stands for "
        f"other tensors, or was made inside torch.vmap or FakeTensorMode (it is a {type(tensor).__name__}): use tensors "
        "that have their elements in memory, or the meta device"
    )


def check_gradient(name: str, weight: torch.Tensor, gradient: Any) -> None:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient of {name} must be a tensor or None, got {type(gradient).__name__}")
    if gradient.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name} is sparse ({gradient.layout}), which rule updates do not take: "
            "use sparse=False in the layer, or gradient.to_dense()"
        )
    if gradient.dtype not in DTYPES:
        raise TypeError(f"the gradient of {name} is {gradient.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise ValueError(
            f"the gradient of {name} is {tuple(gradient.shape)} on {gradient.device}: "
            f"its weight is {tuple(weight.shape)} on {weight.device}"
        )


def sizes_of(first: Sequence[int], columns: Sequence[Sequence[Any]]) -> np.ndarray:
    """Return how many bytes each tensor reaches over, [n_columns, n]; 0 for None.

    `first` has for each row the first one that is alike.
    """
    places = {i: k for k, i in enumerate(set(first))}
    sizes = [[0 if column[i] is None else _bytes(column[i]) for i in places] for column in columns]
    of_kinds = np.array(sizes, dtype=np.int64).reshape(len(columns), len(places))
    return of_kinds[:, [places[i] for i in first]] if places else of_kinds


def rooms_of(tensors: Sequence[Any]) -> np.ndarray:
    """Return how many bytes there are from each tensor's first element to the end of its storage, int64 [n]; 0 for None."""
    try:
        ends = list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)))
        offsets = list(map(torch.Tensor.storage_offset, tensors))
    except TypeError:  # None
        rooms = np.zeros(len(tensors), dtype=np.int64)
        there = [tensor is not None for tensor in tensors]
        rooms[there] = rooms_of(list(compress(tensors, there))) if any(there) else 0
        return rooms
    if not any(offsets):
        return np.array(ends, dtype=np.int64)
    widths = np.array(list(map(torch.Tensor.element_size, tensors)), dtype=np.int64)
    return np.array(ends, dtype=np.int64) - np.array(offsets, dtype=np.int64) * widths


def are_apart(starts: np.ndarray, sizes: np.ndarray) -> bool:
    """Return whether spans of memory on one device do not overlap; tensors whose spans do may yet share no byte."""
    taken = (sizes > 0) & (starts != 0)
    starts, sizes = starts[taken], sizes[taken]
    order = starts.argsort()
    starts, ends = starts[order], (starts + sizes)[order]
    return bool((starts[1:] >= ends[:-1]).all())


def check_apart(written: Sequence[tuple[str, torch.Tensor]], read: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
    """Raise ValueError if a tensor that a step writes shares memory with another one.

    Threads of one launch update tensors at the same time, and would lose updates, others at each run. Tensors that are only
    read may share memory with each other.
    """
    named = [*written, *read]
    spans: dict[torch.device, list[tuple[int, int, int]]] = {}  # first byte, the byte after the last, place in `named`
    for i, (_, tensor) in enumerate(named):
        if tensor.numel() and tensor.device.type != "meta" and (start := tensor.data_ptr()):
            spans.setdefault(tensor.device, []).append((start, start + _bytes(tensor), i))
    for on_device in spans.values():
        reaching: list[tuple[int, int, int]] = []  # of those that begin before, all that end behind the next one's start
        for start, end, i in sorted(on_device):
            reaching = [span for span in reaching if span[1] > start]
            for *_, k in reaching:
                (first, one), (second, other) = named[min(i, k)], named[max(i, k)]
                if min(i, k) < len(written) and _overlap(one, other):
                    raise ValueError(
                        f"{first} and {second} share memory, which a step would change twice at the same time: give each "
                        "memory of its own, by .clone(), or let two modules have the same parameter, a.weight = b.weight"
                    )
            reaching.append((start, end, i))


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements of memory a tensor that has elements reaches over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    return _span(tensor) * tensor.element_size() if tensor.numel() else 0


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose spans overlap share a byte; columns of one matrix do not."""
    if one.numel() == _span(one) and other.numel() == _span(other):
        return True
    start = min(one.data_ptr(), other.data_ptr())
    end = max(tensor.data_ptr() + _bytes(tensor) for tensor in (one, other))
    taken = torch.zeros(end - start, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return taken.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - start)

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())


def check_list(argument: str, tensors: Sequence[Any]) -> None:
    for i, tensor in enumerate(tensors):
        _check_plain(f"{argument}[{i}]", tensor)
        check_memory(f"{argument}[{i}]", tensor)
        _check_overlap(f"{argument}[{i}]", tensor)


def _check_overlap(name: str, tensor: torch.Tensor) -> None:
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if overlapping and tensor.numel():
        raise ValueError(
            f"{name} has several elements in one place in memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), "
            "as expand() makes them: use .contiguous()"
        )


def _check_plain(name: str, tensor: Any) -> None:
    """Raise TypeError unless this is a plain dense tensor of one of the dtypes."""
    instance(name, tensor, torch.Tensor, "a tensor")
    if is_wrapper(tensor):
        words = f"a {type(tensor).__name__}, made of other tensors: must be a plain tensor"
    elif tensor.layout != torch.strided:
        words = f"sparse ({tensor.layout}): must be dense; use .coalesce().values() or .to_dense()"
    elif tensor.dtype not in DTYPES:
        words = f"{tensor.dtype}: must be one of {', '.join(map(str, DTYPES))}"
    else:
        return
    raise TypeError(f"{name} is {words}")
