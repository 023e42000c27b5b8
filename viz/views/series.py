"""Recorded series as lines and axes of scenes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..record import Curve, Run
from ..record.series import POINTS
from ..record.statistics import smoothed
from ..scene import Axis, Band, Control, Layer, Line, Panel, Points, Scene, Text

__all__ = [
    "MARKS",
    "NOWHERE_FINITE",
    "SOLID_GREY",
    "Drawn",
    "apart",
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
    "not_finite",
    "over_steps",
    "percentiles",
    "rate_panel",
    "scalar_names",
    "scalar_panel",
    "smoothing_control",
    "smoothing_of",
    "spread",
    "words_panel",
]

WIDTHS = tuple(float(digit * 10**power) for power in range(9) for digit in (1, 2, 5))  # of averages, in steps
LARGEST = 3e38  # what a scene's numbers can hold
SOLID_GREY = 15  # the number of a line
MARKS = 32  # crosses side by side at most
Drawn = tuple[str, Curve, np.ndarray, int]  # a curve's name in the legend, itself, where its points are, and its style
NOWHERE_FINITE = Text("no value is finite", 0.5, 0.5, align="center", size=11, style="quiet")


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


def smoothing_control(runs: Sequence[Run], names: Iterable[str], wanted: float | None = None) -> Control:
    """The control "smoothing" of `scalar_panel`: none, the width that is wanted, and two to either side of it.

    Args:
        runs, names: whose scalars are drawn.
        wanted: the width at first, in steps; None: enough for a trend to stand out of the noise, and in a long run for the
            line to be smooth; of less than 20 values, none.
    """
    index = None
    if wanted is None:
        points = max((len(run.scalars[name]) for name in names for run in runs if name in run.scalars), default=0)
        longest = max((run.last_step or 0 for run in runs), default=0)
        most = min(max(1.2 * points**0.5, points / 20), points / 6) * max(longest / max(points, 1), 1)
        wanted = min(WIDTHS[2:-2], key=lambda width: abs(np.log(width / max(most, 1))))
        index = 0 if points < 20 else None  # there are as many values at any time, so that a choice can stay as it is
    widths = [0.0, *[width for width in WIDTHS if width < wanted][-2:], *([wanted] if wanted else [])]
    widths += [width for width in WIDTHS if width > wanted][:2]
    return smoothing_of(widths, widths.index(wanted) if index is None else index)


def smoothing_of(widths: Sequence[float], index: int, unit: str = "step") -> Control:
    """The control "smoothing" of these widths, 0 for none."""
    words = [f"average of {width:.10g} {unit}{'s' * (width != 1)}" if width else "as recorded" for width in widths]
    return Control("smoothing", "smoothing", widths, index, texts=words)


def scalar_panel(
    name: str, drawn: Sequence[Drawn], across: Axis, smoothing: Control, *, label: str | None = None, scale: str = "log"
) -> Panel:
    """Scalars over the steps: faint as they were, with the range of steps that share a point, and strong as their average.

    Args:
        name: of the scalar, or of the first of several.
        drawn: its curves.
        across: the horizontal axis.
        smoothing: of `smoothing_control`.
        label: of the vertical axis; None: the name in words.
        scale: "log" where that fits the name and the values, or "linear".
    """
    layers: list[Layer] = []
    limits: list[np.ndarray] = []
    scale = scale if fits_log(name, *(curve.mean for _, curve, _, _ in drawn)) else "linear"
    for legend, curve, x, style in drawn:
        means = smoothed(middle_steps(curve), curve.mean, [float(width) for width in smoothing.values], scale)
        if (curve.low < curve.high).any():
            layers.append(Band(x, drawable(curve.low), drawable(curve.high), style=style, alpha=0.12))
        layers.append(Line(x, drawable(curve.mean), style=style, width=0.6, alpha=0.35))
        strong = Line(x, drawable(means), name=legend, style=style, by=("smoothing",), marker=is_sparse(curve))
        layers.append(strong if len(drawn) > 1 else replace(strong, legend_by="smoothing"))
        limits += [means[smoothing.index], percentiles(curve.mean)]
    if len(drawn) > 1:  # whose legend says once what all of them are
        layers.append(
            Line(drawn[0][2][:1], np.array([np.nan]), name="strong lines", style=SOLID_GREY, legend_by="smoothing")
        )
    vertical = Axis.over(name.replace("_", " ") if label is None else label, *limits, scale=scale, margin=0.06)
    marks = not_finite(across, vertical, [(x, curve.mean, curve.nonfinite, style) for _, curve, x, style in drawn])
    return Panel(across, vertical, [*layers, *marks])


def over_steps(curves: Mapping[str, Curve]) -> list[Drawn]:
    """Curves by their names, along the steps."""
    return [(name, curve, middle_steps(curve), i) for i, (name, curve) in enumerate(curves.items())]


def rate_panel(drawn: Sequence[Drawn], across: Axis, label: str = "learning rate") -> Panel:
    """Learning rates over the steps, each of which holds until the next one."""
    lines = []
    for legend, curve, x, style in drawn:
        lines.append(Line(*held(x, drawable(curve.mean)), name=legend, style=style, marker=len(curve.first) == 1))
    return Panel(across, axis_from_zero(label, *(curve.mean for _, curve, _, _ in drawn)), lines)


def not_finite(
    across: Axis, vertical: Axis, curves: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray, int]]
) -> list[Layer]:
    """Crosses at the bottom of a panel where values are infinite or NaN; and where there are no others, words that say so.

    Args:
        across, vertical: the panel's axes.
        curves: of each where its points are, its means, how many values of each point are not finite, [n], and its style.
    """
    bottom, layers, is_empty = axis_value(vertical, 0.03), list[Layer](), True
    for x, means, nonfinite, style in curves:
        is_empty &= not np.isfinite(means).any()
        at = apart(x[nonfinite > 0], (across.high - across.low) / MARKS)
        if at.size:
            name = "not finite" if not layers else ""
            layers.append(Points(at, np.full(at.size, bottom), marker="cross", size=5, style=style, name=name))
    if is_empty and layers:
        layers.append(NOWHERE_FINITE)
    return layers


def apart(x: np.ndarray, gap: float) -> np.ndarray:
    """Of rising places the first, and from there on each that is at least this far behind the last one taken."""
    found, k = list[float](), 0
    while k < len(x):
        found.append(float(x[k]))
        k = max(int(np.searchsorted(x, x[k] + gap)), k + 1)
    return np.array(found)


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


def words_panel(*words: Layer, **place: Any) -> Panel:
    """Room for words, without axes."""
    return Panel(Axis("", 0, 1), Axis("", 0, 1), words, frame=False, **place)


def empty_scene(words: str) -> Scene:
    """A scene that says why there is nothing in it."""
    return Scene([words_panel(Text(words, 0.5, 0.5, align="center", size=11, style="quiet"))], height=2.0)


def spread(first: int, last: int, most: int) -> np.ndarray:
    """All whole numbers from one to another, or about as many as there may be, evenly spread."""
    return np.unique(np.linspace(first, last, max(min(last - first + 1, most), 0)).round().astype(np.int64))
