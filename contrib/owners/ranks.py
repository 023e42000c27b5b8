"""Assignment of owners: the ranks that update DTensors whose rule needs whole tensors, balanced by cost."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...kernels import Rule, TensorRule
from ...trainer.kvstore.partition import owners_of
from ...trainer.optim import shards
from ...trainer.optim.groups import GroupOptimizer

STAGE_BYTES = 2**27  # bytes of weights in an exchange, about; an exchange runs while the weights of the last are updated


class OwnerGroup(NamedTuple):
    """The ranks over which a parameter is sharded, along one dimension of a mesh; one of them is its owner."""

    mesh: Any
    mesh_dim: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> OwnerGroup:
        """Return the group of a parameter for which `refusal` returns None."""
        ((mesh, mesh_dim),) = shards.cut_among(parameter)
        return cls(mesh, mesh_dim)

    @property
    def processes(self) -> Any:
        """The process group."""
        return self.mesh.get_group(self.mesh_dim)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.mesh.get_local_rank(self.mesh_dim)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size(self.mesh_dim)


def refusal(rule: Rule | TensorRule, parameters: Iterable[torch.Tensor]) -> str | None:
    """Return why one of these parameters, which need owners, cannot have one; None if all can."""
    for parameter in parameters:
        if any(reduction.scope == "global" for reduction in rule.reductions):
            return (
                f"its rule, {rule.name!r}, needs a sum over all parameters together (as clip_norm does), and each is "
                "brought to one rank: clip by tristep.optim.clip_grad_norm_ instead"
            )
        placed: Any = parameter
        if (wrong := _obstacle(placed)) is not None:
            return (
                f"its rule, {rule.name!r}, is one of whole tensors, which are brought to one rank each; one of shape "
                f"{tuple(placed.shape)}, placed as {placed.placements}, is {wrong}: leave it out of fully_shard "
                "(ignored_params=...), or use an optimizer whose rule is one of single elements"
            )
    return None


def _obstacle(parameter: Any) -> str | None:
    cuts = shards.cut_among(parameter)
    if len(cuts) > 1:
        return "cut along several dimensions of its mesh; it must be cut along one"
    if type(parameter.placements[cuts[0][1]]) is not sys.modules["torch.distributed.tensor"].Shard:
        return "not cut in the order of its rows; it must be placed as Shard or Replicate"
    if parameter.is_complex():
        return "complex; it must be real"
    group = OwnerGroup.of(parameter)
    if group.rank != group.mesh.get_coordinate()[group.mesh_dim]:
        return f"on a mesh whose ranks are not in ascending order ({group.mesh}); they must be"
    return None


def assign_owners(optimizer: GroupOptimizer) -> dict[torch.Tensor, int]:
    """Return the owner of each parameter, as a rank in its `OwnerGroup`. An owner never changes.

    The result is the same on all ranks, as it depends neither on gradients nor on states.
    """
    owners: dict[torch.Tensor, int] = vars(optimizer).setdefault("_owners", {})
    costs: dict[OwnerGroup, dict[torch.Tensor, float]] = {}
    for group in optimizer.param_groups:
        rule = optimizer._rule(group)
        for parameter in group["params"]:
            if shards.needs_whole(rule, parameter):
                costs.setdefault(OwnerGroup.of(parameter), {})[parameter] = rule.cost(parameter.shape)
    for ranks, cost_of in costs.items():
        loads = [0.0] * ranks.ranks
        for parameter, cost in cost_of.items():
            if parameter in owners:
                loads[owners[parameter]] += cost
        new = {parameter: cost for parameter, cost in cost_of.items() if parameter not in owners}
        owners.update(zip(new, owners_of(list(new.values()), ranks.ranks, loads), strict=True))
    return owners


def exchanges_of(optimizer: GroupOptimizer) -> dict[torch.Tensor, tuple[OwnerGroup, int]]:
    """Return the exchange of each parameter, its group and a number; the same on all ranks."""
    exchanges: dict[torch.Tensor, tuple[OwnerGroup, int]] = {}
    sizes: dict[OwnerGroup, int] = {}
    for group in optimizer.param_groups:
        rule = optimizer._rule(group)
        for parameter in group["params"]:
            if shards.needs_whole(rule, parameter) and parameter not in exchanges:
                ranks = OwnerGroup.of(parameter)
                before = sizes.get(ranks, 0)
                exchanges[parameter] = ranks, before // STAGE_BYTES
                sizes[ranks] = before + parameter.numel() * parameter.element_size()
    return exchanges
