"""The optimizers of a simulation, each with all combinations of the varied arguments."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels import Rule
from ...trainer.loops.ensemble import kind_of, make_optimizer
from ...trainer.optimizer import Optimizer, RuleOptimizer
from ...trainer.optimizer.counts import StepCounts
from ...trainer.validation import instance, nonempty, number
from .presets import named

__all__ = ["Candidate", "PlainUpdate", "TorchFactory", "named_optimizers", "one_optimizer", "settings_to_try"]


class Candidate:
    """One optimizer of a simulation, with a training for each combination of varied arguments.

    If `relative`, their learning rates are factors of the optimizer's own rate.

    Attributes:
        elementwise: whether each number is updated independently of the others and of its place, with states that are stored
            as they are; None for torch's optimizers and callables, which `Ensemble` cannot update.
        trainings: an `Optimizer`, a `TorchFactory` or a `PlainUpdate` for each combination.
        rates: the learning rate of each combination; NaN for a torch optimizer without one.
    """

    def __init__(self, name: str, entry: Any, values: Sequence[Mapping[str, Any]], relative: bool) -> None:
        self.name = name
        self.trainings: list[Any] = []
        self.rates: list[float] = []
        plain: list[Any] = []  # at the optimizer's own rate: one for each change of other arguments
        last: dict[str, Any] = {}
        for value in values:
            arguments = {key: each for key, each in value.items() if key != "learning_rate"}
            if not plain or any(arguments[key] is not last[key] for key in arguments):
                plain.append(self._make_training(entry, arguments))
                last = arguments
            training, rate = plain[-1], value.get("learning_rate")
            if rate is not None:
                training = _at_rate(training, rate * _rate_of(training) if relative else rate)
            self.trainings.append(training)
            self.rates.append(training.rate_at(1) if isinstance(training, Optimizer) else training.rate)
        self.elementwise = all(map(_is_elementwise, plain)) if isinstance(plain[0], Optimizer) else None

    def _make_training(self, entry: Any, varied: Mapping[str, Any]) -> Optimizer | TorchFactory | PlainUpdate:
        """Make the training at the optimizer's own rate, with `varied` as its other arguments."""
        if isinstance(entry, type) and issubclass(entry, Optimizer):
            entry = {"optimizer": entry}
        if isinstance(entry, Mapping):
            settings: dict[str, Any] = dict(entry)
            kind = settings.pop("optimizer", self.name)
            if isinstance(kind, str):
                kind, settings = named(kind, settings)
            if isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Optimizer)):
                return make_optimizer(kind, settings | dict(varied))
            for name in settings:
                if name != "learning_rate":
                    raise TypeError(f"{self.name}: {name} is for names and classes of optimizers, not for {kind!r}")
            training = self._make_training(kind, varied)
            return _at_rate(training, settings["learning_rate"]) if settings else training
        if isinstance(entry, Optimizer):
            if varied:
                raise TypeError(
                    f"{self.name} is an optimizer that is made already, so {next(iter(varied))} cannot be varied"
                )
            return copy.deepcopy(entry)
        partial = entry if isinstance(entry, functools.partial) else functools.partial(entry) if callable(entry) else None
        if partial is None:
            raise TypeError(
                f"{self.name}: must be a dict of arguments, an Optimizer or its class, a class of torch.optim or a "
                f"callable, got {type(entry).__name__}"
            )
        default = _default(partial, "lr")
        if isinstance(partial.func, type) and issubclass(partial.func, torch.optim.Optimizer):
            return TorchFactory(functools.partial(partial, **varied), math.nan if default is None else default)
        if varied:
            raise TypeError(f"{self.name} is a plain callable, so {next(iter(varied))} cannot be varied")
        return PlainUpdate(partial, 0.01 if default is None else default)


class TorchFactory(NamedTuple):
    """A function that makes a torch optimizer from parameters, and the optimizer's learning rate (NaN if it has none)."""

    make: Callable[..., torch.optim.Optimizer]
    rate: float


