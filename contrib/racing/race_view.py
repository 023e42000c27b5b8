"""RaceView: a race of optimizers to a target loss: curves, ratios with intervals, and what the tuning found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...trainer.validation import instance
from ...viz.scene import Axis, Band, Control, Layer, Line, Panel, Points, RefLine, Scene, Text
from ...viz.views.run_table import with_table
from ...viz.views.view import View
from .result import RaceResult, settings_text, with_interval

__all__ = ["RaceView"]

MEASURES = ("steps", "seconds")
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BETWEEN = (0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 3, 4)  # additional ticks of an axis with a short range


class RaceView(View):
    """View of a race: losses over steps with the target, the ratios of steps to the baseline's, and the tuning.

    A curve is the median over seeds, and its band reaches from the lowest to the highest loss. Ratios have intervals; a
    control chooses between steps and seconds. The tuning has a point for each trial, at its learning rate, and a ring
    around the settings that raced. Losses are shown up to a fifth above the first ones.

    Args:
        result: the result of `tristep.race`.
        **settings: arguments of `View`.

    Raises:
        TypeError: `result` is no RaceResult.

    Example:
        >>> import torch, tristep
        >>> data = [(x, x.sum(dim=1, keepdim=True)) for x in torch.randn(4, 16, 4)]
        >>> make, settings = lambda: torch.nn.Linear(4, 1), {"steps": 40, "trials": 4, "progress": False}
        >>> found = tristep.race(make, torch.nn.MSELoss(), data, ["sgd", "adam"], target=0.1, **settings)
        >>> view = tristep.viz.RaceView(found)
    """

    def __init__(self, result: RaceResult, **settings: Any) -> None:
        instance("result", result, RaceResult, "a RaceResult, as tristep.race gives it")
        self.result = result
        super().__init__(**settings)

    def scene(self) -> Scene:
        measure = Control("measure", "ratios of", list(MEASURES), kind="choice")
        panels = [self._curves(), self._ratios(), self._tuning()]
        height = max(5.6, 3.8 + 0.3 * len(self.result.names))
        shape: dict[str, Any] = {"width": 11, "height": height, "widths": (1.25, 1)}
        scene = Scene(panels, self._title(), [measure], description=self.describe(), notes=self.result.warnings(), **shape)
        result = self.result
        ratios = [result.compare(name, "steps").ratio for name in result.names]
        columns: dict[str, Any] = {f"steps, times {result.baseline}": ratios}
        columns["learning rate"] = [result.settings(name).get("learning_rate", math.nan) for name in result.names]
        return with_table(scene, result.names, columns, ratios)

    def describe(self) -> str:
        result = self.result
        of = "held-out data" if result.held_out else "the training batches"
        words = f"{self._title()}, after at most {result.measured[-1]} steps; losses of {of}.\n{result.verdict()}"
        for name in result.names:
            words += f"\n{name} raced with {settings_text(result.settings(name))}."
        return words

    def _title(self) -> str:
        result = self.result
        seeds = f"{len(result.seeds)} seed" + "s" * (len(result.seeds) > 1)
        return f"A race to a loss of {result.target:g}, {seeds}, {result.tuning.shape[1]} trials of tuning each"

    def _top(self) -> float:
        """Return the upper end of the axes of losses."""
        first = self.result.losses[..., 0]
        first = first[np.isfinite(first)]
        highest = float(first.max()) if first.size else 1.0
        return max(highest + 0.2 * abs(highest), self.result.target)

    def _axis(self, *values: np.ndarray) -> Axis:
        """Return the axis for these losses and the target, up to `_top`."""
        top = self._top()
        shown = [np.where(each <= top, each, np.nan) for each in values]
        finite = np.concatenate([each[np.isfinite(each)] for each in shown] + [np.array([self.result.target])])
        label = "held-out loss" if self.result.held_out else "training loss"
        return Axis.over(label, *shown, [top, self.result.target], scale="log" if (finite > 0).all() else "linear")

    def _curves(self) -> Panel:
        result, layers = self.result, list[Layer]()
        losses = np.sort(np.where(np.isfinite(result.losses), result.losses, np.nan), axis=1)  # NaN is last
        middle = losses[:, (len(result.seeds) - 1) // 2]
        for i in range(len(result.names)):
            if len(result.seeds) > 1:
                layers.append(Band(result.measured, losses[i, 0], np.fmax.reduce(losses[i]), style=i, run=i))
        layers += [
            Line(result.measured, middle[i], name=name, style=i, marker=len(result.measured) < 3, run=i)
            for i, name in enumerate(result.names)
        ]
        layers.append(RefLine([result.target], axis="y", label="target", style="quiet"))
        x = Axis("step", 0, float(result.measured[-1]))
        return Panel(x, self._axis(middle, losses[:, 0]), layers, title="median and range over seeds", rows=2)

    def _ratios(self) -> Panel:
        result, layers = self.result, list[Layer]()
        n = len(result.names)
        compared = [[result.compare(name, by) for name in result.names] for by in MEASURES]
        values = np.array([[(each.ratio, each.low, each.high) for each in row] for row in compared])  # [measures, names, 3]
        layers.append(RefLine([1.0], style="quiet"))
        if not np.isfinite(values).any():
            layers.append(Text(result.missing_ratios(), 0.5, 0.5, align="center"))
        for i, name in enumerate(result.names):
            y = float(n - 1 - i)
            words = [_words(name, compared[0][i])]
            layers.append(Line(values[:, i, 1:], [y, y], style=i, by=("measure",), width=2.5))
            layers.append(Points(values[:, i, :1], [y], style=i, by=("measure",), size=7, words=words))
        names = [f"{name} ({each.reached} of {each.of})" for name, each in zip(result.names, compared[0], strict=True)]
        finite = values[np.isfinite(values)]
        low, high = (min(finite.min(), 0.95), max(finite.max(), 1.05)) if finite.size else (0.5, 2.0)
        low, high = low / (high / low) ** 0.06, high * (high / low) ** 0.06
        ticks = [*TICKS, *(BETWEEN if high / low < 6 else ())]
        x = Axis(
            f"times what {result.baseline} needs",
            low,
            high,
            "log",
            [(t, f"{t:g}") for t in sorted(ticks) if low <= t <= high],
        )
        up = Axis("", -0.6, n - 0.4, ticks=[(n - 1 - i, name) for i, name in enumerate(names)])
        title = f"to the target, {result.level:.0%} intervals" if len(result.seeds) > 1 else "to the target"
        return Panel(x, up, layers, title=title, column=1)

    def _tuning(self) -> Panel:
        result, layers = self.result, list[Layer]()
        final = np.where(np.isfinite(result.tuning[..., -1]), result.tuning[..., -1], np.inf)
        final = np.sort(final, axis=2)[:, :, (final.shape[2] - 1) // 2]  # medians over seeds
        rates = [searched["learning_rate"] for searched in result.searched]
        top = self._top()
        layers.append(RefLine([result.target], axis="y", style="quiet"))
        for i, name in enumerate(result.names):
            k = int(result.chosen[i])
            tried = [{key: values[j] for key, values in result.searched[i].items()} for j in range(len(rates[i]))]
            words = [f"{name}, {settings_text(each)}: {final[i, j]:.4g}" for j, each in enumerate(tried)]
            layers.append(Points(rates[i], np.minimum(final[i], top), style=i, size=6, words=words, run=i))
            at = [rates[i][k]], [min(final[i, k], top)]
            layers.append(Points(*at, style=i, marker="ring", size=14, words=[words[k]], run=i))
        x = Axis.over("learning rate", *rates, scale="log")
        return Panel(x, self._axis(final), layers, title="tuning: loss at the end", row=1, column=1)


def _words(name: str, comparison: Any) -> str:
    if math.isnan(comparison.ratio):
        return f"{name}: reached from {comparison.reached} of {comparison.of} seeds"
    return f"{name}: {with_interval(comparison)} times the steps"
