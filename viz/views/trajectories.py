"""TrajectoryView: the trajectories of several optimizers across a function, and the losses along them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...trainer.presets import COMPARED
from ..scene import Button, Click, Control, Layer, Points, Scene, Text
from ..simulate import RATES, Function, Sensitivity, Simulation, Trajectories, function, tune_learning_rates
from ..simulate.candidates import named_optimizers
from ..simulate.trajectories import one_start
from .functions import (
    On,
    function_layers,
    function_panel,
    has_rate,
    loss_panel,
    plainer_ones,
    rounded,
    starts_around,
    ways,
    with_rate,
)
from .series import spread, words_panel
from .view import View

__all__ = ["MOVING", "TrajectoryView", "moments_of"]

FACTORS = tuple((10 ** np.linspace(-1, 1, 41)).tolist())  # of the best rates; twenty in a decade
MOVING = Click(event="start", does="move the start")
MOMENTS = 200  # positions of the step's slider at most


class TrajectoryView(View):
    """Trajectories of several optimizers on a function, with learning rates set by a slider, and the losses along them.

    Every optimizer starts at its own best rate, found by trying 41, or at the one it is given; the slider multiplies all of
    them. A click on the surface, or a drag of the start, lets them run from there, with a Python kernel.

    Args:
        on: as for `simulate`: a function's name, an expression, a `Function` or a callable.
        optimizers: as for `simulate`. The rate of those given as a name, or without "learning_rate", is the best one found.
        start: (x, y); the function's own if left out.
        steps: >= 1.
        factors: what the slider multiplies all rates by, increasing, with 1 among them; None is 41 from 0.1 to 10.
        seed: of the function's noise.

    Attributes:
        trajectories: the paths, as `simulate` found them.
        best: by name, the rate that the factor 1 stands for.
        found: what the last search for the best rates has found, in words; empty where all were given.
    """

    def __init__(
        self,
        on: On = "rosenbrock",
        optimizers: Any = COMPARED,
        start: Sequence[float] | None = None,
        steps: int = 200,
        *,
        factors: Sequence[float] | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        self.function, self._seed, self._steps = function(on), seed, steps
        self._factors = tuple(FACTORS if factors is None else factors)
        rounded_ones = [round(factor, 9) for factor in self._factors]
        if 1.0 not in rounded_ones or (np.diff(self._factors) <= 0).any():
            raise ValueError(f"factors={self._factors!r}: must be increasing, with 1 among them")
        self._one = rounded_ones.index(1.0)
        self._optimizers = named_optimizers(optimizers)
        self._labels, self._notes = plainer_ones(self._optimizers)
        self._start = one_start(self.function, start)
        self._rates: dict[str, float] = {}
        self._made: tuple[Any, Simulation] | None = None  # of what, and the simulation
        self.found = ""
        self._drawn: tuple[Function, list[Layer]] | None = None  # whose surface, and its layers
        self._find_rates()
        self._run()
        super().__init__(**others)

    @property
    def best(self) -> dict[str, float]:
        return dict(self._rates)

    def scene(self) -> Scene:
        trajectories = self.trajectories
        factors = [rounded(f) for f in self._factors]
        rate = Control("rate", "learning rates", factors, self._one, texts=[self._rate_in_words(f) for f in factors])
        moments = moments_of(trajectories.steps)
        step = Control("step", "step", moments, len(moments) - 1, kind="play")
        paths, curves = ways(trajectories, self._labels, slice(None), ("rate",))
        panels = [
            function_panel(self.function, [*self._surface(), *paths, self._start_point()], click=MOVING),
            loss_panel(trajectories, trajectories.losses[:, self._one, 0], curves, title="loss on the way", column=1),
        ]
        heights: tuple[float, ...] = ()
        if len(trajectories.names) > 1 and len(factors) > 1:
            rates = [
                # A rate stays with its name where the line is broken.
                "rates:  " + ",  ".join(f"{name}\xa0{self._rates[name] * factor:.3g}" for name in trajectories.names)
                for factor in factors
            ]
            panels.append(words_panel(Text(rates, 0.0, 0.5, by=("rate",), size=9, style="ink"), row=1, columns=2))
            heights = (12, 0.7)
        return Scene(
            panels,
            self.function.name,
            [rate, step],
            [Button("best", "find the best rates from here")],
            width=11,
            height=5.2,
            widths=(1.2, 1),
            heights=heights,
            description=self.describe(),
            message=self.found,
            notes=self._notes,
        )

    def describe(self) -> str:
        trajectories = self.trajectories
        x, y = self._start
        number, steps = len(trajectories.names), trajectories.steps
        parts = [f"{number} optimizers on {self.function.name}, {steps} steps from ({x:.3g}, {y:.3g})."]
        lost, losses = trajectories.diverged[:, self._one, 0], trajectories.losses[:, self._one, 0, -1]
        for i in np.argsort(np.where(lost, np.inf, losses)):
            end = trajectories.paths[i, self._one, 0, -1]
            what = "diverged" if lost[i] else f"loss {losses[i]:.4g} at ({end[0]:.3g}, {end[1]:.3g})"
            parts.append(f"{trajectories.names[i]} at rate {self._rates[trajectories.names[i]]:.3g}: {what}.")
        return " ".join([*parts, *([self.found] if self.found else []), *self._notes])

    def on_click(self, event: str, x: float, y: float) -> None:
        if event == "start":
            self._move(x, y)

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        if event == "start":
            self._move(x, y)

    def on_button(self, name: str) -> None:
        if name == "best":
            self._find_rates()
            self._run()
            self.refresh()

    def _rate_in_words(self, factor: float) -> str:
        """The rate itself where there is one, and the factor."""
        times = f"× {factor:.3g}"
        rates = {self._rates[name] for name in self._optimizers}
        return f"{min(rates) * factor:.3g} ({times})" if len(rates) == 1 else f"{times} the best"

    def _start_point(self) -> Points:
        x, y = self._start
        return Points([x], [y], style="ink", marker="ring", size=9, drag="start", words=["start"])

    def _move(self, x: float, y: float) -> None:
        self._start = float(x), float(y)
        self._run()
        self.refresh()

    def _find_rates(self) -> None:
        """The best rate of each optimizer that has none of its own."""
        open_ones = {name: given for name, given in self._optimizers.items() if not has_rate(given)}
        if open_ones:
            # From some starts around this one, so that no rate wins by a stroke of luck.
            starts = starts_around(self.function, 9, self._seed, self._start)
            found = tune_learning_rates(self.function, open_ones, starts, self._steps, seed=self._seed)
            best = dict(zip(found.names, found.best.tolist(), strict=True))
            self.found = _found(found)
        else:
            best, self.found = {}, ""
        for name, given in self._optimizers.items():
            if name in best:
                self._rates[name] = best[name] if np.isfinite(best[name]) else RATES[0]
            else:
                self._rates[name] = float(given["learning_rate"])

    def _run(self) -> None:
        at_best = {name: with_rate(given, self._rates[name]) for name, given in self._optimizers.items()}
        if self._made is None or self._made[0] != (self.function, at_best):
            settings: dict[str, Any] = {"learning_rates": self._factors, "relative": True, "seed": self._seed}
            self._made = (self.function, at_best), Simulation(self.function, at_best, self._steps, **settings)
        self.trajectories: Trajectories = self._made[1].run(self._start)

    def _surface(self) -> list[Layer]:
        """The function's own layers, which stay as they are where only the start has moved."""
        if self._drawn is None or self._drawn[0] is not self.function:
            self._drawn = self.function, function_layers(self.function, self.function.xlim, self.function.ylim)
        return list(self._drawn[1])


def _found(search: Sensitivity) -> str:
    """What a search has found, and among how much."""
    medians = search.quartiles[:, :, 1]
    each = [
        f"{name}: none converged" if np.isnan(rate) else f"{name} {rate:.3g} (loss {medians[i].min():.3g})"
        for i, (name, rate) in enumerate(zip(search.names, search.best.tolist(), strict=True))
    ]
    rates, starts = len(search.learning_rates), search.losses.shape[-1]
    return f"Best of {rates} learning rates, by the median loss from {starts} starts: {', '.join(each)}."


def moments_of(steps: int) -> list[int]:
    return spread(0, steps, MOMENTS).tolist()
