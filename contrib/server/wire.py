"""Encoding of values for a parameter server: JSON, with tags for types that JSON lacks. No pickle, and no code.

Functions, and the classes of optimizers and schedules, are sent as module and name. The receiver accepts only those that its
own program has registered: optimizers with `tristep.optimizer.register`, schedules and their functions with
`tristep.lr_scheduler.register`; and rules and torch's schedules.
"""

from __future__ import annotations

import base64
import json
import sys
import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, TensorRule
from ...trainer import contrib_names
from ...trainer.lr_scheduler import LRScheduler
from ...trainer.lr_scheduler.config import functions
from ...trainer.optimizer import Optimizer
from ...trainer.optimizer.counts import StepCounts

_OBJECTS = (Optimizer, StepCounts, LRScheduler)
_CLASSES = (*_OBJECTS, torch.optim.lr_scheduler.LRScheduler)
_PACKAGE = f"{__name__.partition('.')[0]}."


def encode(value: Any) -> bytes:
    """Encode a value as bytes.

    Args:
        value: None, a number, a string, or a tuple, list, set or dict of these; a torch.dtype; an array or a tensor of
            numbers; a rule, or a registered function or schedule class, at the top level of a module; an optimizer or a
            schedule of a registered class, with attributes of these types.

    Raises:
        TypeError: the value has another type.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Decode the result of `encode`.

    Raises:
        ValueError: `encode` cannot have returned `data`, or it names an object that this process has not registered.
    """
    try:
        return _value(json.loads(data))
    except Exception as error:  # NumPy and torch raise many kinds of errors for invalid bytes, shapes and dtypes
        raise ValueError(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        return {"tuple" if isinstance(value, tuple) else "set": [_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).partition(".")[2]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"tensor": [_plain(value.dtype), list(value.shape), _plain(flat.numpy())]}
    if isinstance(value, _OBJECTS):
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)  # Python 3.10 lacks it
        return {"object": [_name_of(type(value)), _plain(state)]}
    if isinstance(value, Rule | TensorRule | types.FunctionType) or (
        isinstance(value, type) and issubclass(value, _CLASSES)
    ):
        return {"name": _name_of(value)}
    raise TypeError(f"{type(value).__name__} is no plain data")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, content),) = plain.items()
    if tag == "tuple":
        return tuple(map(_value, content))
    if tag == "set":
        return set(map(_value, content))
    if tag == "dict":
        return {_value(key): _value(item) for key, item in content}
    if tag == "dtype" and isinstance(dtype := getattr(torch, content), torch.dtype):
        return dtype
    if tag == "array":
        dtype, shape, text = content
        if (dtype := np.dtype(dtype)).kind in "biuf":
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    if tag == "tensor":
        dtype, shape, flat = map(_value, content)
        return torch.from_numpy(flat).view(dtype).reshape(shape)
    if tag == "object" and issubclass(klass := _named(*content[0]), _OBJECTS):
        made = object.__new__(klass)
        vars(made).update(_value(content[1]))
        return made
    if tag == "name":
        return _named(*content)
    raise ValueError(f"a message with {tag!r}: {str(content)[:80]}")


def _name_of(value: Any) -> list[str]:
    """Return the module and the name of a class, a function or a rule. Raise TypeError if they do not lead to it."""
    name = _own_name(value)
    try:
        named = _named(*name)
    except ValueError as error:
        raise TypeError(str(error)) from None
    if named is not value:
        raise TypeError(f"{'.'.join(name)} is another object now")
    return name


def _own_name(value: Any) -> list[str]:
    function = value.fn if isinstance(value, Rule | TensorRule) else value
    return [function.__module__, function.__qualname__]


def _is_allowed(value: Any) -> bool:
    """Return whether messages may name this object: a rule, a schedule of torch, or a registered function or class."""
    if isinstance(value, Rule | TensorRule):
        return True
    if not isinstance(value, type):
        return any(value is each for each in functions.values())
    if issubclass(value, torch.optim.lr_scheduler.LRScheduler):
        return value.__module__ == torch.optim.lr_scheduler.__name__
    registered = (*Optimizer.opt_registry.values(), *LRScheduler.registry.values())
    return value in registered or (issubclass(value, _OBJECTS) and value.__module__.startswith(_PACKAGE))


def _named(module: str, qualified: str) -> Any:
    """Return the object of this name in an imported module. Raise ValueError if messages may not name it."""
    if f"{module}:{qualified}" in contrib_names.places("optimizers").values():
        import_module(module)
    named: Any = sys.modules.get(module)
    for part in qualified.split("."):
        named = getattr(named, part, None)
    if not _is_allowed(named) or _own_name(named) != [module, qualified]:  # a module also has imported names
        raise ValueError(
            f"{module}.{qualified} is no rule, and no optimizer, schedule or function that this process has registered: "
            "write @tristep.optimizer.register or @tristep.lr_scheduler.register above it, at the top level of a module "
            "that the server imports, too"
        )
    return named
