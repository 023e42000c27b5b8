"""Comparisons of optimizers: the names to compare, and which optimizers take the same steps as a plainer one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..kernels import Rule
from .ensemble import make_optimizer
from .optimizer import NAG, SGD, Optimizer, registered
from .optimizer.updater import Updater

__all__ = ["COMPARED", "PRESETS", "label", "named", "plainer"]

# Names with other arguments than an optimizer's defaults: without momentum, NAG takes SGD's steps, and both give one curve.
PRESETS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "momentum": (SGD, {"momentum": 0.9}),
    "nag": (NAG, {"momentum": 0.9}),
}
COMPARED = ("sgd", "momentum", "nag", "adagrad", "rmsprop", "adam", "lion", "adabelief")  # compared by default
FEW, MANY = 6, 100  # steps: most optimizers differ after FEW; those that are equal after MANY are not equal by chance


def named(name: str, arguments: Mapping[str, Any]) -> tuple[str | type[Optimizer], dict[str, Any]]:
    """Return the optimizer of a name, and its arguments: the preset of this name, updated by `arguments`."""
    kind, preset = PRESETS.get(name.lower(), (name, {}))
    if isinstance(kind, type) and registered().get(name.lower(), kind) is not kind:  # a user has registered this name
        return name, dict(arguments)
    return kind, {**preset, **arguments}


def plainer(name: str, given: Any) -> str | None:
    """Return the name of a plainer optimizer that takes the same steps on a vector, or None.

    Muon, for example, takes AdamW's steps there. Both are run on two variables. Plainer optimizers are those of `COMPARED`,
    in their order, then those that update elements independently, by increasing size of their states. `name` may be any
    label if `given`, the arguments or the class, has "optimizer"; the learning rate is ignored.
    """
    arguments: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"optimizer": given}
    kind = arguments.pop("optimizer", name)
    for ignored in ("learning_rate", "lr_scheduler"):
        arguments.pop(ignored, None)
    if isinstance(kind, str):
        kind, arguments = _resolved(kind, arguments)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return None
    decay = {"wd": arguments.pop("wd")} if arguments.get("wd") else {}
    if (kind, arguments) in map(_resolved, COMPARED):
        return None
    first_steps = _path(kind, {**arguments, **decay}, FEW)
    for candidate in _by_plainness():
        klass, preset = _resolved(candidate)
        if (klass, preset) == (kind, arguments):
            break  # the optimizer itself: no plainer one takes its steps
        path_of_candidate = functools.partial(_cached_path, klass, tuple({**preset, **decay}.items()))
        if _same(first_steps, path_of_candidate(FEW)) and _same(
            _path(kind, {**arguments, **decay}, MANY), path_of_candidate(MANY)
        ):
            return candidate
    return None


def _resolved(name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, dict[str, Any]]:
    """Return the class of an optimizer, None for an unknown name, and its arguments."""
    kind, with_preset = named(name, arguments)
    return registered().get(kind.lower()) if isinstance(kind, str) else kind, with_preset


def _by_plainness() -> Iterator[str]:
    """Yield the names of tristep's own optimizers, the plainest first."""
    yield from COMPARED
    package = SGD.__module__.rpartition(".")[0]
    classes: Mapping[str, Any] = registered()
    names = [name for name in classes.keys() - set(COMPARED) if classes[name].__module__.startswith(package)]
    yield from sorted(names, key=lambda name: (_size(classes[name]), name))


def label(name: str, other: str | None) -> str:
    """Return the legend of an optimizer, with the plainer optimizer `other` that takes the same steps, if any."""
    return name if other is None else f"{name} (= {other})"


@functools.cache
def _size(klass: Any) -> int:
    """Return the number of states for each element; 100 if elements are not updated independently."""
    rule = getattr(klass(), "composed_rule", None)
    return len(rule.slots) if isinstance(rule, Rule) and not rule.reductions else 100


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return False
    return bool(np.abs(one - other).max() <= 1e-4 * np.abs(other - other[0]).max())


@functools.cache
def _cached_path(klass: Any, arguments: tuple[tuple[str, Any], ...], steps: int) -> np.ndarray | None:
    return _path(klass, dict(arguments), steps)


def _path(klass: type[Optimizer], arguments: Mapping[str, Any], steps: int) -> np.ndarray | None:
    """Return an optimizer's path down a bent ravine, float32 [steps + 1, 2]; None if it does not update vectors.

    The signs of gradients change on the way.
    """
    point = torch.tensor([0.6, 0.3])
    path = [point.clone()]
    try:
        update = Updater(make_optimizer(klass, {**arguments, "learning_rate": 0.01}), "eager")
        with torch.random.fork_rng(devices=[]):
            for _ in range(steps):
                x, y = point
                slope = 20.0 * (y - x * x)
                update(0, torch.stack([x - 2.0 * x * slope, slope]), point)
                path.append(point.clone())
    except (TypeError, ValueError):
        return None
    return torch.stack(path).numpy()
