"""What optimizers are called where they are compared, and which of them take a plainer one's steps there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..kernels import Rule
from .ensemble import Ensemble, make_optimizer
from .optimizer import NAG, SGD, Optimizer, registered

__all__ = ["COMPARED", "PRESETS", "label", "named", "plainer"]

# Names that mean more than an optimizer's defaults: without momentum, NAG takes SGD's steps, and both would be one curve.
PRESETS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "momentum": (SGD, {"momentum": 0.9}),
    "nag": (NAG, {"momentum": 0.9}),
}
COMPARED = ("sgd", "momentum", "nag", "adagrad", "rmsprop", "adam", "lion", "adabelief")  # what views compare by default
FEW, MANY = 6, 100  # steps of a comparison: those after which most differ, and those after which they do not by chance


def named(name: str, arguments: Mapping[str, Any]) -> tuple[str | type[Optimizer], dict[str, Any]]:
    """The optimizer of a name and its arguments, to which a preset adds what is not given."""
    kind, own = PRESETS.get(name.lower(), (name, {}))
    if isinstance(kind, type) and registered().get(name.lower(), kind) is not kind:  # the user's own has this name
        return name, dict(arguments)
    return kind, {**own, **arguments}


def plainer(name: str, given: Any) -> str | None:
    """The name of a plainer optimizer that takes the same steps on a vector, as AdamW's are Muon's; None: there is none.

    Found by running both on two variables. Plainer are those of `COMPARED`, in their order, and then those whose elements
    are updated independently, with less state.

    Args:
        name: what it is called.
        given: its arguments, with its name or class as "optimizer" if it is called otherwise; or its class. The rate does
            not count, since all have the same here.
    """
    arguments: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"optimizer": given}
    kind = arguments.pop("optimizer", name)
    for own in ("learning_rate", "lr_scheduler"):
        arguments.pop(own, None)
    if isinstance(kind, str):
        kind, arguments = _resolved(kind, arguments)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return None
    decay = {"wd": arguments.pop("wd")} if arguments.get("wd") else {}
    if (kind, arguments) in map(_resolved, COMPARED):
        return None
    own_start = _path(kind, {**arguments, **decay}, FEW)
    for other in _by_plainness():
        klass, preset = _resolved(other)
        if (klass, preset) == (kind, arguments):
            break  # it is the plainest itself
        theirs = functools.partial(_known_path, klass, tuple({**preset, **decay}.items()))
        if _same(own_start, theirs(FEW)) and _same(_path(kind, {**arguments, **decay}, MANY), theirs(MANY)):
            return other
    return None


def _resolved(name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, dict[str, Any]]:
    """The class, None where there is none, and the arguments."""
    kind, found = named(name, arguments)
    return registered().get(kind.lower()) if isinstance(kind, str) else kind, found


def _by_plainness() -> Iterator[str]:
    """Names of our optimizers, the plainest first."""
    yield from COMPARED
    ours = SGD.__module__.rpartition(".")[0]
    known: Mapping[str, Any] = registered()
    others = [name for name in known.keys() - set(COMPARED) if known[name].__module__.startswith(ours)]
    yield from sorted(others, key=lambda name: (_size(known[name]), name))


def label(name: str, other: str | None) -> str:
    """What an optimizer is called in a legend, and whose steps it takes, if it does."""
    return name if other is None else f"{name} (= {other})"


@functools.cache
def _size(klass: Any) -> int:
    """How much state there is for an element; more than any for those that do not update elements independently."""
    rule = getattr(klass(), "composed_rule", None)
    return len(rule.slots) if isinstance(rule, Rule) and not rule.reductions else 100


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return False
    return bool(np.abs(one - other).max() <= 1e-4 * np.abs(other - other[0]).max())


@functools.cache
def _known_path(klass: Any, arguments: tuple[tuple[str, Any], ...], steps: int) -> np.ndarray | None:
    return _path(klass, dict(arguments), steps)


def _path(klass: type[Optimizer], arguments: Mapping[str, Any], steps: int) -> np.ndarray | None:
    """float32 [steps + 1, 2], down a bent ravine, in which signs of gradients change; None for one that refuses vectors."""
    points = torch.tensor([[0.6, 0.3]])
    path = [points.clone()]
    try:
        alone = Ensemble([make_optimizer(klass, {**arguments, "learning_rate": 0.01})], [points], "eager", stacked=True)
        with torch.random.fork_rng(devices=[]):
            for _ in range(steps):
                x, y = points.T
                away = 20.0 * (y - x * x)
                alone.step([torch.stack([x - 2.0 * x * away, away], dim=1)])
                path.append(points.clone())
    except (TypeError, ValueError):
        return None
    return torch.cat(path).numpy()
