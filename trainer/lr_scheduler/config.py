"""Conversion of schedules' arguments to JSON data: registered functions by name, inner schedules as configurations."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..registry import Registry

functions: Registry[Callable[..., Any]] = Registry("function", ignore_case=False, hint="It needs @register above its def")


def as_function(name: str, function: Any) -> Callable[[int], float]:
    """Return `function` if it is callable, or the function registered under that name.

    Raises:
        TypeError: `function` is neither a string nor callable.
        ValueError: no function is registered under that name.
    """
    if isinstance(function, str):
        return functions.lookup(function, name)
    if not callable(function):
        raise TypeError(f"{name}={function!r}: must be a callable from update count to a number")
    return function


def to_plain(name: str, value: Any) -> Any:
    """Return a copy of an argument that JSON can hold.

    Raises:
        TypeError: `value` holds a function that is not registered, or a mapping that holds a function.
    """
    if hasattr(value, "to_config"):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [to_plain(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if callable(value):
        if not _is_registered(value):
            raise TypeError(
                f"{name}={value!r}: is not registered, so it cannot be saved: write it with def, and @register above that"
            )
        return value.__name__
    if isinstance(value, Mapping) and (function_keys := [key for key, item in value.items() if callable(item)]):
        raise TypeError(
            f"{name}[{function_keys[0]!r}] is a function, which cannot be saved: wrap it in a function with @register above "
            "its def"
        )
    return copy.deepcopy(value)


def is_plain(value: Any) -> bool:
    """Return whether a value is a bool, number, string or None, or a list of such values."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def shown(value: Any) -> str:
    """Return the `repr` of a value, in which registered functions appear by name."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value.__name__ if _is_registered(value) else value)


def constructor_arguments(cls: type) -> dict[str, Any]:
    """Return the names and defaults of a constructor's arguments, including its base class's if it takes **kwargs."""
    arguments: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                arguments.setdefault(p.name, p.default)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return arguments


def _is_registered(value: Any) -> bool:
    return inspect.isfunction(value) and functions.get(value.__name__) is value
