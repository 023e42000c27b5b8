"""EnsembleGroup: trainings of an ensemble that are updated in one launch."""

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
from ..optimizer.states import new_master
from ..optimizer.updater import Updater
from .rows import SharedRows

__all__ = ["EnsembleGroup", "TensorLists", "weight_names"]

AHEAD, ROWS_AHEAD = 128, 16384  # steps, and rows of a table, that are formed at once where that can be done


class TensorLists:
    """Weights, or gradients, of all trainings: a list for each of them, or stacks, taken apart only where that is needed."""

    def __init__(self, given: Sequence[Any], n: int, stacked: bool) -> None:
        self.stacks: list[Any] | None = list(given) if stacked else None
        self._lists = None if stacked else [list(each) for each in given]
        self.counts = [len(given)] * n if self._lists is None else list(map(len, self._lists))

    @property
    def lists(self) -> list[list[Any]]:
        if self._lists is None:
            n = len(self.counts)
            columns = [[None] * n if stack is None else stack.detach().unbind() for stack in self.stacks or ()]
            self._lists = list(map(list, zip(*columns, strict=True)))
        return self._lists


def weight_names(i: int, weights: Sequence[torch.Tensor]) -> list[str]:
    return [f"weights[{i}][{k}]" for k in range(len(weights))]


