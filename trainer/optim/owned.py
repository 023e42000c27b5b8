"""OwnedParameters: DTensors whose rule needs whole tensors, each of which is updated by its owner.

In a step the owner gets all shards of weight and gradient, updates the whole, and sends the new weight's shards back: two
exchanges for all parameters of a rule, during which other parameters are updated.

Source: Liu et al. (2025), "Muon is Scalable for LLM Training", "Distributed Muon", where shards are brought together for the
orthogonalization, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ...kernels import Rule, TensorRule, Update
from ...kernels.guards import PointerGuard
from . import shards
from .exchange import CutTensor, Exchange
from .groups import Group, GroupOptimizer
from .owned_states import Owned, OwnedStates
from .owners import OwnerGroup, assign_owners, check_shards
from .states import same_objects

__all__ = ["OwnedParameters"]


class OwnedParameters:
    """Parameters that are cut among the ranks of one group, of which each is updated by its owner; see `PlanStates`.

    An update has whole tensors for this rank's own parameters, and tensors without elements for the others'.

    Args:
        optimizer: whose parameters they are.
        parameters: in order.
        groups: for each parameter the one that it is in. These store states alike.
        names: what messages call the parameters.

    Attributes:
        sharded: the parameters.
        own_gradients: False, as an update's gradients are not the parameters'.
    """

    own_gradients = False

    def __init__(
        self, optimizer: GroupOptimizer, parameters: list[torch.Tensor], groups: list[Group], names: list[str]
    ) -> None:
        self._optimizer, self.sharded, self.names = optimizer, parameters, names
        self._ranks = OwnerGroup.of(parameters[0])
        owners = assign_owners(optimizer)
        self._members = [
            Owned(optimizer, parameter, group, name, owners[parameter])
            for parameter, group, name in zip(parameters, groups, names, strict=True)
        ]
        self._states = OwnedStates(optimizer, self._members)
        self._tensors: list[torch.Tensor] = []  # the states
        self._values: list[Any] = []  # of the rows in which these are
        self._guard = PointerGuard([])
        self._shards_of_gradients: list[torch.Tensor | None] = []
        self._gradients: list[torch.Tensor | None] = [None] * len(parameters)
        self._back: Exchange | None = None
        self._there: Exchange | None = None

    def make_update(self, rule: Rule | TensorRule) -> Update:
        optimizer = self._optimizer
        check_shards(optimizer, rule, self.sharded)
        assert isinstance(rule, TensorRule)
        states, masters = self._states.make(rule)
        self._values = self._values_now()
        self._tensors = [*chain.from_iterable(states), *(master for master in masters if master is not None)]
        self._guard = PointerGuard(self._tensors)
        wholes = [member.whole for member in self._members]
        seed, control = optimizer._rounding(self._members[0].group), optimizer._control
        update = Update(rule, wholes, states, masters, names=self.names, seed=seed, grad_scale_and_skip=control)
        places = {parameter: i for i, parameter in enumerate(assign_owners(optimizer))}
        update.rng_offsets[:] = [places[parameter] for parameter in self.sharded]  # not those of another exchange
        return update

    def is_current(self, update: Update) -> bool:
        """Whether states and shards are the tensors that they were."""
        shards_now = [shards.local(parameter) for parameter in self.sharded]
        return (
            same_objects(shards_now, [member.shard for member in self._members])
            and same_objects(self._values_now(), self._values)
            and self._guard.passes(self._tensors)
            and update.is_in_place()
        )

    def fits(self, update: Update) -> bool:
        return update.fits()

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        return list(grads), []

    def gradients(self) -> list[torch.Tensor | None]:
        """Room for the gradients, which `arrive` fills."""
        found = list(map(shards.local_gradient, self.names, self.sharded, [each.grad for each in self.sharded]))
        given: list[torch.Tensor | None] = []
        for i, (member, shard) in enumerate(zip(self._members, found, strict=True)):
            room = self._gradients[i]
            if shard is not None and (room is None or room.dtype != shard.dtype):
                with torch.inference_mode(False):  # it outlives the step
                    room = self._gradients[i] = torch.empty_like(member.whole, dtype=shard.dtype)
            given.append(None if shard is None else room)
        self._shards_of_gradients = found
        return given

    def start(self) -> None:
        """Send weights and gradients to their owners, of the parameters that have a gradient."""
        there, back = [], []
        for member, shard, whole in zip(self._members, self._shards_of_gradients, self._gradients, strict=True):
            if shard is not None:
                back.append(self._cut_tensor(member, member.shard, member.whole))
                there += [back[-1], self._cut_tensor(member, shard, whole)]
        self._there = self._back = None
        if there:
            self._there, self._back = (
                Exchange(self._ranks.processes, self._ranks.rank, tensors, to_owners=tensors is there)
                for tensors in (there, back)
            )
            self._there.start()

    def arrive(self) -> None:
        """Have those of this rank's own parameters."""
        if self._there is not None:
            self._there.finish()
        self._states.fill_new([shard is not None for shard in self._shards_of_gradients])

    def send_back(self) -> None:
        """Send the new weights' shards to where they belong."""
        if self._back is not None:
            self._back.start()

    def finish(self) -> None:
        """Have this rank's shards of the new weights."""
        if self._back is not None:
            self._back.finish()
        self._there = self._back = None
        self._shards_of_gradients = []

    def _cut_tensor(self, member: Owned, shard: torch.Tensor, whole: torch.Tensor | None) -> CutTensor:
        return CutTensor(shard, whole if member.mine else None, member.parameter.shape, member.dim, member.owner)

    def _values_now(self) -> list[Any]:
        return [value for parameter in self.sharded for value in self._optimizer.state[parameter].values()]
