"""torch.distributed's collectives on flat tensors by one set of names: torch 2.12 renamed some and warns of the old ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]

# There are none in a torch that was built without torch.distributed.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def all_gather(output: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `output` with the `own` of all ranks in their order. With `async_op` a `Work` to wait for, else None."""
    return _all_gather(output, own, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, values: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `output` with the own part, of as many as there are ranks, of the sum of the `values` of all ranks."""
    return _reduce_scatter(output, values, group=group, async_op=async_op)


def all_to_all(output: torch.Tensor, values: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Send part i of `values`, of as many as there are ranks, to rank i; `output` gets the parts in the ranks' order."""
    return dist.all_to_all_single(output, values, group=group, async_op=async_op)
