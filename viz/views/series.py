"""Layers, axes and controls that draw recorded scalars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..record import Curve, Run, Series
from ..record.series import POINTS
from ..record.statistics import trailing_means
from ..scene import Axis, Band, Control, Layer, Line, Panel, Points, Scene, Text
from ..scene.controls import LARGEST, LEAST

__all__ = [
    "AXES",
    "MARKS",
    "NOWHERE_FINITE",
    "SOLID_GREY",
    "Drawn",
    "axis_from_zero",
    "axis_value",
    "crosses",
    "drawable",
    "empty_scene",
    "fits_log",
    "grouped",
    "held",
    "is_loss",
    "is_sparse",
    "last_value",
    "middle_steps",
    "not_finite",
    "not_positive",
    "over_steps",
    "percentiles",
    "rate_panel",
    "scalar_names",
    "scalar_panel",
    "scale_control",
    "smoothing_control",
    "smoothing_of",
    "spread",
    "thinned",
    "words_panel",
]

WIDTHS = tuple(float(digit * 10**power) for power in range(9) for digit in (1, 2, 5))  # of averages, in steps
AXES = ("epoch", "seconds", "samples")  # scalars that can be on the horizontal axis instead of the step
SOLID_GREY = 15  # the style number of a solid grey line
MARKS = 32  # the largest number of crosses, or of rings, side by side
Drawn = tuple[str, Curve, np.ndarray, int]  # legend name, curve, x of its points, style number
NOWHERE_FINITE = Text("no value is finite", 0.5, 0.5, align="center", size=11, style="quiet")


def held(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a step curve, x and y [n], on which each value holds until the next one.

    A curve that changes too often for the number of points allowed is returned unchanged: its steps could not be seen.
    """
    changes = np.flatnonzero((y[1:] != y[:-1]) & ~(np.isnan(y[1:]) & np.isnan(y[:-1]))) + 1
    if len(x) < 2 or 2 * len(changes) + 2 > POINTS:
        return x, y
    at = np.concatenate([x[:1], np.repeat(x[changes], 2), x[-1:]])
    return at, np.repeat(y[np.append(0, changes)], 2)


def scalar_names(runs: Iterable[Run]) -> tuple[str, ...]:
    """Return the names of the scalars of all runs, "loss" first, without "learning_rate" and those of `AXES`."""
    lengths = {name: len(series) for run in runs for name, series in run.scalars.items() if len(series)}
    for name in ("learning_rate", *AXES):
        lengths.pop(name, None)
    return tuple(sorted(lengths, key=lambda name: name != "loss"))


def grouped(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group names of the same scalar on different data, such as "loss" and "val_loss"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_bare(name), []).append(name)
    return [tuple(sorted(group, key=lambda name: _bare(name) != name)) for group in groups.values()]


def smoothing_control(runs: Sequence[Run], names: Iterable[str], wanted: float | None = None) -> Control:
    """Return the control "smoothing" of `scalar_panel`: no average, the initial width, and up to two widths on either side.

    `wanted` is the initial width in steps, 0 for none; None chooses one from the number of values, or none below 20 values.
    """
    index = None
    if wanted is None:
        points = max((len(run.scalars[name]) for name in names for run in runs if name in run.scalars), default=0)
        longest = max((run.last_step or 0 for run in runs), default=0)
        most = min(max(1.2 * points**0.5, points / 20), points / 6) * max(longest / max(points, 1), 1)
        wanted = min(WIDTHS[2:-2], key=lambda width: abs(np.log(width / max(most, 1))))
        index = 0 if points < 20 else None  # the control always has as many values, so that a selection remains valid
    widths = [0.0, *[width for width in WIDTHS if width < wanted][-2:], *([wanted] if wanted else [])]
    widths += [width for width in WIDTHS if width > wanted][:2]
    return smoothing_of(widths, widths.index(wanted) if index is None else index)


def smoothing_of(widths: Sequence[float], index: int, unit: str = "step") -> Control:
    """Return the control "smoothing", which chooses how many last steps are averaged, 0 for none; `unit` names them."""
    words = [f"average of {width:.10g} {unit}{'s' * (width != 1)}" if width else "as recorded" for width in widths]
    return Control("smoothing", "smoothing", widths, index, texts=words)


