"""The names that `tristep.contrib` adds to the core. Its modules are imported when one of their names is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def places(kind: str) -> dict[str, str]:
    """Return the names of one kind, such as "optimizers", that contrib has, each with its object as "module:name"."""
    return import_module("tristep.contrib").NAMES.get(kind, {})


def load(kind: str, name: str) -> Any:
    """Import and return the object of a name; None if contrib has no such name."""
    if (place := places(kind).get(name)) is None:
        return None
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
