"""DTensors in `tristep.optim`: each rank updates its own shard, and only sums over a whole tensor go through the network.

`torch.distributed.fsdp.fully_shard` and `distribute_tensor` make such parameters. States are DTensors, too, placed as their
parameter is, as torch's own optimizers have them, except for packed ones, whose blocks are those of the rank's shard: they
are plain tensors, and DTensors only in what `state_dict` returns. Nothing here waits for the device. A rule
that needs whole tensors gets them by a plugin, see `whole_plan`.
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
from .. import plugins

# The groups of processes among which a tensor is cut, each a mesh and the number of its dimension; none of them where every
# process has all of it.
Cut = tuple[tuple[Any, int], ...]


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # where there is none, nobody has made one
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what this rank has of a DTensor: always the same object, as long as that is not replaced.

    (`to_local` gives a new one at each call, in some versions.)
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank needs of a parameter's gradient. One that is placed otherwise, such as partial sums, is placed anew."""
    if gradient is None or not is_dtensor(parameter):
        return gradient
    placed: Any = gradient
    if not is_dtensor(gradient) or placed.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        kind = f"on {placed.device_mesh}" if is_dtensor(gradient) else f"a {type(gradient).__name__}"
        raise TypeError(f"the gradient of {name} is {kind}: it must be a DTensor on the parameter's mesh")
    if placed.placements != parameter.placements:  # type: ignore[attr-defined]
        placed = placed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    own = placed._local_tensor
    return own.wait() if is_wrapper(own) else own


def placed_as(parameter: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A state of this rank's elements as it is shown: a DTensor where the parameter is one and it is of its shape."""
    if not is_dtensor(parameter) or state.shape != local(parameter).shape:
        return state
    own: Any = parameter
    make = sys.modules["torch.distributed.tensor"].DTensor.from_local
    return make(state, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())


def cut_among(parameter: torch.Tensor) -> Cut:
    """Who has other elements of the parameter."""
    if not is_dtensor(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return tuple((mesh, k) for k, each in enumerate(placements) if not each.is_replicate() and mesh.size(k) > 1)


def fewest_elements(parameter: torch.Tensor) -> int:
    """Of a parameter's elements as many as each rank has, which all ranks know."""
    if not is_dtensor(parameter):
        return parameter.numel()
    mesh, cuts = parameter.device_mesh, [[] for _ in parameter.shape]  # type: ignore[attr-defined, var-annotated]
    for k, each in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if not each.is_replicate():
            cuts[each.dim].append(mesh.size(k))
    sizes = []
    for size, ways in zip(parameter.shape, map(math.prod, cuts), strict=True):
        sizes.append(size // ways if size % ways == 0 else max(0, size - -(-size // ways) * (ways - 1)))
    # What is cut twice is not cut as by all ranks at once, unless the parts are equal.
    uneven = any(len(own) > 1 and size % math.prod(own) for size, own in zip(parameter.shape, cuts, strict=True))
    return 0 if uneven else math.prod(sizes)


def check_placement(name: str, key: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse the state `key` of a parameter where it is cut otherwise than that."""
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
        f"{key!r} of {name} is {wrong}, otherwise than the parameter: load the states by "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cuts them as they are to be"
    )


def own_place(parameter: torch.Tensor) -> int:
    """Which of a parameter's shards this rank has, counted from 0; copies of one shard have the same number."""
    place = 0
    for mesh, k in cut_among(parameter):
        place = place * mesh.size(k) + mesh.get_local_rank(k)
    return place


def add_up(values: torch.Tensor, by: str, cut: Cut) -> None:
    """Put there, in place, the sums ("sum") or largest ("max") of those of all ranks that have a part."""
    for mesh, k in cut:
        dist.all_reduce(values, dist.ReduceOp.SUM if by == "sum" else dist.ReduceOp.MAX, group=mesh.get_group(k))


def refusal(parameter: torch.Tensor) -> str | None:
    """Why a parameter that is made of other tensors cannot be trained, or None."""
    if not is_wrapper(parameter):
        return None
    if not is_dtensor(parameter):
        return "made of other tensors: it must be a plain tensor or a DTensor, or use torch.optim"
    if any(placement.is_partial() for placement in parameter.placements):  # type: ignore[attr-defined]
        return "of which every rank has a summand: place it as Shard or Replicate before, by redistribute()"
    return None


def rule_refusal(rule: Rule | TensorRule, parameters: Sequence[torch.Tensor]) -> str | None:
    """Why a rule cannot update these parameters by their shards, or None."""
    if not any(map(cut_among, parameters)):
        return None
    if len(set(map(cut_among, parameters))) > 1 and any(reduction.scope == "global" for reduction in rule.reductions):
        return (
            f"its rule, {rule.name!r}, needs a sum over all parameters together (as clip_norm does), and not all of "
            "them are cut among the same ranks: clip by tristep.optim.clip_grad_norm_ instead, or give it those that are"
        )
    return None


def needs_whole(rule: Rule | TensorRule, parameter: torch.Tensor) -> bool:
    """Whether a parameter is cut, and cannot be updated by its shards."""
    whole = isinstance(rule, TensorRule) and not rule.elementwise(parameter.shape)
    return whole and bool(cut_among(parameter))


def whole_plan() -> Any:
    """The plugin's plan of such parameters: a subclass of `GroupPlan` that brings whole tensors to a rank.

    Besides the methods of `GroupPlan`, all of which it may override, it has these static ones:

        refusal(rule, parameters) -> str | None     why it cannot plan one of these parameters
        exchanges_of(optimizer) -> dict             by parameter a key; those of equal keys have a plan together
        show(optimizer, shown, only)                put its states into `shown`, rows of `optimizer.state`, as `state_dict`
                                                    is to have them; called where `optimizer._owners` has parameters
    """
    return plugins.load("tristep.plans", "whole_dtensors")


def join_shards(update: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Let an `Update` add up over the ranks what it sums over a tensor, or over all."""
    cuts = list(map(cut_among, parameters))
    members: dict[Cut, list[int]] = {}
    for i, cut in enumerate(cuts):
        if cut:
            members.setdefault(cut, []).append(i)
    if not members:
        return
    rows = {
        cut: None if len(each) == len(cuts) else torch.tensor(each, device=local(parameters[0]).device)
        for cut, each in members.items()
    }

    def across_each(found: torch.Tensor, by: str) -> None:
        for cut, where in rows.items():
            part = found if where is None else found[where]
            add_up(part, by, cut)
            if where is not None:
                found[where] = part

    update.all_reduce_per_tensor = across_each
    if len(set(cuts)) == 1:
        update.all_reduce_global = lambda found, by: add_up(found, by, cuts[0])
