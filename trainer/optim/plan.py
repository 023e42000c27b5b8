"""OptimizerPlan: how the parameters of a `FusedOptimizer` are updated at every step, as long as its groups stay the same."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import chain
from operator import is_ as _is
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.graphs import Recording
from ...kernels.guards import PointerGuard
from ...kernels.layouts import is_wrapper
from ...kernels.states import allocate_states, as_rows, goes_with, per_tensor_states, slot_dtypes, state_type, states_for
from ..optimizer.sparse import SparseRows, is_sparse
from . import shards

if TYPE_CHECKING:
    from .base import FusedOptimizer

__all__ = ["Group", "Numbers", "OptimizerPlan", "as_real", "name_of"]

Group = dict[str, Any]
Numbers = MutableMapping[str, Any]


class OptimizerPlan:
    """How one optimizer's parameters are updated at every step, as long as groups and states stay what they are."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        members: dict[Any, list[tuple[Group, int]]] = {}
        self._waiting: list[torch.Tensor] = []  # those that have had no gradient yet, and so have no state
        seen: set[int] = set()
        for group in optimizer.param_groups:
            rule = optimizer._rule(group)
            for k, parameter in enumerate(group["params"]):
                if id(parameter) in seen:  # torch only warns of duplicates
                    continue
                seen.add(id(parameter))
                if parameter.grad is None and not optimizer.state.get(parameter):
                    self._waiting.append(parameter)
                else:
                    kind = rule, optimizer._narrow(group), optimizer._rounding(group)
                    members.setdefault(kind, []).append((group, k))
        self._parts = [_Part(optimizer, kind[0], each) for kind, each in members.items()]
        self._groups = [(group, group["params"], optimizer._rule(group)) for group in optimizer.param_groups]
        self._parameters = [parameter for _, params, _ in self._groups for parameter in params]
        self._state = optimizer.state
        self._rows = list(optimizer.state.values())
        # Views of complex tensors do not notice when these are given other memory.
        self._lasting = not any(parameter.is_complex() for part in self._parts for parameter in part.parameters)

    def holds(self) -> bool:
        """Whether a step needs nothing but new gradients and options."""
        optimizer = self._optimizer
        return (
            self._lasting
            and len(optimizer.param_groups) == len(self._groups)
            and all(
                group is now and group["params"] is params and optimizer._rule(group) is rule
                for (group, params, rule), now in zip(self._groups, optimizer.param_groups, strict=True)
            )
            and _same(self._parameters, list(chain.from_iterable(params for _, params, _ in self._groups)))
            and optimizer.state is self._state
            and _same(self._rows, list(optimizer.state.values()))
            and all(part.holds() for part in self._parts)
            and all(parameter.grad is None for parameter in self._waiting)
        )

    def step(self) -> None:
        self.prepare()
        self.run()

    def prepare(self) -> None:
        """All that may fail. Changes nothing that a user sees."""
        for part in self._parts:
            part.prepare()

    def run(self) -> None:
        """Update the parameters and, if that went well, their numbers."""
        for part in self._parts:
            part.run()
        if Recording.current is not None:
            Recording.current.owners.append((lambda: self._optimizer._plan is self and self.holds(), self.advance))

    def advance(self) -> None:
        """All that a step does on the host, for one that is launched otherwise."""
        for part in self._parts:
            part.advance()


