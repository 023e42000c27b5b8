"""Checks of users' arguments, whose errors name the argument, the value and what is allowed."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.messages import instance, listed, one_of, there_are

MOST_DEPTH = 200  # of JSON data: files have at most 160, of values that are nested 50 deep


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
    above: float = -math.inf,
) -> float:
    """Return `value` as a float, or raise unless it is a finite number with low <= value <= high and above < value < below.

    Raises:
        TypeError: it is no number, but a bool or a string, say.
        ValueError: it is outside of the range.
    """
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value):
            raise TypeError
        checked = float(value)
    except OverflowError:
        checked = math.inf
    except (TypeError, ValueError, RuntimeError):  # the last from tensors that are no real number
        raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}") from None
    if math.isfinite(checked) and low <= checked <= high and above < checked < below:
        return checked
    allowed = ["finite"]
    if low > -math.inf:
        allowed.append(f"{low:g} or more")
    if above > -math.inf:
        allowed.append(f"greater than {above:g}")
    if high < math.inf:
        allowed.append(f"{high:g} or less")
    if below < math.inf:
        allowed.append(f"less than {below:g}")
    is_long = isinstance(value, int) and math.isinf(checked)
    shown = f"{name} is an integer of {value.bit_length():,} bits" if is_long else f"{name}={value!r}"
    raise ValueError(f"{shown}: must be {' and '.join(allowed)}")


def int_or_float(name: str, value: Any, low: float = -math.inf) -> float:
    """Return `value` as an int if it is one, which prints without a decimal point, else as a float; see `number`."""
    checked = number(name, value, low)
    return int(value) if isinstance(value, (int, np.integer)) else checked


def integer(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> int:
    """Return `value` as an int, or raise unless it is an integer with low <= value <= high."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        checked = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be an integer, not {type(value).__name__}") from None
    if checked < low:
        raise ValueError(f"{name}={value!r}: must be {low:g} or more")
    if checked > high:
        raise ValueError(f"{name}={value!r}: must be {high:,} or less")
    return checked


def boolean(name: str, value: Any) -> bool:
    """Return `value`, or raise TypeError unless it is True or False."""
    instance(name, value, bool, "True or False", shown=True)
    return value


def choice(
    name: str,
    value: Any,
    allowed: Iterable[str],
    *,
    ignore_case: bool = False,
    other_names: Mapping[str, str] | None = None,
    more: str = "",
) -> str:
    """Return `value`, in lower case with `ignore_case`, or raise unless it is one of the `allowed` names.

    `other_names`: the allowed ones by other libraries' names for them, for a hint. `more`: a sentence for the end of the
    messages, on how to allow further names.
    """
    allowed, more = list(allowed), more and f" {more}"
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be a string, one of {listed(map(repr, allowed))}{more and '.' + more}")
    if ignore_case:
        value = value.lower()
    if value not in allowed:
        raise ValueError(f"{name}={value!r}:{one_of(value, allowed, other_names)}{more and '.' + more}")
    return value


def check_depth(name: str, data: Any) -> None:
    """Raise ValueError if lists and mappings in JSON data are nested so deeply that functions which call themselves fail."""
    level = [data]
    for _ in range(MOST_DEPTH):
        level = [each for each in level if isinstance(each, (Mapping, list, tuple))]
        if not level:
            return
        level = list(chain.from_iterable(each.values() if isinstance(each, Mapping) else each for each in level))
    raise ValueError(f"{name} is nested too deeply, more than {MOST_DEPTH} lists and dicts in each other")


def nonempty(name: str, values: Any, hint: str = "") -> Any:
    """Return `values`, or raise ValueError if there are none. `hint`: what to do, after the message."""
    if not len(values):
        raise ValueError(f"{name} is empty{hint}")
    return values


def absolute_path(name: str, value: Any) -> Path:
    """Return a path that stays the same file or folder after `os.chdir`. Symbolic links are kept.

    Raise FileNotFoundError if it is relative, and the current folder has been removed.
    """
    instance(name, value, (str, os.PathLike), "a path, a string or a pathlib.Path", shown=True)
    try:
        return Path(value).absolute()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{name}={str(value)!r}: is relative, and the current folder has been removed: give an absolute path"
        ) from None


def refuse_arguments(function: str, unknown: Mapping[str, Any], allowed: Iterable[str], instead: str = "") -> None:
    """Raise TypeError if there are unknown keyword arguments.

    `instead`: what to write for the first of them; "" names arguments with similar names.
    """
    for name, value in unknown.items():
        raise TypeError(f"{function} has no argument {name!r} (={value!r}).{there_are(name, allowed, instead)}")
