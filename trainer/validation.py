"""Checks of what users pass, with errors that name the argument, what came and what is allowed."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
    above: float = -math.inf,
) -> float:
    """`value` as a float, if it is a finite number with low <= value <= high and above < value < below."""
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
    raise ValueError(f"{name}={value!r}: must be {' and '.join(allowed)}")


def int_or_float(name: str, value: Any, low: float = -math.inf) -> float:
    """As `number`, but an int stays one, for the sake of how it prints."""
    checked = number(name, value, low)
    return int(value) if isinstance(value, (int, np.integer)) else checked


def integer(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> int:
    """`value` as an int, if it is an integer of at least `low` and at most `high`."""
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
    """`value`, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be True or False, not {type(value).__name__}")
    return value


def choice(
    name: str, value: Any, allowed: Iterable[str], *, ignore_case: bool = False, other_names: Mapping[str, str] | None = None
) -> str:
    """`value`, if it is one of the `allowed` names; `other_names` are what these may be called elsewhere, for a hint."""
    allowed = list(allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be a string, one of {', '.join(map(repr, allowed))}")
    if ignore_case:
        value = value.lower()
    if value not in allowed:
        meant = (other_names or {}).get(value)
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(value, allowed)
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}.{hint}")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known names nearest to `name`, with a space before it; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
