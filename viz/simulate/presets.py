"""Comparisons of optimizers: the names to compare, and the arguments that some names stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...trainer.optimizer import NAG, SGD, Optimizer, registered

__all__ = ["COMPARED", "PRESETS", "named"]

# Names with other arguments than an optimizer's defaults: without momentum, NAG takes SGD's steps, and both give one curve.
PRESETS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "momentum": (SGD, {"momentum": 0.9}),
    "nag": (NAG, {"momentum": 0.9}),
}
COMPARED = ("sgd", "momentum", "nag", "adagrad", "rmsprop", "adam", "lion", "adabelief")  # compared by default


def named(name: str, arguments: Mapping[str, Any]) -> tuple[str | type[Optimizer], dict[str, Any]]:
    """Return the optimizer of a name, and its arguments: the preset of this name, updated by `arguments`."""
    kind, preset = PRESETS.get(name.lower(), (name, {}))
    if isinstance(kind, type) and registered().get(name.lower(), kind) is not kind:  # a user has registered this name
        return name, dict(arguments)
    return kind, {**preset, **arguments}
