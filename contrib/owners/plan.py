"""OwnedPlan: updates DTensors by rules that need whole tensors. Each parameter is updated by one rank, its owner.

In a step the owner receives all shards of weight and gradient, updates the whole weight, and sends its shards back: two
exchanges for all parameters of a rule, during which other parameters are updated.

Only the owner has the states, as whole tensors; others have tensors without elements instead. `state_dict` has DTensors:
states of the parameter's shape are placed as the parameter, others are sharded along their first dimension. Packed states
are shown as bfloat16 in the parameter's shape. So torch.distributed.checkpoint saves and loads them on any number of ranks.

Source: Liu et al. (2025), "Muon is Scalable for LLM Training", "Distributed Muon", where shards are also gathered for the
orthogonalization.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, MutableMapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.guards import PointerGuard
from ...kernels.layouts import is_wrapper
from ...kernels.states import goes_with, master_like, slot_shapes, states_for
from ...trainer.optim import shards
from ...trainer.optim.groups import MASTER_KEY, Group, GroupOptimizer, same_objects
from ...trainer.optim.plan import GroupPlan, check_shards
from ...trainer.optimizer.states import MASTER, State, alike, match_states, new_master, states_and_masters
from .exchange import CutTensor, Exchange, shard_bounds
from .ranks import OwnerGroup, assign_owners, exchanges_of, refusal


class Owned:
    """A parameter and its owner.

    Attributes:
        parameter, group, name: the parameter, its parameter group, and its name in messages.
        owner: the rank of the owner in the parameter's `OwnerGroup`.
        mine: whether this rank is the owner.
        dim: the dimension along which the parameter is sharded.
        shard: this rank's shard.
        whole: a buffer for the whole weight on the owner; elsewhere a tensor without elements.
    """

    def __init__(self, optimizer: GroupOptimizer, parameter: torch.Tensor, group: Group, name: str, owner: int) -> None:
        self.parameter, self.group, self.name, self.owner = parameter, group, name, owner
        self.mine = OwnerGroup.of(parameter).rank == owner
        self.dim = _dimension(parameter, parameter.shape)
        self.shard = shards.local(parameter)
        self.row: dict[str, Any] = optimizer.state[parameter]
        with torch.inference_mode(False):  # the tensor outlives the step
            self.whole = self._room(parameter.shape, parameter.dtype)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape) if self.mine else (0,), dtype=dtype, device=self.shard.device)


class OwnedPlan(GroupPlan):
    """The plan of parameters that are sharded over the ranks of one group; each is updated by its owner.

    The update has whole tensors for parameters that this rank owns, and tensors without elements for the others.
    """

    exchanges = True
    refusal = staticmethod(refusal)
    exchanges_of = staticmethod(exchanges_of)

    _new: list[tuple[int, State, list[str]]]  # parameter's index, its new states, and the slots to fill
    _new_masters: list[tuple[int, torch.Tensor, torch.Tensor | None]]  # parameter's index, its new master, and the old one
    _values: list[Any]  # the values in the rows of `state`
    _shards_of_gradients: list[torch.Tensor | None]
    _back: Exchange | None = None
    _outward: Exchange | None = None

    @cached_property
    def _members(self) -> list[Owned]:
        owners = assign_owners(self._optimizer)
        rows = zip(self.sharded, self._groups, self.names, strict=True)
        return [Owned(self._optimizer, parameter, group, name, owners[parameter]) for parameter, group, name in rows]

    @cached_property
    def _gradients(self) -> list[torch.Tensor | None]:
        """Buffers for whole gradients."""
        return [None] * len(self._members)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        optimizer = self._optimizer
        check_shards(optimizer, rule, self.sharded)
        assert isinstance(rule, TensorRule)
        with torch.inference_mode(False):
            self._bring(rule)
            self._new, self._new_masters = [], []
            states = self._match_states(rule)
        self._values = self._values_now()
        self._tensors = [*chain.from_iterable(map(dict.values, states)), *self.rows.number_tensors()]
        self._guard = PointerGuard(self._tensors)
        wholes, tensors = [member.whole for member in self._members], states_and_masters(rule, states)
        seed, control = optimizer._rounding(self._members[0].group), optimizer._control
        update = Update(rule, wholes, *tensors, names=self.names, seed=seed, grad_scale_and_skip=control)
        places = {parameter: i for i, parameter in enumerate(assign_owners(optimizer))}
        update.rng_offsets[:] = [places[parameter] for parameter in self.sharded]  # offsets do not depend on the exchange
        return update

    def is_current(self, update: Update) -> bool:
        """Return whether states and shards are the same tensors as when the update was made."""
        return (
            same_objects(list(map(shards.local, self.sharded)), self._shards)
            and same_objects(self._values_now(), self._values)
            and self._guard.passes(self._tensors)
            and update.is_in_place()
        )

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the buffers for the gradients, which `arrive` fills; None for parameters without a gradient."""
        local = list(map(shards.local_gradient, self.names, self.sharded, [each.grad for each in self.sharded]))
        buffers: list[torch.Tensor | None] = []
        for i, (member, shard) in enumerate(zip(self._members, local, strict=True)):
            room = self._gradients[i]
            if shard is not None and (room is None or room.dtype != shard.dtype):
                with torch.inference_mode(False):  # the tensor outlives the step
                    room = self._gradients[i] = torch.empty_like(member.whole, dtype=shard.dtype)
            buffers.append(None if shard is None else room)
        self._shards_of_gradients = local
        return buffers

    def start(self) -> None:
        """Start to send the shards of weights and gradients to their owners, for parameters with a gradient."""
        outward, back = [], []
        for member, shard, whole in zip(self._members, self._shards_of_gradients, self._gradients, strict=True):
            if shard is not None:
                back.append(self._cut_tensor(member, member.shard, member.whole))
                outward += [back[-1], self._cut_tensor(member, shard, whole)]
        self._outward = self._back = None
        if outward:
            ranks = OwnerGroup.of(self.sharded[0])
            self._outward, self._back = (
                Exchange(ranks.processes, ranks.rank, tensors, to_owners=tensors is outward) for tensors in (outward, back)
            )
            self._outward.start()

    def arrive(self) -> None:
        """Wait for the weights and gradients of parameters that this rank owns, and fill their new states."""
        if self._outward is not None:
            self._outward.finish()
        self._fill_new([shard is not None for shard in self._shards_of_gradients])

    def send_back(self) -> None:
        """Start to send each rank its shard of the weights that this rank has updated."""
        if self._back is not None:
            self._back.start()

    def finish(self) -> None:
        """Wait for this rank's shards of the new weights."""
        if self._back is not None:
            self._back.finish()
        self._outward = self._back = None
        self._shards_of_gradients = []

    @staticmethod
    def show(optimizer: GroupOptimizer, shown: MutableMapping[Any, Any], only: Collection[str] | None = None) -> None:
        """Replace states in `shown` by DTensors, and packed states by bfloat16 DTensors of the parameter's shape."""
        owners = optimizer._owners or {}
        tensors: dict[OwnerGroup, list[CutTensor]] = {}
        for group in optimizer.param_groups:
            rule = optimizer._rule(group)
            unsigned = {optimizer._keys.get(slot, slot) for slot in rule.nonnegative}
            for parameter in group["params"]:
                if parameter not in owners or not isinstance(rule, TensorRule) or not isinstance(shown.get(parameter), dict):
                    continue
                ranks, row = OwnerGroup.of(parameter), dict(shown[parameter])
                for key, shape in _states_in(optimizer, rule, parameter, row):
                    state = row[key]
                    # A DTensor has been loaded, and no step has converted it yet.
                    if shards.is_dtensor(state) or (only is not None and key not in only):
                        continue
                    if storage.is_packed(state) and key != MASTER_KEY:
                        shape = parameter.shape
                        if ranks.rank == owners[parameter]:
                            state = storage.as_bfloat16(state, shape, key in unsigned)
                        else:
                            state = torch.empty(0, dtype=torch.bfloat16, device=state.device)
                    dim, size = _dimension(parameter, shape), list(shape)
                    if dim is not None:
                        start, stop = shard_bounds(shape[dim], ranks.ranks, ranks.rank)
                        size[dim] = stop - start
                    shard = torch.empty(size, dtype=state.dtype, device=state.device)
                    whole = state if ranks.rank == owners[parameter] else None
                    tensors.setdefault(ranks, []).append(CutTensor(shard, whole, shape, dim, owners[parameter]))
                    row[key] = _dtensor(shard, shape, parameter)
                    shown[parameter] = row
        for ranks, cut_tensors in tensors.items():
            _exchange(ranks, cut_tensors, to_owners=False)

    def _cut_tensor(self, member: Owned, shard: torch.Tensor, whole: torch.Tensor | None) -> CutTensor:
        return CutTensor(shard, whole if member.mine else None, member.parameter.shape, member.dim, member.owner)

    def _values_now(self) -> list[Any]:
        return [value for parameter in self.sharded for value in self._optimizer.state[parameter].values()]

    def _fill_new(self, active: Sequence[bool]) -> None:
        """Fill the new states and masters of parameters with `active`, which needs their whole weights."""
        masters, waiting = self._new_masters, self._new
        self._new_masters = [each for each in masters if not active[each[0]]]
        for i, master, old in masters:
            if active[i]:
                master.copy_(new_master(self._members[i].whole, old, master.dtype))
        self._new = [each for each in waiting if not active[each[0]]]
        for i, new, missing in waiting:
            if active[i]:
                member = self._members[i]
                rule = self._optimizer._rule(member.group)
                room = dict(zip(rule.slots, *states_for(rule, [member.whole], self._narrow), strict=True))
                self._optimizer._initialize_states(member.group, member.whole, room)
                for slot in missing:
                    new[slot].copy_(room[slot])

    def _bring(self, rule: TensorRule) -> None:
        """Gather states that `load_state_dict` has loaded as DTensors on their owners."""
        present = []
        for member in self._members:
            for key, shape in _states_in(self._optimizer, rule, member.parameter, member.row):
                state = member.row[key]
                if state.shape != shape and (member.mine or state.shape != (0,)):
                    raise ValueError(
                        f"{key!r} of {member.name} has shape {tuple(state.shape)}, the parameter "
                        f"{tuple(member.parameter.shape)}: the state of another model?"
                    )
                present.append((member, key, state, shape))
        tensors = []
        for member, key, state, shape in present:
            room = member._room(shape, state.dtype) if shards.is_dtensor(state) or not member.mine else state
            if shards.is_dtensor(state):
                shard, whole = _own_shard(member, key, state), room if member.mine else None
                tensors.append(CutTensor(shard, whole, shape, _dimension(member.parameter, shape), member.owner))
            member.row[key] = room
        if tensors:
            _exchange(OwnerGroup.of(self._members[0].parameter), tensors, to_owners=True)

    def _match_states(self, rule: TensorRule) -> list[State]:
        """Return states and masters: the present ones, converted if they do not fit the parameter, and new ones."""
        members, keys = self._members, {slot: self._optimizer._keys.get(slot, slot) for slot in rule.slots}

        def make(wholes: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
            return [states_for(rule, [whole], self._narrow, on_host=self._on_host)[0] for whole in wholes]

        def start(i: int, new: State, missing: list[str]) -> None:
            if members[i].mine:
                self._new.append((i, new, missing))

        present = [{slot: member.row.get(key) for slot, key in keys.items() if member.mine} for member in members]
        filled = [{slot: state for slot, state in each.items() if state is not None} for each in present]
        wholes = [member.whole for member in members]
        first = alike(rule, wholes, filled)
        no_masters = [None] * len(members)
        states = match_states(rule, wholes, filled, first, self._narrow, make, start, no_masters, self._on_host)
        for i, (member, state) in enumerate(zip(members, states, strict=True)):
            shown = state
            if not member.mine:
                shape, dtype = member.parameter.shape, member.parameter.dtype
                (elsewhere,) = make([torch.empty(shape, dtype=dtype, device="meta")])
                shown = dict(zip(rule.slots, elsewhere, strict=True))
            for slot, tensor in shown.items():
                if tensor.numel():  # an unused factored state has no elements
                    member.row[keys[slot]] = tensor if member.mine else member._room(tensor.shape, tensor.dtype)
            master = self._master_of(i, member)
            if master is not None:
                state[MASTER] = master
        return states

    def _master_of(self, i: int, member: Owned) -> torch.Tensor | None:
        """Return the present or a new master of a parameter; None if it has none."""
        dtype = self._optimizer._master_dtype(member.group, member.whole)
        if dtype is None:
            return None
        found = member.row.get(MASTER_KEY)
        if not member.mine or found is None or not goes_with(found, member.whole, dtype):
            master = master_like(member.whole, dtype)
            if member.mine:
                self._new_masters.append((i, master, found))
            member.row[MASTER_KEY] = found = master
        return found


@torch.no_grad()
def _exchange(ranks: OwnerGroup, tensors: Sequence[CutTensor], to_owners: bool) -> None:
    exchange = Exchange(ranks.processes, ranks.rank, tensors, to_owners)
    exchange.start()
    exchange.finish()


def _states_in(
    optimizer: GroupOptimizer, rule: TensorRule, parameter: torch.Tensor, row: dict[str, Any]
) -> list[tuple[str, torch.Size]]:
    """Return the keys of the states and the master in a parameter's row, with the shapes of the whole tensors."""
    keys = [optimizer._keys.get(slot, slot) for slot in rule.slots]
    like = [parameter.dtype if row.get(key) is None else row[key].dtype for key in keys]
    shapes = [*zip(keys, slot_shapes(rule, parameter.shape, like), strict=True)]
    shapes.append((MASTER_KEY, parameter.shape))
    return [(key, shape) for key, shape in shapes if row.get(key) is not None]


def _dimension(parameter: torch.Tensor, shape: torch.Size) -> int | None:
    """Return the dimension along which a state is sharded: the parameter's if shapes agree, else 0; None for a scalar."""
    if shape == parameter.shape:
        dim: int = parameter.placements[OwnerGroup.of(parameter).mesh_dim].dim  # type: ignore[attr-defined]
        return dim
    return 0 if len(shape) else None


def _placements(parameter: torch.Tensor, shape: torch.Size) -> list[Any]:
    placements = list(parameter.placements)  # type: ignore[attr-defined]
    if shape == parameter.shape:
        return placements
    tensor, dim, cut = sys.modules["torch.distributed.tensor"], _dimension(parameter, shape), OwnerGroup.of(parameter)
    along = tensor.Replicate() if dim is None else tensor.Shard(dim)
    return [along if k == cut.mesh_dim else tensor.Replicate() for k in range(len(placements))]


def _dtensor(shard: torch.Tensor, shape: torch.Size, parameter: torch.Tensor) -> torch.Tensor:
    """Return a state of this shape as a DTensor, given this rank's shard."""
    make, mesh = sys.modules["torch.distributed.tensor"].DTensor.from_local, parameter.device_mesh  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return make(shard, mesh, _placements(parameter, shape), run_check=False, shape=shape, stride=stride)


def _own_shard(member: Owned, key: str, state: Any) -> torch.Tensor:
    """Return this rank's shard of a state that is a DTensor, with the placements of `_placements`."""
    mesh = member.parameter.device_mesh  # type: ignore[attr-defined]
    if state.device_mesh != mesh:
        raise ValueError(
            f"{key!r} of {member.name} is on {state.device_mesh}, the parameter on {mesh}: load the states by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards them as needed"
        )
    shard: Any = shards.local(state.redistribute(placements=_placements(member.parameter, state.shape)))
    return shard.wait() if is_wrapper(shard) else shard
