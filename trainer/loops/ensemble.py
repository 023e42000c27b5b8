"""Ensemble: several models trained at once, with one launch for all updates with the same rule.

Results match training each model alone: a launch takes the weights of all models, with a row of hyper-parameters for each
weight. Rows are computed for all models at once if their optimizers differ only in learning rates and decays.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...kernels import Rule
from ..optimizer import Optimizer, RuleOptimizer, create
from ..optimizer.columns import Column, column
from ..optimizer.counts import StepCounts
from ..optimizer.plan import Plan, Rows
from ..optimizer.updater import Updater, UpdaterPlan
from ..utils.interrupts import uninterrupted
from ..validation import instance, nonempty, number

__all__ = ["Ensemble", "JointRows", "kind_of", "make_optimizer"]

# Attributes of optimizers of one kind that may differ, apart from numbers, or that `kind_of` compares in another way.
_APART = {"lr_scheduler", "step_counts", "_updater", "idx2name", "param_dict", "param_names", "lr_mult", "wd_mult"}
_APART |= {"_schedules"}
_SAME = ("begin_num_update", "lookahead", "num_update")  # numbers that do not differ
_COLUMNS = ("lr", "wd")  # numbers that are columns in arithmetic for several optimizers


class Ensemble:
    """Updates the weights of several models together, each model with its own optimizer.

    The weights get the same bits as if each model were updated alone. Models with the same rule share a launch, unless the
    rule reduces over all tensors of a model (`clip_norm`, `skip_nonfinite`, Prodigy) or works on whole tensors (Muon, SOAP),
    or the optimizer has no rule: such models are updated one after the other.

    Args:
        optimizers: one for each model, all distinct objects. Attributes and multipliers are read by the constructor only;
            schedules are called at every step.
        weights: for each weight one tensor [n_models, *shape]. They are updated in place, and must keep their memory. Rows
            that are aligned to 16 bytes share a launch.
        engine: "triton", "cpu", "eager", or None for the fastest that is available.

    Attributes:
        optimizers: the optimizers, a list.
        updaters: for each model an `Updater`, whose `states` has the optimizer's states by index of the weight.

    Raises:
        TypeError, ValueError: an invalid argument; there must be a weight, and as many optimizers as models.

    Example:
        >>> import torch
        >>> from tristep import optimizer
        >>> from tristep.trainer import Ensemble
        >>> weights = torch.ones(2, 2)
        >>> together = Ensemble([optimizer.SGD(0.5), optimizer.SGD(0.1)], [weights])
        >>> together.step([torch.ones(2, 2)])
        >>> weights, together.launches
        (tensor([[0.5000, 0.5000],
                [0.9000, 0.9000]]), 1)
    """

    def __init__(self, optimizers: Sequence[Optimizer], weights: Sequence[torch.Tensor], engine: str | None = None) -> None:
        self.optimizers = list(optimizers)
        n = len(self.optimizers)
        for k, stack in enumerate(nonempty("weights", list(weights), ": there is nothing to train")):
            instance(f"weights[{k}]", stack, torch.Tensor, "a tensor of the weights of all trainings")
            if stack.dim() == 0 or len(stack) != n:
                raise ValueError(f"weights[{k}] is {tuple(stack.shape)}: must be [{n}, ...], for {n} trainings")
            if n > 1 and stack.stride(0) == 0:
                raise ValueError(f"weights[{k}] has the same memory for all trainings: give each its own, as by clone()")
        if len(set(map(id, self.optimizers))) < n:
            raise ValueError(
                "an optimizer occurs twice: each training needs its own, which counts its updates; use copy.deepcopy"
            )
        self._stacks = list(weights)
        kinds: dict[Any, list[int]] = {}
        for i, optimizer in enumerate(self.optimizers):
            instance(f"optimizers[{i}]", optimizer, Optimizer, "an Optimizer", "; see optimizer.create(name)")
            optimizer.slots(range(len(weights)))
            kind = kind_of(optimizer, len(weights))
            kinds.setdefault(i if kind is None else kind, []).append(i)
        self.updaters = [Updater(optimizer, engine) for optimizer in self.optimizers]
        of_models = _taken_apart(self._stacks)
        names = [[f"weights[{k}][{i}]" for k in range(len(weights))] for i in range(n)]
        self._alone: dict[int, Plan] = {}
        self._joint: list[tuple[list[int], _JointPlan]] = []  # with the indices of their models
        for kind, members in kinds.items():
            if isinstance(kind, int):
                self._alone[kind] = self.updaters[kind].make_plan(range(len(weights)), of_models[kind], names[kind])
            else:
                joint_names = [name for i in members for name in names[i]]
                updaters = [self.updaters[i] for i in members]
                self._joint.append((members, _JointPlan(updaters, [of_models[i] for i in members], joint_names)))
        self._gradients: list[list[Any]] | None = None

    def __len__(self) -> int:
        """The number of models."""
        return len(self.optimizers)

    @property
    def launches(self) -> int:
        """The number of GPU launches or native calls of the last step, without those for reductions."""
        updates = [plan.update for plan in chain((plan for _, plan in self._joint), self._alone.values())]
        return sum(update.launches for update in updates if update is not None)

    @uninterrupted
    def step(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Update all weights.

        Args:
            gradients: for each weight the gradients of all models, dense, [n_models, *shape]. None: take the tensors of the
                last step again, with their present values, which is faster.

        Raises:
            RuntimeError: `gradients` is None at the first step.
            TypeError, ValueError: gradients of another number, shape or type, or an optimizer raises an error. No weight has
                changed, except of models that are updated alone.
        """
        if gradients is not None:
            self._gradients = self._checked(gradients)
            for members, plan in self._joint:
                plan.gradients = [gradient for i in members for gradient in self._gradients[i]]
        elif self._gradients is None:
            raise RuntimeError(
                "step() without gradients takes those of the step before, and there was no step: give gradients"
            )
        lists: Any = self._gradients
        for i, alone in self._alone.items():
            alone.prepare(lists[i])
        plans = [plan for _, plan in self._joint]
        for plan in plans:
            plan.prepare(plan.gradients)
        written = []
        try:
            for plan in plans:
                written.append(plan)
                plan.rows.write(plan.update)
                plan.update.compute_ahead()
            for alone in self._alone.values():
                alone.run()
        except BaseException:
            for plan in written:
                plan.rows.undo()
            raise
        for plan in plans:
            plan.launch()

    def _checked(self, gradients: Sequence[Any]) -> list[list[Any]]:
        """Return for each model the list of its gradients."""
        if len(gradients) != len(self._stacks):
            raise ValueError(f"{len(gradients)} stacks of gradients for {len(self._stacks)} of weights")
        for k, (gradient, weight) in enumerate(zip(gradients, self._stacks, strict=True)):
            instance(f"gradients[{k}]", gradient, torch.Tensor, "a tensor of the gradients of all trainings")
            if gradient.shape != weight.shape:
                raise ValueError(f"gradients[{k}] is {tuple(gradient.shape)}: must be {tuple(weight.shape)}, as its weights")
            if gradient.layout != torch.strided:
                raise TypeError(f"gradients[{k}] is {gradient.layout}: must be dense")
        return _taken_apart(gradients)


