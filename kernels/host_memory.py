"""States of a GPU's weights in memory of the host, which kernels read and write over the bus where it is."""

from __future__ import annotations

import mmap
from weakref import WeakValueDictionary, finalize

import torch

from . import streams

_blocks: WeakValueDictionary[int, _Block] = WeakValueDictionary()  # by address
_ended: list[tuple[mmap.mmap, int, torch.device]] = []  # to be given back


class _Block:
    """Zeros in memory of the host that a GPU can address.

    Registered memory has one address for host and GPU, and through the CUDA array interface torch takes it for the GPU's:
    any kernel or operation works on it, in the order of its stream.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        pages = mmap.mmap(-1, n_bytes)  # CUDA registers whole pages, and each but once
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        with streams.on_device(device):  # else torch takes it for another GPU's
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)))
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        finalize(self, _release, pages, address, device).atexit = False  # CUDA may have ended before
        _blocks[address] = self


def _release(pages: mmap.mmap, address: int, device: torch.device) -> None:
    """Give memory back whose tensors are gone; while a graph is captured, the next call does it."""
    _ended.append((pages, address, device))
    while _ended and not streams.is_capturing(device):
        _, address, on = _ended[-1]
        torch.cuda.synchronize(on)  # kernels may still write to it
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
        _ended.pop()


def zeros(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `n` zeros in memory of the host, as a tensor on this GPU.

    Raises:
        RuntimeError: the host has no room for them that could be locked.
    """
    if not n:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.as_tensor(_Block(n * dtype.itemsize, device), device=device).view(dtype)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a GPU's tensor is in memory of the host."""
    return bool(_blocks) and tensor.device.type == "cuda" and tensor.untyped_storage().data_ptr() in _blocks


def check_device(name: str, device: torch.device) -> None:
    """Raise ValueError if states of a weight on this device cannot be in memory of the host."""
    where = "a GPU of AMD" if torch.version.hip is not None and device.type == "cuda" else str(device)
    if device.type not in ("cpu", "cuda") or where != str(device):
        raise ValueError(f"state_device='cpu': {name} is on {where}; it must be None for what is not on a GPU of NVIDIA")
