"""Recorded series as lines and axes of scenes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..record import Curve, Run
from ..record.blocks import POINTS
from ..scene import Axis, Panel, Scene, Text

__all__ = [
    "axis_from_zero",
    "axis_value",
    "drawable",
    "empty_scene",
    "fits_log",
    "grouped",
    "held",
    "is_loss",
    "is_sparse",
    "middle_steps",
    "percentiles",
    "scalar_names",
]

LARGEST = 3e38  # what a scene's numbers can hold
SOLID_GREY = 15  # the number of a line


def held(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve of values of which each holds until the next one: level, with a step where it changes.

    Where it changes too often for the points that a curve may have, steps are too small to be seen, and it stays as it is.
    """
    changes = np.flatnonzero((y[1:] != y[:-1]) & ~(np.isnan(y[1:]) & np.isnan(y[:-1]))) + 1
    if len(x) < 2 or 2 * len(changes) + 2 > POINTS:
        return x, y
    at = np.concatenate([x[:1], np.repeat(x[changes], 2), x[-1:]])
    return at, np.repeat(y[np.append(0, changes)], 2)


def scalar_names(runs: Iterable[Run]) -> tuple[str, ...]:
    """The scalars that any of these runs has, the loss first, without those that have a place of their own."""
    found = {name: len(series) for run in runs for name, series in run.scalars.items() if len(series)}
    for name in ("learning_rate", "epoch", "seconds"):
        found.pop(name, None)
    return tuple(sorted(found, key=lambda name: name != "loss"))


def grouped(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Scalars that are the same of other data, as "loss" and "val_loss", put together."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_bare(name), []).append(name)
    return [tuple(sorted(group, key=lambda name: _bare(name) != name)) for group in found.values()]


def is_loss(name: str) -> bool:
    """Whether a scalar is called a loss."""
    return _bare(name).endswith("loss")


def fits_log(name: str, *values: np.ndarray) -> bool:
    """Whether scalars of this name may be on a log scale: a loss that is ever above 0, and what spans two decades."""
    known = np.concatenate([each[(each > 0) & (each < LARGEST)] for each in values])
    return bool(known.size) and (is_loss(name) or float(known.max()) > 100 * float(known.min()))


def is_sparse(curve: Curve) -> bool:
    """Whether a curve has a value once in many steps, or one in all, which are seen better as dots."""
    n = int(np.isfinite(curve.mean).sum())
    return n == 1 or (1 < n <= 64 and float(curve.last[-1] - curve.first[0]) > 1.5 * (n - 1))


def _bare(name: str) -> str:
    for data in ("val_", "eval_", "valid_", "validation_", "test_", "train_"):
        if name.startswith(data) and name != data:
            return name.removeprefix(data)
    return name


def middle_steps(curve: Curve) -> np.ndarray:
    middle: np.ndarray = (curve.first + curve.last) / 2
    return middle


def drawable(values: np.ndarray) -> np.ndarray:
    """What a scene can hold: the rest is left out."""
    values = np.asarray(values, dtype=np.float64)
    return np.where(np.abs(values) < LARGEST, values, np.nan)


def percentiles(values: np.ndarray) -> np.ndarray:
    """Nearly the smallest and the largest, so that a single outlier does not set the scale."""
    there = values[np.abs(values) < LARGEST]
    return np.percentile(there, [0.5, 99.5]) if there.size else there


def axis_value(axis: Axis, share: float) -> float:
    """The value this far up an axis."""
    if axis.scale == "log":
        return float(axis.low * (axis.high / axis.low) ** share)
    return axis.low + (axis.high - axis.low) * share


def axis_from_zero(label: str, *values: np.ndarray) -> Axis:
    largest = max((float(np.nanmax(each)) for each in values if np.isfinite(each).any()), default=0.0)
    return Axis(label, 0.0, 1.08 * largest if largest > 0 else 1.0)


def empty_scene(words: str, description: str) -> Scene:
    """A scene that says why there is nothing in it."""
    layer = Text(words, 0.5, 0.5, align="center", size=11, style="quiet")
    return Scene([Panel(Axis("", 0, 1), Axis("", 0, 1), [layer], frame=False)], height=2.0, description=description)
