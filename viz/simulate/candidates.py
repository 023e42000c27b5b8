"""The optimizers of a simulation, each with all combinations of the varied arguments."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
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
    """One optimizer of a simulation, with a training for each combination of varied arguments.

    Args:
        name: the label of the optimizer.
        given: a dict of arguments, an `Optimizer` or its class, a class of torch.optim, or a callable; see `simulate`.
        values: the varied arguments of each combination.
        relative: whether their learning rates are factors of the optimizer's own rate.

    Attributes:
        together: whether all starts of a training can be in one weight, because the rule is elementwise; None for torch's
            optimizers and callables, which `Ensemble` cannot update.
        trainings: an `Optimizer`, a `TorchFactory` or a `PlainUpdate` for each combination.
        rates: the learning rate of each combination; NaN for a torch optimizer without one.
    """

    def __init__(self, name: str, given: Any, values: Sequence[Mapping[str, Any]], relative: bool) -> None:
        self.name = name
        self.trainings: list[Any] = []
        self.rates: list[float] = []
        plain: list[Any] = []  # at their own rate: one for each change of other arguments
        known: dict[str, Any] = {}
        for value in values:
            others = {key: each for key, each in value.items() if key != "learning_rate"}
            if not plain or any(others[key] is not known[key] for key in others):
                plain.append(self._make(given, others))
                known = others
            own, rate = plain[-1], value.get("learning_rate")
            if rate is not None:
                own = _at_rate(own, rate * _rate_of(own) if relative else rate)
            self.trainings.append(own)
            self.rates.append(own.rate_at(1) if isinstance(own, Optimizer) else own.rate)
        self.together = all(map(_is_elementwise, plain)) if isinstance(plain[0], Optimizer) else None

    def _make(self, given: Any, others: Mapping[str, Any]) -> Optimizer | TorchFactory | PlainUpdate:
        """Make the training at the optimizer's own rate, with `others` as its other arguments."""
        if isinstance(given, type) and issubclass(given, Optimizer):
            given = {"optimizer": given}
        if isinstance(given, Mapping):
            arguments: dict[str, Any] = dict(given)
            kind = arguments.pop("optimizer", self.name)
            if isinstance(kind, str):
                kind, arguments = named(kind, arguments)
            if isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, Optimizer)):
                return make_optimizer(kind, arguments | dict(others))
            for name in arguments:
                if name != "learning_rate":
                    raise TypeError(f"{self.name}: {name} is for names and classes of optimizers, not for {kind!r}")
            own = self._make(kind, others)
            return _at_rate(own, arguments["learning_rate"]) if arguments else own
        if isinstance(given, Optimizer):
            if others:
                raise TypeError(
                    f"{self.name} is an optimizer that is made already, so {next(iter(others))} cannot be varied"
                )
            return copy.deepcopy(given)
        partial = given if isinstance(given, functools.partial) else functools.partial(given) if callable(given) else None
        if partial is None:
            raise TypeError(
                f"{self.name}: must be a dict of arguments, an Optimizer or its class, a class of torch.optim or a "
                f"callable, got {type(given).__name__}"
            )
        default = _default(partial, "lr")
        if isinstance(partial.func, type) and issubclass(partial.func, torch.optim.Optimizer):
            return TorchFactory(functools.partial(partial, **others), math.nan if default is None else default)
        if others:
            raise TypeError(f"{self.name} is a plain callable, so {next(iter(others))} cannot be varied")
        return PlainUpdate(partial, 0.01 if default is None else default)


class TorchFactory(NamedTuple):
    """A function that makes a torch optimizer from parameters, and the optimizer's learning rate (NaN if it has none)."""

    make: Callable[..., torch.optim.Optimizer]
    rate: float


class PlainUpdate(NamedTuple):
    """A callable `(point, gradient, state, lr) -> new point`, and its learning rate."""

    update: Callable[..., torch.Tensor]
    rate: float


def _rate_of(own: Any) -> Any:
    """Return the optimizer's own learning rate, or its schedule's base rate."""
    if isinstance(own, TorchFactory) and math.isnan(own.rate):
        raise TypeError("relative learning_rates need a rate to be relative to, which this optimizer of torch's has not")
    if not isinstance(own, Optimizer):
        return own.rate
    return own.lr if own.lr_scheduler is None else own.lr_scheduler.base_lr  # type: ignore[attr-defined]


def _at_rate(own: Any, rate: float) -> Any:
    """Return a copy of an unused optimizer at another learning rate."""
    if isinstance(own, TorchFactory):
        return TorchFactory(functools.partial(own.make, lr=rate), rate)
    if isinstance(own, PlainUpdate):
        return own._replace(rate=rate)
    if own.lr_scheduler is None:
        other = object.__new__(type(own))  # ten times as fast as copy.copy, for hundreds of copies
        vars(other).update(vars(own), step_counts=StepCounts(own.begin_num_update))
        other.lr = number("learning_rate", rate, low=0)
        return other
    other = copy.deepcopy(own)
    if not hasattr(other.lr_scheduler, "base_lr"):
        raise TypeError(f"learning_rates together with {own.lr_scheduler!r}, which decides the rate and has no base_lr")
    other.lr_scheduler.base_lr = number("learning_rate", rate, low=0)
    return other


def _is_elementwise(own: Any) -> bool:
    """Whether each element of a weight is updated independently of the others and of its index."""
    rule = own.composed_rule if isinstance(own, RuleOptimizer) else None
    return isinstance(rule, Rule) and not rule.reductions and "index" not in rule.extras


def named_optimizers(optimizers: Any) -> dict[str, Any]:
    """Return the optimizers by label, from a name, a sequence or a mapping; raise if none or two with the same label."""
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
    """Return {label: optimizer} for one optimizer; the label is its name, or "optimizer" if it is not given by name."""
    return {optimizer: {}} if isinstance(optimizer, str) else {"optimizer": optimizer}


def settings_to_try(rates: Sequence[float] | None, sweep: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Return all combinations of the arguments in `sweep` and the learning rates; the rate varies fastest."""
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
