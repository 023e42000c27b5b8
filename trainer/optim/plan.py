"""GroupPlan: the update of a `FusedOptimizer`'s parameters at every step, with the states and masters in its `state`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.guards import PointerGuard
from ...kernels.layouts import is_wrapper
from ...kernels.states import PerTensorStates, per_tensor_states, states_for
from ..optimizer.plan import StepPlan
from ..optimizer.sparse import is_sparse
from ..optimizer.states import MASTER, State, match_states, states_and_masters
from . import shards
from .groups import MASTER_KEY, Group, GroupOptimizer, GroupRows, as_real, same_objects


class GroupPlan(StepPlan):
    """The plan for parameters with one rule, in groups with the same storage of states."""

    rows: GroupRows
    # Whether ranks exchange tensors in a step: `start` sends, `arrive` receives before the launch, `send_back` sends after
    # it, and `finish` receives, after the launches of all plans.
    exchanges = False

    def __init__(
        self,
        optimizer: GroupOptimizer,
        rule: Rule | TensorRule,
        parameters: list[torch.Tensor],
        groups: list[Group],
        names: list[str],
    ) -> None:
        self._optimizer, self._parameters, self._groups, self.names = optimizer, parameters, groups, names
        self._narrow = optimizer._narrow(groups[0])
        self._weights = [as_real(parameter) for parameter in parameters]
        self._complex = any(parameter.is_complex() for parameter in parameters)
        self.sharded = [parameter for parameter in parameters if is_wrapper(parameter)]
        self._shards = list(map(shards.local, self.sharded))
        self._tensors: list[torch.Tensor] = []  # weights, states and masters
        self._guard = PointerGuard([])
        own = not (self.sharded or self._complex)  # whether updates use the gradients themselves, no views or shards
        super().__init__(names, GroupRows(optimizer, rule, parameters, groups), own, optimizer._takes_sparse)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        optimizer = self._optimizer
        if self.sharded:
            check_shards(optimizer, rule, self._parameters)
        masters = list(map(optimizer._master_dtype, self._groups, self._weights))
        keys = {optimizer._keys.get(slot, slot) for slot in rule.slots} | {MASTER_KEY}
        nothing: State = {}
        present = [
            nothing if keys.isdisjoint(optimizer.state.get(parameter, ())) else self._present(rule, i, masters[i])
            for i, parameter in enumerate(self._parameters)
        ]
        make = partial(self._make_states, rule)
        states = match_states(rule, self._weights, present, self._narrow, make, self._start, masters)
        for i, (old, new) in enumerate(zip(present, states, strict=True)):
            if new is not old:
                self._show(rule, i, {slot: tensor for slot, tensor in new.items() if tensor is not old.get(slot)})
        self._join_numbers(rule, states)
        self._tensors = [*self._weights, *chain.from_iterable(map(dict.values, states))]
        self._guard = PointerGuard(self._tensors)  # users may offload states, which gives them other memory
        update = Update(
            rule,
            self._weights,
            *states_and_masters(rule, states),
            names=self.names,
            seed=optimizer._rounding(self._groups[0]),
            grad_scale_and_skip=optimizer._control,
        )
        if self.sharded:
            shards.join_shards(update, self._parameters)
            update.rng_offsets += np.array([shards.own_place(parameter) << 32 for parameter in self._parameters])
        return update

    def is_current(self, update: Update) -> bool:
        """Return whether weights and states have the same memory as before, and DTensors the same shards."""
        if self._complex:  # a real view keeps the old memory when its complex tensor gets other memory
            return False
        if self.sharded and not same_objects(self._shards, list(map(shards.local, self.sharded))):
            return False
        return self._guard.passes(self._tensors)

    def fits(self, update: Update) -> bool:
        return update.fits(partial(self._optimizer._master_dtype, self._groups[0]))

    def start(self) -> None: ...

    def arrive(self) -> None: ...

    def send_back(self) -> None: ...

    def finish(self) -> None: ...

    def gradients(self) -> list[torch.Tensor | None]:
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        if self.sharded:
            gradients = list(map(shards.local_gradient, self.names, self._parameters, gradients))
        if self._complex:
            gradients = [None if gradient is None else as_real(gradient.resolve_conj()) for gradient in gradients]
        return gradients

    def split(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        optimizer, whole = self._optimizer, list(grads)
        sparse = [i for i, grad in enumerate(grads) if is_sparse(grad)]
        if sparse and not optimizer._takes_sparse:
            raise RuntimeError(
                f"the gradient of {self.names[sparse[0]]} is sparse, which {type(optimizer).__name__} does not support: "
                "use sparse=False in the layer, or SparseAdam, SGD or Adagrad"
            )
        by_row = [i for i in sparse if optimizer._by_row(self._groups[i]) and self._weights[i].dim()]
        if by_row and storage.is_packed(self._narrow):
            raise ValueError(
                f"state_dtype={self._groups[by_row[0]]['state_dtype']!r} for {self.names[by_row[0]]}, whose gradient is "
                "sparse: rows share scales, so it must be None or 'bfloat16'"
            )
        for i in sparse:
            gradient: Any = grads[i]
            listed = optimizer._by_row(self._groups[i]) and gradient._nnz() == 0  # an empty gradient of a scalar
            whole[i] = None if i in by_row or listed else gradient.detach().to_dense()
        return whole, by_row

    def _present(self, rule: Rule | TensorRule, i: int, master_dtype: torch.dtype | None) -> State:
        """Return the states that parameter `i` has already, and its master, if it needs one of this dtype."""
        optimizer, name, parameter, weight = self._optimizer, self.names[i], self._parameters[i], self._weights[i]
        row = optimizer.state[parameter]
        present = {}
        for slot, shape in zip(rule.slots, rule.shapes(weight.shape), strict=True):
            key = optimizer._keys.get(slot, slot)
            state = row.get(key)
            if state is None:
                continue
            if state.layout != torch.strided:  # torch's SGD has sparse momentum for sparse gradients
                state = row[key] = state.to_dense()
            packed = storage.is_packed(state)
            if not packed:
                shards.check_placement(name, key, state, parameter)
            present[slot] = as_real(state)
            if packed:
                shape = torch.Size([storage.packed_size(weight.numel(), present[slot].dtype)])
            if present[slot].shape != shape:
                raise ValueError(
                    f"{key!r} of {name} has shape {tuple(state.shape)}, the parameter {tuple(parameter.shape)}: the "
                    "state of another model?"
                )
        if master_dtype is not None and (master := row.get(MASTER_KEY)) is not None:
            shards.check_placement(name, MASTER_KEY, master, parameter)
            present[MASTER] = shards.local(master)
        return present

    def _make_states(self, rule: Rule | TensorRule, weights: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return states of zeros for each weight, each in memory of its own, as in torch."""
        return states_for(rule, weights, self._narrow, separate=True)

    def _start(self, i: int, new: State, missing: list[str]) -> None:
        self._optimizer._initialize_states(self._groups[i], self._weights[i], new)

    def _show(self, rule: Rule | TensorRule, i: int, new: State) -> None:
        optimizer, parameter = self._optimizer, self._parameters[i]
        row, wholes = optimizer.state[parameter], dict(zip(rule.slots, rule.shapes(parameter.shape), strict=True))
        for slot, tensor in new.items():
            if slot == MASTER:
                key, shown = MASTER_KEY, tensor
            else:
                key, is_complex = optimizer._keys.get(slot, slot), self._complex and parameter.is_complex() and tensor.dim()
                shown = torch.view_as_complex(tensor) if is_complex else tensor
            # An unused factored state has no elements; of others an empty shard has none.
            if tensor.numel() or not parameter.numel() or slot == MASTER or wholes[slot].numel():
                row[key] = shards.placed_as(parameter, shown) if self.sharded else shown

    def _join_numbers(self, rule: Rule | TensorRule, states: list[State]) -> None:
        """Move the numbers that the rule keeps for each tensor into one array, so that one call computes all of them."""
        names = rule.kept if isinstance(rule, Rule) else ()
        if not names or self.sharded:
            return
        numbers = [[state[name] for name in names] for state in states]
        if PerTensorStates(numbers).is_joined:
            return
        joined = per_tensor_states(self._weights, len(names))
        torch._foreach_copy_(list(chain.from_iterable(joined)), list(chain.from_iterable(numbers)))
        for i, row in enumerate(joined):
            new = dict(zip(names, row, strict=True))
            states[i] = states[i] | new
            self._show(rule, i, new)


def check_shards(optimizer: GroupOptimizer, rule: Rule | TensorRule, parameters: Sequence[torch.Tensor]) -> None:
    """Raise if the rule cannot update a DTensor, neither by its shards nor as a whole."""
    whole = [parameter for parameter in parameters if shards.needs_whole(rule, parameter)]
    by_shard = [parameter for parameter in parameters if not shards.needs_whole(rule, parameter)]
    refusal = shards.whole_plan().refusal(rule, whole) if whole else None
    refusal = refusal or shards.rule_refusal(rule, by_shard)
    if refusal is not None:
        raise NotImplementedError(f"{type(optimizer).__name__} with sharded parameters: {refusal}")


def exchanges_of(optimizer: GroupOptimizer) -> dict[torch.Tensor, Any]:
    """Return a key for each sharded parameter that is updated as a whole; parameters with equal keys share a plan."""
    for group in optimizer.param_groups:
        rule = optimizer._rule(group)
        if any(shards.needs_whole(rule, parameter) for parameter in group["params"]):
            return shards.whole_plan().exchanges_of(optimizer)
    return {}
