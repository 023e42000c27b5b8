"""UpdateRatioView and WeightsView: update ratios, norms of tensors, and single weights over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...trainer.validation import choice
from ..record import Recorder, Run, Series
from ..record.diagnosis import nonfinite_gradients
from ..record.series import POINTS
from ..record.statistics import quantiles
from ..scene import Axis, Band, Control, Layer, Line, Panel, RefLine, Scene, Text
from .rows import Rows
from .run_view import OneRunView
from .series import NOWHERE_FINITE, SOLID_GREY, crosses, drawable, empty_scene, middle_steps, not_positive, scale_control

__all__ = ["UpdateRatioView", "WeightsView", "bad_gradients", "farthest_ratios", "norm_panel", "ratio_panel"]

TARGET = (3e-4, 1e-3, 3e-3)  # the usual advice for the update ratio: 1e-3, within half a decade
MOST_NAMED = 8  # the number of lines with distinct colours


class UpdateRatioView(OneRunView):
    """The update ratio of each tensor over the steps: the norm of its update divided by the norm of its weights.

    In successful training it is usually about 1e-3; a band shows half a decade around it. Up to 8 tensors have a line each.
    With more tensors a band shows the middle 80 % and a line the median, and the 5 tensors that are farthest from 1e-3 in
    the later half of training have lines of their own.

    Args:
        run: a `Recorder`, a `Run` or a `LiveLoop`.
        scale: the initial scale of the ratios, "log" or "linear", which a choice changes.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `run` is something else.
        ValueError: `scale` is unknown.
    """

    def __init__(self, run: Recorder | Run, *, scale: str = "log", **settings: Any) -> None:
        self.scale = choice("scale", scale, ("log", "linear"))
        super().__init__(run, **settings)

    def scene(self) -> Scene:
        panel = ratio_panel(self.run, self.scale)
        if panel is None:
            return self.said(empty_scene("no update ratios recorded yet"))
        return self.said(Scene([panel], self.title("How far each update moves its tensor"), [scale_control(self.scale)]))

    def description(self) -> str:
        """Describe the run, and name the five tensors whose update ratio is farthest from 1e-3, the usual size."""
        worst = [f"{name} {ratio:.1g}" for name, ratio in farthest_ratios(self.run)[:5]]
        return super().description() + (f"\nfarthest from 1e-3: {', '.join(worst)}" if worst else "")


class WeightsView(OneRunView):
    """The norms of a tensor's weights, gradient and update over the steps, the cosine of the latter two, and single weights.

    A choice selects the tensor; with more than 64 tensors it also has whole modules. Single weights are drawn for tensors
    some weights of which were recorded (see `weights` of `Recorder`).

    Args:
        run: a `Recorder`, a `Run` or a `LiveLoop`.
        scale: the initial scale of the norms, "log" or "linear", which a choice changes.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `run` is something else.
        ValueError: `scale` is unknown.
    """

    def __init__(self, run: Recorder | Run, *, scale: str = "log", **settings: Any) -> None:
        self.scale = choice("scale", scale, ("log", "linear"))
        super().__init__(run, **settings)

    def scene(self) -> Scene:
        rows = Rows(self.run)
        followed = {name: series for name, series in self.run.weights.items() if len(series)}
        panels: list[Panel] = []
        norms = norm_panel(self.run, rows, self.scale)
        if norms is not None:
            panels.append(norms)
        cosine = self.run.tensors.get("cosine")
        if cosine is not None and len(cosine):
            x, means = cosine.means(rows.points(512))
            line = Line(x, drawable(rows.of_choices("cosine", means).T), by=("layer",))
            across = Axis.over("step", x, margin=0.01)
            vertical = Axis("cosine of gradient and update", -1.05, 1.05)
            layers = [RefLine([0.0], "y", style="grid"), line, *bad_gradients(self.run, rows, across, vertical)]
            panels.append(Panel(across, vertical, layers))
        if followed:
            panels.append(self._followed(followed, rows))
        if not panels:
            return self.said(empty_scene("no weights recorded yet"))
        placed = [replace(panel, column=i, legend="") for i, panel in enumerate(panels)]
        first = next((rows.choice_of(name) for name in followed), 0)
        layer = Control("layer", "tensor", rows.choices, first, "choice")
        title = self.title("Weights, gradients and updates")
        scale = [] if norms is None else [scale_control(self.scale, "scale of norms")]
        return self.said(Scene(placed, title, [layer, *scale], width=max(6.5, 4.4 * len(placed)), height=4.5))

    def _followed(self, followed: Mapping[str, Series], rows: Rows) -> Panel:
        layers: list[Layer] = []
        ends, values = [], []
        most = 0
        for name, series in followed.items():
            curve, choices = series.curve(), [rows.row_of(name), rows.choice_of(name)]
            ends += [curve.first[:1], curve.last[-1:]]
            values.append(curve.mean)
            for k in range(min(series.shape[0], MOST_NAMED)):
                y = np.full((len(rows.choices), len(curve.first)), np.nan)
                y[choices] = drawable(curve.mean[:, k])
                label = "" if k < most else f"followed weight {k + 1}"
                layers.append(Line(middle_steps(curve), y, by=("layer",), style=k, name=label))
            most = max(most, min(series.shape[0], MOST_NAMED))
        return Panel(Axis.over("step", *ends, margin=0.01), Axis.over("single weights", *values), layers)


def norm_panel(run: Run, rows: Rows, scale: str = "log") -> Panel | None:
    """Return a panel of the norms of weights, gradients and updates of the selected row; None if no norm was recorded.

    The scale "log" is linear while no norm is above 0.
    """
    layers: list[Layer] = []
    ends, values, zeros = [], [], []
    for i, what in enumerate(("weight", "gradient", "update")):
        series = run.tensors.get(f"{what}_norm")
        if series is None or not len(series):
            continue
        x, means = series.means(rows.points(512))
        y = drawable(rows.of_choices(f"{what}_norm", means).T)
        layers.append(Line(x, y, by=("layer",), style=i, name=what, marker=len(x) == 1))
        ends.append(x[[0, -1]])
        values.append(y)
        zeros.append(([x[each <= 0] for each in y], i))
    if not layers:
        return None
    scale = scale if any((each > 0).any() for each in values) else "linear"
    across, vertical = Axis.over("step", *ends, margin=0.01), Axis.over("norm", *values, scale=scale)
    layers += not_positive(across, vertical, zeros, ("layer",))
    layers += bad_gradients(run, rows, across, vertical)
    if not any(np.isfinite(each).any() for each in values):
        layers.append(NOWHERE_FINITE)
    return Panel(across, vertical, layers)


def bad_gradients(run: Run, rows: Rows | None, across: Axis, vertical: Axis) -> list[Layer]:
    """Return crosses, in a list, at the bottom of a panel, at steps with gradients that are not finite; empty if all are.

    The control "layer" selects one of `rows`; None marks steps with a bad gradient in any tensor.
    """
    nonfinite = nonfinite_gradients(run)
    if nonfinite is None or not nonfinite[1].any():
        return []
    curve, bad = nonfinite
    counts = bad.astype(np.float64)
    counts = counts.sum(axis=1, keepdims=True) if rows is None else rows.of_choices("gradient_nonfinite", counts)
    places = [middle_steps(curve)[here > 0] for here in counts.T]
    return crosses(across, vertical, places, style=1, by=() if rows is None else ("layer",))


def ratio_panel(run: Run, scale: str = "log", *, is_small: bool = False) -> Panel | None:
    """Return a panel of the tensors' update ratios; None if no update ratio was recorded.

    If `is_small`, its legend is short and names at most 3 of many tensors, as the panel is one of several.
    """
    series = run.tensors.get("update_ratio")
    if series is None or not len(series):
        return None
    x, ratios = series.means(512 if series.shape[0] > MOST_NAMED else POINTS)
    across = Axis.over("step", x[[0, -1]], margin=0.01)
    usual = "" if is_small else "usual"
    layers: list[Layer] = [
        Band([across.low, across.high], [TARGET[0]] * 2, [TARGET[2]] * 2, style="quiet", alpha=0.13, name=usual),
    ]
    positive = np.where((ratios > 0) & np.isfinite(ratios), ratios, np.nan)
    shown = dict(farthest_ratios(run))
    marker = len(x) == 1
    if ratios.shape[1] > MOST_NAMED:
        low, middle, high = quantiles(positive, (0.1, 0.5, 0.9))
        layers.append(Band(x, low, high, style=SOLID_GREY, name="" if is_small else "80 % of tensors"))
        middle = np.where((ratios == 0).all(axis=1), 0.0, middle)
        name = "median and 80 %" if is_small else "median"
        layers.append(Line(x, middle, style=SOLID_GREY, width=1.2, name=name, marker=marker))
        names = list(shown)[: 3 if is_small else 5]
    else:
        names = run.parameters
    for i, name in enumerate(names):
        layers.append(Line(x, drawable(ratios[:, run.parameters.index(name)]), style=i, width=1.2, name=name, marker=marker))
    label = "update / weight" if is_small else "update norm / weight norm"
    vertical = Axis.over(label, positive, np.array([1e-4, 1e-2]), scale=scale)
    if is_small:
        low, usual_ratio, high = map(np.log if scale == "log" else float, (vertical.low, TARGET[1], vertical.high))
        place = (usual_ratio - low) / (high - low)
        layers.append(Text("usual", 0.01, place, style="quiet", size=8))
    columns = (ratios[:, run.parameters.index(name)] for name in names)
    rings = not_positive(across, vertical, [([x[column <= 0]], i) for i, column in enumerate(columns)])
    layers += [replace(ring, name="") for ring in rings] if is_small else rings
    layers += bad_gradients(run, None, across, vertical)
    if not np.isfinite(ratios).any():
        layers.append(NOWHERE_FINITE)
    return Panel(across, vertical, layers)


def farthest_ratios(run: Run) -> list[tuple[str, float]]:
    """Return (tensor name, median update ratio in the later half), beginning with the ratio farthest from 1e-3."""
    series = run.tensors.get("update_ratio")
    if series is None or not len(series):
        return []
    _, ratios = series.means()
    late = ratios[len(ratios) // 2 :]
    late = np.where(late > 0, late, np.nan)
    (typical,) = quantiles(late.T, (0.5,))
    order = sorted(np.flatnonzero(np.isfinite(typical)), key=lambda i: -abs(np.log10(typical[i] / TARGET[1])))
    return [(run.parameters[i], float(typical[i])) for i in order]