def _taken_apart(stacks: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return for each model the list of its tensors in the stacks."""
    return list(map(list, zip(*(stack.detach().unbind() for stack in stacks), strict=True)))


class _JointPlan(UpdaterPlan):
    """Plan of models whose optimizers are of one kind; the states are shared with their updaters."""

    def __init__(self, updaters: Sequence[Updater], weights: Sequence[list[torch.Tensor]], names: Sequence[str]) -> None:
        self._updaters, self._n = updaters, len(weights[0])
        optimizers: list[Any] = [updater.optimizer for updater in updaters]
        holder = Updater(optimizers[0], updaters[0].engine)
        updaters[0].register_with(optimizers[0])
        self.gradients: list[torch.Tensor] = []  # of the step, in the order of its weights
        # Each model gets the random numbers of a training alone.
        offsets = np.tile(np.arange(self._n), len(updaters))
        super().__init__(
            *(holder, optimizers[0], range(self._n * len(updaters)), list(chain.from_iterable(weights)), names),
            rng_offsets=offsets,
            rows=JointRows(optimizers, self._n),
        )

    def new_update(self, rule: Any) -> Any:
        update = super().new_update(rule)
        for i in range(len(self._updaters) * self._n):
            self._updaters[i // self._n].state[i % self._n] = self._updater.state[i]
        return update

    def _owner_of(self, i: int) -> tuple[Any, int]:
        return self._updaters[i // self._n].optimizer, i % self._n


def kind_of(optimizer: Optimizer, n: int) -> Hashable | None:
    """Return what optimizers of models with `n` weights must have in common to be updated together.

    They may then differ in numbers and in `lr_scheduler`. None if this optimizer must be alone: it has no rule, a rule of
    whole tensors or with a reduction over all tensors of a model, `schedules`, other weights than the first `n`, or a
    setting that cannot be compared.
    """
    if not isinstance(optimizer, RuleOptimizer) or optimizer.schedules:
        return None
    rule = optimizer.rule_for(np.arange(n))
    if not isinstance(rule, Rule) or any(reduction.scope == "global" for reduction in rule.reductions):
        return None
    counts = optimizer.step_counts
    if list(optimizer.counts) != list(range(n)):  # it has updated other weights before
        return None
    plain = not (optimizer.lr_mult or optimizer.wd_mult or optimizer.param_dict)
    kind = (
        *(type(optimizer), rule, optimizer.rounding, n),
        None if plain else tuple(map(optimizer.multipliers, range(n))),
        tuple(optimizer.idx2name.items()),
        *(counts.values.tobytes(), *[getattr(optimizer, name) for name in _SAME]),
        tuple([(k, v) for k, v in vars(optimizer).items() if type(v) not in (float, int) and k not in _APART]),
    )
    try:
        hash(kind)
    except TypeError:  # a user-defined setting, such as a list
        return None
    return kind


class _NoNumber:
    """A placeholder for a number that raises TypeError in every operation, to detect whether the number is used."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("this stands for a number that is not known")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("this stands for a number that is not known")


class JointRows(Rows):
    """Rows of hyper-parameters of models whose optimizers have one `kind_of`: those of the first model, then of the second.

    The rows of optimizers that differ in learning rates and decays only are computed at once, by one of them with `Column`
    in place of these numbers. Where that cannot be, each optimizer computes its own. `n`: the weights of each model.
    """

    def __init__(self, optimizers: Sequence[Any], n: int) -> None:
        first = optimizers[0]
        super().__init__(len(optimizers) * n, partial(first.rule_for, np.arange(n)))
        self._optimizers, self._n = optimizers, n
        # One array for the counts of all optimizers, a row for each.
        self._counts = np.tile(first.step_counts.values, (len(optimizers), 1))
        for optimizer, counts in zip(optimizers, self._counts, strict=True):
            optimizer.step_counts.values = counts
        self._scheduled = any(optimizer.lr_scheduler is not None for optimizer in optimizers)
        # For each set of weights that share a row: their indices, the count's slot, multipliers, and the first index.
        kinds: dict[Any, list[int]] = {}
        for k, count in enumerate(first.step_counts.values.tolist()):
            kind = (count, *first.multipliers(k))
            kinds.setdefault(kind if first.shares_rows else k, []).append(k)
        self._sets = [
            (slice(None) if len(kinds) == 1 else np.array(at), at[0], *first.multipliers(at[0]), at[0])
            for at in kinds.values()
        ]
        alike: dict[Any, list[int]] = {}
        for i, optimizer in enumerate(optimizers):
            numbers = [(k, v) for k, v in vars(optimizer).items() if type(v) in (float, int) and k not in _COLUMNS]
            alike.setdefault(tuple(numbers), []).append(i)
        alone = type(first).begin_step is not RuleOptimizer.begin_step
        self._alike = [(at, None if alone or len(at) == 1 else self._joined(at)) for at in alike.values()]
        self._before: list[tuple[Any, ...]] = []  # the host states before the step

    def is_steady(self, rule: Rule) -> bool:
        """Return whether the rows of this rule are the same at every step: they can be computed without the count."""
        first = self._optimizers[0]
        if self._scheduled or first.has_options or first.host_state_names or first.rounding is not None:
            return False
        computing = ([self._optimizers[i] for i in at] if one is None else [one] for at, one in self._alike)
        return all(self._ignores_count(optimizer, rule) for optimizer in chain.from_iterable(computing))

    def _ignores_count(self, optimizer: Any, rule: Rule) -> bool:
        one: Any = copy.copy(optimizer)
        one.step_counts, number = StepCounts(_NoNumber()), _NoNumber()  # type: ignore[arg-type]
        before = dict(vars(one))
        try:
            rows = one.rows_of_step([number] * len(self._sets), self._sets, rule, lr=one.lr)
        except Exception:  # any kind, from arithmetic with `_NoNumber` or columns
            return False
        same = vars(one).keys() == before.keys() and all(map(operator.is_, vars(one).values(), before.values()))
        return same and not any(value is number for row in rows for value in row)

    def form(self, rule: Any, number: int | None = None) -> list[tuple[Any, Any]]:
        names = self._optimizers[0].host_state_names
        self._before = [optimizer.host_state() for optimizer in self._optimizers] if names else []
        times = [int(self._counts[0, slot]) + 1 for _, slot, *_ in self._sets]
        rates = self._rates(times) if self._scheduled else None
        table = np.empty((len(self._optimizers), self._n, 1 + len(rule.hyper) + (self._optimizers[0].rounding is not None)))
        for k, (members, one) in enumerate(self._alike):
            whole = len(members) == len(table)
            block = table if whole else np.empty((len(members), *table.shape[1:]))
            if one is None or not self._form_joined(one, members, times, rule, rates, block):
                self._alike[k] = members, None
                for i, of_model in zip(members, block, strict=True):
                    rate = self._optimizers[i].lr if rates is None else rates[i]
                    rows = self._optimizers[i].rows_of_step(times, self._sets, rule, lr=rate)
                    for (where, *_), row in zip(self._sets, rows, strict=True):
                        of_model[where] = row
            if not whole:
                table[members] = block
        return [(None, table.reshape(-1, table.shape[-1]))]

    def _form_joined(
        self, one: Any, members: Sequence[int], times: Sequence[int], rule: Any, rates: list[float] | None, block: np.ndarray
    ) -> bool:
        """Write the rows of these optimizers, computed by `one`, into `block`; return False if that cannot be."""
        try:
            if self._before:
                states = zip(*(self._before[i] for i in members), strict=True)
                one.load_host_state([column(list(values)) for values in states])
            if rates is not None:
                vars(one)["lr"] = column([rates[i] for i in members])
            rows = one.rows_of_step(times, self._sets, rule, lr=one.lr)
        except Exception:  # any kind: code that takes numbers may raise any error for columns
            return False
        if np.ndarray in {type(value) for row in rows for value in row}:  # of code that made its own array of a column
            return False
        if self._before:
            self._carry(one.host_state(), members)
        for (where, *_), row in zip(self._sets, rows, strict=True):
            for j, value in enumerate(row):
                block[:, where, j] = value.view(np.ndarray)[:, None] if isinstance(value, Column) else value
        return True

    def undo(self) -> None:
        for optimizer, before in zip(self._optimizers, self._before, strict=False):
            optimizer.load_host_state(before)

    def _carry(self, host_state: Sequence[Any], members: Sequence[int]) -> None:
        """Give these optimizers the host state of the one that has computed their rows."""
        columns = [value.tolist() if isinstance(value, Column) else [value] * len(members) for value in host_state]
        for i, values in zip(members, zip(*columns, strict=True), strict=False):
            self._optimizers[i].load_host_state(values)

    def count(self) -> None:
        self._counts += 1
        largest = max(self._optimizers[0].num_update, int(self._counts[0].max()))
        for optimizer in self._optimizers:
            optimizer.step_counts.largest = largest

    def _rates(self, times: Sequence[int]) -> list[float]:
        """Return the learning rates of all optimizers; a schedule that several share is called once."""
        count = self._optimizers[0].count_for_rate(times)
        scheduled: dict[int, float] = {}
        rates = []
        for optimizer in self._optimizers:
            schedule = optimizer.lr_scheduler
            if schedule is not None and id(schedule) not in scheduled:
                scheduled[id(schedule)] = optimizer.rate_at(count)
            rates.append(optimizer.lr if schedule is None else scheduled[id(schedule)])
        return rates

    def _joined(self, members: Sequence[int]) -> Any:
        """Return an optimizer that computes the rows of several, which differ in learning rates and decays only."""
        one = copy.copy(self._optimizers[members[0]])
        for name in _COLUMNS:
            vars(one)[name] = column([getattr(self._optimizers[i], name) for i in members])
        return one


def make_optimizer(kind: str | type[Optimizer], arguments: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer by name or class, with copies of its schedules, which may remember what they were called with.

    A `learning_rate` given with an `lr_scheduler` becomes the `base_lr` of the copy; TypeError if that has none.
    """
    arguments = dict(arguments)
    if "schedules" in arguments:
        arguments["schedules"] = copy.deepcopy(arguments["schedules"])
    schedule = arguments["lr_scheduler"] = copy.deepcopy(arguments.get("lr_scheduler"))
    if schedule is not None and arguments.get("learning_rate") is not None:
        if not hasattr(schedule, "base_lr"):
            raise TypeError(f"learning_rate together with {schedule!r}, which decides the rate and has no base_lr: omit one")
        arguments["learning_rate"] = schedule.base_lr = number("learning_rate", arguments["learning_rate"], low=0)
    return kind(**arguments) if isinstance(kind, type) else create(kind, **arguments)
