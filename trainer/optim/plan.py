"""GroupPlan: the update of a `FusedOptimizer`'s parameters at every step, with the states and masters in its `state`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage
from ...kernels.layouts import first_alike, wrappers
from ...kernels.states import PerTensorStates, per_tensor_states, states_for
from ..optimizer.plan import StepPlan
from ..optimizer.sparse import is_sparse
from ..optimizer.states import MASTER, State, match_states, slots_that_fit, states_and_masters
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
        self._narrow, self._on_host = optimizer._narrow(groups[0]), optimizer._on_host(groups[0])
        self._complex = any(map(torch.Tensor.is_complex, parameters))
        self.sharded = wrappers(parameters)
        self._special = bool(self.sharded) or self._complex  # whether tensors in `state` are not those of the update
        self._weights = list(map(as_real, parameters)) if self._special else list(parameters)
        self._shards = list(map(shards.local, self.sharded))
        rows = GroupRows(optimizer, rule, parameters, groups)
        super().__init__(names, rows, not self._special, optimizer._takes_sparse)

    def new_update(self, rule: Rule | TensorRule) -> Update:
        optimizer = self._optimizer
        if self.sharded:
            check_shards(optimizer, rule, self._parameters)
        columns, first, masters = self._present(rule)
        states, held = self._whole_rows(rule, columns, first, masters) or self._matched(rule, columns, first, masters)
        update = Update(
            rule,
            self._weights,
            states,
            held,
            names=self.names,
            seed=optimizer._rounding(self._groups[0]),
            grad_scale_and_skip=optimizer._control,
            alike=None if any(masters) else first,
            numbers=self.rows.number_tensors(),  # users may offload these and states, which gives them other memory
        )
        if self.sharded:
            shards.join_shards(update, self._parameters)
            update.rng_offsets += np.array([shards.own_place(parameter) << 32 for parameter in self._parameters])
        return update

    def _whole_rows(
        self, rule: Rule | TensorRule, columns: list[list[Any]], first: list[int], masters: list[torch.dtype | None]
    ) -> tuple[list[tuple[torch.Tensor, ...]], None] | None:
        """Return the states that parameters have, without a dictionary for each, if all fit; else None."""
        kept = isinstance(rule, Rule) and rule.kept
        if kept or not columns or any(masters) or any(type(None) in set(map(type, column)) for column in columns):
            return None
        for i in set(first):
            state = dict(zip(rule.slots, (column[i] for column in columns), strict=True))
            if len(slots_that_fit(rule, self._weights[i], state, self._narrow, self._on_host)) < len(columns):
                return None
        return list(zip(*columns, strict=True)), None

    def _matched(
        self, rule: Rule | TensorRule, columns: list[list[Any]], first: list[int], masters: list[torch.dtype | None]
    ) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor | None]]:
        """Return states and masters for all parameters, of those that they have, and show new ones."""
        optimizer = self._optimizer
        of_each: Iterable[Any] = zip(*columns, strict=True) if columns else [()] * len(self._weights)
        present = [
            {slot: state for slot, state in zip(rule.slots, each, strict=True) if state is not None} for each in of_each
        ]
        for i, dtype in enumerate(masters):
            if dtype is None:
                continue
            master = optimizer.state.get(self._parameters[i], {}).get(MASTER_KEY)
            if master is not None:
                shards.check_placement(self.names[i], MASTER_KEY, master, self._parameters[i])
                present[i][MASTER] = shards.local(master)
        groups, make = {id(group): group for group in self._groups}, partial(self._make_states, rule)
        start = None if all(map(optimizer._starts_from_zeros, groups.values())) else self._start
        states = match_states(rule, self._weights, present, first, self._narrow, make, start, masters, self._on_host)
        changed = {i: (old, new) for i, (old, new) in enumerate(zip(present, states, strict=True)) if new is not old}
        self._show(rule, {i: {k: v for k, v in new.items() if v is not old.get(k)} for i, (old, new) in changed.items()})
        self._join_numbers(rule, states)
        return states_and_masters(rule, states)

    def is_current(self, update: Update) -> bool:
        """Return whether weights and states have the same memory as before, and DTensors the same shards."""
        if self._complex:  # a real view keeps the old memory when its complex tensor gets other memory
            return False
        if self.sharded and not same_objects(self._shards, list(map(shards.local, self.sharded))):
            return False
        return update.is_in_place()

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

    def _present(self, rule: Rule | TensorRule) -> tuple[list[list[Any]], list[int], list[torch.dtype | None]]:
        """Return the states that parameters have already, or None, a column for each slot; for each parameter the first one
        that is alike but for its master; and the dtypes of the masters that they need."""
        optimizer, nothing = self._optimizer, dict[str, Any]()
        rows = list(map(optimizer.rows_by_id().get, map(id, self._parameters), repeat(nothing)))
        keys = [optimizer._keys.get(slot, slot) for slot in rule.slots]
        columns: list[list[Any]] = [[row.get(key) for row in rows] for key in keys]
        for key, column in zip(keys, columns, strict=True):
            # torch's SGD has sparse momentum for sparse gradients
            for i in [i for i, state in enumerate(column) if state is not None and state.layout is not torch.strided]:
                column[i] = rows[i][key] = column[i].to_dense()
        first = first_alike(self._weights, *columns, also=list(map(id, self._groups)))
        of_kind = {i: optimizer._master_dtype(self._groups[i], self._weights[i]) for i in set(first)}
        masters = [of_kind[i] for i in first]
        for i in range(len(rows)) if self.sharded else sorted(of_kind):
            self._check_present(rule, i, {key: column[i] for key, column in zip(keys, columns, strict=True)})
        if self._special:
            columns = [[None if state is None else as_real(state) for state in column] for column in columns]
            first = first_alike(self._weights, *columns)
        return columns, first, masters

    def _check_present(self, rule: Rule | TensorRule, i: int, states: Mapping[str, torch.Tensor | None]) -> None:
        """Raise if a state of parameter `i` does not fit it."""
        name, parameter, weight = self.names[i], self._parameters[i], self._weights[i]
        for (key, state), shape in zip(states.items(), rule.shapes(weight.shape), strict=True):
            if state is None:
                continue
            packed = storage.is_packed(state)
            if packed:
                shape = torch.Size([storage.packed_size(weight.numel(), state.dtype)])
            else:
                shards.check_placement(name, key, state, parameter)
            if as_real(state).shape != shape:
                raise ValueError(
                    f"{key!r} of {name} has shape {tuple(state.shape)}, the parameter {tuple(parameter.shape)}: the "
                    "state of another model?"
                )

    def _make_states(self, rule: Rule | TensorRule, weights: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return states of zeros for each weight, each in memory of its own, as in torch."""
        return states_for(rule, weights, self._narrow, separate=True, on_host=self._on_host)

    def _start(self, i: int, new: State, missing: list[str]) -> None:
        self._optimizer._initialize_states(self._groups[i], self._weights[i], new)

    def _show(self, rule: Rule | TensorRule, new: Mapping[int, State]) -> None:
        """Put new states and masters of parameters into their rows of `state`."""
        optimizer, keys = self._optimizer, {MASTER: MASTER_KEY}
        keys |= {slot: optimizer._keys.get(slot, slot) for slot in rule.slots}
        for i, states in new.items():
            parameter = self._parameters[i]
            row = optimizer.state[parameter]
            for slot, tensor in states.items():
                # An unused factored state has no elements; of others an empty shard has none.
                if tensor.numel() or not parameter.numel() or slot == MASTER or self._whole(rule, i, slot).numel():
                    row[keys[slot]] = self._shown(parameter, tensor, slot) if self._special else tensor

    def _whole(self, rule: Rule | TensorRule, i: int, slot: str) -> torch.Size:
        return rule.shapes(self._parameters[i].shape)[rule.slots.index(slot)]

    def _shown(self, parameter: torch.Tensor, tensor: torch.Tensor, slot: str) -> torch.Tensor:
        """Return a state or master as `state` has it."""
        if slot != MASTER and parameter.is_complex() and tensor.dim():
            tensor = torch.view_as_complex(tensor)
        return shards.placed_as(parameter, tensor) if self.sharded else tensor

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
        new = {i: dict(zip(names, row, strict=True)) for i, row in enumerate(joined)}
        for i, numbers_of_one in new.items():
            states[i] = states[i] | numbers_of_one
        self._show(rule, new)


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
        if any(shards.needs_whole(rule, parameter) for parameter in wrappers(group["params"])):
            return shards.whole_plan().exchanges_of(optimizer)
    return {}
