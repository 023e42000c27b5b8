"""Ensemble: several trainings side by side, the updates of those that follow one rule in one launch.

Nothing is computed otherwise than by a training alone: the launch has the weights of all, and for each of them a row of
hyper-parameters, which are formed for all trainings at once where their optimizers differ in numbers only.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels import Rule, Update, choose_engine
from ..kernels.layouts import is_dense
from ..kernels.states import stacked_zeros
from .arguments import real
from .interrupts import interrupts_wait, uninterrupted
from .optimizer import Optimizer, RuleOptimizer, create
from .optimizer.plan import StepPlan, new_master
from .optimizer.updater import Updater

__all__ = ["Ensemble", "make_optimizer"]


class Ensemble:
    """Optimizers, each with weights of its own, that are stepped together.

    Each training gets the same weights, to the bit, as with an `Updater` of its own. Those whose rule is the same share a
    launch, unless it looks at all tensors of a training together (`clip_norm`, `skip_nonfinite`, Prodigy), is one of whole
    tensors (Muon, SOAP), or is no rule: such trainings are updated one after the other.

    Args:
        optimizers: one for each training, no two the same object. Their attributes and multipliers are read now, so set them
            before; schedules are asked at every step.
        weights: for each training its weights, or, stacked, for each of a training's weights a tensor with those of all
            trainings, [n_trainings, *shape]. They are updated in place, and stacks must stay where they are.
        engine: as for `tristep.kernels.choose_engine`.
        stacked: whether weights are stacked, and gradients, too. That makes many small trainings ready more quickly,
            mostly if each row begins at a multiple of 16 bytes.

    Attributes:
        optimizers: as given.

    Raises:
        TypeError, ValueError: what does not fit.

    Example:
        >>> import torch
        >>> from tristep import optimizer
        >>> from tristep.trainer import Ensemble
        >>> weights = [torch.ones(2), torch.ones(2)]
        >>> together = Ensemble([optimizer.SGD(0.5), optimizer.SGD(0.1)], [[weight] for weight in weights])
        >>> together.step([[torch.ones(2)], [torch.ones(2)]])
        >>> weights, together.launches
        ([tensor([0.5000, 0.5000]), tensor([0.9000, 0.9000])], 1)
        >>> stack = torch.ones(2, 2)
        >>> Ensemble([optimizer.SGD(0.5), optimizer.SGD(0.1)], [stack], stacked=True).step([torch.ones(2, 2)])
        >>> stack
        tensor([[0.5000, 0.5000],
                [0.9000, 0.9000]])
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        weights: Sequence[Any],
        engine: str | None = None,
        *,
        stacked: bool = False,
    ) -> None:
        self.optimizers = list(optimizers)
        n = len(self.optimizers)
        if stacked:
            for k, stack in enumerate(weights):
                if not isinstance(stack, torch.Tensor):
                    raise TypeError(
                        f"weights[{k}] must be a tensor, of the weights of all trainings, got {type(stack).__name__}"
                    )
                if stack.dim() == 0 or len(stack) != n:
                    raise ValueError(f"weights[{k}] is {tuple(stack.shape)}: must be [{n}, ...], of as many trainings")
        elif len(weights) != n:
            raise ValueError(f"{n} optimizers for weights of {len(weights)} trainings: there must be as many")
        self._weights = _Tensors(weights, n, stacked)
        for i, count in enumerate(self._weights.counts):
            if not count:
                raise ValueError(f"weights[{i}] is empty: each training needs at least one weight")
        if len(set(map(id, self.optimizers))) < len(self.optimizers):
            raise ValueError(
                "an optimizer is there twice: each training needs its own, which counts its updates; use copy.deepcopy"
            )
        kinds: dict[Any, list[int]] = {}
        kind, begun = None, None
        for i, (optimizer, count) in enumerate(zip(self.optimizers, self._weights.counts, strict=True)):
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"optimizers[{i}] must be an Optimizer, got {type(optimizer).__name__}; see optimizer.create(name)"
                )
            updated = optimizer.step_counts.copy()
            if kind is not None and updated == begun and self._like_the_one_before(i):
                optimizer.step_counts.restore(self.optimizers[i - 1].step_counts)
            else:
                optimizer.slots(range(count))
                kind, begun = self._kind(i), updated
            kinds.setdefault(kind, []).append(i)
        self._engine = engine
        self._updaters: list[Updater] = []
        self._alone: dict[int, StepPlan] = {}
        self._groups = [
            _Group([self.optimizers[i] for i in members], members, self._weights, engine)
            for kind, members in kinds.items()
            if kind[0] is not None
        ]
        for kind, members in kinds.items():
            if kind[0] is None:
                self._separate(members)
        if not all(group.stacked for group in self._groups):
            _ = self.updaters  # where optimizers find the numbers that rules keep
        self._gradients: _Tensors | None = None

    def __len__(self) -> int:
        """How many trainings there are."""
        return len(self.optimizers)

    @property
    def updaters(self) -> list[Updater]:
        """For each training what has its states, by the places of its weights."""
        if not self._updaters:
            self._updaters = [Updater(optimizer, self._engine) for optimizer in self.optimizers]
            for group in self._groups:
                group.hand_over(self._updaters)
        return self._updaters

    @property
    def launches(self) -> int:
        """Native calls or GPU launches of the last step, those of reductions not counted."""
        updates = [group.update for group in self._groups] + [plan.update for plan in self._alone.values()]
        return sum(update.launches for update in updates if update is not None)

    @uninterrupted
    def step(self, gradients: Sequence[Any] | None = None) -> None:
        """Update all weights that have a gradient.

        Args:
            gradients: for each training those of its weights, None for one that is to stay as it is; stacked where weights
                are. Without them those of the step before are taken, in which there must be other numbers now: that is
                quicker.

        Raises:
            RuntimeError: there was no step before.
            TypeError, ValueError: gradients that do not fit, or an optimizer that refuses the step. No weight has changed
                then, unless it is one of a training that is updated alone.
        """
        held = gradients is None
        if gradients is not None:
            self._gradients = self._checked(gradients)
        elif self._gradients is None:
            raise RuntimeError("step() without gradients repeats the step before with what is in them now; there was none")
        given: Any = self._gradients
        for group in list(self._groups):
            if not group.prepare(None if held else given):
                self._separate(group.members)
                self._groups.remove(group)
        for i, plan in self._alone.items():
            plan.prepare(given.lists[i])
        self._form_rows(self._groups)
        for i, plan in self._alone.items():
            plan.step(given.lists[i])
        for group in self._groups:
            group.run()

    def steps(self) -> Iterator[None]:
        """Steps like the one before, one whenever the iterator is asked for the next: as `step()`, and much quicker.

        Meanwhile nothing may change but the numbers in weights and gradients. It is only when the iterator is closed that
        optimizers have counted the steps, and that autograd knows of them.

        Example:
            >>> import torch
            >>> from tristep import optimizer
            >>> from tristep.trainer import Ensemble
            >>> weight, gradient = torch.ones(2), torch.ones(2)
            >>> together = Ensemble([optimizer.SGD(0.5)], [[weight]])
            >>> together.step([[gradient]])
            >>> more = together.steps()
            >>> for k in range(2):
            ...     _ = gradient.fill_(10 * k), next(more)
            >>> more.close()
            >>> weight, together.optimizers[0].num_update
            (tensor([-4.5000, -4.5000]), 3)
        """
        self.step()
        yield
        if self._alone or not all(group.repeats for group in self._groups):
            while True:
                self.step()
                yield
        moving = [group for group in self._groups if not group.is_steady]
        try:
            while True:
                with interrupts_wait():
                    self._form_rows(moving)
                    for group in self._groups:
                        group.repeat()
                yield
        finally:
            for group in self._groups:
                group.count()
                group.update.count_change()

    def restart(self) -> bool:
        """Begin anew: states and counts become what they were before the first step, for whatever the weights are now.

        Returns:
            Whether that could be done. It cannot, and nothing has changed, where a training is updated alone, or has what a
            copy of its optimizer would have, too: a schedule, numbers that it carries on, a master of a weight.

        Example:
            >>> import torch
            >>> from tristep import optimizer
            >>> from tristep.trainer import Ensemble
            >>> weights = [torch.ones(2), torch.ones(2)]
            >>> together = Ensemble([optimizer.Adam(0.5), optimizer.Adam(0.1)], [[weight] for weight in weights])
            >>> together.step([[torch.ones(2)], [torch.ones(2)]])
            >>> together.restart(), together.updaters[0].states[0][0], together.optimizers[0].num_update
            (True, tensor([0., 0.]), 0)
        """
        if self._alone or not all(group.can_restart for group in self._groups):
            return False
        for group in self._groups:
            group.restart()
        return True

    def _form_rows(self, groups: Sequence[_Group]) -> None:
        """Those of all these, or of none if an optimizer refuses."""
        done = []
        try:
            for group in groups:
                done.append(group)
                group.form_rows()
        except BaseException:
            for group in done:
                group.undo()
            raise

    def _checked(self, gradients: Sequence[Any]) -> _Tensors:
        weights = self._weights
        if weights.stacks is not None:
            if len(gradients) != len(weights.stacks):
                raise ValueError(f"{len(gradients)} stacks of gradients for {len(weights.stacks)}: there must be as many")
            for k, (gradient, weight) in enumerate(zip(gradients, weights.stacks, strict=True)):
                if gradient is not None and gradient.shape != weight.shape:
                    raise ValueError(
                        f"gradients[{k}] is {tuple(gradient.shape)}: must be {tuple(weight.shape)}, as its weights"
                    )
            return _Tensors(gradients, len(self), True)
        if len(gradients) != len(self):
            raise ValueError(f"gradients of {len(gradients)} trainings for {len(self)}: there must be as many")
        given = _Tensors(gradients, len(self), False)
        for i, (count, needed) in enumerate(zip(given.counts, weights.counts, strict=True)):
            if count != needed:
                raise ValueError(f"gradients[{i}] are {count}, weights {needed}: there must be as many")
        return given

    def _separate(self, members: Sequence[int]) -> None:
        """Let these trainings be updated each by itself, from the states they have."""
        for i in members:
            weights = self._weights.lists[i]
            self._alone[i] = StepPlan(self.updaters[i], list(range(len(weights))), weights, _names(i, weights))
        self._alone = dict(sorted(self._alone.items()))

    def _like_the_one_before(self, i: int) -> bool:
        """Whether this optimizer and the one before it have the very same settings but for rates and counts, at a glance."""
        one, other = self.optimizers[i - 1], self.optimizers[i]
        a, b = vars(one), vars(other)
        return (
            type(one) is type(other)
            and a.keys() == b.keys()
            and set(itertools.compress(a, map(operator.is_not, a.values(), b.values()))) <= _OWN
            and self._weights.counts[i - 1] == self._weights.counts[i]
        )

    def _kind(self, i: int) -> tuple[Any, ...]:
        """What must be equal where trainings are to be updated together; a first None says that this one cannot be."""
        optimizer, n = self.optimizers[i], self._weights.counts[i]
        alone = (None, i)
        if not isinstance(optimizer, RuleOptimizer) or type(optimizer).counts_as_step is not True:  # some steps may be none
            return alone
        if list(optimizer.counts) != list(range(n)):  # it has updated others
            return alone
        settings = tuple((k, v) for k, v in vars(optimizer).items() if type(v) not in _NUMBERS and k not in _READ_APART)
        plain = not (optimizer.lr_mult or optimizer.wd_mult or optimizer.param_dict)
        multipliers = None if plain else tuple(map(optimizer.multipliers, range(n)))
        names = tuple(optimizer.idx2name.items())
        counts = (
            optimizer.step_counts.values.tobytes(),
            optimizer.num_update,
            optimizer.begin_num_update,
            optimizer.lookahead,
        )
        kind = (
            type(optimizer),
            optimizer.rule_for(np.arange(n)),
            optimizer.rounding,
            n,
            multipliers,
            names,
            counts,
            settings,
        )
        try:
            hash(kind)
        except TypeError:  # a setting of one's own, such as a list
            return alone
        return alone if not isinstance(kind[1], Rule) or any(r.scope == "global" for r in kind[1].reductions) else kind


