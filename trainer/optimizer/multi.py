"""`MultiOptimizer`, which combines several optimizers, each for the parameters that match its pattern."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..validation import number
from .base import Optimizer, create
from .counts import Index, StepCounts
from .limits import has_limit
from .options import OPTIONS
from .patterns import Pattern, assign, pattern_text, read_entry, table_text
from .settings import switch

_COMMON = ("rescale_grad", "begin_num_update", "param_idx2name", "param_dict")  # arguments shared by all optimizers
LIMITS = [option for option in OPTIONS if option.by_norm]  # by the norm of all gradients


class MultiOptimizer(Optimizer):
    """Optimizer that combines several optimizers, each for the parameters that match its pattern.

    The first pattern that matches a parameter decides. A `Trainer` makes a `MultiOptimizer` if its optimizer is given as a
    list. All optimizers count updates together, so that their schedules are at the same update. Each has its own
    `schedules`; those of `**defaults` are copied. `learning_rate`, `lr` and
    `lr_scheduler` refer to the last optimizer, usually the one for all remaining parameters. Setting `lr` multiplies the
    learning rates of the others by the same factor; setting `lr_scheduler` gives the others copies whose `base_lr` is
    scaled by the ratio of their learning rates.

    Args:
        entries: list of (pattern, optimizer) or (pattern, optimizer, arguments). `patterns.matcher` describes patterns; an
            optimizer is a registered name, or an instance that is not used elsewhere. `"optional": True` among the arguments
            allows a pattern to match no parameter, for instance because these are frozen.
        clip_norm, skip_norm, skip_nonfinite: the options of `RuleOptimizer` on the global norm, here that of the gradients
            of all optimizers together. In an entry, they mean the norm of that optimizer's gradients.
        **defaults: arguments of all optimizers that are given by name, unless their entry has them. Each optimizer gets its
            own copy of `lr_scheduler`, which starts from its `learning_rate`, if it has one.

    Attributes:
        optimizers: the optimizers, in the order of the entries.
        patterns: their patterns.
        layers: the module that owns each parameter, by the parameter's id, for patterns with layers; set by a Trainer.

    Raises:
        TypeError, ValueError: an entry or argument is not allowed. Under a Trainer: a pattern that is not optional gets no
            parameter, or no pattern matches a parameter.

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
    _skips_overflow = switch()  # `skip_nonfinite` on behalf of a loss scaler

    def __init__(self, entries: Iterable[Sequence[Any]], **defaults: Any) -> None:
        common = {name: defaults.pop(name) for name in ("rescale_grad", "begin_num_update") if name in defaults}
        if odd := [name for name in _COMMON if name in defaults]:
            raise TypeError(f"{odd[0]}={defaults[odd[0]]!r}: a Trainer with several optimizers knows its parameters itself")
        for option in LIMITS:
            setattr(self, option.name, defaults.pop(option.name, option.default))
        self._skips_overflow = False
        self.patterns: list[Pattern] = []
        self._optional: set[int] = set()  # the patterns that may get no parameter
        self.optimizers, self._scales = [], []
        self.layers: dict[int, torch.nn.Module] | None = None
        self._of: dict[Index, int] = {}  # the position of each parameter's optimizer, by the parameter's index
        super().__init__(**common)
        made = [_made(k, entry, defaults, self.begin_num_update) for k, entry in enumerate(entries)]
        if not made:
            raise ValueError("optimizer=[]: must have at least one (pattern, optimizer)")
        if len({id(optimizer) for _, optimizer, _ in made}) < len(made):
            raise ValueError("optimizer: an instance occurs twice; give one entry both patterns, 'a|b', or make another")
        self.patterns, self.optimizers = [each[0] for each in made], [each[1] for each in made]
        self._optional = {k for k, each in enumerate(made) if each[2]}
        self._scales = [optimizer.rescale_grad for optimizer in self.optimizers]
        self.rescale_grad, self.step_counts = self._rescale_grad, self._step_counts  # sets them in each optimizer
        self._join()

    def _join(self) -> None:
        """Let the optimizers obey this object's limits."""
        for optimizer in self.optimizers:
            optimizer._joint = self if has_limit(self) else None

    def check_settings(self) -> None:
        super().check_settings()
        self._join()

    def __getattr__(self, name: str) -> Any:
        has = [f"optimizers[{k}]" for k, each in enumerate(vars(self).get("optimizers", ())) if hasattr(each, name)]
        where = f"; {' and '.join(has)} {'has' if len(has) == 1 else 'have'} it" if has else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{where}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "step_counts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.step_counts = self._step_counts.copy()
        self._join()

    @property
    def rescale_grad(self) -> float:
        """Multiplier of every gradient, in addition to the `rescale_grad` of each optimizer; may be set."""
        return self._rescale_grad

    @rescale_grad.setter
    def rescale_grad(self, value: float) -> None:
        self._rescale_grad = value
        for optimizer, scale in zip(self.optimizers, self._scales, strict=True):
            optimizer.rescale_grad = value * scale

    @property
    def step_counts(self) -> StepCounts:
        """The update counts of all parameters, shared with each optimizer; may be set."""
        return self._step_counts

    @step_counts.setter
    def step_counts(self, counts: StepCounts) -> None:
        self._step_counts = counts
        for optimizer in self.optimizers:
            optimizer.step_counts = counts

    @property
    def lr(self) -> float:
        """The learning rate of the last optimizer without its schedule. Setting it scales the other optimizers' rates."""
        return self.optimizers[-1].lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not self.optimizers:  # while the base class is initialized
            return
        before = self.optimizers[-1].lr
        if before == 0 and any(optimizer.lr for optimizer in self.optimizers):
            raise ValueError(
                f"lr={value}: the last optimizer's learning rate is 0, so there is no factor for the others; set each one, "
                "as in trainer.optimizer.optimizers[0].set_learning_rate(0.1)"
            )
        for optimizer in self.optimizers[:-1]:
            optimizer.lr = optimizer.lr * (value / before) if before else value
        self.optimizers[-1].lr = value

    @property
    def lr_scheduler(self) -> Callable[[int], float] | None:
        """The schedule of the last optimizer, or None. Setting it gives the others copies, scaled to their rates."""
        return self.optimizers[-1].lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Callable[[int], float] | None) -> None:
        if not self.optimizers:
            return
        schedules: list[Any] = [schedule]
        for optimizer in self.optimizers[-2::-1]:
            schedules.insert(0, None if schedule is None else _schedule_from(schedule, optimizer.lr, self.lr))
        for optimizer, scaled in zip(self.optimizers, schedules, strict=True):
            optimizer.lr_scheduler = scaled

    @property
    def schedules(self) -> Mapping[str, Callable[[int], float]]:
        """Empty: each optimizer has its own."""
        return {}

    @schedules.setter
    def schedules(self, value: Any) -> None:
        raise TypeError("schedules of several optimizers: set optimizer.optimizers[k].schedules of each")

    def scheduled_at(self, num_update: int) -> dict[str, float]:
        """Return the scheduled values of all optimizers, under names such as "wd of optimizers[0]"."""
        parts = enumerate(self.optimizers)
        return {f"{name} of optimizers[{k}]": x for k, part in parts for name, x in part.scheduled_at(num_update).items()}

    @property
    def can_update(self) -> bool:
        return all(optimizer.can_update for optimizer in self.optimizers)

    @property
    def depends_on_order(self) -> bool:
        return any(optimizer.depends_on_order for optimizer in self.optimizers)

    def check_alone(self, index: Index) -> None:
        part_of(self, index).check_alone(index)

    def rate_at(self, num_update: int) -> float:
        """Return the last optimizer's learning rate at an update count, before multipliers; checks the others' rates, too.

        Raises:
            TypeError: a scheduler returned something that is not a number.
            ValueError: a scheduler returned a negative or infinite number.
        """
        return [optimizer.rate_at(num_update) for optimizer in self.optimizers][-1]

    def set_learning_rate(self, lr: float) -> None:
        """Set the last optimizer's learning rate, and multiply the others' learning rates by the same factor.

        Args:
            lr: the new learning rate of the last optimizer, >= 0.

        Raises:
            UserWarning: an optimizer has a scheduler, which decides the rate.
            TypeError: `lr` is not a number.
            ValueError: `lr` is negative or not finite, or the last optimizer's learning rate is 0 and another's is not.
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

    def load_host_state(self, host_state: tuple[Any, ...]) -> None:
        for optimizer, state in zip(self.optimizers, host_state, strict=True):
            optimizer.load_host_state(state)

    def multipliers(self, index: Index) -> tuple[float, float]:
        return part_of(self, index).multipliers(index)

    def keeps_master(self, weight: torch.Tensor) -> bool:
        """Return whether any of the optimizers updates a weight of this dtype through a master copy."""
        return any(optimizer.keeps_master(weight) for optimizer in self.optimizers)

    def use_parameters(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        chosen = assign(self.patterns, names, params, self.layers, self._optional)
        for k, optimizer in enumerate(self.optimizers):
            indices = {i for i, part in enumerate(chosen) if part == k}
            for argument, multipliers in (("lr_mult", optimizer.lr_mult), ("wd_mult", optimizer.wd_mult)):
                for key in multipliers:
                    if key not in indices and key not in {names[i] for i in indices}:
                        raise ValueError(
                            f"{argument}[{key!r}] of optimizers[{k}], {type(optimizer).__name__}: its pattern "
                            f"{pattern_text(self.patterns[k])!r} does not get that parameter"
                        )
        super().use_parameters(params, names)
        for optimizer in self.optimizers:
            optimizer.use_parameters(params, names)
        self._of = dict(enumerate(chosen))

    def settings(self) -> dict[str, Any]:
        """Return all settings as plain data, those of each optimizer under names such as "lr of optimizers[0]"."""
        settings: dict[str, Any] = self.limits()
        for k, (pattern, optimizer) in enumerate(zip(self.patterns, self.optimizers, strict=True)):
            settings[f"optimizers[{k}]"] = f"{type(optimizer).__name__} of {pattern_text(pattern)}"
            settings |= {f"{name} of optimizers[{k}]": value for name, value in optimizer.settings().items()}
        return settings

    def unsaved_settings(self) -> dict[str, Any]:
        parts = enumerate(self.optimizers)
        return {f"{name} of optimizers[{k}]": each for k, part in parts for name, each in part.unsaved_settings().items()}

    def limits(self) -> dict[str, Any]:
        """Return the options of limits over all optimizers: `clip_norm`, `skip_nonfinite`, and `skip_norm` if it is on."""
        return {each.name: vars(self)[each.name] for each in LIMITS if each.name != "skip_norm" or each.is_on(self)}

    def table(self) -> list[tuple[str, ...]]:
        """Return the table that `print(trainer.optimizer)` shows, as tuples of strings: a header, then one per parameter.

        The columns are name, shape, optimizer, learning rate, weight decay and pattern.
        """
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
        return table_text(rows) if len(rows) > 1 else repr(self)  # without a Trainer there are no parameters

    def __repr__(self) -> str:
        pairs = zip(map(pattern_text, self.patterns), self.optimizers, strict=True)
        return f"{type(self).__name__}([{', '.join(f'({pattern!r}, {optimizer!r})' for pattern, optimizer in pairs)}])"


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that a `MultiOptimizer` combines; for any other optimizer, a list of itself."""
    return optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else [optimizer]


