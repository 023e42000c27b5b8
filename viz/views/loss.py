"""LossView: losses, other scalars and learning rates of recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...trainer.validation import choice, nonempty, number
from ..record import Curve, Run, Series
from ..scene import Axis, Control, Panel, RefLine, Scene
from .run_table import MOST_IN_LEGEND, with_table
from .run_view import Runs, RunView
from .series import (
    AXES,
    Drawn,
    empty_scene,
    grouped,
    is_loss,
    last_value,
    middle_steps,
    rate_panel,
    scalar_names,
    scalar_panel,
    scale_control,
    smoothing_control,
)

__all__ = ["LossView"]


class LossView(RunView):
    """Losses, other scalars such as accuracies, and learning rates of one or several runs over the steps.

    A scalar and its validation counterpart, such as "loss" and "val_loss", share a panel.

    Each scalar is drawn twice: a faint line as recorded, with a band from the smallest to the largest value of the steps
    that share a point; and a strong line, the mean of what was recorded in the last n steps, whose number the legend names.
    Before step n it is the mean of all values so far, and of a scalar recorded every k > n steps the value itself. A run
    that branches off another run begins anew. Crosses at the bottom mark steps with a loss that is not finite, rings at the
    lower edge of a log scale steps with one of 0 or below. Thin lines mark new epochs, if a scalar "epoch" was recorded.
    Learning rates are step curves.

    Args:
        runs: a `Recorder`, a `Run`, a `LiveLoop`, a `RunSet`, or an iterable of recorders, runs and loops; or a mapping from
            names to the losses of steps 1, 2, ..., such as {"adam": [1.0, 0.5]}; or the losses of one run.
        scalars: the names of the scalars to draw; a run may lack some of them. None draws all recorded scalars.
        smoothing: the initial number of steps to average, >= 0, which a slider changes; 0 draws no average. None is about
            a twentieth of the number of values of the longest curve, and a larger share for short curves.
        scale: the initial scale of losses and learning rates, "log" or "linear", which a choice changes. "log" is linear
            for losses while none is above 0, and for rates unless all are above 0 and the largest is over ten times the
            least.
        axis: the initial horizontal axis, "step", "epoch", "seconds" or "samples", which a choice changes. Others than
            "step" need scalars of these names in all runs.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `runs` is or contains something else, or a loss is no number.
        ValueError: `runs` or `scalars` is empty, or another argument is out of its range.

    Example:
        >>> from tristep.viz import LossView, Run
        >>> run = Run("adam")
        >>> for step in range(1, 101):
        ...     run.add_scalars(step, {"loss": 1 / step, "learning_rate": 0.1})
        >>> print(LossView(run).describe())
        adam: 100 steps, loss from 1 to 0.01 (average of 10 steps: 0.0105)
    """

    def __init__(
        self,
        runs: Runs | Mapping[str, Sequence[float]] | Sequence[float],
        scalars: Sequence[str] | None = None,
        *,
        smoothing: float | None = None,
        scale: str = "log",
        axis: str = "step",
        **settings: Any,
    ) -> None:
        self._scalars = (scalars,) if isinstance(scalars, str) else None if scalars is None else tuple(scalars)
        if self._scalars is not None:
            nonempty("scalars", self._scalars, ": there is nothing to draw")
        self._smoothing = None if smoothing is None else number("smoothing", smoothing, low=0)
        self.scale = choice("scale", scale, ("log", "linear"))
        self.axis = choice("axis", axis, ("step", *AXES))
        if isinstance(runs, Mapping):
            runs = [_run_of(name, losses) for name, losses in runs.items()]
        elif _are_losses(runs):
            runs = [_run_of("run", runs)]
        super().__init__(cast(Runs, runs), **settings)
        if self.axis not in self._axes():
            raise ValueError(f"axis={axis!r}: no scalar of this name was recorded, so it must be 'step'")

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the scalars that are drawn."""
        return scalar_names(self.runs) if self._scalars is None else self._scalars

    def smoothing(self) -> Control:
        return smoothing_control(self.runs, self.scalars, self._smoothing)

    def on_control(self, name: str, value: Any, index: int) -> None:
        if name == "axis":
            self.axis = value
            super().refresh()
        super().on_control(name, value, index)

    def scene(self) -> Scene:
        names = self.scalars
        smoothing = self.smoothing()
        scalars = [(run, scalar, run.scalars.get(scalar, Series())) for run in self.runs for scalar in names]
        curves = {i: series.curve() for i, (_, _, series) in enumerate(scalars) if len(series)}
        if not curves:
            wanted = " or ".join(map(repr, self._scalars or ("loss",)))
            return self.said(empty_scene(f"no {wanted} recorded yet"))
        along = {i: self._along(scalars[i][0], curve) for i, curve in curves.items()}
        reach = Axis.over(self.axis, *(x[[0, -1]] for x in along.values()), margin=0.01)
        epochs, rates = self._epoch_marks(), self._rates()
        many = len(self.runs) > MOST_IN_LEGEND
        rows = lambda numbers: [i // len(names) for i in numbers] if many else []  # noqa: E731
        panels = []
        for group in grouped(names):
            members = [i for i in curves if scalars[i][1] in group]
            if not members:
                continue
            drawn = []
            for i in members:
                run, scalar, _ = scalars[i]
                name = scalar if len(self.runs) == 1 else f"{run.name}, {scalar}" if len(names) > 1 else run.name
                drawn.append((name, curves[i], along[i], i))
            panel = scalar_panel(
                group[0], drawn, reach, smoothing, label=", ".join(group), scale=self.scale, runs=rows(members)
            )
            marks = [] if epochs is None else [RefLine(epochs, style="grid", name="epochs")]
            panels.append(replace(panel, layers=[*panel.layers, *marks]))
        below = [rate_panel(rates, reach, rows([style for *_, style in rates]), self.scale)] if rates else []
        panels, heights = _stacked([*panels, *below], reach, bool(rates))
        controls = [smoothing, scale_control(self.scale)]
        if len(axes := self._axes()) > 1:
            controls.append(Control("axis", "over", axes, axes.index(self.axis), "choice", remote=True))
        title = self.title("Loss" if all(map(is_loss, names)) else "Scalars")
        shares = heights if len(heights) > 1 else ()
        scene = Scene(panels, title, controls, height=sum(heights) + 0.1, heights=shares)
        return self.said(self._tabled(scene, names) if many else scene, self.axis)

    def _tabled(self, scene: Scene, names: Sequence[str]) -> Scene:
        """Return the scene with a table of the runs: their steps, and the last value of each scalar."""
        columns: dict[str, list[float]] = {"steps": [float(run.last_step or 0) for run in self.runs]}
        for name in names:
            columns[name.replace("_", " ")] = [last_value(run.scalars.get(name, Series())) for run in self.runs]
        first = names[0]
        return with_table(scene, [run.name for run in self.runs], columns, columns[first.replace("_", " ")], is_loss(first))

    def _axes(self) -> list[str]:
        return ["step", *(name for name in AXES if all(name in run.scalars for run in self.runs))]

    def _along(self, run: Run, curve: Curve) -> np.ndarray:
        steps = middle_steps(curve)
        if self.axis == "step":
            return steps
        axis = run.scalars[self.axis].curve()
        at, values = middle_steps(axis), axis.mean
        begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1) > 0)
        if self.axis == "epoch" and begins.size > 1 and (values == np.floor(values)).all():
            # Whole epoch numbers were recorded: interpolate within each epoch.
            at, values = at[begins], values[begins]
            length = (at[-1] - at[0]) / (values[-1] - values[0])
            at, values = np.append(at, at[-1] + length), np.append(values, values[-1] + 1)
        return np.interp(steps, at, values)

    def _epoch_marks(self) -> np.ndarray | None:
        """Return the first step of each epoch of the first run that has epochs; None if they are too many to be seen."""
        if self.axis != "step":
            return None
        for run in self.runs:
            if "epoch" in run.scalars and len(run.scalars["epoch"]):
                curve = run.scalars["epoch"].curve()
                begins = np.flatnonzero(np.diff(np.floor(curve.low)) > 0) + 1
                return curve.first[begins] if 0 < begins.size <= 60 else None
        return None

    def _rates(self) -> list[Drawn]:
        rates = [(i, run, run.scalars.get("learning_rate", Series())) for i, run in enumerate(self.runs)]
        curves = [(i, run, series.curve()) for i, run, series in rates if len(series)]
        return [("", curve, self._along(run, curve), i * max(len(self.scalars), 1)) for i, run, curve in curves]


