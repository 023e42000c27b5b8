"""The functions that servers run for `set_updater`: those that their own program has registered, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from ...trainer.registry import Registry

_Updater = TypeVar("_Updater", bound=Callable[..., None])

updaters: Registry[Callable[..., None]] = Registry("updater", ignore_case=False)


def register_updater(updater: _Updater) -> _Updater:
    """Decorator: let `set_updater` send this function to servers, which run it.

    Servers run no other functions. It must be defined at the top level of a module that they import, too, such as the
    script. Another function of that name is replaced, with a warning.

    Raises:
        TypeError: it is no function, or has no name.

    Example:
        >>> from tristep import kvstore
        >>> @kvstore.register_updater
        ... def add(key, pushed, stored):
        ...     stored += pushed
    """
    if not inspect.isfunction(updater) or updater.__name__ == "<lambda>":
        raise TypeError(f"updater={updater!r}: must be a function (key, pushed, stored) with a name, written with def")
    return updaters.register(updater, stacklevel=3)
