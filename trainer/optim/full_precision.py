"""Weights in float32, out of masters and into them: `float32_weights` and `load_float32_weights` of `FusedOptimizer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...kernels.layouts import is_wrapper
from ..full_precision import check_weights, float32_of, parts_of
from ..optimizer.states import put_master
from . import shards
from .groups import MASTER_KEYS, Group, GroupOptimizer, as_real, master_key, name_of
from .saved import shown_states


def float32_weights(optimizer: GroupOptimizer) -> dict[torch.Tensor, torch.Tensor]:
    """See `FusedOptimizer.float32_weights`."""
    found = {}
    with shown_states(optimizer, MASTER_KEYS):
        rows = dict(optimizer.state)
    for _, group, parameter in _parameters(optimizer):
        weight, row = as_real(parameter).detach(), rows.get(parameter, {})
        masters = [row[key] for key in MASTER_KEYS if key in row]
        has_one = masters and optimizer._master_dtype(group, weight) is not None
        whole = float32_of(weight, shards.local(masters[0]) if has_one else None)
        found[parameter] = shards.placed_as(parameter, torch.view_as_complex(whole) if parameter.is_complex() else whole)
    return found


@torch.no_grad()
def load_float32_weights(optimizer: GroupOptimizer, weights: Any) -> None:
    """See `FusedOptimizer.load_float32_weights`."""
    rows = list(_parameters(optimizer))
    names = {parameter: name for name, _, parameter in rows}
    given = weights
    if isinstance(weights, Mapping):
        given = {names.get(key, f"a {type(key).__name__} that is none of its parameters"): weights[key] for key in weights}
    check_weights({name: parameter for name, _, parameter in rows}, given)
    parts = []
    for name, group, parameter in rows:
        value, weight = given[name], as_real(parameter).detach()
        if is_wrapper(value) != is_wrapper(parameter) or _placement(value) != _placement(parameter):
            raise ValueError(
                f"weights: {name!r} is not placed as its parameter, {_placement(parameter) or 'a plain tensor'}"
            )
        parts.append((parameter, weight, *parts_of(weight, as_real(value), optimizer._master_dtype(group, weight))))
    for parameter, weight, new, master in parts:
        weight.copy_(new)
        if master is not None:
            row = optimizer.state[parameter]
            key, other = master_key(weight, master.dtype)
            row.pop(other, None)
            old = None if key not in row or parameter in (optimizer._owners or {}) else shards.local(row[key])
            put = put_master(weight, old, master)
            if put is not old:
                row[key] = shards.placed_as(parameter, put)
    optimizer._plan = None


def _parameters(optimizer: GroupOptimizer) -> Iterator[tuple[str, Group, torch.Tensor]]:
    """What messages call each parameter, its group, and it."""
    for group in optimizer.param_groups:
        for k, parameter in enumerate(group["params"]):
            yield name_of(group, k), group, parameter


def _placement(tensor: torch.Tensor) -> Any:
    """Where the shards of a DTensor are; None of a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if shards.is_dtensor(tensor) else None  # type: ignore[attr-defined]
