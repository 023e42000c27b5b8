"""SensitivityView: how the final loss of optimizers depends on the learning rate."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ...trainer.validation import integer
from ..scene import Axis, Band, Layer, Line, Panel, Points, Scene
from ..simulate import function, tune_learning_rates
from ..simulate.candidates import named_optimizers
from ..simulate.presets import COMPARED
from .functions import LEAST, On, loss_label, starts_around
from .run_table import with_table
from .view import View

__all__ = ["SensitivityView"]


class SensitivityView(View):
    """The final loss on a function over the learning rate: a curve for each optimizer, with its best rate marked.

    Args:
        on: the function: a name, an expression, a `Function` or a callable, as for `simulate`.
        optimizers: the optimizers to compare, as for `simulate`.
        starts: the number of random starts around the function's start. A curve is the median over the starts, and a band
            holds the middle half of them.
        **arguments: `steps`, `learning_rates` and `seed` of `tune_learning_rates`; and `name`,
            `theme` and `budget` of `View`.

    Attributes:
        found: the result of `tune_learning_rates`, a `Sensitivity`.
    """

    def __init__(self, on: On = "rosenbrock", optimizers: Any = COMPARED, starts: int = 16, **arguments: Any) -> None:
        ours = {
            name: value for name, value in arguments.items() if name in inspect.signature(tune_learning_rates).parameters
        }
        where, named = function(on), named_optimizers(optimizers)
        if "start" not in ours:
            ours["start"] = starts_around(where, integer("starts", starts, low=1), int(ours.get("seed", 0)))
        self.found = tune_learning_rates(where, named, **ours)
        super().__init__(**{name: value for name, value in arguments.items() if name not in ours})

    def scene(self) -> Scene:
        tuning, where = self.found, self.found.trajectories.function
        least = tuning.trajectories.least
        quartiles = np.maximum(tuning.quartiles.astype(np.float64) - least, LEAST)
        top = (
            max(float(np.quantile(quartiles[np.isfinite(quartiles)], 0.98)), 10 * LEAST)
            if np.isfinite(quartiles).any()
            else 1.0
        )
        shown = np.where(np.isfinite(quartiles), np.minimum(quartiles, 30 * top), np.nan)
        layers, stars = list[Layer](), list[Layer]()
        for i, name in enumerate(tuning.names):
            low, middle, high = shown[i].T
            layers.append(Band(tuning.learning_rates, low, high, style=i, run=i))
            layers.append(Line(tuning.learning_rates, middle, name=name, style=i, run=i))
            if np.isfinite(tuning.best[i]):
                k = int(np.argmin(np.abs(tuning.learning_rates - tuning.best[i])))
                words = [f"{name}: best rate {tuning.best[i]:.3g}"]
                star = Points([tuning.best[i]], [middle[k]], style="ink", marker="star", size=9, words=words, run=i)
                stars.append(star)
        layers += stars
        rates = tuning.learning_rates
        panel = Panel(
            Axis("learning rate", float(rates.min()), float(rates.max()), scale="log"),
            Axis.over(loss_label(where) + f", after {tuning.trajectories.steps} steps", shown, scale="log"),
            layers,
        )
        title = f"Which rates work on {where.name}"
        scene = Scene([panel], title, width=8.5, height=4.8, description=self.describe())
        least_medians = np.nanmin(np.where(np.isfinite(quartiles), quartiles, np.nan)[:, :, 1], axis=1, initial=np.inf)
        columns = {"best rate": tuning.best.tolist(), "loss": least_medians.tolist()}
        return with_table(scene, tuning.names, columns, columns["loss"])

    def describe(self) -> str:
        """Return a sentence for each optimizer with its best rate, and with the range of rates that work about as well."""
        tuning = self.found
        parts = [f"Loss after {tuning.trajectories.steps} steps on {tuning.trajectories.function.name}, by learning rate."]
        for i, name in enumerate(tuning.names):
            median = tuning.quartiles[i, :, 1]
            if not np.isfinite(tuning.best[i]):
                parts.append(f"{name}: diverged at every rate.")
                continue
            # A wide range of rates whose loss is within ten times the best one's means that a rate is easy to choose.
            least = tuning.trajectories.least
            k = int(np.nanargmin(np.where(np.isfinite(median), median, np.nan)))
            good = tuning.learning_rates[(median - least) <= 10 * max(float(median[k] - least), LEAST)]
            parts.append(
                f"{name}: best {median[k]:.4g} at {tuning.best[i]:.3g}; within ten times of it from {good.min():.3g} to "
                f"{good.max():.3g}."
            )
        return " ".join(parts)
