"""BasinMap: the basins of attraction of an optimizer on a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..scene import Control, Heatmap, Points, Scene, Text
from ..simulate import RATES, Basins, basin_map, function, tune_learning_rates
from ..simulate.candidates import named_optimizers
from .functions import On, function_panel, rounded, starts_around, with_rate
from .series import words_panel
from .view import View

__all__ = ["BasinMap"]


class BasinMap(View):
    """Basins of attraction: the minimum that an optimizer reaches from each start in the plane, and after how many steps.

    A choice selects the optimizer, and a slider the learning rate.

    Args:
        on: the function: a name, an expression, a `Function` or a callable, as for `simulate`.
        optimizers: the optimizers, as for `simulate`.
        learning_rates: the rates on the slider; None is 13 rates for each optimizer, from a thirtieth of its best rate to
            thirty times that rate.
        n: the number of starts along each side of the map, >= 2.
        steps: the number of steps from each start, >= 1.
        tolerance: how near a minimum a path must end, > 0; None is a hundredth of the larger side of the plot.
        **others: `name`, `theme` and `budget` of `View`.

    Attributes:
        basins: a dict from the name of each optimizer to its `Basins`, one for each learning rate.
    """

    def __init__(
        self,
        on: On = "himmelblau",
        optimizers: Any = ("sgd", "adam"),
        *,
        learning_rates: Sequence[float] | None = None,
        n: int = 64,
        steps: int = 300,
        tolerance: float | None = None,
        **others: Any,
    ) -> None:
        self.function, self._steps = function(on), steps
        named = named_optimizers(optimizers)
        if learning_rates is None:
            starts = starts_around(self.function, 16, 0)
            best = tune_learning_rates(self.function, named, starts, steps).best
            factors = 10 ** np.linspace(-1.5, 1.5, 13)
            rates = [np.nan_to_num(rate, nan=RATES[0]) * factors for rate in best]
            self._relative = True
        else:
            rates = [np.asarray(learning_rates, dtype=np.float64)] * len(named)
            self._relative = False
        self.learning_rates = dict(zip(named, rates, strict=True))
        self.basins: dict[str, list[Basins]] = {
            name: [
                basin_map(self.function, with_rate(arguments, rate, name), n, steps, tolerance=tolerance)
                for rate in self.learning_rates[name].tolist()
            ]
            for name, arguments in named.items()
        }
        super().__init__(**others)

    def scene(self) -> Scene:
        names = list(self.basins)
        n_rates = len(self.learning_rates[names[0]])
        choice = Control("optimizer", "optimizer", names, kind="choice")
        if self._relative:
            values = [rounded(factor) for factor in (10 ** np.linspace(-1.5, 1.5, n_rates)).tolist()]
            rate = Control("rate", "learning rate, times the best", values, n_rates // 2)
        else:
            rate = Control("rate", "learning rate", [rounded(each) for each in self.learning_rates[names[0]].tolist()])
        first = self.basins[names[0]][0]
        minima = first.minima
        reached = np.array([[basin.reached for basin in self.basins[name]] for name in names], dtype=np.int16)
        steps = np.array([[basin.steps for basin in self.basins[name]] for name in names], dtype=np.float32)
        steps = np.where(steps < 0, np.nan, np.maximum(steps, 1))
        by = ("optimizer", "rate")
        x, y = _edges(first.x), _edges(first.y)
        words = [f"({minimum.x:.3g}, {minimum.y:.3g})" for minimum in minima]
        heatmap = Heatmap(reached, x, y, palette="categories", words=words, label="minimum reached", by=by)
        duration = Heatmap(steps, x, y, limits=(1.0, float(self._steps)), scale="log", label="steps until near it", by=by)
        stars = Points([m.x for m in minima], [m.y for m in minima], style="ink", marker="star", size=10, words=words)
        shares = [[self._share(basin) for basin in self.basins[name]] for name in names]
        notes = Text(
            [
                [f"{name}, rate {self.learning_rates[name][k]:.3g}: {shares[i][k]:.0%} of the starts end at a minimum"
                 for k in range(n_rates)]
                for i, name in enumerate(names)
            ],
            0.5,
            0.5,
            by=by,
            align="center",
            size=10,
            style="ink",
        )  # fmt: skip
        panels = [
            function_panel(self.function, [heatmap, stars], title="which minimum is reached", row=0),
            function_panel(self.function, [duration, stars], title="how soon", row=0, column=1, legend=""),
            words_panel(notes, row=1, columns=2),
        ]
        return Scene(
            panels,
            f"Where optimizers end on {self.function.name}",
            [choice, rate],
            width=11,
            height=5.8,
            heights=(14, 1),
            description=self.describe(),
        )

    def describe(self) -> str:
        """Return the best rate of each optimizer, with the fraction of starts that reach each minimum, in sentences."""
        parts = [f"Starts all over {self.function.name}, {self._steps} steps."]
        for name, basins in self.basins.items():
            shares = [self._share(basin) for basin in basins]
            k = int(np.argmax(shares))
            counts = np.bincount(basins[k].reached[basins[k].reached >= 0], minlength=len(basins[k].minima))
            split = ", ".join(
                f"{count / basins[k].reached.size:.0%} at ({minimum.x:.3g}, {minimum.y:.3g})"
                for count, minimum in zip(counts.tolist(), basins[k].minima, strict=True)
            )
            parts.append(f"{name} at rate {self.learning_rates[name][k]:.3g}: {shares[k]:.0%} end at a minimum: {split}.")
        return " ".join(parts)

    @staticmethod
    def _share(basin: Basins) -> float:
        return float((basin.reached >= 0).mean())


def _edges(centres: np.ndarray) -> list[float]:
    half = float(centres[1] - centres[0]) / 2
    return [float(centres[0]) - half, float(centres[-1]) + half]
