"""The torch side of `tl`: what rules may call, on tensors. Every backend has the same names with the same meanings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import random


def _of_one(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An op of one value, which may be a hyper-parameter: on torch tensors these are plain numbers."""

    def op(self: TorchOps, x: Any) -> Any:
        return fn(self._tensor(x))

    return op


class TorchOps:
    """What a rule may call, on torch tensors. Triton's names and meanings; each backend has all of them.

    Args:
        dtype: the arithmetic's type, which numbers take where torch could not tell.
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
    sqrt = _of_one(torch.sqrt)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def normal(self, key0: float, key1: float, index: torch.Tensor) -> torch.Tensor:
        """A standard normal number for each index, always the same for the same keys (integers below 2^24)."""
        return random.normal(int(key0), int(key1), index).to(self._dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`, element by element."""
        if isinstance(condition, bool):  # of hyper-parameters, which are plain numbers
            chosen, other = (a, b) if condition else (b, a)
            chosen = self._tensor(chosen, _device_of(a, b))
            # Not by torch.broadcast_shapes, whose first call imports sympy: 0.3 s of a notebook's first picture.
            return torch.broadcast_tensors(chosen, other)[0] if isinstance(other, torch.Tensor) else chosen
        condition = torch.as_tensor(condition, device=_device_of(condition))
        return torch.where(condition, self._tensor(a, condition.device), self._tensor(b, condition.device))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of two values."""
        return torch.maximum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller of two values."""
        return torch.minimum(self._tensor(a, _device_of(a, b)), self._tensor(b, _device_of(a, b)))

    def clamp(self, x: Any, low: Any, high: Any) -> Any:
        """`x` limited to [low, high], of which neither is NaN, nor low above high; NaN stays NaN."""
        return self.minimum(self.maximum(x, low), high)

    def _tensor(self, value: Any, device: torch.device | str = "cpu") -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.full((), value, dtype=self._dtype, device=device)  # made on the device, which is not waited for


def _device_of(*values: Any) -> torch.device | str:
    """Where the tensors among these are; not torch's default device, which is for what its users make."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), "cpu")


TORCH_OPS = {dtype: TorchOps(dtype) for dtype in (torch.float32, torch.float64)}
tl: Any = TORCH_OPS[torch.float32]
OPS = tuple(name for name in vars(TorchOps) if not name.startswith("_"))


def is_tl(value: Any) -> bool:
    # A notebook may say `import triton.language as tl`, which means the same.
    return value is tl or (value is not None and value is sys.modules.get("triton.language"))
