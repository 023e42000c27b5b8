"""LossView: losses, other scalars and learning rates of recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...trainer.validation import choice
from ..record import Curve, Run, Series
from ..record.statistics import smoothed
from ..scene import Axis, Band, Control, Layer, Line, Panel, Points, RefLine, Scene
from .run_view import Runs, RunView
from .series import (
    axis_from_zero,
    axis_value,
    drawable,
    empty_scene,
    fits_log,
    grouped,
    held,
    is_loss,
    is_sparse,
    percentiles,
    scalar_names,
)

__all__ = ["LossView"]

WIDTHS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)  # of averages, in steps


class LossView(RunView):
    """Losses of one or several runs, and below them their other scalars, such as accuracies, and their learning rates.

    A scalar and the same of the validation data, such as "loss" and "val_loss", share a panel; others have their own.

    Each is drawn twice: faint as it was, with the smallest and largest values of steps that share a point, and strong, as
    the exponentially weighted average of each step and those before it, on a log scale the geometric one. Crosses at the
    bottom stand for steps whose loss is not finite, thin lines for new epochs where a scalar "epoch" was recorded. A
    learning rate holds until the next one takes its place.

    Args:
        runs: a `Recorder`, a `Run`, a `RunSet`, or several recorders and runs.
        scalars: names of the scalars to draw; a run may lack some. None: all that have been recorded, as they come.
        smoothing: how many steps back the weight in the average is 1 / e, at first, >= 0. None follows from the number of
            values of the longest curve: half its square root, but at least a fiftieth and at most a twentieth of it. A
            slider sets it.
        scale: "log" or "linear", of the losses; with "log" it is linear while no loss is above 0.
        axis: "step", "epoch" or "seconds": the last two where scalars of these names were recorded.
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: an argument that does not fit.

    Example:
        >>> from tristep.viz import LossView, Run
        >>> run = Run("adam")
        >>> for step in range(1, 101):
        ...     run.add_scalars(step, {"loss": 1 / step, "learning_rate": 0.1})
        >>> print(LossView(run).describe())
        adam: 100 steps, loss from 1 to 0.01
    """

    def __init__(
        self,
        runs: Runs,
        scalars: Sequence[str] | None = None,
        *,
        smoothing: float | None = None,
        scale: str = "log",
        axis: str = "step",
        **settings: Any,
    ) -> None:
        self._scalars = (scalars,) if isinstance(scalars, str) else None if scalars is None else tuple(scalars)
        if self._scalars == ():
            raise ValueError("scalars is empty: there is nothing to draw")
        if smoothing is not None and not smoothing >= 0:
            raise ValueError(f"smoothing={smoothing!r}: must be a number of steps, 0 or more")
        self._smoothing = smoothing
        self.scale = choice("scale", scale, ("log", "linear"))
        self.axis = choice("axis", axis, ("step", "epoch", "seconds"))
        super().__init__(runs, **settings)
        if self.axis not in self._axes():
            raise ValueError(f"axis={axis!r}: no scalar of this name was recorded, so it must be 'step'")

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the scalars that are drawn."""
        return scalar_names(self.runs) if self._scalars is None else self._scalars

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Another horizontal axis."""
        if name == "axis":
            self.axis = value
            super().refresh()

    def scene(self) -> Scene:
        """The picture as data."""
        widths, index = self._widths()
        control = Control("smoothing", "smoothing", widths, index, unit="steps")
        names = self.scalars
        known = [(run, scalar, run.scalars.get(scalar, Series())) for run in self.runs for scalar in names]
        curves = {i: series.curve() for i, (_, _, series) in enumerate(known) if len(series)}
        if not curves:
            wanted = " or ".join(map(repr, self._scalars or ("loss",)))
            return empty_scene(f"no {wanted} recorded yet", self.description())
        along = {i: self._along(known[i][0], curve) for i, curve in curves.items()}
        reach = Axis.over(self.axis, *(x[[0, -1]] for x in along.values()), margin=0.01)
        epochs, rates = self._epoch_marks(), self._rates()
        panels = []
        for group in grouped(names):
            there = [i for i in curves if known[i][1] in group]
            if not there:
                continue
            scale = self.scale if fits_log(group[0], *(curves[i].mean for i in there)) else "linear"
            layers: list[Layer] = []
            limits: list[np.ndarray] = []
            crosses: list[tuple[np.ndarray, int]] = []
            for i in there:
                curve, x, (run, scalar, _) = curves[i], along[i], known[i]
                means = smoothed(curve.mean, [width / _steps_per_point(curve) for width in widths], scale)
                name = scalar if len(self.runs) == 1 else f"{run.name}, {scalar}" if len(names) > 1 else run.name
                if (curve.low < curve.high).any():
                    layers.append(Band(x, drawable(curve.low), drawable(curve.high), style=i, alpha=0.12))
                layers.append(Line(x, drawable(curve.mean), style=i, width=0.6, alpha=0.35))
                layers.append(Line(x, drawable(means), name=name, style=i, by=("smoothing",), marker=is_sparse(curve)))
                limits += [means[index], percentiles(curve.mean)]
                if (bad := curve.nonfinite > 0).any():
                    crosses.append((x[bad], i))
            vertical = Axis.over(", ".join(group), *limits, scale=scale, margin=0.06)
            bottom = axis_value(vertical, 0.02)
            for k, (x, i) in enumerate(crosses):
                name = "" if k else "not finite"
                layers.append(Points(x, np.full(len(x), bottom), marker="cross", size=5, style=i, name=name))
            if epochs is not None:
                layers.append(RefLine(epochs, style="grid", name="epochs"))
            panels.append(Panel(reach, vertical, layers))
        panels, heights = _stacked(panels, reach, rates)
        controls = [control]
        if len(axes := self._axes()) > 1:
            controls.append(Control("axis", "over", axes, axes.index(self.axis), "choice", remote=True))
        return Scene(
            panels,
            self.title("Loss" if all(map(is_loss, names)) else "Scalars"),
            controls,
            height=sum(heights) + 0.1,
            heights=heights if len(heights) > 1 else (),
            description=self.description(),
        )

    def _widths(self) -> tuple[list[float], int]:
        """Widths of averages to choose from, in steps, and which is chosen."""
        longest = max((run.last_step or 0 for run in self.runs), default=0)
        known = {float(width) for width in WIDTHS if width <= max(longest / 10, 1)}
        if self._smoothing is None:
            curves = [run.scalars[name] for run in self.runs for name in self.scalars if len(run.scalars.get(name, ()))]
            points = max(map(len, curves), default=1)
            # Enough for a trend to stand out of the noise, and in a long run for the line to be smooth.
            wanted = min(max(points**0.5 / 2, points / 50), points / 20) * max(longest / points, 1)
            return sorted(known), sorted(known).index(min(known, key=lambda width: abs(np.log(max(width, 0.5) / wanted))))
        widths = sorted(known | {float(self._smoothing)})
        return widths, widths.index(float(self._smoothing))

    def _axes(self) -> list[str]:
        return ["step", *(name for name in ("epoch", "seconds") if all(name in run.scalars for run in self.runs))]

    def _along(self, run: Run, curve: Curve) -> np.ndarray:
        steps = (curve.first + curve.last) / 2
        if self.axis == "step":
            return steps
        known = run.scalars[self.axis].curve()
        at, values = (known.first + known.last) / 2, known.mean
        begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1) > 0)
        if self.axis == "epoch" and begins.size > 1 and (values == np.floor(values)).all():
            # Numbers of epochs: within one, time goes on.
            at, values = at[begins], values[begins]
            length = (at[-1] - at[0]) / (values[-1] - values[0])
            at, values = np.append(at, at[-1] + length), np.append(values, values[-1] + 1)
        return np.interp(steps, at, values)

    def _epoch_marks(self) -> np.ndarray | None:
        """The steps at which the first run that knows began an epoch, unless these are too many to be seen."""
        if self.axis != "step":
            return None
        for run in self.runs:
            if "epoch" in run.scalars and len(run.scalars["epoch"]):
                curve = run.scalars["epoch"].curve()
                begins = np.flatnonzero(np.diff(np.floor(curve.low)) > 0) + 1
                return curve.first[begins] if 0 < begins.size <= 60 else None
        return None

    def _rates(self) -> list[Line]:
        found = []
        for i, run in enumerate(self.runs):
            series = run.scalars.get("learning_rate")
            if series is not None and len(series):
                curve = series.curve()
                x, y = held(self._along(run, curve), drawable(curve.mean))
                found.append(Line(x, y, style=i * max(len(self.scalars), 1), width=1.4))
        return found


def _stacked(panels: list[Panel], reach: Axis, rates: list[Line]) -> tuple[list[Panel], tuple[float, ...]]:
    """The first panel above all, others side by side below it, and rates at the bottom; and the heights of these rows."""
    first, others = panels[0], panels[1:]
    columns = max(len(others), 1)
    blank = replace(reach, label="")
    placed = [replace(first, columns=columns, x=reach if not (rates or others) else blank)]
    placed += [replace(panel, row=1, column=k, x=blank if rates else reach) for k, panel in enumerate(others)]
    heights = [2.4, 1.6] if others else [4.0 if not rates else 3.75]
    if rates:
        vertical = axis_from_zero("learning rate", *(np.asarray(rate.y) for rate in rates))
        placed.append(Panel(reach, vertical, rates, row=len(heights), columns=columns))
        heights.append(1.25)
    return placed, tuple(heights)


def _steps_per_point(curve: Curve) -> float:
    return max(float(curve.last[-1] - curve.first[0]) / max(len(curve.first) - 1, 1), 1.0)