def _are_losses(runs: Any) -> bool:
    """Return whether these are numbers: a list, an array or a tensor of them."""
    if isinstance(runs, (list, tuple)):
        return bool(runs) and all(isinstance(each, (int, float, np.number)) or hasattr(each, "item") for each in runs)
    return getattr(runs, "ndim", None) == 1


def _run_of(name: Any, losses: Any) -> Run:
    run = Run(str(name))
    try:
        numbers = [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError):  # the last from tensors of several numbers
        raise TypeError(f"runs[{name!r}]={losses!r:.80}: must be a list of losses, one number for each step") from None
    for step, value in enumerate(numbers, 1):
        run.add_scalars(step, {"loss": value})
    return run


def _stacked(panels: list[Panel], reach: Axis, has_rates: bool) -> tuple[list[Panel], tuple[float, ...]]:
    """Place the first panel at the top, the next panels side by side below it, and the last, of rates, at the bottom.

    Return the placed panels, and the heights of the rows in inches.
    """
    first, lower, rates = panels[0], panels[1 : len(panels) - has_rates], panels[len(panels) - has_rates :]
    columns = max(len(lower), 1)
    blank = replace(reach, label="")
    placed = [replace(first, columns=columns, x=reach if not (rates or lower) else blank)]
    placed += [replace(panel, row=1, column=k, x=blank if rates else reach) for k, panel in enumerate(lower)]
    heights = [2.4, 1.6] if lower else [4.0 if not rates else 3.75]
    for panel in rates:
        placed.append(replace(panel, row=len(heights), columns=columns))
        heights.append(1.25)
    return placed, tuple(heights)
