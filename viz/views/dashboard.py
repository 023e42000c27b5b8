"""Dashboard: what one wants to see of a run at once, with one slider for the step over all panels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..record import Recorder, Run, Series
from ..record.statistics import smoothed
from ..scene import Axis, Band, Click, Control, Layer, Line, Panel, RefLine, Scene, Text
from .heatmap import QUANTITIES, heat_panels, histogram_panel
from .rows import Rows
from .run_view import OneRunView
from .series import axis_from_zero, drawable, empty_scene, held, middle_steps, percentiles
from .weights import norm_panel, ratio_panel

__all__ = ["Dashboard"]

STOPS = 120  # of the slider


class Dashboard(OneRunView):
    """Loss, learning rate, gradients of all tensors, update ratios, and histograms of one, with a slider for the step.

    The slider, or a click into a panel, moves a line through all panels, and says what was recorded there. A click on a row
    of the heat map, or the choice "tensor", shows another tensor below. All of it works in the exported page, too.

    Args:
        run: a `Recorder`, with which `refresh` shows what is new, or a `Run`.
        quantity: of the heat map, as for `TensorHeatmap`.
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """

    def __init__(self, run: Recorder | Run, quantity: str = "gradient_norm", **settings: Any) -> None:
        if quantity not in QUANTITIES:
            raise ValueError(f"quantity={quantity!r}: must be one of {', '.join(map(repr, QUANTITIES))}")
        self.quantity = quantity
        super().__init__(run, **settings)

    def scene(self) -> Scene:
        """The picture as data."""
        run = self.run
        if not run.last_step:
            return empty_scene("nothing recorded yet", self.description())
        rows = Rows(run)
        scalars = [name for name in ("loss", "learning_rate") if len(run.scalars.get(name, ()))]
        steps = _stops(run)
        histograms = self._kept_panel(histogram_panel, rows)
        if histograms is not None:  # come seldom; the same step is as far right as in the other panels
            histograms = replace(histograms, x=Axis.over("step", steps[[0, -1]], margin=0.01))
        panels: list[list[Panel]] = [
            [_loss_panel(run.scalars[name]) if name == "loss" else _rate_panel(run.scalars[name]) for name in scalars],
            [heat_panels(run, rows, [self.quantity])[0]] if len(run.tensors.get(self.quantity, ())) else [],
            [panel for panel in (histograms, norm_panel(run, rows)) if panel is not None],
        ]
        if (ratios := ratio_panel(run)) is not None:
            panels[1].append(ratios)
        chosen = bool(panels[1] or panels[2])
        panels = [row for row in panels if row]
        mark = RefLine(steps[:, None], by=("step",), style="quiet", width=0.9)
        readout = Text(self._readouts(steps, scalars), 0.0, 0.5, by=("step",), size=9.5, style="ink")
        placed = [Panel(Axis("", 0, 1), Axis("", 0, 1), [readout], columns=2, frame=False)]
        for i, row in enumerate(panels):
            for k, panel in enumerate(row):
                click = panel.click or Click("step", "x")
                layers = [*panel.layers, mark]
                placed.append(replace(panel, layers=layers, click=click, row=i + 1, column=k, columns=2 // len(row)))
        controls = [Control("step", "step", steps.tolist(), len(steps) - 1)]
        if chosen:
            controls.append(Control("layer", "tensor", rows.names, 0, "choice"))
        return Scene(
            placed,
            self.title("Training"),
            controls,
            width=11.0,
            height=2.5 * len(panels) + 0.7,
            heights=(0.12, *[1.0] * len(panels)),
            description=self.description(),
        )

    def _readouts(self, steps: np.ndarray, scalars: list[str]) -> list[str]:
        columns = [_at(self.run.scalars[name], steps) for name in scalars]
        texts = []
        for k, step in enumerate(steps):
            found = [f"{name.replace('_', ' ')} {column[k]:.4g}" for name, column in zip(scalars, columns, strict=True)]
            texts.append("   ".join([f"step {step:,.0f}", *found]))
        return texts


def _loss_panel(series: Series) -> Panel:
    curve = series.curve()
    x = middle_steps(curve)
    scale = "log" if (curve.mean > 0).any() else "linear"
    (mean,) = smoothed(curve.mean, [max(len(x) / 50, 1.0) if len(x) > 20 else 0.0], scale)
    layers: list[Layer] = [
        Band(x, drawable(curve.low), drawable(curve.high), alpha=0.12),
        Line(x, drawable(curve.mean), width=0.6, alpha=0.35),
        Line(x, drawable(mean), marker=len(x) == 1),
    ]
    vertical = Axis.over("loss", mean, percentiles(curve.mean), scale=scale)
    return Panel(Axis.over("step", curve.first[:1], curve.last[-1:], margin=0.01), vertical, layers)


def _rate_panel(series: Series) -> Panel:
    curve = series.curve()
    line = Line(*held(middle_steps(curve), drawable(curve.mean)), marker=len(curve.first) == 1)
    across = Axis.over("step", curve.first[:1], curve.last[-1:], margin=0.01)
    return Panel(across, axis_from_zero("learning rate", curve.mean), [line])


def _stops(run: Run) -> np.ndarray:
    """Steps that the slider goes through, recorded ones."""
    longest = max((series for kind in (run.scalars, run.tensors) for series in kind.values()), key=len, default=Series())
    steps = longest.curve().last
    if not len(steps):
        return np.array([float(run.last_step or 0)])
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(STOPS, len(steps))).round().astype(np.int64))
    return steps[chosen].astype(np.float64)


def _at(series: Series, steps: np.ndarray) -> np.ndarray:
    """The value at each step, or the last one before it."""
    curve = series.curve()
    values: np.ndarray = curve.mean[np.clip(np.searchsorted(curve.last, steps), 0, len(curve.last) - 1)]
    return values