class _Part:
    """The parameters that share a rule and how states are stored, whatever their groups.

    Attributes:
        parameters: in order.
    """

    def __init__(self, optimizer: FusedOptimizer, rule: Rule | TensorRule, members: list[tuple[Group, int]]) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._groups = [group for group, _ in members]
        self._narrow = optimizer._narrow(self._groups[0])
        self._names = [name_of(group, k) for group, k in members]
        self.parameters = [group["params"][k] for group, k in members]
        self._weights = [as_real(parameter) for parameter in self.parameters]
        self._complex = any(parameter.is_complex() for parameter in self.parameters)
        self._sharded = [parameter for parameter in self.parameters if is_wrapper(parameter)]
        self._shards = list(map(shards.local, self._sharded))
        if self._sharded:
            optimizer._check_shards(rule, self._narrow, self.parameters)
        first = [
            optimizer._first_numbers(group, parameter, optimizer.state.get(parameter, {}))
            for group, parameter in zip(self._groups, self.parameters, strict=True)
        ]
        found = [self._found(i) for i in range(len(members))]
        self._numbers = self._numbers_of(first)
        states = self._with_joined_numbers([self._states_of(i, each) for i, each in enumerate(found)])
        self._masters = [self._master_of(i) for i in range(len(members))]
        self._rows = [optimizer.state[parameter] for parameter in self.parameters if parameter in optimizer.state]
        self._kept = list(chain.from_iterable(map(dict.values, self._rows)))
        self._tensors = [*chain.from_iterable(states), *(master for master in self._masters if master is not None)]
        self._guard = PointerGuard(self._tensors)  # users offload states, say, by giving them other memory
        self._update = Update(
            rule,
            self._weights,
            states,
            self._masters,
            names=self._names,
            seed=optimizer._rounding(self._groups[0]),
            grad_scale_and_skip=optimizer._control,
        )
        if self._sharded:
            shards.join_shards(self._update, self.parameters)
            self._update.rng_offsets += np.array([shards.own_place(parameter) << 32 for parameter in self.parameters])
        self._active: list[bool] = []
        self._shared: list[tuple[Any, int]] = []  # rows of equal hyper-parameters, and the first of them
        self._changes: list[tuple[Any, dict[str, Any]]] = []  # new numbers of these rows, after the step
        self._stepping: list[Group] = []
        self._sparse = SparseRows(self._names, self._without_sparse)
        self._alive: list[Any] = []  # views of gradients and shards of them, until they have been used

    def holds(self) -> bool:
        """Whether states, and the shards of DTensors, are the tensors that they were."""
        if self._sharded and not _same(self._shards, list(map(shards.local, self._sharded))):
            return False
        kept = list(chain.from_iterable(map(dict.values, self._rows)))
        return _same(self._kept, kept) and self._guard.passes(self._tensors) and self._update.fits()

    def _found(self, i: int) -> dict[str, torch.Tensor]:
        """The states that a parameter has already."""
        optimizer, rule = self._optimizer, self._rule
        row = optimizer.state.get(self.parameters[i], {})
        found = {}
        for slot, shape in zip(rule.slots, rule.shapes(self._weights[i].shape), strict=True):
            key = optimizer._keys.get(slot, slot)
            if row.get(key) is None:
                continue
            if row[key].layout != torch.strided:  # as torch's SGD keeps the momentum of sparse gradients
                row[key] = row[key].to_dense()
            self._check_placement(i, key, row[key])
            found[slot] = as_real(row[key])
            if found[slot].dtype == torch.uint8 and isinstance(rule, Rule):
                shape = torch.Size([storage.packed_size(self._weights[i].numel())])
            if found[slot].shape != shape:
                raise ValueError(
                    f"{key!r} of {self._names[i]} has shape {tuple(row[key].shape)}, the parameter "
                    f"{tuple(self.parameters[i].shape)}: the state of another model?"
                )
        return found

    def _check_placement(self, i: int, key: str, state: Any) -> None:
        """Refuse a state that is cut otherwise than its parameter."""
        parameter: Any = self.parameters[i]
        if not (shards.is_dtensor(state) or (shards.cut_among(parameter) and state.shape == parameter.shape != ())):
            return
        if not shards.is_dtensor(state) or not shards.is_dtensor(parameter):
            wrong = "a whole tensor" if shards.is_dtensor(parameter) else "a DTensor"
        elif (state.device_mesh, state.placements) != (parameter.device_mesh, parameter.placements):
            wrong = f"placed as {state.placements} on {state.device_mesh}"
        else:
            return
        raise ValueError(
            f"{key!r} of {self._names[i]} is {wrong}, otherwise than the parameter: load the states by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cuts them as they are to be"
        )

    def _states_of(self, i: int, usable: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The states of a parameter: those found, converted where they do not go with it, and new ones."""
        optimizer, rule, parameter, weight = self._optimizer, self._rule, self.parameters[i], self._weights[i]
        types = dict(zip(rule.slots, slot_dtypes(rule, weight.dtype, state_type(weight, self._narrow)), strict=True))
        usable = dict(usable)
        fitting = {slot for slot, state in usable.items() if goes_with(state, weight, types[slot])}
        if len(fitting) < len(rule.slots):
            (made,) = states_for(rule, [weight.detach()], self._narrow)
            new = dict(zip(rule.slots, made, strict=True))
            optimizer._first_states(self._groups[i], weight.detach(), new)
            for slot, state in new.items():
                if slot in fitting:
                    new[slot] = usable[slot]
                    continue
                if slot in usable:
                    storage.copy(state, usable[slot], weight.shape, slot in getattr(rule, "nonnegative", ()))
                if state.numel() or not weight.numel():  # a factored state has no elements where it is not used
                    shown = torch.view_as_complex(state) if parameter.is_complex() and state.dim() else state
                    optimizer.state[parameter][optimizer._keys.get(slot, slot)] = shards.placed_as(parameter, shown)
            usable = new
        return tuple(usable[slot] for slot in rule.slots)

    def _with_joined_numbers(self, states: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        """The states, with the numbers that the rule keeps of each tensor in one array: one call computes all of them."""
        names = self._rule.kept if isinstance(self._rule, Rule) else ()
        if not names or self._sharded or as_rows(numbers := [state[-len(names) :] for state in states]) is not None:
            return states
        joined = per_tensor_states(self._weights, len(names))
        torch._foreach_copy_(list(chain.from_iterable(joined)), list(chain.from_iterable(numbers)))
        for parameter, row in zip(self.parameters, joined, strict=True):
            for name, number in zip(names, row, strict=True):
                self._optimizer.state[parameter][self._optimizer._keys.get(name, name)] = number
        return [state[: -len(names)] + row for state, row in zip(states, joined, strict=True)]

    def _master_of(self, i: int) -> torch.Tensor | None:
        """The master of a parameter, made or converted if need be."""
        optimizer, parameter, weight = self._optimizer, self.parameters[i], self._weights[i]
        dtype = optimizer._master_dtype(self._groups[i], weight)
        if dtype is None:
            return None
        row = optimizer.state[parameter]
        found = row.get("compensation")
        if found is not None:
            self._check_placement(i, "compensation", found)
            found = shards.local(found)
        if found is None or not goes_with(found, weight, dtype):
            ((master,),) = allocate_states([weight.detach()], 1, dtype)
            row["compensation"] = shards.placed_as(parameter, master)
            return master if found is None else master.copy_(found)
        return found

    def _numbers_of(self, first: list[dict[str, float]]) -> dict[str, np.ndarray]:
        """One array for each number; where they are shown, `state` has views of its elements."""
        optimizer = self._optimizer
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        arrays = {}
        for name in first[0]:
            values = torch.tensor([numbers[name] for numbers in first], dtype=dtype, device="cpu")
            if name in optimizer._shown:
                for i, parameter in enumerate(self.parameters):
                    row = optimizer.state[parameter]
                    if name in row:
                        values[i] = float(row[name])
                    row[name] = values[i]
            arrays[name] = values.numpy()
        return arrays

    def prepare(self) -> None:
        """Take gradients and hyper-parameters, and check all of them. Changes nothing that a user sees."""
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        if self._sharded:
            gradients = list(map(shards.local_gradient, self._names, self.parameters, gradients))
            self._alive = gradients
        if self._complex:
            gradients = [None if gradient is None else as_real(gradient.resolve_conj()) for gradient in gradients]
            self._alive = gradients
        if not self._sparse.rebind(self._update, gradients, not self._alive):
            self._sparse.bind(self._update, gradients, not self._alive)
            active = [gradient is not None for gradient in gradients]
            if active != self._active:
                self._active, self._shared = active, []
        self._share()
        self._take_hyper()

    def _without_sparse(self, gradients: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The gradients to be taken as a whole, None for the others, and the places of those to be taken by row."""
        optimizer = self._optimizer
        sparse = [i for i, gradient in enumerate(gradients) if is_sparse(gradient)]
        if sparse and not optimizer._takes_sparse:
            raise RuntimeError(
                f"the gradient of {self._names[sparse[0]]} is sparse, which {type(optimizer).__name__} does not support: "
                "use sparse=False in the layer, or SparseAdam, SGD or Adagrad"
            )
        whole = list(gradients)
        by_row = [i for i in sparse if optimizer._by_row(self._groups[i])]
        for i in sparse:
            whole[i] = None if i in by_row else gradients[i].to_dense()
        return whole, by_row

    def _share(self) -> None:
        """Find the parameters that share hyper-parameters: those of one group and of equal numbers."""
        arrays = self._numbers.values()
        if self._shared and all((array[rows] == array[first]).all() for rows, first in self._shared for array in arrays):
            return
        members: dict[Any, list[int]] = {}
        for i, (group, active) in enumerate(zip(self._groups, self._active, strict=True)):
            if active:
                members.setdefault((id(group), *(float(array[i]) for array in arrays)), []).append(i)
        everything = [slice(None)] if len(members) == 1 and all(self._active) else map(np.array, members.values())
        self._shared = [(rows, each[0]) for rows, each in zip(everything, members.values(), strict=True)]

    def _take_hyper(self) -> None:
        """Hyper-parameters, each group's own."""
        optimizer, update = self._optimizer, self._update
        scale = getattr(optimizer, "grad_scale", None) if optimizer._control is None else None
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        self._stepping = list({id(self._groups[first]): self._groups[first] for _, first in self._shared}.values())
        for group in self._stepping:
            optimizer._begin(group)
        self._changes = []
        for rows, first in self._shared:
            group = self._groups[first]
            numbers = {name: array[first] for name, array in self._numbers.items()}
            numbers["step"] += 1
            row = optimizer._row(group, numbers)
            row[0] *= -unscale if group.get("maximize") else unscale
            update.hyper[rows] = row
            if optimizer._counted(group):
                self._changes.append((rows, numbers))

    def run(self) -> None:
        """Update the parameters and, if that went well, their numbers."""
        self._sparse.run(self._update)
        for rows, numbers in self._changes:
            for name, array in self._numbers.items():
                array[rows] = numbers[name]
        for group in self._stepping:
            self._optimizer._end(group)
        if self._sharded:  # autograd looks at the DTensor's version, the update has counted its shard's
            increment_version([parameter for parameter in self._sharded if parameter.grad is not None])
        self._alive = []

    def advance(self) -> None:
        """All that a step does on the host, for one that is launched otherwise."""
        self._update.host_only = True
        try:
            self._share()
            self._take_hyper()
            self.run()
        finally:
            self._update.host_only = False


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists have the very same objects."""
    return len(a) == len(b) and all(map(_is, a, b))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a complex one's real and imaginary parts, which rules take for numbers of their own.

    Of a DTensor it is this rank's shard.
    """
    tensor = shards.local(tensor)
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def name_of(group: Group, k: int) -> str:
    """What messages call a group's parameter."""
    return repr(group["param_names"][k]) if "param_names" in group else f"params[{k}]"
