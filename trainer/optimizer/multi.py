"""MultiOptimizer: several optimizers, each for the parameters that match its pattern."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..validation import number
from .base import Optimizer, create
from .counts import Index, StepCounts
from .patterns import Pattern, assign, pattern_text, read_entry, table_text
from .settings import Setting, switch

_OWN = ("rescale_grad", "begin_num_update", "param_idx2name", "param_dict")  # these are the same for all
_OF_ONE = ("zclip", "skip_norm", "skip_percentile")  # they look at the norm of all gradients of one optimizer


class MultiOptimizer(Optimizer):
    """Several optimizers in one, each for some of a model's parameters: of the patterns that match a parameter, the first.

    A `Trainer` makes one of the list that it is given as its optimizer. All count updates together, so that their schedules
    are at the same update. `learning_rate`, `lr` and `lr_scheduler` are those of the last optimizer, which takes the rest as
    a rule. Setting `lr` multiplies the others' rates by the same factor; setting `lr_scheduler` gives the others copies
    whose `base_lr` is in the ratio of their rates.

    Args:
        entries: (pattern, optimizer) or (pattern, optimizer, arguments): see `patterns.matcher` for the patterns; an
            optimizer is a name, or an instance that nobody else uses. `"optional": True` among the arguments allows the
            pattern to get no parameter, as where the ones that it names are frozen.
        clip_norm: multiply the gradients by min(1, clip_norm / (norm + 1e-6)), with the global norm of the gradients of all
            optimizers together, > 0; None means never. The factor is a float32, and telemetry sees gradients after it. In an
            entry `clip_norm` means the norm of its own parameters; so do `zclip`, `skip_norm` and
            `skip_percentile`, which only entries have.
        skip_nonfinite: skip steps in which one of the gradients of all optimizers is not finite.
        **defaults: arguments of every optimizer that is given by name, where its entry does not have them. Of
            `lr_scheduler` each gets a copy, which starts from its own `learning_rate`, if it has one.

    Attributes:
        optimizers: in the order of the entries.
        patterns: of these.
        layers: by the id of a parameter the module that has it, for patterns that ask for layers; a Trainer sets it.

    Raises:
        TypeError, ValueError: an entry or argument that does not fit. Under a Trainer: a pattern that gets no parameter and
            is not optional, or a parameter that no pattern takes.

    Example:
        >>> import torch, tristep
        >>> net = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> trainer = tristep.Trainer(
        ...     net,
        ...     [("layer==Embedding|ndim<2", "adamw", {"learning_rate": 0.001}), ("*", "muon", {"learning_rate": 0.02})],
        ...     {"wd": 0.1},
        ... )
        >>> print(trainer.optimizer)
        parameter  shape   optimizer  learning rate   wd  pattern
        0.weight   (8, 4)      adamw          0.001  0.1  layer==Embedding|ndim<2
        1.weight   (4, 4)       muon           0.02  0.1  *
        1.bias       (4,)      adamw          0.001  0.1  layer==Embedding|ndim<2
    """

    optimizers: list[Optimizer]
    clip_norm: Setting[float | None] = Setting(number, optional=True, above=0)
    skip_nonfinite = switch()

    def __init__(
        self,
        entries: Iterable[Sequence[Any]],
        *,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        **defaults: Any,
    ) -> None:
        own = {name: defaults.pop(name) for name in ("rescale_grad", "begin_num_update") if name in defaults}
        if odd := [name for name in _OWN if name in defaults]:
            raise TypeError(f"{odd[0]}={defaults[odd[0]]!r}: a Trainer with several optimizers knows its parameters itself")
        if odd := [name for name in _OF_ONE if defaults.get(name) is not None]:
            raise ValueError(
                f"{odd[0]}={defaults[odd[0]]!r} for several optimizers together: give it in an entry, where it means the "
                "norm of the gradients of its parameters"
            )
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.patterns: list[Pattern] = []
        self._optional: set[int] = set()  # the patterns that may get no parameter
        self.optimizers, self._scales = [], []
        self.layers: dict[int, torch.nn.Module] | None = None
        self._of: dict[Index, int] = {}  # which optimizer each parameter has, by its index
        super().__init__(**own)
        made = [_made(k, entry, defaults, self.begin_num_update) for k, entry in enumerate(entries)]
        if not made:
            raise ValueError("optimizer=[]: must have at least one (pattern, optimizer)")
        if len({id(optimizer) for _, optimizer, _ in made}) < len(made):
            raise ValueError("an optimizer instance is there twice: give one entry both patterns, 'a|b', or make another")
        self.patterns, self.optimizers = [each[0] for each in made], [each[1] for each in made]
        self._optional = {k for k, each in enumerate(made) if each[2]}
        self._scales = [optimizer.rescale_grad for optimizer in self.optimizers]
        self.rescale_grad, self.step_counts = self._rescale_grad, self._step_counts  # now of each, too

    def __getattr__(self, name: str) -> Any:
        has = [f"optimizers[{k}]" for k, each in enumerate(vars(self).get("optimizers", ())) if hasattr(each, name)]
        where = f"; {' and '.join(has)} {'has' if len(has) == 1 else 'have'} it" if has else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{where}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "step_counts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.step_counts = self._step_counts.copy()

    @property
    def rescale_grad(self) -> float:
        """What every gradient is multiplied by first, in addition to each optimizer's own `rescale_grad`."""
        return self._rescale_grad

    @rescale_grad.setter
    def rescale_grad(self, value: float) -> None:
        self._rescale_grad = value
        for optimizer, scale in zip(self.optimizers, self._scales, strict=True):
            optimizer.rescale_grad = value * scale

    @property
    def step_counts(self) -> StepCounts:
        """The counts of all parameters, which are those of each optimizer, too."""
        return self._step_counts

    @step_counts.setter
    def step_counts(self, counts: StepCounts) -> None:
        self._step_counts = counts
        for optimizer in self.optimizers:
            optimizer.step_counts = counts

    @property
    def lr(self) -> float:
        """The learning rate of the last optimizer, without its schedule."""
        return self.optimizers[-1].lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not self.optimizers:  # as when the base class is initialized
            return
        before = self.optimizers[-1].lr
        if before == 0 and any(optimizer.lr for optimizer in self.optimizers):
            raise ValueError(
                f"the last optimizer's learning rate is 0, so that there is no factor to {value} for the others: set each, "
                "as in trainer.optimizer.optimizers[0].set_learning_rate(0.1)"
            )
        for optimizer in self.optimizers[:-1]:
            optimizer.lr = optimizer.lr * (value / before) if before else value
        self.optimizers[-1].lr = value

    @property
    def lr_scheduler(self) -> Callable[[int], float] | None:
        """The schedule of the last optimizer."""
        return self.optimizers[-1].lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Callable[[int], float] | None) -> None:
        if not self.optimizers:
            return
        given: list[Any] = [schedule]
        for optimizer in self.optimizers[-2::-1]:
            given.insert(0, None if schedule is None else _schedule_from(schedule, optimizer.lr, self.lr))
        for optimizer, own in zip(self.optimizers, given, strict=True):
            optimizer.lr_scheduler = own

    @property
    def can_update(self) -> bool:
        return all(optimizer.can_update for optimizer in self.optimizers)

    @property
    def depends_on_order(self) -> bool:
        return any(optimizer.depends_on_order for optimizer in self.optimizers)

    def check_alone(self, index: Index) -> None:
        part_of(self, index).check_alone(index)
        if self.has_others(index) and (self.clip_norm is not None or self.skip_nonfinite):
            raise ValueError(
                f"an update of one parameter with clip_norm={self.clip_norm!r}, skip_nonfinite={self.skip_nonfinite!r} of "
                "several optimizers together, which need the gradients of all parameters: give lists, or use Trainer.step"
            )

    def rate_at(self, num_update: int) -> float:
        """The learning rate of the last optimizer at this update count, before multipliers; checks those of all.

        Raises:
            ValueError, TypeError: a scheduler gave something else than a finite number >= 0.
        """
        return [optimizer.rate_at(num_update) for optimizer in self.optimizers][-1]

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate of the last optimizer, and multiply those of the others by the same factor.

        Raises:
            UserWarning: one of them has a scheduler, which decides the rate.
            ValueError: negative or not finite; or the last one's rate is 0, so that there is no factor.
        """
        lr = number("lr", lr, low=0)
        for optimizer in self.optimizers:
            if optimizer.lr_scheduler is not None:
                optimizer.set_learning_rate(lr)  # which raises
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        super().set_lr_mult(args_lr_mult)
        for optimizer in self.optimizers:
            optimizer.lr_mult = self.lr_mult

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        super().set_wd_mult(args_wd_mult)
        for optimizer in self.optimizers:
            optimizer.wd_mult = self.wd_mult

    def host_state(self) -> tuple[Any, ...]:
        return tuple(optimizer.host_state() for optimizer in self.optimizers)

    def load_host_state(self, carried: tuple[Any, ...]) -> None:
        for optimizer, own in zip(self.optimizers, carried, strict=True):
            optimizer.load_host_state(own)

    def multipliers(self, index: Index) -> tuple[float, float]:
        return part_of(self, index).multipliers(index)

    def keeps_master(self, weight: torch.Tensor) -> bool:
        """Whether one of the optimizers updates such a weight through a float32 copy."""
        return any(optimizer.keeps_master(weight) for optimizer in self.optimizers)

    def use_parameters(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        chosen = assign(self.patterns, names, params, self.layers, self._optional)
        for k, optimizer in enumerate(self.optimizers):
            own = {i for i, part in enumerate(chosen) if part == k}
            for argument, given in (("lr_mult", optimizer.lr_mult), ("wd_mult", optimizer.wd_mult)):
                for key in given:
                    if key not in own and key not in {names[i] for i in own}:
                        raise ValueError(
                            f"{argument}[{key!r}] of optimizers[{k}], {type(optimizer).__name__}: its pattern "
                            f"{pattern_text(self.patterns[k])!r} does not get that parameter"
                        )
        super().use_parameters(params, names)
        for optimizer in self.optimizers:
            optimizer.use_parameters(params, names)
        self._of = dict(enumerate(chosen))

    def settings(self) -> dict[str, Any]:
        """Its own settings, and those of each optimizer under names such as "lr of optimizers[0]"."""
        found: dict[str, Any] = {"clip_norm": self.clip_norm, "skip_nonfinite": self.skip_nonfinite}
        for k, (pattern, optimizer) in enumerate(zip(self.patterns, self.optimizers, strict=True)):
            found[f"optimizers[{k}]"] = f"{type(optimizer).__name__} of {pattern_text(pattern)}"
            found |= {f"{name} of optimizers[{k}]": value for name, value in optimizer.settings().items()}
        return found

    def table(self) -> list[tuple[str, ...]]:
        """What each parameter has got, as rows of texts, after a row of titles: see `print(trainer.optimizer)`."""
        rows: list[tuple[str, ...]] = [("parameter", "shape", "optimizer", "learning rate", "wd", "pattern")]
        for index, name in self.param_names.items():
            optimizer, param = part_of(self, index), self.param_dict[index]
            lr_mult, wd_mult = optimizer.multipliers(index)
            is_lazy = isinstance(param, torch.nn.UninitializedParameter)
            rows.append(
                (
                    name,
                    "not known yet" if is_lazy else str(tuple(param.shape)),
                    type(optimizer).__name__.lower(),
                    f"{optimizer.learning_rate * lr_mult:.6g}",
                    f"{optimizer.wd * wd_mult:.6g}",
                    pattern_text(self.patterns[self._of[index]]),
                )
            )
        return rows

    def __str__(self) -> str:
        rows = self.table()
        return table_text(rows) if len(rows) > 1 else repr(self)  # there are no parameters before a Trainer has it

    def __repr__(self) -> str:
        pairs = zip(map(pattern_text, self.patterns), self.optimizers, strict=True)
        return f"{type(self).__name__}([{', '.join(f'({pattern!r}, {optimizer!r})' for pattern, optimizer in pairs)}])"


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one consists of; itself, if it is one alone."""
    return optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else [optimizer]