class EnsembleGroup:
    """Trainings that are updated in one launch: optimizers of one class, which differ in numbers and schedules only."""

    def __init__(self, optimizers: Sequence[Any], members: list[int], weights: TensorLists, engine: str | None) -> None:
        self.members, self._engine = members, engine
        self._optimizers = optimizers
        self._first = first = optimizers[0]
        self._n = n = weights.counts[members[0]]
        self._slots = np.arange(n)
        self._where = self._slice(weights.stacks)  # of stacks; None where tensors are taken one by one
        self._weights = self._own(weights)
        if self._where is None:
            self._names = [name for i in members for name in weight_names(i, weights.lists[i])]
        else:
            self._names = [f"weights[{k}]" for k in range(n)]
        # One array for the counts of all, in which each optimizer has a row.
        self._counts = np.tile(first.step_counts.values, (len(members), 1))
        for optimizer, counts in zip(self._optimizers, self._counts, strict=True):
            optimizer.step_counts.values = counts
        self._shared = self._columns()
        self._scheduled = any(optimizer.lr_scheduler is not None for optimizer in self._optimizers)
        self._for_all: SharedRows | None = SharedRows(self._optimizers) if len(members) > 1 else None
        self._checked = False
        self._before: list[tuple[Any, ...]] = []
        self._updates: dict[Rule, Update] = {}
        self._gradients: list[torch.Tensor | None] = []
        self._used = False  # whether weights may have changed since states were made for them
        self._bound: set[Rule] = set()  # whose updates have these gradients
        self._written: Sequence[Sequence[Any]] = []  # the rows of the step before
        self._written_by: Update | None = None  # for which update
        self._only = None if first.has_options else first.rule_for(self._slots)  # the rule of all steps, if it is one
        self._steady: Rule | None = None  # whose rows are in the update, and stay as they are
        self._begin = self._counts.copy(), [optimizer.num_update for optimizer in self._optimizers]
        self._step_counts = [optimizer.step_counts for optimizer in self._optimizers]
        self._tables: dict[int, tuple[Any, np.ndarray]] = {}  # by the number of the step: the rule, and all rows
        self._keeps_tables = False  # because they will be those after a restart, too
        self._looks_ahead = True  # whether rows of coming steps can be formed, as far as is known
        self._step = 0
        self._counted = 0  # of these steps, those that are in the counts
        self._states: list[tuple[torch.Tensor, ...]] = []  # of each weight, or stack of weights
        self._masters: list[torch.Tensor | None] = []
        self._make_states()
        self.update = self._make_update(first.rule_for(self._slots))

    def prepare(self, gradients: TensorLists | None) -> bool:
        """Take these gradients for the step, None for the last ones; whether that can be done for all together."""
        rule = self._only or self._first.rule_for(self._slots)
        update = self.update = self._updates.get(rule) or self._make_update(rule)
        if gradients is not None:
            self._gradients, self._bound = self._own(gradients), set()
        if rule in self._bound:
            return True
        if not update.rebind(self._gradients):
            if any(gradient is None or gradient.layout != torch.strided for gradient in self._gradients):
                return False
            if self._used and not update.fits(self._first.master_dtype):
                return False
            update.bind(self._gradients)
            self._used = True
        self._bound.add(rule)
        return True

    def form_rows(self) -> None:
        """Write the hyper-parameters of the coming step, which is not counted yet."""
        rule: Any = self.update.rule
        if self._steady is rule:
            return
        self._before = [optimizer.host_state() for optimizer in self._optimizers] if self._first.host_state_names else []
        if self._step not in self._tables and self._checked and self._looks_ahead:
            self._form_coming_rows(rule)
        known, table = self._tables.get(self._step, (None, None))
        if known is rule:
            self.update.hyper[:] = table
            self._written_by = None
        else:
            self._form_rows(rule)
            if self._keeps_tables and self._steady is not rule:
                self._tables[self._step] = rule, self.update.hyper.copy()

    def _form_coming_rows(self, rule: Any) -> None:
        """Those of the coming steps at once, if that can be done."""
        hyper, rows = self.update.hyper, None
        count = min(AHEAD, ROWS_AHEAD // len(hyper))
        if self._for_all is not None and not self._scheduled and self._only is not None and count > 1:
            rows = self._for_all.coming_rows(self._times(), count, self._shared, rule)
        if rows is None:
            self._looks_ahead = False
            return
        tables = np.empty((count, *hyper.shape))
        table = self._by_training(tables)
        for (where, *_), row in zip(self._shared, rows, strict=True):
            for k, value in enumerate(row):
                table[:, :, where, k] = value[..., None] if isinstance(value, np.ndarray) else value
        if not self._keeps_tables:
            self._tables.clear()
        self._tables.update((self._step + i, (rule, each)) for i, each in enumerate(tables))

    def _form_rows(self, rule: Any) -> None:
        times = self._times()
        self._first.num_update = self._number(times)
        if self._for_all is not None:
            rates = self._rates(times) if self._scheduled else None
            known = self._checked or self._for_all.is_right(times, self._shared, rule, rates)
            rows = self._for_all.rows(times, self._shared, rule, rates) if known else None
            if rows is not None:
                self._write_columns(rows)
                if not self._checked:
                    self._steady = None if self._scheduled or not self._for_all.is_steady(self._shared, rule) else rule
                self._checked = True
                return
            self._for_all = None
        self.count()
        table = self._by_training(self.update.hyper)
        for i, optimizer in enumerate(self._optimizers):
            for (where, *_), row in zip(self._shared, optimizer.rows_of_step(times, self._shared, rule), strict=True):
                table[i, where] = row

    def undo(self) -> None:
        """Restore the host state that computing the rows has changed."""
        for optimizer, before in zip(self._optimizers, self._before, strict=False):
            optimizer.load_host_state(before)
        if self._for_all is not None and self._before:
            self._for_all = SharedRows(self._optimizers)

    def run(self) -> None:
        """Take the step, and count it."""
        self.update()
        self._step += 1
        self.count()

    @property
    def repeats(self) -> bool:
        """Whether all steps differ in numbers only."""
        return self._only is not None and not self._only.reductions

    @property
    def is_steady(self) -> bool:
        """Whether rows have been formed that are right at every step."""
        return self._steady is not None and self._steady is self._only

    def repeat(self) -> None:
        """Take a step like the one before. No optimizer is told of it; `count` does that."""
        self.update.repeat(same=self._steady is not None)
        self._step += 1

    def count(self) -> None:
        """Let all optimizers, and autograd, know of the steps that have been taken."""
        self._counts += self._step - self._counted
        self._counted = self._step
        number = self._number(self._times())
        for counts in self._step_counts:
            counts.largest = number

    def _times(self) -> list[int]:
        """The number of the coming update, of weights that share rows."""
        return [int(self._begin[0][0, slot]) + 1 + self._step for _, slot, *_ in self._shared]

    def _number(self, times: Sequence[int]) -> int:
        """`num_update` before that update."""
        begun = self._begin[1][0]
        return max(begun, *(t - 1 for t in times)) if self._step else begun

    @property
    def can_restart(self) -> bool:
        """Whether nothing but states and counts is changed by steps."""
        has_masters = any(master is not None for master in self._masters)
        return not (self._scheduled or self._first.host_state_names or has_masters)

    @property
    def stacked(self) -> bool:
        """Whether weights are updated as stacks."""
        return self._where is not None

    def hand_over(self, updaters: Sequence[Updater]) -> None:
        """Let the updaters of all trainings have the states."""
        for (j, k), _, _, state, master in self._single():
            updater = updaters[self.members[j]]
            updater.states[k] = state
            if master is not None:
                updater.masters[k] = master

    def restart(self) -> None:
        """Reset states and counts, for the weights as they are now."""
        self._counts[:] = self._begin[0]
        for counts, number in zip(self._step_counts, self._begin[1], strict=True):
            counts.largest = number
        if states := [state for row in self._states for state in row]:
            torch._foreach_zero_(states)
        self._start_states()
        self._tables = self._tables if self._keeps_tables else {}
        self._keeps_tables = True  # who restarts once will do it again
        self._step = self._counted = 0

    def _rates(self, times: Sequence[int]) -> list[float]:
        """The rates of all trainings, each schedule asked once."""
        first = self._first
        asked = first.num_update if first.reads_rate_first else max(first.num_update, *times)
        found: dict[int, float] = {}
        rates = []
        for optimizer in self._optimizers:
            schedule = optimizer.lr_scheduler
            if schedule is None:
                rates.append(optimizer.lr)
            else:
                if id(schedule) not in found:
                    found[id(schedule)] = optimizer.rate_at(asked)
                rates.append(found[id(schedule)])
        return rates

    def _write_columns(self, rows: Sequence[Sequence[Any]]) -> None:
        table = self._by_training(self.update.hyper)
        written = self._written if self._written_by is self.update else [[None] * len(row) for row in rows]
        for (where, *_), row, before in zip(self._shared, rows, written, strict=True):
            for k, (value, old) in enumerate(zip(row, before, strict=True)):
                if isinstance(value, np.ndarray):
                    if value is not old:
                        table[:, where, k] = value[:, None]
                elif isinstance(old, np.ndarray) or value != old:
                    table[:, where, k] = value
        self._written, self._written_by = rows, self.update

    def _columns(self) -> list[tuple[Any, int, float, float, int]]:
        """Weights of equal count and multipliers, which share rows: which, the count's slot, multipliers, and the first."""
        first = self._first
        kinds: dict[Any, list[int]] = {}
        for k in range(self._n):
            kind = (int(self._counts[0, k]), *first.multipliers(k))
            kinds.setdefault(kind if first.uniform_hyper else k, []).append(k)
        whole = len(kinds) == 1
        return [
            (slice(None) if whole else np.array(members), members[0], *first.multipliers(members[0]), members[0])
            for members in kinds.values()
        ]

    def _by_training(self, hyper: np.ndarray) -> np.ndarray:
        """An update's hyper-parameters [..., n_trainings, n_weights, n], as a view of [..., n_trainings * n_weights, n]."""
        *others, _, width = hyper.shape
        if self._where is None:
            return hyper.reshape(*others, len(self.members), self._n, width)
        return hyper.reshape(*others, self._n, len(self.members), width).swapaxes(-3, -2)

    def _slice(self, stacks: Sequence[torch.Tensor] | None) -> slice | None:
        """Which rows of stacks these trainings have, if they can be updated as stacks."""
        first, members = self._first, self.members
        step = members[1] - members[0] if len(members) > 1 else 1
        where = slice(members[0], members[-1] + 1, step)
        if stacks is None or members != list(range(where.start, where.stop, step)) or not _has_plain_states(first):
            return None
        plain = all(first.master_dtype(stack) is None and is_dense(stack[0]) for stack in stacks)
        return where if plain and choose_engine(stacks[0].device, self._engine) != "eager" else None

    def _own(self, tensors: TensorLists) -> list[Any]:
        """Those of these trainings, stacked or one by one."""
        if self._where is None:
            return [each for i in self.members for each in tensors.lists[i]]
        return [None if stack is None else stack.detach()[self._where] for stack in tensors.stacks or ()]

    def _make_states(self) -> None:
        first = self._first
        for name, weight in zip(self._names, self._weights, strict=True):
            first.check_storage(name, weight)
        weights = [weight.detach() for weight in self._weights]
        if self._where is None:
            self._states = first.states_for(weights)
            dtypes = map(first.master_dtype, weights)
            self._masters = [None if d is None else new_master(w, None, d) for w, d in zip(weights, dtypes, strict=True)]
        else:
            names = first.composed_rule.state
            self._states = [tuple(stacked_zeros(len(stack), stack[0]) for _ in names) for stack in weights]
            self._masters = [None] * len(weights)
        self._start_states()

    def _start_states(self) -> None:
        """Fill states, which are zero, where the rule starts otherwise."""
        first = self._first
        if type(first).init_state is RuleOptimizer.init_state and first.lookahead is None and first.ema_decay is None:
            return
        name = ""
        try:
            for (j, _), name, weight, state, _ in self._single():  # noqa: B007
                self._optimizers[j].start_state(weight.detach(), state)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _make_update(self, rule: Rule) -> Update:
        stacked, n = self._where is not None, len(self.members)
        engine, seed = self._engine, self._first.rounding
        update = Update(rule, self._weights, self._states, self._masters, engine, self._names, seed, stacked=stacked)
        # So that each has the random numbers of a training alone.
        update.rng_offsets = np.repeat(self._slots, n) if stacked else np.tile(self._slots, n)
        self._updates[rule] = update
        return update

    def _single(self) -> Iterator[tuple[tuple[int, int], str, torch.Tensor, tuple[torch.Tensor, ...], Any]]:
        """Each weight, one by one: of which of these trainings, and where in it; its name, itself, states and master."""
        if self._where is None:
            places = itertools.product(range(len(self.members)), range(self._n))
            yield from zip(places, self._names, self._weights, self._states, self._masters, strict=True)
        else:
            for k, (name, weights, states) in enumerate(zip(self._names, self._weights, self._states, strict=True)):
                for j, (weight, *state) in enumerate(zip(weights, *states, strict=True)):
                    yield (j, k), name, weight, tuple(state), None


def _has_plain_states(optimizer: RuleOptimizer) -> bool:
    """Whether there is nothing else to its states but that they are zeros like the weights, or filled by `start_state`."""
    rule = optimizer.composed_rule
    own = type(optimizer).states_for is not RuleOptimizer.states_for
    return isinstance(rule, Rule) and not rule.kept and optimizer.narrow is None and not own
