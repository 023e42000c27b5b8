"""EnsembleGroup: the models of an ensemble that are updated in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, Update, choose_engine
from ...kernels.layouts import is_dense
from ...kernels.states import stacked_zeros
from ..optimizer import RuleOptimizer
from ..optimizer.states import MASTER, State, new_master, states_and_masters
from ..optimizer.updater import Updater
from .rows import EnsembleRows


class TensorLists:
    """The weights, or the gradients, of all models: a list for each model, or stacks, which are split only when needed.

    Args:
        tensors: a list of tensors for each model, or, with `stacked`, one tensor [n, *shape] or None for each weight.
        n: the number of models.
        stacked: whether tensors are stacked.

    Attributes:
        stacks: the stacks, or None.
        counts: the number of tensors of each model.
    """

    def __init__(self, tensors: Sequence[Any], n: int, stacked: bool) -> None:
        self.stacks: list[Any] | None = list(tensors) if stacked else None
        self._lists = None if stacked else [list(of_model) for of_model in tensors]
        self.counts = [len(tensors)] * n if self._lists is None else list(map(len, self._lists))

    @property
    def lists(self) -> list[list[Any]]:
        """For each model the list of its tensors."""
        if self._lists is None:
            n = len(self.counts)
            columns = [[None] * n if stack is None else stack.detach().unbind() for stack in self.stacks or ()]
            self._lists = list(map(list, zip(*columns, strict=True)))
        return self._lists


def weight_names(i: int, weights: Sequence[torch.Tensor]) -> list[str]:
    return [f"weights[{i}][{k}]" for k in range(len(weights))]


class EnsembleGroup:
    """Models that are updated in one launch, with optimizers of one class that differ in numbers and schedules only.

    Args:
        optimizers: the optimizers of the group's models.
        members: the indices of these models in the ensemble.
        weights: the weights of all models of the ensemble.
        engine: the engine of the updates; None: the fastest that is available.

    Attributes:
        members: the indices of the group's models in the ensemble.
        stacked: whether weights are updated as stacks.
        rows: the hyper-parameters.
        update: the `Update` of the present step.
    """

    def __init__(self, optimizers: Sequence[Any], members: list[int], weights: TensorLists, engine: str | None) -> None:
        self._optimizers, self.members, self._engine = optimizers, members, engine
        self._n = weights.counts[members[0]]
        self._where = self._slice(weights.stacks)  # the members' rows of stacks; None: tensors are updated one by one
        self.stacked = self._where is not None
        self._weights = self._of_members(weights)
        if self.stacked:
            self._names = [f"weights[{k}]" for k in range(self._n)]
        else:
            self._names = [name for i in members for name in weight_names(i, weights.lists[i])]
        self._states: list[State] = []  # for each weight, or stack of weights
        self._make_states()
        self.rows = EnsembleRows(optimizers, self._n, self.stacked)
        self._gradients: list[torch.Tensor | None] = []
        self._used = False  # whether weights may have changed since states were made for them
        self._bound: set[Rule] = set()  # the rules whose updates have been bound to the gradients
        rule = self.rows.rule()
        self.update = self._make_update(rule)
        self._updates = {rule: self.update}

    def prepare(self, gradients: TensorLists | None) -> bool:
        """Bind the step to gradients, None for the last ones; return False if the models cannot be updated together."""
        rule = self.rows.rule()
        if rule not in self._updates:
            self._updates[rule] = self._make_update(rule)
        update = self.update = self._updates[rule]
        if gradients is not None:
            self._gradients, self._bound = self._of_members(gradients), set()
        if rule in self._bound:
            return True
        if not update.rebind(self._gradients):
            if any(gradient is None or gradient.layout != torch.strided for gradient in self._gradients):
                return False
            if self._used and not update.fits(self._optimizers[0].master_dtype):
                return False
            update.bind(self._gradients)
            self._used = True
        elif update.active is not None:  # gradients are missing, so the counts of a model's weights become different
            return False
        self._bound.add(rule)
        return True

    def run(self) -> None:
        """Take the step, after `prepare` and `rows.write`, and count it."""
        self.update()
        self.rows.count()

    def repeat(self) -> None:
        """Update the group's models once more, with the gradient tensors of the last step.

        Neither the optimizers' update counts nor the tensors' versions change before `end_repeats`, to save time.
        """
        self.update.repeat(same=self.rows.is_steady)
        self.rows.counts.step += 1

    def end_repeats(self) -> None:
        """Add the repeated steps to the optimizers' counts and to the versions of tensors."""
        self.rows.counts.write_back()
        self.update.count_change()

    @property
    def repeats(self) -> bool:
        """Whether `repeat` can take the next steps: they differ in hyper-parameters only."""
        return self.rows.only is not None and not self.rows.only.reductions

    def share_states(self, updaters: Sequence[Updater]) -> None:
        """Give the states to the updaters of the ensemble's models."""
        for (j, k), _, _, state in self._single():
            updaters[self.members[j]].state[k] = state

    @property
    def can_restart(self) -> bool:
        """Whether steps change nothing but weights, states and counts; a master would keep the value of another weight."""
        return self.rows.can_restart and not any(MASTER in state for state in self._states)

    def restart(self) -> None:
        """Reset states and counts, and keep the weights."""
        self.rows.restart()
        if states := [tensor for state in self._states for tensor in state.values()]:
            torch._foreach_zero_(states)
        self._start_states()

    def _of_members(self, tensors: TensorLists) -> list[Any]:
        """Return the tensors of the group's models, stacked or one by one."""
        if self._where is None:
            return [tensor for i in self.members for tensor in tensors.lists[i]]
        return [None if stack is None else stack.detach()[self._where] for stack in tensors.stacks or ()]

    def _make_update(self, rule: Rule) -> Update:
        seed, stacked, states = self._optimizers[0].rounding, self.stacked, states_and_masters(rule, self._states)
        update = Update(rule, self._weights, *states, self._engine, self._names, seed, stacked=stacked)
        # Each model gets the random numbers of a training alone.
        slots, n = np.arange(self._n), len(self.members)
        update.rng_offsets = np.repeat(slots, n) if stacked else np.tile(slots, n)
        return update

    def _slice(self, stacks: Sequence[torch.Tensor] | None) -> slice | None:
        """Return the rows of the group's models in stacks; None if they cannot be updated as stacks."""
        first, members = self._optimizers[0], self.members
        step = members[1] - members[0] if len(members) > 1 else 1
        where = slice(members[0], members[-1] + 1, step)
        if stacks is None or members != list(range(where.start, where.stop, step)) or not _has_plain_states(first):
            return None
        plain = all(first.master_dtype(stack) is None and is_dense(stack[0]) for stack in stacks)
        return where if plain and choose_engine(stacks[0].device, self._engine) != "eager" else None

    def _make_states(self) -> None:
        first = self._optimizers[0]
        for name, weight in zip(self._names, self._weights, strict=True):
            first.check_storage(name, weight)
        weights = [weight.detach() for weight in self._weights]
        slots = first.composed_rule.slots
        if self.stacked:
            states = [tuple(stacked_zeros(len(stack), stack[0]) for _ in slots) for stack in weights]
        else:
            states = first.states_for(weights)
        self._states = [dict(zip(slots, state, strict=True)) for state in states]
        for weight, state in zip(weights, self._states, strict=True):
            if (dtype := first.master_dtype(weight)) is not None:
                state[MASTER] = new_master(weight, None, dtype)
        self._start_states()

    def _start_states(self) -> None:
        """Fill the states, which are zero, if the rule starts from other values."""
        first = self._optimizers[0]
        if type(first).init_state is RuleOptimizer.init_state and first.lookahead is None and first.ema_decay is None:
            return
        name = ""
        try:
            for (j, _), name, weight, state in self._single():  # noqa: B007
                self._optimizers[j].start_state(weight.detach(), state)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _single(self) -> Iterator[tuple[tuple[int, int], str, torch.Tensor, State]]:
        """Yield for each weight (model in the group, index of the weight), name, weight, and states with master."""
        if self._where is None:
            places = itertools.product(range(len(self.members)), range(self._n))
            yield from zip(places, self._names, self._weights, self._states, strict=True)
        else:
            for k, (name, weights, states) in enumerate(zip(self._names, self._weights, self._states, strict=True)):
                for j, (weight, *state) in enumerate(zip(weights, *states.values(), strict=True)):
                    yield (j, k), name, weight, dict(zip(states, state, strict=True))


def _has_plain_states(optimizer: RuleOptimizer) -> bool:
    """Return whether all states begin as zeros of the weight's shape, or are filled by `start_state`."""
    rule = optimizer.composed_rule
    overridden = type(optimizer).states_for is not RuleOptimizer.states_for
    return isinstance(rule, Rule) and not rule.kept and optimizer.narrow is None and not overridden
