"""Tensors of the CPU that say they are on a GPU, by labels of their storage; see simulated_gpus.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Functions", "Operations", "label", "where"]

# The host has to know their results, or the sizes of these.
WAITING = (
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim"),
    *("_unique", "unique_consecutive", "_linalg_eigh", "_linalg_svd", "_linalg_check_errors", "bincount", "_coalesce"),
)
_get_device = torch.Tensor.device
_get_is_cuda = torch.Tensor.is_cuda


def label(tensor: torch.Tensor) -> int | None:
    """The number of the GPU that a tensor is on; None: it is on the CPU, or has no memory."""
    return getattr(_storage(tensor), "simulated_gpu", None)


def _storage(tensor: torch.Tensor) -> Any:
    if tensor.is_sparse:
        tensor = tensor._values()
    return tensor.untyped_storage() if tensor.layout == torch.strided and not tensor.is_meta else None


def _put(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    """Label the memory of a new tensor."""
    for each in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        if index is not None and (storage := _storage(each)) is not None:
            storage.simulated_gpu = index
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(_storage(tensor), "is_pinned_here", False)


def where(tensor: torch.Tensor) -> str:
    index = label(tensor)
    return ("pinned memory" if _is_pinned(tensor) else "the CPU") if index is None else f"cuda:{index}"


class Functions(TorchFunctionMode):
    """What Python asks of tensors: where they are, and to make some on a device."""

    def __init__(self, gpus: Any) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpus = dict(kwargs or {}), self._gpus
        getter = getattr(func, "__self__", None)
        if getter is _get_device:
            real, index = func(*args), label(args[0])
            return real if index is None else torch.device("cuda", index)
        if getter is _get_is_cuda:
            return label(args[0]) is not None
        name = getattr(func, "__name__", "")
        if name in _METHODS and args and isinstance(args[0], torch.Tensor):
            return _METHODS[name](gpus, *args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        target = None if device is None else torch.device(device)
        if target is not None and target.type == "cuda":
            return self._made(func, args, kwargs, gpus.check_device(target, f"an allocation by torch.{name}"))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and isinstance(args[0], torch.Tensor):
            if target is not None and label(args[0]) is not None:  # to the CPU
                return _to(gpus, args[0], **kwargs)
        found = func(*args, **kwargs)
        if pinned:
            found.untyped_storage().is_pinned_here = True
        return found

    def _made(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        kwargs["device"] = torch.device("cpu")
        if func not in (torch.tensor, torch.as_tensor, torch.asarray):
            return _pytree.tree_map_only(torch.Tensor, lambda each: _put(each, device.index), func(*args, **kwargs))
        if isinstance(args[0], torch.Tensor):
            return _to(self._gpus, args[0], device, kwargs.get("dtype"))
        if (interface := getattr(args[0], "__cuda_array_interface__", None)) is not None:
            return _put(_registered(args[0], interface), device.index)
        self._gpus.check_wait(f"torch.{func.__name__} copies a value from the host to {device}")
        return _put(func(*args, **kwargs), device.index)


class Operations(TorchDispatchMode):
    """Checks the tensors of each operation, and labels what it makes."""

    def __init__(self, gpus: Any) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpus = kwargs or {}, self._gpus
        tensors = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        labels = {index for each in tensors if (index := label(each)) is not None}
        name = func.overloadpacket.__name__
        if labels:
            self._check(name, args, kwargs, tensors, labels)
        capturing, schema = gpus.capturing, func._schema
        is_view = any(each.alias_info is not None for each in schema.returns) and not schema.is_mutable
        if capturing is not None and labels and not is_view:
            capturing.played.append(lambda: _again(func, args, kwargs, found))
            if schema.is_mutable:
                found = args[0] if schema.returns else None
                return found
        found = func(*args, **kwargs)
        if labels and not schema.is_mutable:
            _pytree.tree_map_only(torch.Tensor, lambda each: _put(each, min(labels)), found)
        return found

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor], labels: set[int]) -> None:
        gpus = self._gpus
        if name in ("copy_", "_foreach_copy_"):
            targets, sources = (each if isinstance(each, list | tuple) else [each] for each in args[:2])
            asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            for target, source in zip(targets, sources, strict=True):
                _check_copy(gpus, target, source, asked, name)
            return
        masks = [each for each in args[1] if each is not None] if name in ("index", "index_put_") else []
        if name in WAITING or any(each.dtype in (torch.bool, torch.uint8) for each in masks):
            gpus.check_wait(f"{name} of a tensor on cuda:{min(labels)}")
        if name in ("detach", "alias", "_local_scalar_dense"):
            return
        if len(labels) > 1:
            gpus.refuse(f"{name} of tensors on {', '.join(f'cuda:{each}' for each in sorted(labels))}")
        for each in tensors:
            if each.dim() and each.numel() and label(each) is None and not each.is_meta:
                gpus.refuse(f"{name} of a tensor on cuda:{min(labels)} and one of {tuple(each.shape)} on the CPU")


def _check_copy(gpus: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, what: str) -> None:
    """A copy between host and GPU runs behind the host's back only if it may, and the host's memory is pinned."""
    pair = label(target), label(source)
    for index in pair:
        if index is not None:
            gpus.check_device(torch.device("cuda", index), what)
    if source.numel() and (pair[0] is None) != (pair[1] is None):
        host = source if pair[1] is None else target
        if not (non_blocking and _is_pinned(host)):
            gpus.check_wait(f"{what} of {tuple(source.shape)} from {where(source)} to {where(target)}, {non_blocking=}")


def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    """What a graph does at a replay: the same operation, whose result is in the same memory."""
    found = func(*args, **kwargs)
    for old, new in zip(_pytree.tree_leaves(before), _pytree.tree_leaves(found), strict=True):
        if isinstance(old, torch.Tensor) and old is not new:
            old.copy_(new)


def _to(gpus: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype, others = kwargs.get("device"), kwargs.get("dtype"), list(args)
    if others and isinstance(others[0], torch.Tensor):
        other = others.pop(0)
        device, dtype = other.device, other.dtype
        device = device if label(other) is None else torch.device("cuda", label(other))
    elif others and not isinstance(others[0], torch.dtype):
        device = others.pop(0)
    if others and (others[0] is None or isinstance(others[0], torch.dtype)):
        dtype = others.pop(0)
    asked = kwargs.get("non_blocking", others[0] if others else False)
    copy = kwargs.get("copy", others[1] if len(others) > 1 else False)
    form = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    dtype, own = tensor.dtype if dtype is None else dtype, label(tensor)
    target = None if device is None else torch.device(device)
    if target is not None and target.type not in ("cpu", "cuda"):
        return tensor.to(target, dtype, **form)
    index = own if target is None else None if target.type == "cpu" else gpus.check_device(target, "a copy").index
    if index == own:
        return tensor.to(dtype, copy=copy, **form)
    if tensor.numel() and (index is None or own is None):
        if index is None and asked:  # torch takes pinned memory for it
            made = tensor.to(dtype, copy=True, **form)
            made.untyped_storage().__dict__.pop("simulated_gpu", None)
            made.untyped_storage().is_pinned_here = True
            return made
        if not (asked and _is_pinned(tensor)):
            place = "the CPU" if index is None else f"cuda:{index}"
            gpus.check_wait(f"to() of {tuple(tensor.shape)} from {where(tensor)} to {place}")
    made = tensor.to(dtype, copy=True, **form)
    for each in (made._indices(), made._values()) if made.is_sparse else (made,):
        each.untyped_storage().__dict__.pop("simulated_gpu", None)
    return _put(made, index)


def _to_gpu(gpus: Any, tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    return _to(gpus, tensor, torch.device("cuda", gpus.index_of(device)), non_blocking=non_blocking)


def _registered(owner: Any, interface: dict[str, Any]) -> torch.Tensor:
    """Registered memory of the host as bytes, whose tensor keeps its owner alive."""
    (size,), (address, _) = interface["shape"], interface["data"]
    made = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    made.untyped_storage().owner = owner
    return made


def _on_host(gpus: Any, tensor: torch.Tensor, name: str) -> Any:
    if label(tensor) is not None:
        gpus.check_wait(f"{name}() of a tensor on {where(tensor)}")
    return getattr(tensor, name)()


def _numpy(gpus: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    if label(tensor) is not None:
        raise TypeError("can't convert a cuda tensor to numpy")
    return tensor.numpy(**kwargs)


def _pin(gpus: Any, tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.untyped_storage().is_pinned_here = True
    return made


def _hooked(gpus: Any, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """A hook that is called with the mode, which is off while backward() runs."""

    def inside(given: torch.Tensor) -> None:
        with Functions(gpus):
            hook(given)

    return tensor.register_post_accumulate_grad_hook(inside)


_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": lambda gpus, tensor: _to(gpus, tensor, torch.device("cpu")),
    "cuda": _to_gpu,
    "get_device": lambda gpus, tensor: -1 if label(tensor) is None else label(tensor),
    "is_pinned": lambda gpus, tensor, *device: _is_pinned(tensor),
    "pin_memory": _pin,
    "register_post_accumulate_grad_hook": _hooked,
    "tolist": lambda gpus, tensor: _on_host(gpus, tensor, "tolist"),
    "numpy": _numpy,
    "record_stream": lambda gpus, tensor, stream: gpus.check_device(stream.device, "a stream that a tensor is used on"),
}
