"""Ensemble: several models trained at once, with one launch for all updates that follow the same rule.

Results match training each model on its own: the launch has the weights of all, and for each of them a row of
hyper-parameters, which are computed for all models at once if their optimizers differ in numbers only.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Rule
from ..interrupts import interrupts_wait, uninterrupted
from ..optimizer import Optimizer, RuleOptimizer, create
from ..optimizer.plan import Plan
from ..optimizer.updater import Updater
from ..validation import number
from .group import EnsembleGroup, TensorLists, weight_names
from .rows import NUMBERS


class Ensemble:
    """Optimizers, each with weights of its own, that are stepped together.

    Each model's weights have the same bits as with an `Updater` of its own. Models with the same rule share a launch,
    unless the rule reduces over all tensors of a model (`clip_norm`, `skip_nonfinite`, Prodigy) or is one of whole tensors
    (Muon, SOAP), or the optimizer has no rule: such models are updated one after the other.

    Args:
        optimizers: one for each model, no two the same object. Their attributes and multipliers are read now, so set them
            before; schedules are called at every step.
        weights: for each model its weights, or, stacked, for each weight a tensor with those of all models,
            [n_models, *shape]. They are updated in place, and stacks must keep their memory.
        engine: as for `tristep.kernels.choose_engine`.
        stacked: whether weights and gradients are stacked. That makes setting up many small models faster, especially if
            each row begins at a multiple of 16 bytes.

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
        self._weights = TensorLists(weights, n, stacked)
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
        self._alone: dict[int, Plan] = {}
        self._groups = [
            EnsembleGroup([self.optimizers[i] for i in members], members, self._weights, engine)
            for kind, members in kinds.items()
            if kind[0] is not None
        ]
        for kind, members in kinds.items():
            if kind[0] is None:
                self._separate(members)
        if not all(group.stacked for group in self._groups):
            _ = self.updaters  # where optimizers find the numbers that rules keep
        self._gradients: TensorLists | None = None

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
        """An iterator that repeats the last step at each `next()`: as `step()`, but much faster.

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
        moving = [group for group in self._groups if not group.rows.is_steady]
        try:
            while True:
                with interrupts_wait():
                    self._form_rows(moving)
                    for group in self._groups:
                        group.repeat()
                yield
        finally:
            for group in self._groups:
                group.end_repeats()

    def restart(self) -> bool:
        """Reset states and counts to those before the first step, for the weights as they are now.

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

    def _form_rows(self, groups: Sequence[EnsembleGroup]) -> None:
        """Those of all these, or of none if an optimizer refuses."""
        done = []
        try:
            for group in groups:
                done.append(group)
                group.rows.write(group.update)
        except BaseException:
            for group in done:
                group.rows.undo()
            raise

    def _checked(self, gradients: Sequence[Any]) -> TensorLists:
        weights = self._weights
        if weights.stacks is not None:
            if len(gradients) != len(weights.stacks):
                raise ValueError(f"{len(gradients)} stacks of gradients for {len(weights.stacks)}: there must be as many")
            for k, (gradient, weight) in enumerate(zip(gradients, weights.stacks, strict=True)):
                if gradient is not None and gradient.shape != weight.shape:
                    raise ValueError(
                        f"gradients[{k}] is {tuple(gradient.shape)}: must be {tuple(weight.shape)}, as its weights"
                    )
            return TensorLists(gradients, len(self), True)
        if len(gradients) != len(self):
            raise ValueError(f"gradients of {len(gradients)} trainings for {len(self)}: there must be as many")
        given = TensorLists(gradients, len(self), False)
        for i, (count, needed) in enumerate(zip(given.counts, weights.counts, strict=True)):
            if count != needed:
                raise ValueError(f"gradients[{i}] are {count}, weights {needed}: there must be as many")
        return given

    def _separate(self, members: Sequence[int]) -> None:
        """Let these trainings be updated each by itself, from the states they have."""
        for i in members:
            weights = self._weights.lists[i]
            self._alone[i] = self.updaters[i].make_plan(range(len(weights)), weights, weight_names(i, weights))
        self._alone = dict(sorted(self._alone.items()))

    def _like_the_one_before(self, i: int) -> bool:
        """A cheap check: are the settings of this optimizer and the one before equal, but for learning rates and counts?"""
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
        settings = tuple((k, v) for k, v in vars(optimizer).items() if type(v) not in NUMBERS and k not in _READ_APART)
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
        except TypeError:  # a user-defined setting, such as a list
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
_OWN = {"lr", "wd", "lr_scheduler", "step_counts", "_updater"}  # what each optimizer has for itself


def make_optimizer(kind: str | type[Optimizer], arguments: Mapping[str, Any]) -> Optimizer:
    """One of several optimizers that differ in some arguments.

    Its schedule is a copy, since it may remember what it was asked; a `learning_rate` given with it becomes its `base_lr`.
    """
    own = dict(arguments)
    schedule = own["lr_scheduler"] = copy.deepcopy(own.get("lr_scheduler"))
    if schedule is not None and own.get("learning_rate") is not None:
        if not hasattr(schedule, "base_lr"):
            raise TypeError(f"learning_rate together with {schedule!r}, which decides the rate and has no base_lr: omit one")
        rate = own["learning_rate"] = number("learning_rate", own["learning_rate"], low=0)
        schedule.base_lr = rate
    return kind(**own) if isinstance(kind, type) else create(kind, **own)
