"""The optimizers that take part in a simulation, each with all values of what is varied."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels import Rule
from ...trainer.ensemble import make_optimizer
from ...trainer.optimizer import Optimizer, RuleOptimizer
from ...trainer.optimizer.counts import StepCounts
from ...trainer.presets import named
from ...trainer.validation import number

__all__ = ["Candidate", "PlainUpdate", "TorchFactory", "named_optimizers", "one_optimizer", "settings_to_try"]


class Candidate:
    """One optimizer with all values of what is varied: a training for each.

    Attributes:
        together: whether a training's starts may be one weight, as rules of single elements let them; None where `Ensemble`
            does not update them.
        trainings: for each value an optimizer, or what `_OneByOne` takes.
        rates: for each value the learning rate.
    """

    def __init__(self, name: str, given: Any, values: Sequence[Mapping[str, Any]], relative: bool) -> None:
        self.name = name
        self.together: bool | None = None
        self.trainings: list[Any] = []
        self.rates: list[float] = []
        known: Mapping[str, Any] = {}
        makes: list[Any] = []  # those that are no copies of others
        plain = 1.0  # what rates of copies are relative to
        for value in values:
            before = makes[-1] if makes and _differ_in_rate(value, known) else None
            if isinstance(before, Optimizer) and before.lr_scheduler is None:
                own = _fresh_copy(before)
                own.lr = value["learning_rate"] * plain if relative else value["learning_rate"]  # which has been checked
                rate = own.lr
            else:
                own, rate = self._make(given, value, relative)
                known = value
                makes.append(own)
                if relative and isinstance(own, Optimizer) and own.lr_scheduler is None:
                    plain = self._make(given, {k: v for k, v in value.items() if k != "learning_rate"}, False)[0].lr
            self.trainings.append(own)
            self.rates.append(rate)
        if isinstance(makes[0], Optimizer):
            self.together = all(map(_is_elementwise, makes))

    def _make(self, given: Any, value: Mapping[str, Any], relative: bool) -> tuple[Any, float]:
        others = {k: v for k, v in value.items() if k != "learning_rate"}
        rate = value.get("learning_rate")
        if isinstance(given, type) and issubclass(given, Optimizer):
            given = {"optimizer": given}
        if isinstance(given, Mapping):
            kind = given.get("optimizer", self.name)
            if isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Optimizer)):
                return self._ours(dict(given), others, rate, relative)
            for name in given:
                if name not in ("optimizer", "learning_rate"):
                    raise TypeError(f"{self.name}: {name} is for names and classes of optimizers, not for {kind!r}")
            if "learning_rate" in given:
                own_rate = given["learning_rate"]
                rate, relative = own_rate if rate is None else rate * own_rate if relative else rate, False
            given = kind
        if isinstance(given, Optimizer):
            if others:
                raise TypeError(
                    f"{self.name} is an optimizer that is made already, so {next(iter(others))} cannot be varied"
                )
            own = copy.deepcopy(given)
            if rate is not None:
                rate = rate * (own.lr if own.lr_scheduler is None else own.lr_scheduler.base_lr) if relative else rate  # type: ignore[attr-defined]
                _set_rate(own, number("learning_rate", rate, low=0))
            return own, own.rate_at(1)
        partial = given if isinstance(given, functools.partial) else functools.partial(given) if callable(given) else None
        if partial is not None and isinstance(partial.func, type) and issubclass(partial.func, torch.optim.Optimizer):
            before = partial.keywords.get("lr", _default(partial.func, "lr"))
            chosen = before if rate is None else rate * before if relative else rate
            keywords = {} if chosen is None else {"lr": chosen}
            return TorchFactory(functools.partial(partial, **keywords, **others)), float("nan") if chosen is None else float(
                chosen
            )
        if partial is not None:
            if others:
                raise TypeError(f"{self.name} is a plain callable, so {next(iter(others))} cannot be varied")
            before = _default(partial, "lr")
            before = 0.01 if before is None else before
            chosen = before if rate is None else rate * before if relative else rate
            return PlainUpdate(partial, chosen), chosen
        raise TypeError(
            f"{self.name}: must be a dict of arguments, an Optimizer or its class, a class of torch.optim or a "
            f"callable, got {type(given).__name__}"
        )

    def _ours(
        self, arguments: dict[str, Any], others: dict[str, Any], rate: float | None, relative: bool
    ) -> tuple[Any, float]:
        kind = arguments.pop("optimizer", self.name)
        if isinstance(kind, str):
            kind, arguments = named(kind, arguments)
        if rate is not None and relative:
            plain = make_optimizer(kind, arguments | others)
            rate *= plain.lr if plain.lr_scheduler is None else plain.lr_scheduler.base_lr  # type: ignore[attr-defined]
        own = make_optimizer(kind, arguments | others | ({} if rate is None else {"learning_rate": rate}))
        return own, own.rate_at(1)


def _differ_in_rate(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if "learning_rate" not in a or a.keys() != b.keys():
        return False
    return len(a) == 1 or all(a[k] is b[k] for k in a if k != "learning_rate")


def _fresh_copy(own: Optimizer) -> Optimizer:
    """Another one of the same settings; neither has updated anything yet."""
    other = object.__new__(type(own))  # copy.copy takes ten times as long, which there are hundreds of
    vars(other).update(vars(own), step_counts=StepCounts(own.begin_num_update))
    return other


def _set_rate(own: Optimizer, rate: float) -> None:
    schedule: Any = own.lr_scheduler
    if schedule is None:
        own.set_learning_rate(rate)
    elif hasattr(schedule, "base_lr"):
        schedule.base_lr = rate
    else:
        raise TypeError(f"learning_rates together with {schedule!r}, which decides the rate and has no base_lr")


class TorchFactory(NamedTuple):
    """A torch optimizer, as a function that makes one of parameters."""

    make: Callable[..., torch.optim.Optimizer]


class PlainUpdate(NamedTuple):
    """A plain callable from point, gradient, state and rate to the new point."""

    update: Callable[..., torch.Tensor]
    rate: float


def _is_elementwise(own: Any) -> bool:
    """Whether the elements of a weight are updated independently of each other, and of their places."""
    rule = own.composed_rule if isinstance(own, RuleOptimizer) else None
    return isinstance(rule, Rule) and not rule.reductions and "index" not in rule.extras


def named_optimizers(optimizers: Any) -> dict[str, Any]:
    if isinstance(optimizers, str):
        optimizers = [optimizers]
    if isinstance(optimizers, Mapping):
        found = dict(optimizers)
    elif isinstance(optimizers, Sequence):
        found = {}
        for each in optimizers:
            label = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__).lower()
            if label in found:
                raise ValueError(f"optimizers: {label!r} is there twice; give a mapping from labels of your own")
            found[label] = {} if isinstance(each, str) else each
    else:
        raise TypeError(f"optimizers must be names or a mapping from labels, got {type(optimizers).__name__}")
    if not found:
        raise ValueError("optimizers is empty: name at least one")
    return found


def one_optimizer(optimizer: Any) -> dict[str, Any]:
    """A single optimizer by its label, which is its name, or "optimizer" where it has none."""
    return {optimizer: {}} if isinstance(optimizer, str) else {"optimizer": optimizer}


def settings_to_try(rates: Sequence[float] | None, sweep: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    axes = {name: list(values) for name, values in (sweep or {}).items()}
    if rates is not None:
        if "learning_rate" in axes:
            raise ValueError("learning_rate is given twice, in sweep and in learning_rates: leave one out")
        axes["learning_rate"] = [number("learning_rates", rate, low=0) for rate in rates]
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name}: no values to try")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _default(call: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(call).parameters.get(name)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    return float(default) if isinstance(default, (int, float, torch.Tensor)) else None