def part_of(optimizer: Optimizer, index: Index) -> Optimizer:
    """Return the optimizer that updates a parameter: one of a `MultiOptimizer`, or `optimizer` itself."""
    return optimizer.optimizers[optimizer._of[index]] if isinstance(optimizer, MultiOptimizer) else optimizer


def _made(k: int, entry: Any, defaults: Mapping[str, Any], begin_num_update: int) -> tuple[Pattern, Optimizer, bool]:
    """Return (pattern, optimizer, whether the entry is optional) of the entry at position k."""
    pattern, chosen, arguments = read_entry(f"optimizer[{k}]", entry)
    optional = arguments.pop("optional", False)
    if isinstance(chosen, (MultiOptimizer, list, tuple)):
        raise TypeError(f"optimizer[{k}]={entry!r}: is a list of optimizers inside the list; put all into one list")
    if isinstance(chosen, Optimizer):
        chosen.check_made()
        if arguments:
            raise ValueError(f"optimizer[{k}]: arguments {arguments!r} with an instance: give them to it, or give its name")
        if chosen.counts or (chosen.trainer is not None and chosen.trainer() is not None):
            raise ValueError(f"optimizer[{k}]: this {type(chosen).__name__} belongs to another Trainer; make a new one")
        if chosen.begin_num_update != begin_num_update:
            raise ValueError(
                f"optimizer[{k}]: begin_num_update={chosen.begin_num_update}, but all optimizers count together from "
                f"{begin_num_update}: give begin_num_update for all, in optimizer_params"
            )
        return pattern, chosen, optional
    for name in _COMMON:
        if name in arguments and name != "rescale_grad":
            raise ValueError(
                f"optimizer[{k}]: {name}={arguments[name]!r} is for all optimizers: give it in optimizer_params"
            )
    shared = {name: value for name, value in defaults.items() if name not in arguments}
    if "schedules" in shared:
        shared["schedules"] = copy.deepcopy(shared["schedules"])
    if "lr_scheduler" in shared:
        shared["lr_scheduler"] = copy.deepcopy(shared["lr_scheduler"])
        rate = arguments.get("learning_rate", shared.get("learning_rate"))
        if rate is not None and hasattr(shared["lr_scheduler"], "start_from"):
            shared["lr_scheduler"].start_from(rate)
    try:
        return pattern, create(chosen, **{**shared, **arguments, "begin_num_update": begin_num_update}), optional
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer[{k}]: {error}") from None


def _schedule_from(schedule: Any, rate: float, last: float) -> Any:
    """Return a copy of the last optimizer's schedule for the learning rate `rate`, scaled by `rate` / `last`."""
    if rate == last:
        return copy.deepcopy(schedule)
    if not hasattr(schedule, "start_from") or last == 0:
        raise TypeError(
            f"lr_scheduler={schedule!r} for optimizers with different learning rates: must be a schedule of "
            "tristep.lr_scheduler, and the last learning rate not 0; or set optimizers[k].lr_scheduler of each"
        )
    scaled = copy.deepcopy(schedule)
    scaled.start_from(schedule.base_lr * (rate / last))
    return scaled


for _option in LIMITS:
    setattr(MultiOptimizer, _option.name, _option)
_parameters = [inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in LIMITS]
_self, _entries, _defaults = inspect.signature(MultiOptimizer.__init__).parameters.values()
_signature = inspect.Signature([_self, _entries, *_parameters, _defaults])
MultiOptimizer.__init__.__signature__ = _signature  # type: ignore[attr-defined]