# Attributes that are looked at apart from the others, and numbers that must be equal.
_READ_APART = {
    "lr_scheduler",
    "step_counts",
    "_updater",
    "idx2name",
    "param_dict",
    "param_names",
    "lr_mult",
    "wd_mult",
}
_SAME = ("begin_num_update", "lookahead", "num_update")
_NUMBERS = (float, int)
AHEAD, ROWS_AHEAD = 128, 16384  # steps, and rows of a table, that are formed at once where that can be done
_OWN = {"lr", "wd", "lr_scheduler", "step_counts", "_updater"}  # what each optimizer has for itself


class _Tensors:
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


def _names(i: int, weights: Sequence[torch.Tensor]) -> list[str]:
    return [f"weights[{i}][{k}]" for k in range(len(weights))]


def make_optimizer(kind: str | type[Optimizer], arguments: Mapping[str, Any]) -> Optimizer:
    """One of several optimizers that differ in some arguments.

    Its schedule is a copy, since it may remember what it was asked; a `learning_rate` beside it becomes its `base_lr`.
    """
    own = dict(arguments)
    schedule = own["lr_scheduler"] = copy.deepcopy(own.get("lr_scheduler"))
    if schedule is not None and own.get("learning_rate") is not None:
        if not hasattr(schedule, "base_lr"):
            raise TypeError(f"learning_rate beside {schedule!r}, which decides the rate and has no base_lr: leave one out")
        rate = own["learning_rate"] = real("learning_rate", own["learning_rate"], low=0)
        schedule.base_lr = rate
    return kind(**own) if isinstance(kind, type) else create(kind, **own)


