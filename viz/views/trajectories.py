"""TrajectoryView: trajectories of several optimizers on a function, and the losses along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..scene import Button, Click, Control, Layer, Points, Scene, Text
from ..simulate import RATES, Function, Sensitivity, Simulation, Trajectories, function, tune_learning_rates
from ..simulate.candidates import named_optimizers
from ..simulate.presets import COMPARED
from ..simulate.trajectories import one_start
from .functions import (
    On,
    Plane,
    function_layers,
    function_panel,
    has_rate,
    loss_panel,
    plane_of,
    rounded,
    starts_around,
    ways,
    with_rate,
)
from .run_table import with_table
from .series import spread, words_panel
from .view import View

__all__ = ["MOVING", "TrajectoryView", "moments_of"]

FACTORS = tuple((10 ** np.linspace(-1, 1, 41)).tolist())  # multiples of the best rates, twenty per decade
MOVING = Click(event="start", does="move the start")
MOMENTS = 200  # the largest number of positions of the step slider


class TrajectoryView(View):
    """Trajectories of several optimizers on a function, with learning rates set by a slider, and the losses along them.

    Every optimizer initially uses the learning rate given for it, or the best of 41 rates tried; the slider multiplies all
    rates. With a Python kernel, a click on the surface or a drag of the start reruns the optimizers from there.

    Args:
        on: the function: a name, an expression, a `Function` or a callable, as for `simulate`.
        optimizers: the optimizers to run, as for `simulate`. One without a "learning_rate" uses the best rate found.
        start: the start (x, y); None is the function's own.
        steps: the number of steps, >= 1.
        factors: the multipliers on the slider, increasing, 1 among them; None is 41 from 0.1 to 10.
        seed: the seed of the function's noise.
        **others: `name`, `theme` and `budget` of `View`.

    Attributes:
        trajectories: the paths and losses, a `Trajectories`.
        best: a dict from the name of each optimizer to its learning rate at the factor 1.
        found: the result of the last search for the best rates in a sentence; empty if all rates were given.

    Raises:
        ValueError: `factors` do not increase or lack 1, or another argument is out of its range.
    """

    instead_of: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("lr", "learning_rate", "learning_rates"), 'Write optimizers={"adam": {"learning_rate": 0.1}}.'
    )

    shape: ClassVar[float] = 1.07  # how much wider than high the panel of the function is

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
        rounded_factors = [round(factor, 9) for factor in self._factors]
        if 1.0 not in rounded_factors or (np.diff(self._factors) <= 0).any():
            raise ValueError(f"factors={self._factors!r}: must be increasing, with 1 among them")
        self._one = rounded_factors.index(1.0)
        self._optimizers = named_optimizers(optimizers)
        self._start = one_start(self.function, start)
        self._rates: dict[str, float] = {}
        self._made: tuple[Any, Simulation] | None = None  # (function, optimizers), and their simulation
        self.found = ""
        self._drawn: tuple[Function, list[Layer]] | None = None  # the function drawn last, and its layers
        self._find_rates()
        self._run()
        super().__init__(**others)

    @property
    def best(self) -> dict[str, float]:
        """The learning rate of each optimizer by name, without the slider's factor: the given or the best one."""
        return dict(self._rates)

    def scene(self) -> Scene:
        trajectories = self.trajectories
        factors = [rounded(f) for f in self._factors]
        rate = Control("rate", "learning rates", factors, self._one, texts=[self._rate_in_words(f) for f in factors])
        moments = moments_of(trajectories.steps)
        step = Control("step", "step", moments, len(moments) - 1, kind="play")
        paths, curves = ways(trajectories, slice(None), ("rate",))
        panels = [
            function_panel(self._plane, [*self._surface(), *paths, self._start_point()], click=MOVING),
            loss_panel(trajectories, trajectories.losses[:, self._one, 0], curves, title="loss on the way", column=1),
        ]
        heights: tuple[float, ...] = ()
        if len(trajectories.names) > 1 and len(factors) > 1:
            rates = [
                # A no-break space keeps a rate and its name on one line.
                "rates:  " + ",  ".join(f"{name}\xa0{self._rates[name] * factor:.3g}" for name in trajectories.names)
                for factor in factors
            ]
            panels.append(words_panel(Text(rates, 0.0, 0.5, by=("rate",), size=9, style="ink"), row=1, columns=2))
            heights = (12, 0.7)
        lost, ends = trajectories.diverged[:, self._one, 0], trajectories.losses[:, self._one, 0, -1].astype(np.float64)
        ends = np.where(lost, np.nan, ends)
        columns = {"learning rate": [self._rates[name] for name in trajectories.names], "loss": ends.tolist()}
        scene = Scene(
            panels,
            self.function.name,
            [rate, step],
            [Button("best", "find the best rates from here")],
            width=11,
            height=6.0,
            widths=(1.2, 1),
            heights=heights,
            description=self.describe(),
            message=self.found,
        )
        return with_table(scene, trajectories.names, columns, ends.tolist())

    def describe(self) -> str:
        """Return a sentence for each optimizer with its rate and its final loss, the lowest loss first."""
        trajectories = self.trajectories
        x, y = self._start
        number, steps = len(trajectories.names), trajectories.steps
        parts = [f"{number} optimizers on {self.function.name}, {steps} steps from ({x:.3g}, {y:.3g})."]
        lost, losses = trajectories.diverged[:, self._one, 0], trajectories.losses[:, self._one, 0, -1]
        for i in np.argsort(np.where(lost, np.inf, losses)):
            end = trajectories.paths[i, self._one, 0, -1]
            what = "diverged" if lost[i] else f"loss {losses[i]:.4g} at ({end[0]:.3g}, {end[1]:.3g})"
            parts.append(f"{trajectories.names[i]} at rate {self._rates[trajectories.names[i]]:.3g}: {what}.")
        return " ".join([*parts, *([self.found] if self.found else [])])

    def on_click(self, event: str, x: float, y: float) -> None:
        if event == "start":
            self._move(x, y)

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        if event == "start":
            self._move(x, y)

    def on_button(self, name: str) -> None:
        """Find the best learning rates from the current start, and rerun the optimizers."""
        if name == "best":
            self._find_rates()
            self._run()
            self.refresh()

    def _rate_in_words(self, factor: float) -> str:
        """Return the factor in words, with the learning rate if all optimizers have the same."""
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
        """Set the learning rate of each optimizer: the rate given for it, or the best rate found."""
        without_rate = {name: optimizer for name, optimizer in self._optimizers.items() if not has_rate(optimizer)}
        if without_rate:
            # Several starts around this one, so that no rate wins by luck.
            starts = starts_around(self.function, 9, self._seed, self._start)
            tuned = tune_learning_rates(self.function, without_rate, starts, self._steps, seed=self._seed)
            best = dict(zip(tuned.names, tuned.best.tolist(), strict=True))
            self.found = _found(tuned)
        else:
            best, self.found = {}, ""
        for name, optimizer in self._optimizers.items():
            if name in best:
                self._rates[name] = best[name] if np.isfinite(best[name]) else RATES[0]
            else:
                self._rates[name] = float(optimizer["learning_rate"])

    def _run(self) -> None:
        at_best = {name: with_rate(optimizer, self._rates[name]) for name, optimizer in self._optimizers.items()}
        if self._made is None or self._made[0] != (self.function, at_best):
            settings: dict[str, Any] = {"learning_rates": self._factors, "relative": True, "seed": self._seed}
            self._made = (self.function, at_best), Simulation(self.function, at_best, self._steps, **settings)
        self.trajectories: Trajectories = self._made[1].run(self._start)

    @property
    def _plane(self) -> Plane:
        return plane_of(self.function, self.shape)

    def _surface(self) -> list[Layer]:
        if self._drawn is None or self._drawn[0] is not self.function:
            self._drawn = self.function, function_layers(self.function, self._plane)
        return list(self._drawn[1])


def _found(search: Sensitivity) -> str:
    medians = search.quartiles[:, :, 1]
    each = [
        f"{name}: none converged" if np.isnan(rate) else f"{name} {rate:.3g} (loss {medians[i].min():.3g})"
        for i, (name, rate) in enumerate(zip(search.names, search.best.tolist(), strict=True))
    ]
    rates, starts = len(search.learning_rates), search.losses.shape[-1]
    return f"Best of {rates} learning rates, by the median loss from {starts} starts: {', '.join(each)}."


def moments_of(steps: int) -> list[int]:
    """Return the positions of a step slider from 0 to `steps`, at most 200."""
    return spread(0, steps, MOMENTS).tolist()
