"""Dashboard: the overview of a run, in panels that share one step slider."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...trainer.validation import choice
from ..record import Recorder, Run, Series
from ..scene import Axis, Click, Control, RefLine, Scene, Text
from .heatmap import QUANTITIES, heat_panels, histogram_control, kept_histograms
from .rows import Rows
from .run_view import OneRunView
from .series import (
    empty_scene,
    grouped,
    over_steps,
    rate_panel,
    scalar_names,
    scalar_panel,
    scale_control,
    spread,
    words_panel,
)
from .weights import norm_panel, ratio_panel

__all__ = ["Dashboard"]

STOPS = 120  # the largest number of positions of the slider
MOST_GROUPS = 3  # the largest number of panels of scalars
COLUMNS = 12  # columns of the grid
TOP, BELOW = 2.9, 2.5  # inches of the first row of panels, and of each further one


class Dashboard(OneRunView):
    """An overview of a run: scalars, learning rate, a heat map of all tensors, update ratios, and one tensor's histograms.

    Up to three panels show scalars, each together with the same scalar on validation data, such as "loss" and "val_loss".
    The first, the losses, is the largest; the others and the learning rate stand at the right.

    The slider, or a click in a panel, selects a step: a line marks it in all panels, and a text shows the values recorded
    there, while legends have those of the lines, which are averages where they say so. A click on a row of the heat map, or
    the choice "tensor", selects the tensor shown below. The exported page has the same controls.

    Args:
        run: a `Run`; or a `Recorder` or a `LiveLoop`, whose new data `refresh` shows.
        quantity: the quantity of the heat map, such as "gradient_norm"; `TensorHeatmap` lists them all.
        scale: the initial scale of losses, learning rates, update ratios and norms, "log" or "linear", as of `LossView`; a
            choice changes it.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `run` is not a `Recorder`, a `Run` or a `LiveLoop`.
        ValueError: `quantity` or `scale` is unknown.
    """

    def __init__(self, run: Recorder | Run, quantity: str = "gradient_norm", *, scale: str = "log", **settings: Any) -> None:
        self.quantity = choice("quantity", quantity, QUANTITIES)
        self.scale = choice("scale", scale, ("log", "linear"))
        super().__init__(run, **settings)

    def scene(self) -> Scene:
        run = self.run
        if not run.last_step:
            return self.said(empty_scene("nothing recorded yet"))
        rows = Rows(run)
        groups = grouped(scalar_names([run]))[:MOST_GROUPS]
        rate = run.scalars.get("learning_rate", Series())
        smoothing = self.smoothing()
        scalars = [*(name for group in groups for name in group), *(["learning_rate"] if len(rate) else [])]
        steps = _stops(run)
        across = Axis.over("step", steps[[0, -1]], margin=0.01)
        kinds = histogram_control([run])
        histograms = kept_histograms(self._kept, run, rows, kinds)
        first = [
            scalar_panel(
                group[0],
                over_steps({name: run.scalars[name].curve() for name in group}),
                across,
                smoothing,
                scale=self.scale,
                names_each=True,  # the legend has the value of each
            )
            for group in groups
        ] + ([rate_panel(over_steps({"": rate.curve()}), across, scale=self.scale)] if len(rate) else [])
        heat = heat_panels([run], rows, [self.quantity])[0] if len(run.tensors.get(self.quantity, ())) else []
        tensors = [[*heat, ratio_panel(run, self.scale, is_small=True)], [histograms, norm_panel(run, rows, self.scale)]]
        below = [[panel for panel in row if panel is not None] for row in tensors]
        # The losses take two thirds of the first row. What has no place there ends the last row, and the one above.
        filled = [row for row in (first[:2], below[0] + first[3:], below[1] + first[2:3]) if row]
        mark = RefLine(steps[:, None], by=("step",), style="quiet", width=0.9)
        readout = Text(self._readouts(steps, scalars), 0.0, 0.5, by=("step",), size=9.5, style="ink")
        placed, heights = [words_panel(readout, columns=COLUMNS)], [0.05]
        for row in filled:
            starts = [0, 8] if row is filled[0] and first else [0, 4, 8] if len(first) > 2 else [0, 6]
            ends = [*starts[1 : len(row)], COLUMNS]
            for panel, start, end in zip(row, starts, ends, strict=False):
                # The shared axis aligns steps, also of histograms, which are counted seldom. Only the last row labels it.
                axis = across if row is filled[-1] else replace(across, label="")
                layers, click = [*panel.layers, mark], panel.click or Click("step", "x")
                panel = replace(panel, x=axis, layers=layers, click=click, legend="step" if len(row) < 3 else "")
                placed.append(replace(panel, row=len(heights), column=start, columns=end - start))
            heights.append(TOP if row is filled[0] else BELOW)
        controls = [Control("step", "step", steps.tolist(), len(steps) - 1)]
        if groups:
            controls.append(smoothing)
        controls += kinds
        if any(below):
            controls.append(Control("layer", "tensor", rows.choices, 0, "choice"))
        if first:
            controls.append(scale_control(self.scale))
        scene = Scene(placed, self.title("Training"), controls, width=11.0, height=sum(heights) + 0.05, heights=heights)
        return self.said(scene)

    def _readouts(self, steps: np.ndarray, scalars: list[str]) -> list[str]:
        columns = [_at(self.run.scalars[name], steps) for name in scalars]
        texts = []
        for k, step in enumerate(steps):
            values = [f"{name.replace('_', ' ')} {column[k]:.4g}" for name, column in zip(scalars, columns, strict=True)]
            texts.append(f"step {step:,.0f}" + ("   recorded: " if values else "") + "   ".join(values))
        return texts


def _stops(run: Run) -> np.ndarray:
    longest = max((series for kind in (run.scalars, run.tensors) for series in kind.values()), key=len, default=Series())
    steps = longest.curve().last
    if not len(steps):
        return np.array([float(run.last_step or 0)])
    return steps[spread(0, len(steps) - 1, STOPS)].astype(np.float64)


def _at(series: Series, steps: np.ndarray) -> np.ndarray:
    """Return the value of the point that contains each step, or of the next point if none does."""
    curve = series.curve()
    values: np.ndarray = curve.mean[np.clip(np.searchsorted(curve.last, steps), 0, len(curve.last) - 1)]
    return values
