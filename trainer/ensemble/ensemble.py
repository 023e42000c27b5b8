"""Ensemble: several models trained at once, with one launch for all updates with the same rule.

Results match training each model alone: a launch takes the weights of all models, with a row of hyper-parameters for each
weight. Rows are computed for all models at once if their optimizers differ only in numbers.
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
    """Updates the weights of several models together, each model with its own optimizer.

    The weights get the same bits as if each model were updated alone. Models with the same rule share a launch, unless the
    rule reduces over all tensors of a model (`clip_norm`, `skip_nonfinite`, Prodigy) or works on whole tensors (Muon, SOAP),
    or the optimizer has no rule: such models are updated one after the other.

    Args:
        optimizers: one for each model, all distinct objects. Attributes and multipliers are read by the constructor only;
            schedules are called at every step.
        weights: for each model a list of its weights; or, with `stacked`, one tensor [n_models, *shape] for each weight.
            They are updated in place, and stacks must keep their memory.
        engine: "triton", "cpu", "eager", or None for the fastest that is available.
        stacked: whether weights and gradients are stacked, which makes the set-up of many small models faster, especially if
            each row is aligned to 16 bytes.

    Attributes:
        optimizers: the optimizers, a list.

    Raises:
        TypeError, ValueError: an invalid argument; there must be as many optimizers as models, each with a weight.

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
                        f"weights[{k}] must be a tensor of the weights of all trainings, got {type(stack).__name__}"
                    )
                if stack.dim() == 0 or len(stack) != n:
                    raise ValueError(f"weights[{k}] is {tuple(stack.shape)}: must be [{n}, ...], for {n} trainings")
        elif len(weights) != n:
            raise ValueError(f"{n} optimizers for weights of {len(weights)} trainings: there must be one for each")
        self._weights = TensorLists(weights, n, stacked)
        for i, count in enumerate(self._weights.counts):
            if not count:
                raise ValueError(f"weights[{i}] is empty: each training needs at least one weight")
        if len(set(map(id, self.optimizers))) < len(self.optimizers):
            raise ValueError(
                "an optimizer occurs twice: each training needs its own, which counts its updates; use copy.deepcopy"
            )
        kinds: dict[Any, list[int]] = {}
        kind, counts_before = None, None
        for i, (optimizer, count) in enumerate(zip(self.optimizers, self._weights.counts, strict=True)):
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"optimizers[{i}] must be an Optimizer, got {type(optimizer).__name__}; see optimizer.create(name)"
                )
            counts = optimizer.step_counts.copy()
            if kind is not None and counts == counts_before and self._like_the_one_before(i):
                optimizer.step_counts.restore(self.optimizers[i - 1].step_counts)
            else:
                optimizer.slots(range(count))
                kind, counts_before = self._kind(i), counts
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
            _ = self.updaters  # optimizers read numbers that rules keep from their updaters
        self._gradients: TensorLists | None = None

    def __len__(self) -> int:
        """The number of models."""
        return len(self.optimizers)

    @property
    def updaters(self) -> list[Updater]:
        """For each model an `Updater`, whose `states` has the optimizer's states by index of the weight."""
        if not self._updaters:
            self._updaters = [Updater(optimizer, self._engine) for optimizer in self.optimizers]
            for group in self._groups:
                group.share_states(self._updaters)
        return self._updaters

    @property
    def launches(self) -> int:
        """The number of GPU launches or native calls of the last step, without those for reductions."""
        updates = [group.update for group in self._groups] + [plan.update for plan in self._alone.values()]
        return sum(update.launches for update in updates if update is not None)

    @uninterrupted
    def step(self, gradients: Sequence[Any] | None = None) -> None:
        """Update all weights that have a gradient.

        Args:
            gradients: for each model the gradients of its weights, None for a weight that is not updated; stacked if weights
                are stacked. None for all: take the tensors of the last step again, with their present values, which is
                faster.

        Raises:
            RuntimeError: `gradients` is None at the first step.
            TypeError, ValueError: gradients of another number, shape or type, or an optimizer raises an error. No weight has
                changed, except of models that are updated alone.
        """
        repeated = gradients is None
        if gradients is not None:
            self._gradients = self._checked(gradients)
        elif self._gradients is None:
            raise RuntimeError(
                "step() without gradients takes those of the step before, and there was no step: give gradients"
            )
        lists: Any = self._gradients
        for group in list(self._groups):
            if not group.prepare(None if repeated else lists):
                self._separate(group.members)
                self._groups.remove(group)
        for i, plan in self._alone.items():
            plan.prepare(lists.lists[i])
        self._form_rows(self._groups)
        for i, plan in self._alone.items():
            plan.step(lists.lists[i])
        for group in self._groups:
            group.run()

    def steps(self) -> Iterator[None]:
        """Return an iterator that takes a step at each `next()`, with the gradients of the last step, faster than `step()`.

        Until it is closed, nothing may change except the values of weights and gradients. Closing it updates the optimizers'
        counts, and the versions of tensors that autograd checks.

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
        """Reset the optimizers' states and counts to their start, and keep the weights.

        Returns:
            True; or False if it is not possible, and nothing has changed: a model is updated alone, or an optimizer has a
            schedule, numbers that it carries from step to step, or a master of a weight.

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
        """Write the hyper-parameters of all groups; if an optimizer raises an error, undo it for all."""
        written = []
        try:
            for group in groups:
                written.append(group)
                group.rows.write(group.update)
        except BaseException:
            for group in written:
                group.rows.undo()
            raise

    def _checked(self, gradients: Sequence[Any]) -> TensorLists:
        weights = self._weights
        if weights.stacks is not None:
            if len(gradients) != len(weights.stacks):
                raise ValueError(f"{len(gradients)} stacks of gradients for {len(weights.stacks)} of weights")
            for k, (gradient, weight) in enumerate(zip(gradients, weights.stacks, strict=True)):
                if gradient is not None and gradient.shape != weight.shape:
                    raise ValueError(
                        f"gradients[{k}] is {tuple(gradient.shape)}: must be {tuple(weight.shape)}, as its weights"
                    )
            return TensorLists(gradients, len(self), True)
        if len(gradients) != len(self):
            raise ValueError(f"gradients of {len(gradients)} trainings for {len(self)}: there must be one list for each")
        lists = TensorLists(gradients, len(self), False)
        for i, (count, needed) in enumerate(zip(lists.counts, weights.counts, strict=True)):
            if count != needed:
                raise ValueError(f"gradients[{i}] are {count}, weights {needed}: there must be one for each weight")
        return lists

    def _separate(self, members: Sequence[int]) -> None:
        """Update these models one after the other from now on, from their present states."""
        for i in members:
            weights = self._weights.lists[i]
            self._alone[i] = self.updaters[i].make_plan(range(len(weights)), weights, weight_names(i, weights))
        self._alone = dict(sorted(self._alone.items()))

    def _like_the_one_before(self, i: int) -> bool:
        """Return whether optimizers `i - 1` and `i` differ in learning rates and counts only, by a cheap check."""
        before, optimizer = self.optimizers[i - 1], self.optimizers[i]
        a, b = vars(before), vars(optimizer)
        return (
            type(before) is type(optimizer)
            and a.keys() == b.keys()
            and set(itertools.compress(a, map(operator.is_not, a.values(), b.values()))) <= _OWN
            and self._weights.counts[i - 1] == self._weights.counts[i]
        )

    def _kind(self, i: int) -> tuple[Any, ...]:
        """Return a key shared by models that are updated together; its first entry is None if model `i` is updated alone."""
        optimizer, n = self.optimizers[i], self._weights.counts[i]
        alone = (None, i)
        if not isinstance(optimizer, RuleOptimizer) or type(optimizer).counts_as_step is not True:  # it may skip steps
            return alone
        if list(optimizer.counts) != list(range(n)):  # it has updated other weights before
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


# Attributes that `_kind` compares in other ways than by equality, or not at all.
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
_OWN = {"lr", "wd", "lr_scheduler", "step_counts", "_updater"}  # attributes that differ between equal optimizers


def make_optimizer(kind: str | type[Optimizer], arguments: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer by name or class, with a copy of its schedule, which may remember what it was called with.

    A `learning_rate` given with an `lr_scheduler` becomes the `base_lr` of the copy.

    Raises:
        TypeError: `learning_rate` with a schedule that has no `base_lr`.
    """
    arguments = dict(arguments)
    schedule = arguments["lr_scheduler"] = copy.deepcopy(arguments.get("lr_scheduler"))
    if schedule is not None and arguments.get("learning_rate") is not None:
        if not hasattr(schedule, "base_lr"):
            raise TypeError(f"learning_rate together with {schedule!r}, which decides the rate and has no base_lr: omit one")
        arguments["learning_rate"] = schedule.base_lr = number("learning_rate", arguments["learning_rate"], low=0)
    return kind(**arguments) if isinstance(kind, type) else create(kind, **arguments)
