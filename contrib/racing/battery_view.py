"""BatteryView: a map of optimizers and small tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...viz.scene import Axis, Heatmap, Layer, Panel, Points, Scene, Text
from ...viz.views.view import View
from .battery import BatteryResult, battery
from .tasks import TASKS

__all__ = ["BatteryView"]


class BatteryView(View):
    """A map of scores with a row for each optimizer and a column for each task; cells have the steps needed, or "–".

    The score is the fewest steps of any optimizer divided by an optimizer's own, from 0 to 1. Rows are sorted by their mean
    scores, the best at the top.

    Args:
        result: the result of `tristep.battery`, or optimizers to run it with.
        **settings: arguments of `View`.

    Example:
        >>> from tristep.viz import BatteryView
        >>> view = BatteryView(["sgd", "adam"])
    """

    def __init__(self, result: Any, **settings: Any) -> None:
        self.result = result if isinstance(result, BatteryResult) else battery(result)
        super().__init__(**settings)

    def scene(self) -> Scene:
        result = self.result
        order = np.argsort(result.scores.mean(axis=1), kind="stable")  # the first row is the lowest
        scores, medians = result.scores[order], result.medians[order]
        rows, columns = scores.shape
        layers: list[Layer] = [
            Heatmap(scores, [-0.5, columns - 0.5], [-0.5, rows - 0.5], limits=(0.0, 1.0), label="score", alpha=0.75)
        ]
        names = [result.labels[i] for i in order]
        for i in range(rows):
            for k in range(columns):
                word = f"{medians[i, k]:.0f}" if math.isfinite(medians[i, k]) else "–"
                layers.append(Text(word, (k + 0.5) / columns, (i + 0.5) / rows, align="center"))
        x, y = np.meshgrid(np.arange(columns), np.arange(rows))
        words = [
            f"{names[i]}, {TASKS[result.tasks[k]].name}: score {scores[i, k]:.2f}, rate {result.chosen[order[i], k]:.3g}"
            for i in range(rows)
            for k in range(columns)
        ]
        layers.append(Points(x.ravel(), y.ravel(), style="ink", size=0.1, words=words))
        across = Axis("", -0.5, columns - 0.5, ticks=[(k, TASKS[task].name) for k, task in enumerate(result.tasks)])
        mean = scores.mean(axis=1)
        up = Axis("", -0.5, rows - 0.5, ticks=[(i, f"{name}  {mean[i]:.2f}") for i, name in enumerate(names)])
        height = 1.7 + 0.45 * rows
        panel = Panel(across, up, layers, title="steps to solve each task, and the mean score", legend="")
        return Scene([panel], self._title(), width=9, height=height, description=self.describe())

    def describe(self) -> str:
        result = self.result
        parts = [f"{self._title()}: steps to solve each task, medians over {result.needed.shape[-1]} seeds."]
        medians = result.medians
        for k, task in enumerate(result.tasks):
            solved = np.isfinite(medians[:, k])
            if not solved.any():
                parts.append(f"{TASKS[task].name}: solved by none.")
                continue
            best = int(medians[:, k].argmin())
            words = f"{TASKS[task].name}: {result.names[best]} is first with {medians[best, k]:.0f} steps"
            failed = [name for name, one in zip(result.names, solved, strict=True) if not one]
            parts.append(words + (f"; not solved by {', '.join(failed)}." if failed else "."))
        best_mean = result.scores.mean(axis=1)
        parts.append(f"The highest mean score is {result.names[int(best_mean.argmax())]}'s, {best_mean.max():.2f}.")
        return " ".join(parts)

    def _title(self) -> str:
        return f"{len(self.result.names)} optimizers on {len(self.result.tasks)} tasks of one difficulty each"
