"""DTensors in `tristep.optim`: each rank updates its own shard, and ranks exchange only sums over whole tensors.

`torch.distributed.fsdp.fully_shard` and `distribute_tensor` make such parameters. Their states are DTensors with the same
placement, as in torch. Packed states are an exception: their blocks are of the rank's shard, so they are plain tensors, and
DTensors only in `state_dict()`. Nothing here waits for the device. `tristep.contrib` brings whole tensors to rules that need
them, see `whole_plan`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import Rule, TensorRule
from ...kernels.layouts import is_wrapper
from .. import contrib_names

# The mesh dimensions along which a tensor is sharded, as (mesh, index of the dimension); () if every process has all of it.
Cut = tuple[tuple[Any, int], ...]


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, always the same object, or a plain tensor itself."""
    # `to_local` returns a new object at each call, in some versions of torch.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's shard of a gradient, redistributed first if its placement differs from the parameter's."""
    if gradient is None or not is_dtensor(parameter):
        return gradient
    placed: Any = gradient
    if not is_dtensor(gradient) or placed.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        kind = f"on {placed.device_mesh}" if is_dtensor(gradient) else f"a {type(gradient).__name__}"
        raise TypeError(f"the gradient of {name} is {kind}: it must be a DTensor on the parameter's mesh")
    if placed.placements != parameter.placements:  # type: ignore[attr-defined]
        placed = placed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    shard = placed._local_tensor
    return shard.wait() if is_wrapper(shard) else shard


def placed_as(parameter: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a state as a DTensor placed as its parameter; unchanged for plain ones or other shapes."""
    if not is_dtensor(parameter) or state.shape != local(parameter).shape:
        return state
    like: Any = parameter
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(state, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def cut_among(parameter: torch.Tensor) -> Cut:
    """Return the mesh dimensions along which the parameter is sharded."""
    if not is_dtensor(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return tuple((mesh, k) for k, placed in enumerate(placements) if not placed.is_replicate() and mesh.size(k) > 1)


def fewest_elements(parameter: torch.Tensor) -> int:
    """Return the size of the smallest shard of a parameter, or less, computed without communication."""
    if not is_dtensor(parameter):
        return parameter.numel()
    mesh, cuts = parameter.device_mesh, [[] for _ in parameter.shape]  # type: ignore[attr-defined, var-annotated]
    for k, placed in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not placed.is_replicate():
            cuts[placed.dim].append(mesh.size(k))
    sizes = []
    for size, ways in zip(parameter.shape, map(math.prod, cuts), strict=True):
        sizes.append(size // ways if size % ways == 0 else max(0, size - -(-size // ways) * (ways - 1)))
    # A dimension that is sharded twice gives other sizes than one that is sharded once over all ranks, unless it is even.
    uneven = any(len(ways) > 1 and size % math.prod(ways) for size, ways in zip(parameter.shape, cuts, strict=True))
    return 0 if uneven else math.prod(sizes)


def check_placement(name: str, key: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
    """Raise if the state `key` of a parameter is sharded differently from the parameter."""
    if not (is_dtensor(state) or (cut_among(parameter) and state.shape == parameter.shape != ())):
        return
    shard: Any = state
    if not is_dtensor(state) or not is_dtensor(parameter):
        wrong = "a whole tensor" if is_dtensor(parameter) else "a DTensor"
    elif (shard.device_mesh, shard.placements) != (parameter.device_mesh, parameter.placements):  # type: ignore[attr-defined]
        wrong = f"placed as {shard.placements} on {shard.device_mesh}"
    else:
        return
    raise ValueError(
        f"{key!r} of {name} is {wrong}, unlike the parameter: load the states by "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards them as their parameters"
    )


def own_place(parameter: torch.Tensor) -> int:
    """Return the index of this rank's shard of a parameter; replicas of a shard have the same index."""
    place = 0
    for mesh, k in cut_among(parameter):
        place = place * mesh.size(k) + mesh.get_local_rank(k)
    return place


def add_up(values: torch.Tensor, by: str, cut: Cut) -> None:
    """All-reduce in place, by "sum" or "max", over the ranks that hold a shard."""
    for mesh, k in cut:
        dist.all_reduce(values, dist.ReduceOp.SUM if by == "sum" else dist.ReduceOp.MAX, group=mesh.get_group(k))


def refusal(parameter: torch.Tensor) -> str | None:
    """Return why a tensor subclass cannot be trained, for messages; None if it can."""
    if not is_wrapper(parameter):
        return None
    if not is_dtensor(parameter):
        return "made of other tensors: it must be a plain tensor or a DTensor, or use torch.optim"
    if any(placement.is_partial() for placement in parameter.placements):  # type: ignore[attr-defined]
        return "with partial sums on every rank: place it as Shard or Replicate before, by redistribute()"
    return None


def rule_refusal(rule: Rule | TensorRule, parameters: Sequence[torch.Tensor]) -> str | None:
    """Return why a rule cannot update parameters by their shards, for messages; None if it can."""
    if not any(map(cut_among, parameters)):
        return None
    if len(set(map(cut_among, parameters))) > 1 and any(reduction.scope == "global" for reduction in rule.reductions):
        return (
            f"its rule, {rule.name!r}, needs a sum over all parameters together (as clip_norm does), and not all of "
            "them are sharded over the same ranks: clip by tristep.optim.clip_grad_norm_ instead, or give each optimizer "
            "parameters that are"
        )
    return None


def needs_whole(rule: Rule | TensorRule, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is sharded, and the rule needs the whole tensor."""
    whole = isinstance(rule, TensorRule) and not rule.elementwise(parameter.shape)
    return whole and bool(cut_among(parameter))


def whole_plan() -> Any:
    """Return the subclass of `GroupPlan` that brings whole tensors to a rank.

    It may override all methods of `GroupPlan`, and has three static methods:

        refusal(rule, parameters) -> str | None     why it cannot plan one of these parameters; None if it can
        exchanges_of(optimizer) -> dict             a key for each parameter; parameters with equal keys share a plan
        show(optimizer, shown, only)                put its states into `shown`, a copy of `optimizer.state`, in the format
                                                    of `state_dict`; called if `optimizer._owners` has parameters
    """
    return contrib_names.load("plans", "whole_dtensors")


def join_shards(update: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Let an `Update` all-reduce its sums over a tensor, and over all tensors, over the ranks that hold shards."""
    cuts = list(map(cut_among, parameters))
    members: dict[Cut, list[int]] = {}
    for i, cut in enumerate(cuts):
        if cut:
            members.setdefault(cut, []).append(i)
    if not members:
        return
    rows = {
        cut: None if len(indices) == len(cuts) else torch.tensor(indices, device=local(parameters[0]).device)
        for cut, indices in members.items()
    }

    def reduce_per_tensor(sums: torch.Tensor, by: str) -> None:
        for cut, where in rows.items():
            part = sums if where is None else sums[where]
            add_up(part, by, cut)
            if where is not None:
                sums[where] = part

    update.all_reduce_per_tensor = reduce_per_tensor
    if len(set(cuts)) == 1:
        update.all_reduce_global = lambda sums, by: add_up(sums, by, cuts[0])