def part_of(optimizer: Optimizer, index: Index) -> Optimizer:
    """Which of these updates a parameter."""
    return optimizer.optimizers[optimizer._of[index]] if isinstance(optimizer, MultiOptimizer) else optimizer


def _made(k: int, entry: Any, defaults: Mapping[str, Any], begin_num_update: int) -> tuple[Pattern, Optimizer, bool]:
    """The pattern and the optimizer of an entry, and whether it is optional."""
    pattern, chosen, own = read_entry(f"optimizer[{k}]", entry)
    optional = own.pop("optional", False)
    if isinstance(chosen, (MultiOptimizer, list, tuple)):
        raise TypeError(f"optimizer[{k}]={entry!r}: several optimizers inside one of several; put all into one list")
    if isinstance(chosen, Optimizer):
        if own:
            raise ValueError(f"optimizer[{k}]: arguments {own!r} with an instance: give them to it, or give its name")
        if chosen.counts or (chosen.trainer is not None and chosen.trainer() is not None):
            raise ValueError(f"optimizer[{k}]: this {type(chosen).__name__} is another Trainer's: give one of its own")
        if chosen.begin_num_update != begin_num_update:
            raise ValueError(
                f"optimizer[{k}]: begin_num_update={chosen.begin_num_update}, where all count together from "
                f"{begin_num_update}: give begin_num_update for all, in optimizer_params"
            )
        return pattern, chosen, optional
    for name in _OWN:
        if name in own and name != "rescale_grad":
            raise ValueError(f"optimizer[{k}]: {name}={own[name]!r} is for all optimizers: give it in optimizer_params")
    shared = {name: value for name, value in defaults.items() if name not in own}
    if "lr_scheduler" in shared:
        shared["lr_scheduler"] = copy.deepcopy(shared["lr_scheduler"])
        rate = own.get("learning_rate", shared.get("learning_rate"))
        if rate is not None and hasattr(shared["lr_scheduler"], "start_from"):
            shared["lr_scheduler"].start_from(rate)
    try:
        return pattern, create(chosen, **{**shared, **own, "begin_num_update": begin_num_update}), optional
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer[{k}]: {error}") from None


def _schedule_from(schedule: Any, rate: float, last: float) -> Any:
    """A copy of the last optimizer's schedule for one with another learning rate, in the ratio of both."""
    if rate == last:
        return copy.deepcopy(schedule)
    if not hasattr(schedule, "start_from") or last == 0:
        raise TypeError(
            f"lr_scheduler={schedule!r} for optimizers with different learning rates: it must be one of "
            "tristep.lr_scheduler, and the last rate not 0; or set optimizers[k].lr_scheduler of each"
        )
    own = copy.deepcopy(schedule)
    own.start_from(schedule.base_lr * (rate / last))
    return own
