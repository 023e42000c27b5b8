"""UpdateCost: bytes of weights and optimizer states, and the time of an update, computed from the optimizer's rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule, storage
from ...trainer.optimizer import Optimizer, RuleOptimizer, create
from ...trainer.validation import choice, integer, number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OTHER_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
SIDE = 4096  # rows of the square matrices that are assumed for a plain number of parameters
# Bytes per second: memory bandwidths of data sheets times 0.9, which a copy about reaches (on an H200 4.3 of 4.8 TB/s).
MEMORIES = {"a100": 2.039e12 * 0.9, "h100": 3.35e12 * 0.9, "h200": 4.8e12 * 0.9, "b200": 8.0e12 * 0.9}


class UpdateCost:
    """Bytes and time of an optimizer's update of parameters. Nothing is allocated.

    Args:
        params, optimizer, optimizer_params, weights, memory: the arguments of `estimate_cost`.

    Attributes:
        tensors: the parameters as meta tensors.
        n: the number of elements.
        weight_bytes: the bytes of the weights, and of the gradients.
        state_bytes: the bytes of states and masters.
        memory: bytes per second of the GPU's memory.
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None,
        weights: str,
        memory: str | float,
    ) -> None:
        self.memory = _bandwidth(memory)
        dtype = DTYPES[choice("weights", weights, DTYPES, other_names=OTHER_NAMES)]
        self._optimizer: Any = create(optimizer, **dict(optimizer_params or {}))
        if not isinstance(self._optimizer, RuleOptimizer):
            raise TypeError(f"optimizer={optimizer!r}: must be one that is a rule, since memory follows from the rule")
        self.tensors = _tensors(params, dtype)
        for i, tensor in enumerate(self.tensors):
            self._optimizer.check_storage(f"params[{i}]", tensor)
        self.n = sum(tensor.numel() for tensor in self.tensors)
        self.weight_bytes = float(sum(tensor.numel() * tensor.itemsize for tensor in self.tensors))
        self.state_bytes = self._state_bytes(self.tensors)

    def sharded_state_bytes(self, ranks: int) -> float:
        """Return the bytes of states and masters on each of `ranks`, with shards of all parameters, or whole matrices."""
        if ranks == 1 or not isinstance(self._optimizer.composed_rule, Rule):
            return self.state_bytes / ranks
        numbers: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + tensor.numel()
        return self._state_bytes([torch.empty(-(-n // ranks), dtype=dtype, device="meta") for dtype, n in numbers.items()])

    def seconds(self, share: float = 1.0) -> float:
        """Return the seconds of an update of this share of the parameters: bytes read and written over the bandwidth."""
        rule, total, w, s = self._optimizer.composed_rule, 0.0, self.weight_bytes, self.state_bytes
        for reduction in rule.reductions if isinstance(rule, Rule) else ():
            total += ("w" in reduction.reads) * w + ("g" in reduction.reads) * w + ("state" in reduction.reads) * s
        total += w + 2 * s  # gradients, states and masters
        for tensor in self.tensors:
            master = self._optimizer.master_dtype(tensor)
            through_master = master is not None and storage.kind_of(tensor.dtype, master) == storage.MasterKind.FULL
            total += tensor.numel() * tensor.itemsize * (1 if through_master else 2)
        return total * share / self.memory

    def _state_bytes(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return the bytes of the states and masters that the optimizer makes for these tensors."""
        states = self._optimizer.states_for(tensors)
        dtypes = [(tensor, self._optimizer.master_dtype(tensor)) for tensor in tensors]
        masters = sum(tensor.numel() * dtype.itemsize for tensor, dtype in dtypes if dtype is not None)
        return float(sum(state.numel() * state.itemsize for row in states for state in row) + masters)


def _bandwidth(memory: Any) -> float:
    """Return the bytes per second of a memory, given by name or in GB/s."""
    if isinstance(memory, str):
        try:
            memory = float(memory)
        except ValueError:
            return MEMORIES[choice("memory", memory, MEMORIES)]
    return number("memory", memory, above=0) * 1e9


def _tensors(params: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return meta tensors with the shapes and dtypes of the parameters."""
    if isinstance(params, torch.nn.Module):
        params = list(params.parameters())
    if isinstance(params, (int, float)) and not isinstance(params, bool):
        n = number("params", params, low=1)
        if n != int(n):
            raise ValueError(f"params={params!r}: must be an integer number of parameters")
        n = int(n)
        side = min(SIDE, math.isqrt(n))
        count, remainder = divmod(n, side * side)
        shapes: list[Any] = [(side, side)] * count + ([(remainder,)] if remainder else [])
    elif isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise TypeError(f"params={params!r}: must be a number, a module, or tensors or shapes, not {type(params).__name__}")
    else:
        shapes = list(params)
    if not shapes:
        raise ValueError("params is empty: there is nothing to train")
    tensors = []
    for i, each in enumerate(shapes):
        if isinstance(each, torch.Tensor):
            tensors.append(torch.empty_like(each, device="meta"))
            continue
        try:
            tensors.append(torch.empty([integer(f"params[{i}]", size, low=0) for size in each], dtype=dtype, device="meta"))
        except TypeError:
            raise TypeError(f"params[{i}]={each!r}: must be a tensor or a shape") from None
    return tensors
