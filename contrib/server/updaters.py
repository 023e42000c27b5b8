"""Registry of the functions that servers may run for `set_updater`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from ...trainer.registry import Registry

_Updater = TypeVar("_Updater", bound=Callable[..., None])

updaters: Registry[Callable[..., None]] = Registry("updater", ignore_case=False)


def register_updater(updater: _Updater) -> _Updater:
    """Register a function, so that `set_updater` can send it to servers; a decorator.

    Servers run registered functions only. The function must be at the top level of a module that servers also import, such
    as the script. A function that is registered under the same name is replaced, with a warning.

    Raises:
        TypeError: `updater` is not a function, or has no name.

    Example:
        >>> from tristep import kvstore
        >>> @kvstore.register_updater
        ... def add(key, pushed, stored):
        ...     stored += pushed
    """
    if not inspect.isfunction(updater) or updater.__name__ == "<lambda>":
        raise TypeError(f"updater={updater!r}: must be a function (key, pushed, stored) with a name, written with def")
    return updaters.register(updater, stacklevel=3)
