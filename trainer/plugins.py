"""Plugins: optimizers and other objects that packages add to tristep by name, imported when a name is first looked up.

A package declares each name as an entry point; docs/plugins.md shows how. `tristep.contrib` declares its names in a table,
so that they work in a checkout that was never installed, too.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

# The groups of entry points.
GROUPS = tuple(f"tristep.{kind}" for kind in ("optimizers", "options", "stores", "compressors", "initializers", "viz"))


def names(group: str) -> list[str]:
    """Return the names that plugins declare in a group such as "tristep.optimizers", sorted; nothing is imported."""
    return sorted({entry.name for entry in _declared(group)})


def load(group: str, name: str) -> Any:
    """Import and return the object that a plugin declares by this name; None if no plugin declares it.

    Raise ImportError if it cannot be imported, and ValueError if several packages declare the name.
    """
    entries = [entry for entry in _declared(group) if entry.name == name]
    if not entries:
        return None
    if len({entry.value for entry in entries}) > 1:
        values = " and ".join(sorted(entry.value for entry in entries))
        raise ValueError(f"{name!r} in the entry points {group!r} means both {values}: uninstall one of these packages")
    try:
        return entries[0].load()
    except Exception as error:
        raise ImportError(
            f"{name!r}, which the entry points {group!r} declare as {entries[0].value}, cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def in_contrib(group: str) -> dict[str, str]:
    """Return the names that `tristep.contrib` declares in a group, with their objects as "module:name"."""
    return import_module("tristep.contrib").PLUGINS.get(group, {})


def _declared(group: str) -> list[EntryPoint]:
    ours = [EntryPoint(name, value, group) for name, value in in_contrib(group).items()]
    return [*ours, *_installed(group, tuple((path, _changed(path)) for path in sys.path))]


@functools.lru_cache(maxsize=32)
def _installed(group: str, _folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages in a group, cached until a folder of `sys.path` changes."""
    return tuple(entry_points(group=group))


def _changed(path: str) -> int:
    """Return when a folder was last modified, as pip does when it installs or removes a package; 0 if it is missing."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0