class PlainUpdate(NamedTuple):
    """A callable `(point, gradient, state, lr) -> new point`, and its learning rate."""

    update: Callable[..., torch.Tensor]
    rate: float


def _rate_of(training: Any) -> Any:
    """Return the optimizer's own learning rate, or its schedule's base rate."""
    if isinstance(training, TorchFactory) and math.isnan(training.rate):
        raise TypeError("relative learning_rates need a rate to be relative to, which this optimizer of torch's has not")
    if not isinstance(training, Optimizer):
        return training.rate
    return training.lr if training.lr_scheduler is None else training.lr_scheduler.base_lr  # type: ignore[attr-defined]


def _at_rate(training: Any, rate: float) -> Any:
    """Return a copy of an unused optimizer at another learning rate."""
    if isinstance(training, TorchFactory):
        return TorchFactory(functools.partial(training.make, lr=rate), rate)
    if isinstance(training, PlainUpdate):
        return training._replace(rate=rate)
    if training.lr_scheduler is None:
        other = object.__new__(type(training))  # ten times as fast as copy.copy, for hundreds of copies
        vars(other).update(vars(training), step_counts=StepCounts(training.begin_num_update))
        other.lr = number("learning_rate", rate, low=0)
        return other
    other = copy.deepcopy(training)
    if not hasattr(other.lr_scheduler, "base_lr"):
        raise TypeError(f"learning_rates together with {training.lr_scheduler!r}, which decides the rate and has no base_lr")
    other.lr_scheduler.base_lr = number("learning_rate", rate, low=0)
    return other


def _is_elementwise(optimizer: Any) -> bool:
    rule = optimizer.composed_rule if isinstance(optimizer, RuleOptimizer) else None
    if not isinstance(rule, Rule) or rule.reductions or "index" in rule.extras or optimizer.narrow is not None:
        return False
    return type(optimizer).states_for is RuleOptimizer.states_for and kind_of(optimizer, 0) is not None


def named_optimizers(optimizers: Any) -> dict[str, Any]:
    """Return the optimizers by label, from a name, a sequence or a mapping; raise if none or two with the same label."""
    if isinstance(optimizers, str):
        optimizers = [optimizers]
    instance("optimizers", optimizers, (Mapping, Sequence), "names or a mapping from labels")
    if isinstance(optimizers, Mapping):
        by_label = dict(optimizers)
    else:
        by_label = {}
        for each in optimizers:
            label = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__).lower()
            if label in by_label:
                raise ValueError(f"optimizers: {label!r} is there twice; give a mapping from labels of your own")
            by_label[label] = {} if isinstance(each, str) else each
    return nonempty("optimizers", by_label, ": name at least one")


def one_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return {label: optimizer} for one optimizer; the label is its name, or "optimizer" if it is not given by name."""
    return {optimizer: {}} if isinstance(optimizer, str) else {"optimizer": optimizer}


def _several(argument: str, key: str | None, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        given = f"{argument}={values!r}" if key is None else f"{argument}[{key!r}]={values!r}"
        instead = f"{argument}=[{values!r}]" if key is None else f"{argument}={{{key!r}: [{values!r}]}}"
        raise TypeError(f"{given}: must be a list of the values to try, such as {instead}")
    return nonempty(argument if key is None else f"{argument}[{key!r}]", list(values), ": there are no values to try")


def settings_to_try(rates: Sequence[float] | None, sweep: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Return all combinations of the arguments in `sweep` and the learning rates; the rate varies fastest."""
    axes = {name: _several("sweep", name, values) for name, values in (sweep or {}).items()}
    if rates is not None:
        if "learning_rate" in axes:
            raise ValueError("learning_rate is given twice, in sweep and in learning_rates: leave one out")
        axes["learning_rate"] = [number("learning_rates", rate, low=0) for rate in _several("learning_rates", None, rates)]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _default(call: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(call).parameters.get(name)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    return float(default) if isinstance(default, (int, float, torch.Tensor)) else None
