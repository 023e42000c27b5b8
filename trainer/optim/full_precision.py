"""Conversion of weights and their masters to float32 and back, for `FusedOptimizer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...kernels.layouts import is_wrapper
from ..checkpoint.full_precision import check_weights, float32_of, parts_of
from ..optimizer.states import put_master
from . import shards
from .groups import MASTER_KEY, Group, GroupOptimizer, as_real, held_master, name_of
from .saved import shown_states


def float32_weights(optimizer: GroupOptimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return the weights by parameter, in float32; the implementation of `FusedOptimizer.float32_weights`."""
    weights = {}
    with shown_states(optimizer, {MASTER_KEY}):
        rows = dict(optimizer.state)
    for _, group, parameter in _parameters(optimizer):
        weight, row = as_real(parameter).detach(), rows.get(parameter, {})
        value = float32_of(weight, held_master(optimizer, group, weight, row))
        weights[parameter] = shards.placed_as(parameter, torch.view_as_complex(value) if parameter.is_complex() else value)
    return weights


@torch.no_grad()
def load_float32_weights(optimizer: GroupOptimizer, weights: Any) -> None:
    """Set weights and masters; the implementation of `FusedOptimizer.load_float32_weights`."""
    rows = list(_parameters(optimizer))
    names = {parameter: name for name, _, parameter in rows}
    by_name = weights
    if isinstance(weights, Mapping):
        by_name = {names.get(key, f"a {type(key).__name__} that is none of its parameters"): weights[key] for key in weights}
    check_weights({name: parameter for name, _, parameter in rows}, by_name)
    parts = []
    for name, group, parameter in rows:
        value, weight = by_name[name], as_real(parameter).detach()
        if is_wrapper(value) != is_wrapper(parameter) or _placement(value) != _placement(parameter):
            raise ValueError(
                f"weights: {name!r} must be placed as its parameter, which is {_placement(parameter) or 'a plain tensor'}"
            )
        parts.append((parameter, weight, *parts_of(weight, as_real(value), optimizer._master_dtype(group, weight))))
    for parameter, weight, new, master in parts:
        weight.copy_(new)
        if master is not None:
            row = optimizer.state[parameter]
            old = None if MASTER_KEY not in row or parameter in (optimizer._owners or {}) else shards.local(row[MASTER_KEY])
            put = put_master(weight, old, master)
            if put is not old:
                row[MASTER_KEY] = shards.placed_as(parameter, put)
    optimizer._plan = None


def _parameters(optimizer: GroupOptimizer) -> Iterator[tuple[str, Group, torch.Tensor]]:
    """Yield for each parameter its name for messages, its group, and the parameter."""
    for group in optimizer.param_groups:
        for k, parameter in enumerate(group["params"]):
            yield name_of(group, k), group, parameter


def _placement(tensor: torch.Tensor) -> Any:
    """Return the mesh and placements of a DTensor; None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if shards.is_dtensor(tensor) else None  # type: ignore[attr-defined]