def scalar_panel(
    name: str,
    drawn: Sequence[Drawn],
    across: Axis,
    smoothing: Control,
    *,
    label: str | None = None,
    scale: str = "log",
    names_each: bool = False,
    runs: Sequence[int | None] = (),
) -> Panel:
    """Return a panel of scalars over the steps: faint lines as recorded, strong ones by `trailing_means`, and bands.

    A band spans the smallest and largest values of the steps that share a point. `name` is the (first) scalar, which also
    labels the vertical axis if `label` is None. A log scale is used only if it fits name and values. The legend names the
    width of the average: once for all of several curves, or with `names_each` of each. `runs` has each curve's row of the
    table of runs; it is empty without a table.
    """
    of = [*runs, *[None] * (len(drawn) - len(runs))]
    layers: list[Layer] = []
    limits: list[np.ndarray] = []
    scale = scale if fits_log(name, *(curve.mean for _, curve, _, _ in drawn)) else "linear"
    for (legend, curve, x, style), run in zip(drawn, of, strict=True):
        means = trailing_means(curve, [float(width) for width in smoothing.values])
        if (curve.low < curve.high).any():
            layers.append(Band(x, drawable(curve.low), drawable(curve.high), style=style, alpha=0.12, run=run))
        layers.append(Line(x, drawable(curve.mean), style=style, width=0.6, alpha=0.35, run=run))
        strong = Line(x, drawable(means), name=legend, style=style, by=("smoothing",), marker=is_sparse(curve), run=run)
        layers.append(replace(strong, legend_by="smoothing") if names_each or len(drawn) == 1 else strong)
        limits += [means[smoothing.index], percentiles(curve.mean)]
    if not names_each and len(drawn) > 1:  # the legend explains the strong lines once for all curves
        layers.append(
            Line(drawn[0][2][:1], np.array([np.nan]), name="strong lines", style=SOLID_GREY, legend_by="smoothing")
        )
    vertical = Axis.over(name.replace("_", " ") if label is None else label, *limits, scale=scale, margin=0.06)
    marks = list[Layer]()
    for run in dict.fromkeys(of):  # all at once without a table
        own = [each for each, other in zip(drawn, of, strict=True) if other == run]
        found = not_finite(across, vertical, [(x, curve.mean, curve.nonfinite, style) for _, curve, x, style in own])
        found += not_positive(across, vertical, [([x[curve.low < LEAST]], style) for _, curve, x, style in own])
        marks += [replace(mark, run=run) for mark in found]
    return Panel(across, vertical, [*layers, *marks])


def over_steps(curves: Mapping[str, Curve]) -> list[Drawn]:
    """Return named curves for a panel with steps on its horizontal axis."""
    return [(name, curve, middle_steps(curve), i) for i, (name, curve) in enumerate(curves.items())]


def scale_control(scale: str, label: str = "scale") -> Control:
    """Return the control "scale", which chooses between a logarithmic scale, where values allow it, and a linear one."""
    scales = ("log", "linear")
    return Control("scale", label, scales, scales.index(scale), "choice", remote=True)


def rate_panel(drawn: Sequence[Drawn], across: Axis, runs: Sequence[int | None] = (), scale: str = "log") -> Panel:
    """Return a panel of learning rates as step curves, on which each rate holds until the next one.

    A log scale is used only for rates above 0 the largest of which is more than ten times the least.
    """
    lines, rates = [], np.concatenate([curve.mean[np.isfinite(curve.mean)] for _, curve, _, _ in drawn])
    for (legend, curve, x, style), run in zip(drawn, [*runs, *[None] * (len(drawn) - len(runs))], strict=True):
        lines.append(Line(*held(x, drawable(curve.mean)), name=legend, style=style, marker=len(curve.first) == 1, run=run))
    if scale == "log" and rates.size and LEAST <= rates.min() < 0.1 * rates.max() < 0.1 * LARGEST:
        return Panel(across, Axis.over("learning rate", rates, scale="log", margin=0.06), lines)
    return Panel(across, axis_from_zero("learning rate", rates), lines)


def not_finite(
    across: Axis, vertical: Axis, curves: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray, int]]
) -> list[Layer]:
    """Return crosses at the bottom of a panel where values are infinite or NaN, and a text if no value is finite.

    For each curve: the x of its points, their means, their numbers of non-finite values, each [n], and its style.
    """
    layers, is_empty = list[Layer](), True
    for x, means, nonfinite, style in curves:
        is_empty &= not np.isfinite(means).any()
        layers += crosses(across, vertical, [x[nonfinite > 0]], style=style, name="" if layers else "not finite")
    if is_empty and layers:
        layers.append(NOWHERE_FINITE)
    return layers


def crosses(
    across: Axis, vertical: Axis, places: Sequence[np.ndarray], name: str = "not finite", **look: Any
) -> list[Layer]:
    """Return crosses at the bottom of a panel, where something is not finite; `name` is for the legend.

    `places` are their x; with `by`, the x for each value of that control. `look` has further arguments of `Points`.
    """
    return _at_the_bottom(across, axis_value(vertical, 0.03), places, marker="cross", name=name, **look)


