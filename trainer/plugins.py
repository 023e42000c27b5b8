"""Plugins: what other packages add to tristep by name, imported when the name is first asked for.

A package declares each name as an entry point; docs/plugins.md shows how. `tristep.contrib` declares its own in a table,
so that they are found in a checkout that was never installed, too.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any


def names(group: str) -> list[str]:
    """The names that plugins declare in a group such as "tristep.optimizers", in alphabetical order; nothing is imported."""
    return sorted({entry.name for entry in _declared(group)})


def load(group: str, name: str) -> Any:
    """Import what a plugin declares by this name; None if no plugin does.

    Raises:
        ImportError: it cannot be imported.
        ValueError: several packages declare the name.
    """
    found = [entry for entry in _declared(group) if entry.name == name]
    if not found:
        return None
    if len({entry.value for entry in found}) > 1:
        values = " and ".join(sorted(entry.value for entry in found))
        raise ValueError(f"{name!r} in the entry points {group!r} means both {values}: uninstall one of these packages")
    try:
        return found[0].load()
    except Exception as error:
        raise ImportError(
            f"{name!r}, which the entry points {group!r} declare as {found[0].value}, cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def in_contrib(group: str) -> dict[str, str]:
    """What `tristep.contrib` declares in a group: "module:name" by name."""
    return import_module("tristep.contrib").PLUGINS.get(group, {})


def _declared(group: str) -> list[EntryPoint]:
    ours = [EntryPoint(name, value, group) for name, value in in_contrib(group).items()]
    return [*ours, *_installed(group, tuple((path, _changed(path)) for path in sys.path))]


@functools.lru_cache(maxsize=32)
def _installed(group: str, _folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """What installed packages declare in a group. Their files are read again when a folder of `sys.path` has changed."""
    return tuple(entry_points(group=group))


def _changed(path: str) -> int:
    """When a folder of packages changed last, as it does when pip installs or removes one; 0 for a missing one."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0
