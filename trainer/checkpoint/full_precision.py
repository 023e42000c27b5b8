"""Conversion of weights and their masters to float32 and back: `Trainer.float32_weights` and `load_float32_weights`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import storage
from ...kernels.layouts import compute_dtype
from ..kvstore.sync import GradientSync
from ..optimizer import Optimizer, RuleOptimizer
from ..optimizer.multi import part_of
from ..serialization.check import few
from ..step.replica import Replica
from ..validation import instance


def float32_weights(replicas: Sequence[Replica], sync: GradientSync, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights of the first replica by name, in float32; the implementation of `Trainer.float32_weights`."""
    first = replicas[0]
    dtypes = _master_dtypes(first.params, optimizer)
    masters: Mapping[Any, torch.Tensor] = {}
    if any(dtypes):
        masters = sync.masters() if sync.updates else first.updater.masters
    rows = enumerate(zip(first.names, first.params, dtypes, strict=True))
    return {name: float32_of(param.detach(), None if dtype is None else masters.get(i)) for i, (name, param, dtype) in rows}


@torch.no_grad()
def load_float32_weights(replicas: Sequence[Replica], sync: GradientSync, optimizer: Optimizer, weights: Any) -> None:
    """Set weights and masters from `float32_weights`; the implementation of `Trainer.load_float32_weights`."""
    first = replicas[0]
    dtypes = _master_dtypes(first.params, optimizer)
    with sync.all_or_none():
        check_weights(dict(zip(first.names, first.params, strict=True)), weights)
    for replica in replicas:
        rows = zip(replica.names, replica.params, dtypes, strict=True)
        parts = [parts_of(param.detach(), weights[name], dtype) for name, param, dtype in rows]
        masters = {i: master for i, (_, master) in enumerate(parts) if master is not None}
        if not sync.updates:
            replica.updater.put_masters(masters, dict(enumerate(replica.params)) if masters else {})
            replica.forget_plan()
        elif replica is first:
            sync.masters(masters)  # raises, before anything has changed, if another process has the masters
        for param, (weight, _) in zip(replica.params, parts, strict=True):
            param.copy_(weight)


def float32_of(weight: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """Return a weight combined with its master, in float32, in a new tensor."""
    if master is not None and storage.kind_of(weight.dtype, master.dtype) is None:  # the weight had another dtype before
        master = None
    combined = storage.combined(weight, None if master is None else master.to(weight.device))
    return combined.to(torch.float32, copy=True)


def parts_of(
    weight: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split a value into the stored weight and the master of this dtype; no master if `dtype` is None."""
    value = value.detach().to(weight.device, compute_dtype(weight.dtype))
    if dtype is None:
        return value.to(weight.dtype), None
    kind = storage.kind_of(weight.dtype, dtype)
    assert kind is not None
    if kind == storage.MasterKind.FULL:
        return value.to(weight.dtype), value
    return storage.split(value.contiguous(), kind)


def check_weights(params: Mapping[str, torch.Tensor], weights: Any) -> None:
    """Raise if `weights` is no mapping from each parameter's name to a floating-point tensor of its shape."""
    instance("weights", weights, Mapping, "a dict as float32_weights() returns it")
    missing, unknown = [name for name in params if name not in weights], [name for name in weights if name not in params]
    if missing or unknown:
        both = (("lacks", missing), ("has unknown", unknown))
        what = " and ".join(f"{verb} {few(keys)}" for verb, keys in both if keys)
        raise ValueError(f"weights {what}: it must have all parameters, and no others")
    for name, param in params.items():
        value = weights[name]
        right = isinstance(value, torch.Tensor) and (value.is_complex() if param.is_complex() else value.is_floating_point())
        if not right or value.layout != torch.strided:
            got = f"{value.dtype} ({value.layout})" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"weights: {name!r} must be a dense tensor of floating-point numbers, got {got}")
        if value.shape != param.shape:
            raise ValueError(f"weights: {name!r} has shape {tuple(value.shape)}, the parameter has {tuple(param.shape)}")


def _master_dtypes(params: Sequence[torch.Tensor], optimizer: Optimizer) -> list[torch.dtype | None]:
    dtypes: list[torch.dtype | None] = []
    for i, param in enumerate(params):
        part = part_of(optimizer, i)
        dtypes.append(part.master_dtype(param) if isinstance(part, RuleOptimizer) else None)
        if part.keeps_master(param) and not isinstance(part, RuleOptimizer):
            raise TypeError(
                f"{type(part).__name__} updates by hand, and keeps float32 copies in states of its own: it must be a "
                "RuleOptimizer, or have multi_precision=False"
            )
    return dtypes
