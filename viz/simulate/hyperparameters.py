"""The hyper-parameters of an optimizer, and the ranges worth searching."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...trainer.loops.ensemble import make_optimizer
from ...trainer.optimizer import Optimizer, RuleOptimizer
from .presets import named

__all__ = ["SearchRange", "search_ranges"]


class SearchRange(NamedTuple):
    """A hyper-parameter of an optimizer, and the values that a slider offers for it.

    Attributes:
        name: the name of the constructor's argument.
        default: the default value.
        low, high: the first and last value.
        scale: "log" for positive numbers; "zero and log" for 0 and positive numbers; "below one" for decay rates of
            averages, spaced by their distance from 1; "above one", spaced likewise; "linear"; "integer"; or "boolean".
        values: the values in increasing order, including the default.
    """

    name: str
    default: Any
    low: Any
    high: Any
    scale: str
    values: tuple[Any, ...]


def search_ranges(optimizer: str | type[Optimizer]) -> list[SearchRange]:
    """Return the numeric hyper-parameters of an optimizer, with the values that its constructor accepts.

    They come in the order of the constructor's arguments, then `wd` if the optimizer uses it. Arguments whose default is
    text or None are left out.

    Args:
        optimizer: the name or class of an optimizer.

    Raises:
        ValueError: no optimizer is registered by that name.

    Example:
        >>> from tristep.viz import search_ranges
        >>> [(setting.name, setting.default, setting.scale) for setting in search_ranges("adam")]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('learning_rate', 0.001, 'log'), ('beta1', 0.9, 'below one'), ('beta2', 0.999, 'below one'),
         ('epsilon', 1e-08, 'log'), ('lazy_update', True, 'boolean'), ('wd', 0.0, 'zero and log')]
    """
    kind, preset = named(optimizer, {}) if isinstance(optimizer, str) else (optimizer, {})
    plain = make_optimizer(kind, preset)
    klass = type(plain)
    used = set(plain.rule.hyper) if isinstance(plain, RuleOptimizer) else {"lr", "wd"}
    has_own_init = klass.__init__ not in (RuleOptimizer.__init__, Optimizer.__init__)
    parameters = inspect.signature(klass.__init__).parameters.items() if has_own_init else ()
    defaults = {argument: parameter.default for argument, parameter in parameters}
    if "learning_rate" in defaults or (not has_own_init and "lr" in used):
        defaults["learning_rate"] = plain.lr
    defaults |= preset
    if used & {"wd", "decay"}:
        defaults["wd"] = plain.wd
    ranges = [_setting(klass, argument, each) for argument, each in defaults.items() if isinstance(each, (bool, int, float))]
    return [setting for setting in ranges if len(setting.values) > 1]


# Sliders.
_BELOW_ONE = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.965, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)


def _setting(klass: type[Optimizer], name: str, default: Any) -> SearchRange:
    takes = functools.partial(_takes, klass, name)
    if isinstance(default, bool):
        return SearchRange(name, default, False, True, "boolean", (False, True))
    if isinstance(default, int) and not takes(0.5):
        counts = [each for each in (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 50, 64, 100, 1000, 10_000) if takes(each)]
        high = max(20, 4 * default)
        return _positions(name, default, [each for each in counts if each <= high], "integer")
    values: Sequence[float]
    if not takes(1.0) and takes(0.5) and not takes(-0.5):
        scale, values = "below one", _BELOW_ONE
    elif default < 0 or (takes(-0.5) and not takes(0.5)):
        scale, values = "linear", (-1.0, -0.9, -0.7, -0.6, -0.5, -0.3, -0.1)
    elif default == 0:
        scale, values = "zero and log", (0.0, *(m * 10.0**k for k in range(-5, 0) for m in (1, 2, 5)), 1.0)
    elif not takes(1.0) and takes(2.0):
        scale, values = "above one", [float(f"{1 + (default - 1) * 10 ** (k / 4):.4g}") for k in range(-4, 5)]
    else:
        each_decade = 8 if name == "learning_rate" else 4
        wide = (3 if name == "learning_rate" or default < 0.1 else 1) * each_decade
        grid = [default * 10 ** (k / each_decade) for k in range(-wide, wide + 1)]
        scale, values = "log", [default if each == default else float(f"{each:.4g}") for each in grid]
    return _positions(name, default, [each for each in values if takes(each)], scale)


def _positions(name: str, default: Any, values: Sequence[Any], scale: str) -> SearchRange:
    ordered = tuple(sorted({*values, default}))
    return SearchRange(name, default, ordered[0], ordered[-1], scale, ordered)


def _takes(klass: type[Optimizer], name: str, value: Any) -> bool:
    try:
        klass(**{name: value})
    except (TypeError, ValueError):
        return False
    return True
