"""The functions of `tl` on torch tensors. Every backend has the same names with the same meanings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import random, roots


def _of_one(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a method that applies `fn` to a tensor or to a hyper-parameter, which is a plain number here."""

    def op(self: TorchOps, x: Any) -> Any:
        return fn(self._tensor(x))

    return op


class TorchOps:
    """The functions that a rule may call, on torch tensors, with the names and meanings of `triton.language`.

    Args:
        dtype: the dtype of the arithmetic, float32 or float64, into which plain numbers are converted.
    """

    abs = _of_one(torch.abs)
    ceil = _of_one(torch.ceil)
    cos = _of_one(torch.cos)
    exp = _of_one(torch.exp)
    exp2 = _of_one(torch.exp2)
    floor = _of_one(torch.floor)
    log = _of_one(torch.log)
    log2 = _of_one(torch.log2)
    rsqrt = _of_one(torch.rsqrt)
    sigmoid = _of_one(torch.sigmoid)
    sin = _of_one(torch.sin)
    sqrt = _of_one(roots.sqrt)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def normal(self, key0: float, key1: float, index: torch.Tensor) -> torch.Tensor:
        """Return a standard normal number for each index, determined by the index and two keys, whole numbers below 2^24."""
        return random.normal(int(key0), int(key1), index).to(self._dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Return `a` where the condition holds, else `b`, elementwise."""
        device, condition = _device_of(condition, a, b), torch.as_tensor(condition, device=_device_of(condition))
        if condition.dim() == 0 and condition.device.type == "cpu":  # a comparison of hyper-parameters
            chosen, other = (a, b) if condition else (b, a)
            chosen = self._tensor(chosen, device)
            # Not by torch.broadcast_shapes, whose first call imports sympy: 0.3 s of a notebook's first picture.
            return torch.broadcast_tensors(chosen, other)[0] if isinstance(other, torch.Tensor) else chosen
        return torch.where(condition, self._tensor(a, device), self._tensor(b, device))

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger of two values, elementwise; NaN if one of them is NaN."""
        return torch.maximum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the smaller of two values, elementwise; NaN if one of them is NaN."""
        return torch.minimum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def clamp(self, x: Any, low: Any, high: Any) -> Any:
        """Return `x` limited to [low, high]; NaN stays NaN. The limits must not be NaN, and low must not exceed high."""
        if isinstance(low, float) and isinstance(high, float) and high == -low == math.inf:  # saves two passes
            return x
        return self.minimum(self.maximum(x, low), high)

    def _number(self, value: torch.Tensor) -> torch.Tensor:
        """Return whole numbers, such as the element's index, in the arithmetic's dtype."""
        return value.to(self._dtype)

    def _literal(self, value: float) -> float:
        """Return a literal that is a result; compilers give it the arithmetic's type."""
        return value

    def _tensor(self, value: Any, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a tensor; a number, which may be a CPU tensor without dimensions, as a tensor on the device."""
        if isinstance(value, torch.Tensor):
            if value.dim() or value.device.type != "cpu" or device == "cpu":
                return value
            value = value.item()
        return torch.full((), value, dtype=self._dtype, device=device)  # filled on the device, without waiting for it


def _device_of(*values: Any) -> torch.device | str:
    """Return the device of the tensors among the values; "cpu", and not torch's default device, if there are none."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), "cpu")


TORCH_OPS = {dtype: TorchOps(dtype) for dtype in (torch.float32, torch.float64)}
tl: Any = TORCH_OPS[torch.float32]
OPS = tuple(name for name in vars(TorchOps) if not name.startswith("_"))


def is_tl(value: Any) -> bool:
    """Return whether the value is `tl`, or `triton.language`, which a notebook may import as `tl`."""
    return value is tl or (value is not None and value is sys.modules.get("triton.language"))