class _Group:
    """Trainings that are updated in one launch: optimizers of one class, which differ in numbers and schedules only."""

    def __init__(self, optimizers: Sequence[Any], members: list[int], weights: _Tensors, engine: str | None) -> None:
        self.members, self._engine = members, engine
        self._optimizers = optimizers
        self._first = first = optimizers[0]
        self._n = n = weights.counts[members[0]]
        self._slots = np.arange(n)
        self._where = self._slice(weights.stacks)  # of stacks; None where tensors are taken one by one
        self._weights = self._own(weights)
        if self._where is None:
            self._names = [name for i in members for name in _names(i, weights.lists[i])]
        else:
            self._names = [f"weights[{k}]" for k in range(n)]
        # One array for the counts of all, in which each optimizer has a row.
        self._counts = np.tile(first.step_counts.values, (len(members), 1))
        for optimizer, counts in zip(self._optimizers, self._counts, strict=True):
            optimizer.step_counts.values = counts
        self._shared = self._columns()
        self._scheduled = any(optimizer.lr_scheduler is not None for optimizer in self._optimizers)
        self._for_all: _ForAll | None = _ForAll(self._optimizers) if len(members) > 1 else None
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

    def prepare(self, gradients: _Tensors | None) -> bool:
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
        """Put back what forming rows has carried on."""
        for optimizer, before in zip(self._optimizers, self._before, strict=False):
            optimizer.load_host_state(before)
        if self._for_all is not None and self._before:
            self._for_all = _ForAll(self._optimizers)

    def run(self) -> None:
        """Take the step, and count it."""
        self.update()
        self._step += 1
        self.count()

    @property
    def repeats(self) -> bool:
        """Whether all steps are alike but for numbers."""
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
        """Begin anew with the weights as they are now."""
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

    def _own(self, tensors: _Tensors) -> list[Any]:
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


