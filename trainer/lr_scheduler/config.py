"""Conversion of schedules' arguments and attributes to JSON data: functions by name, inner schedules as configurations."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..registry import Registry
from ..validation import number

# Attributes of a schedule that are neither compared nor saved: caches, and how it was made.
NOT_SAVED = ("_recording", "_position", "_base_lr_given")
functions: Registry[Callable[..., Any]] = Registry("function", ignore_case=False, hint="It needs @register above its def")


def as_function(name: str, function: Any) -> Callable[[int], float]:
    """Return `function` if it is callable, or the function registered under that name."""
    if isinstance(function, str):
        return functions.lookup(function, name)
    if not callable(function):
        raise TypeError(f"{name}={function!r}: must be a callable from update count to a number")
    return function


def to_plain(name: str, value: Any) -> Any:
    """Return a copy of an argument that JSON can hold; raise TypeError for an unregistered function or what JSON lacks."""
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
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    value = value.item() if isinstance(value, np.generic) else value
    if not is_plain(value):
        raise TypeError(
            f"{name}={value!r:.200}: cannot be saved; numbers, strings, lists, and dicts with strings as keys can"
        )
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value is a bool, number, string or None, or a list of such values."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def saved_attributes(schedule: Any) -> dict[str, Any]:
    """Return copies of the attributes of any object that are bools, numbers, strings, None or lists of these."""
    attributes = {name: value.item() if isinstance(value, np.generic) else value for name, value in vars(schedule).items()}
    return {name: copy.deepcopy(value) for name, value in attributes.items() if name not in NOT_SAVED and is_plain(value)}


def checked_attributes(schedule: Any, saved: Any) -> dict[str, Any]:
    """Return what `saved_attributes` returned, perhaps read back from JSON, with tuples where the object has some.

    Raise TypeError or ValueError if it cannot have been of such an object.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"state of {type(schedule).__name__} is {saved!r:.80}: must be a dict")
    own = vars(schedule)
    for name, value in saved.items():
        allowed = isinstance(name, str) and name[:2] != "__" and name not in NOT_SAVED and is_plain(value)
        if not allowed or (callable(own.get(name)) and value is not None):
            raise ValueError(f"state of {type(schedule).__name__}: has {name!r}, which this class does not save")
    for name in ("_base_lr", "_warmup_final_lr"):
        if name in saved and (name == "_base_lr" or saved[name] is not None):
            number(f"state of {type(schedule).__name__}: {name}", saved[name], low=0)
    return {name: _like(own.get(name), copy.deepcopy(value)) for name, value in saved.items()}


def _like(own: Any, value: Any) -> Any:
    if not isinstance(value, list) or not isinstance(own, list | tuple):
        return value
    items = [_like(own[i] if i < len(own) else None, item) for i, item in enumerate(value)]
    return tuple(items) if isinstance(own, tuple) else items


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