def not_positive(
    across: Axis, vertical: Axis, lines: Iterable[tuple[Sequence[np.ndarray], int | str]], by: tuple[str, ...] = ()
) -> list[Layer]:
    """Return rings at the lower edge of a panel that is logarithmic, where values are 0 or below.

    For each line: the x of such values, as `places` of `crosses`, and its style.
    """
    layers: list[Layer] = []
    for places, style in lines if vertical.scale == "log" else ():
        name, y = "" if layers else "0 or below", axis_value(vertical, 0.015)
        layers += _at_the_bottom(across, y, places, by, marker="ring", style=style, name=name)
    return layers


def _at_the_bottom(
    across: Axis, y: float, places: Sequence[np.ndarray], by: tuple[str, ...] = (), **look: Any
) -> list[Layer]:
    marks = [thinned(x, (across.high - across.low) / MARKS) for x in places]
    most = max(map(len, marks))
    if not most:
        return []
    x = np.array([np.pad(mark, (0, most - len(mark)), constant_values=np.nan) for mark in marks])
    x = x if by else x[0]
    return [Points(x, np.full(x.shape, y), by=by, size=5, **look)]


def thinned(x: np.ndarray, gap: float) -> np.ndarray:
    """Return a subset of increasing positions, beginning with the first, whose neighbours are at least `gap` apart."""
    positions, k = list[float](), 0
    while k < len(x):
        positions.append(float(x[k]))
        k = max(int(np.searchsorted(x, x[k] + gap)), k + 1)
    return np.array(positions)


def is_loss(name: str) -> bool:
    """Return whether the name of a scalar says that it is a loss."""
    return _bare(name).endswith("loss")


def fits_log(name: str, *values: np.ndarray) -> bool:
    """Return whether a log scale suits scalars: a loss with a value above 0, or values over more than two decades."""
    positive = np.concatenate([each[(each >= LEAST) & (each < LARGEST)] for each in values])
    return bool(positive.size) and (is_loss(name) or float(positive.max()) > 100 * float(positive.min()))


def is_sparse(curve: Curve) -> bool:
    """Return whether a curve has only one value, or values many steps apart, which dots show better."""
    n = int(np.isfinite(curve.mean).sum())
    return n == 1 or (1 < n <= 64 and float(curve.last[-1] - curve.first[0]) > 1.5 * (n - 1))


def _bare(name: str) -> str:
    for data in ("val_", "eval_", "valid_", "validation_", "test_", "train_"):
        if name.startswith(data) and name != data:
            return name.removeprefix(data)
    return name


def last_value(series: Series) -> float:
    """Return the last finite value of a scalar among the last 2,048; NaN if there is none."""
    values = series.recent()[1]
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else float("nan")


def middle_steps(curve: Curve) -> np.ndarray:
    """Return the middle of the range of steps of each point of a curve."""
    middle: np.ndarray = (curve.first + curve.last) / 2
    return middle


def drawable(values: np.ndarray) -> np.ndarray:
    """Replace values that a scene cannot hold: large ones by NaN, which leaves a gap, those nearer to 0 than 1e-37 by 0."""
    values = np.asarray(values, dtype=np.float64)
    return np.where(np.abs(values) < LARGEST, np.where(np.abs(values) < LEAST, 0.0, values), np.nan)


def percentiles(values: np.ndarray) -> np.ndarray:
    """Return the 0.5th and 99.5th percentiles, so that a single outlier does not set the scale; empty if none is finite."""
    finite = values[np.abs(values) < LARGEST]
    return np.percentile(finite, [0.5, 99.5]) if finite.size else finite


def axis_value(axis: Axis, share: float) -> float:
    if axis.scale == "log":
        return float(axis.low * (axis.high / axis.low) ** share)
    return axis.low + (axis.high - axis.low) * share


def axis_from_zero(label: str, *values: np.ndarray) -> Axis:
    """Return a linear axis from 0 to slightly above the largest value."""
    largest = max((float(np.nanmax(each)) for each in values if np.isfinite(each).any()), default=0.0)
    return Axis(label, 0.0, 1.08 * largest if largest >= LEAST else 1.0)


def words_panel(*words: Layer, **place: Any) -> Panel:
    """Return a panel of texts without axes, at the place in the grid given to `Panel`."""
    return Panel(Axis("", 0, 1), Axis("", 0, 1), words, frame=False, **place)


def empty_scene(words: str) -> Scene:
    """Return a scene that contains only `words`, which say why there is no picture."""
    return Scene([words_panel(Text(words, 0.5, 0.5, align="center", size=11, style="quiet"))], height=2.0)


def spread(first: int, last: int, most: int) -> np.ndarray:
    """Return the integers from `first` to `last`, or, if there are more than `most`, an evenly spaced subset."""
    return np.unique(np.linspace(first, last, max(min(last - first + 1, most), 0)).round().astype(np.int64))