class _NoNumber:
    """In the place of a number, to find out whether it is looked at: nothing can be done with it, not even a comparison."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("this stands for a number that is not known")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("this stands for a number that is not known")


class _ForAll:
    """One optimizer in the place of several: its numbers are arrays of theirs where they differ.

    `+ - * /` of arrays are those of Python's numbers, to the bit. That is not so of powers, so that settings are arrays of
    Python's own numbers; rates and decays, which are multiplied, are float64. What cannot be computed with arrays raises an
    error, and what came out otherwise would be found by `is_right`.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        first = optimizers[0]
        self._one = _copied(first)
        self._one.lr_scheduler = None
        for name, value in vars(first).items():
            if type(value) in _NUMBERS and name not in _SAME:
                values = [getattr(optimizer, name) for optimizer in optimizers]
                setattr(self._one, name, _joined(values, float if name in ("lr", "wd") else object))

    def rows(
        self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None = None
    ) -> list[list[Any]] | None:
        """As `rows_of_step` of each, with arrays of one number for each where they differ; None where it cannot be done."""
        one = self._one
        one.num_update = self._optimizers[0].num_update
        if rates is not None:
            one.lr = _joined(rates, float)
        for name in one.host_state_names:
            if isinstance(carried := getattr(one, name), np.ndarray):
                setattr(one, name, carried.copy())  # it may be changed in place
        try:
            rows = one.rows_of_step(times, parameters, rule)
        except Exception:  # of whatever kind: their own code says what it is, where it was not written for arrays
            return None
        for name in one.host_state_names:
            value = getattr(one, name)
            values = value.tolist() if isinstance(value, np.ndarray) else [value] * len(self._optimizers)
            for optimizer, each in zip(self._optimizers, values, strict=True):
                setattr(optimizer, name, each)
        return rows

    def is_steady(self, parameters: Sequence[Any], rule: Rule) -> bool:
        """Whether rows are the same at every step: they are if they can be formed without the number of the update."""
        number: Any = _NoNumber()
        rows = self._rows_at([number] * len(parameters), parameters, rule)
        return rows is not None and not any(value is number for row in rows for value in row)

    def coming_rows(self, times: Sequence[int], count: int, parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """As `rows`, of that many steps, >= 2: numbers may be arrays [count, n_optimizers] or [count, 1], too.

        None where they cannot be formed so, or would be others than those formed step by step.
        """
        coming = [np.array(range(t, t + count), dtype=object)[:, None] for t in times]
        found = self._rows_at(coming, parameters, rule)
        if found is None:
            return None
        for i in (0, count // 2, count - 1):
            single = self._rows_at([t + i for t in times], parameters, rule)
            for row, expected in zip(found, single or (), strict=True):
                for value, own in zip(row, expected, strict=True):
                    if value is own:
                        continue
                    value = value[i] if isinstance(value, np.ndarray) and value.ndim == 2 else value
                    one, other = np.broadcast_arrays(np.array(value, dtype=float), np.array(own, dtype=float))
                    if one.tobytes() != other.tobytes():
                        return None
        return found

    def _rows_at(self, times: Sequence[Any], parameters: Sequence[Any], rule: Rule) -> list[list[Any]] | None:
        """As `rows`, if nothing else than these times is asked for, and nothing is changed by asking."""
        kept = ("begin_step", "rows_of_step")
        overridden = any(getattr(type(self._one), name) is not getattr(RuleOptimizer, name) for name in kept)
        if self._one.host_state_names or overridden:
            return None
        one: Any = _copied(self._one)
        one.num_update = _NoNumber()
        before = dict(vars(one))
        try:
            rows = [
                one.row(t, one.lr * lr_mult, one.wd * wd_mult, index, rule)
                for t, (*_, lr_mult, wd_mult, index) in zip(times, parameters, strict=True)
            ]
        except Exception:  # whatever comes of counting with what is no number
            return None
        same = vars(one).keys() == before.keys() and all(map(operator.is_, vars(one).values(), before.values()))
        return rows if same else None

    def is_right(self, times: Sequence[int], parameters: Sequence[Any], rule: Rule, rates: list[float] | None) -> bool:
        """Whether these rows are those of optimizers by themselves, up to 8 of them. Nothing is carried on."""
        chosen = sorted({i * (len(self._optimizers) - 1) // 7 for i in range(8)})
        tried = _ForAll([_copied(optimizer) for optimizer in self._optimizers]) if self._one.host_state_names else self
        rows = tried.rows(times, parameters, rule, rates)
        if rows is None:
            return False
        for i in chosen:
            own_rows = _copied(self._optimizers[i]).rows_of_step(times, parameters, rule)
            for found, expected in zip(rows, own_rows, strict=True):
                own = [value[i] if isinstance(value, np.ndarray) else value for value in found]
                if np.array(own, dtype=float).tobytes() != np.array(expected, dtype=float).tobytes():
                    return False
        return True


def _copied(optimizer: Any) -> Any:
    other = object.__new__(type(optimizer))  # copy.copy takes ten times as long
    vars(other).update(vars(optimizer), step_counts=optimizer.step_counts.copy())
    return other


def _joined(values: Sequence[Any], dtype: type) -> Any:
    """One number where all are equal, else an array of them."""
    if all(value == values[0] for value in values):
        return values[0]
    return np.array(values, dtype=dtype)
