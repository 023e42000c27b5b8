"""Interactive views of optimizers on functions of two variables: trajectories, learning rates, basins, single updates.

All numbers are made by `simulate` and its neighbours, with the library's own optimizers; here they become pictures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..trainer.arguments import whole
from ..trainer.optimizer import Optimizer, create, registered
from .scene import (
    Arrows,
    Axis,
    Band,
    Button,
    Click,
    Control,
    Heatmap,
    Layer,
    Line,
    Panel,
    Points,
    RefLine,
    Scene,
    Text,
    surface_layers,
)
from .simulate import (
    FUNCTIONS,
    RATES,
    Basins,
    Function,
    SearchRange,
    Sensitivity,
    Simulation,
    Trajectories,
    UpdateTrace,
    basin_map,
    function,
    rule_source,
    search_ranges,
    trace_updates,
    tune_learning_rates,
)
from .view import View

__all__ = ["BasinMap", "Playground", "SensitivityView", "TrajectoryView"]

FACTORS = tuple((10 ** np.linspace(-1, 1, 41)).tolist())  # of the best rates; twenty in a decade
GRID = 161  # points of a surface along each side
MOMENTS = 200  # positions of the step's slider at most
LEAST = 1e-12  # of losses on a log scale
DEFAULT: Mapping[str, Mapping[str, Any]] = {
    "sgd": {},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "nag": {"momentum": 0.9},
    "adagrad": {},
    "rmsprop": {},
    "adam": {},
    "lion": {},
    "adabelief": {},
}

On = str | Function | Callable[[torch.Tensor], torch.Tensor]


class TrajectoryView(View):
    """The ways of several optimizers across a function, at rates that a slider moves, and the losses along them.

    Every optimizer starts at its own best rate, found by trying 41, or at the one it is given; the slider multiplies all of
    them. A click on the surface, or a drag of the start, lets them run from there, where Python is at hand.

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
    """

    def __init__(
        self,
        on: On = "rosenbrock",
        optimizers: Any = DEFAULT,
        start: Sequence[float] | None = None,
        steps: int = 200,
        *,
        factors: Sequence[float] | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        self.function, self._seed, self._steps = function(on), seed, steps
        self._factors = tuple(FACTORS if factors is None else factors)
        if 1.0 not in [round(factor, 9) for factor in self._factors] or (np.diff(self._factors) <= 0).any():
            raise ValueError(f"factors={self._factors!r}: must be increasing, with 1 among them")
        self._optimizers = _named(optimizers)
        self._start = tuple(map(float, self.function.start if start is None else start))
        self._rates: dict[str, float] = {}
        self._made: tuple[Any, Simulation] | None = None  # of what, and the simulation
        self._drawn: tuple[Function, list[Layer]] | None = None  # whose surface, and its layers
        self._find_rates()
        self._run()
        super().__init__(**others)

    @property
    def best(self) -> dict[str, float]:
        return dict(self._rates)

    def scene(self) -> Scene:
        trajectories = self.trajectories
        one = [round(factor, 9) for factor in self._factors].index(1.0)
        rate = Control("rate", "learning rates, times each one's best", [_rounded(f) for f in self._factors], one)
        moments = _moments(trajectories.steps)
        step = Control("step", "step", moments, len(moments) - 1, kind="play")
        surface = self._surface()
        curves: list[Layer] = []
        for i, name in enumerate(trajectories.names):
            paths = trajectories.paths[i, :, 0]
            surface.append(Line(paths[..., 0], paths[..., 1], name=name, style=i, by=("rate",), upto="step", head=True))
            losses = _above(trajectories.losses[i, :, 0], trajectories)
            number = np.arange(trajectories.steps + 1)
            curves.append(Line(number, losses, name=name, style=i, by=("rate",), upto="step"))
        surface.append(
            Points([self._start[0]], [self._start[1]], style="ink", marker="ring", size=9, drag="start", words=["start"])
        )
        finite = trajectories.losses[:, one, 0]
        axis = _loss_axis(trajectories, finite)
        panels = [
            _plane(self.function, surface, click=Click(event="start")),
            Panel(Axis("step", 0, trajectories.steps), axis, curves, title="loss on the way", column=1),
        ]
        return Scene(
            panels,
            self.function.name,
            [rate, step],
            [Button("best", "find the best rates from here")],
            width=11,
            height=5,
            widths=(1.2, 1),
            description=self.describe(),
        )

    def describe(self) -> str:
        trajectories = self.trajectories
        one = [round(factor, 9) for factor in self._factors].index(1.0)
        x, y = self._start
        number, steps = len(trajectories.names), trajectories.steps
        parts = [f"{number} optimizers on {self.function.name}, {steps} steps from ({x:.3g}, {y:.3g})."]
        order = np.argsort(np.where(trajectories.diverged[:, one, 0], np.inf, trajectories.losses[:, one, 0, -1]))
        for i in order:
            end = trajectories.paths[i, one, 0, -1]
            what = (
                "diverged"
                if trajectories.diverged[i, one, 0]
                else f"loss {trajectories.losses[i, one, 0, -1]:.4g} at ({end[0]:.3g}, {end[1]:.3g})"
            )
            parts.append(f"{trajectories.names[i]} at rate {self._rates[trajectories.names[i]]:.3g}: {what}.")
        return " ".join(parts)

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

    def _start_point(self) -> Points:
        x, y = self._start
        return Points([x], [y], style="ink", marker="ring", size=9, drag="start", words=["start"])

    def _move(self, x: float, y: float) -> None:
        self._start = float(x), float(y)
        self._run()
        self.refresh()

    def _find_rates(self) -> None:
        """The best rate of each optimizer that has none of its own."""
        open_ones = {name: given for name, given in self._optimizers.items() if not _has_rate(given)}
        if open_ones:
            # From some starts around this one, so that no rate wins by a stroke of luck.
            starts = _starts_around(self.function, 9, self._seed, self._start)
            found = tune_learning_rates(self.function, open_ones, starts, self._steps, seed=self._seed)
            best = dict(zip(found.names, found.best.tolist(), strict=True))
        else:
            best = {}
        for name, given in self._optimizers.items():
            if name in best:
                self._rates[name] = best[name] if np.isfinite(best[name]) else RATES[0]
            else:
                self._rates[name] = float(given["learning_rate"])

    def _run(self) -> None:
        at_best = {name: _with_rate(given, self._rates[name]) for name, given in self._optimizers.items()}
        if self._made is None or self._made[0] != (self.function, at_best):
            settings: dict[str, Any] = {"learning_rates": self._factors, "relative": True, "seed": self._seed}
            self._made = (self.function, at_best), Simulation(self.function, at_best, self._steps, **settings)
        self.trajectories: Trajectories = self._made[1].run(self._start)

    def _surface(self) -> list[Layer]:
        """The function's own layers, which stay as they are where only the start has moved."""
        if self._drawn is None or self._drawn[0] is not self.function:
            self._drawn = self.function, _surface(self.function, self.function.xlim, self.function.ylim)
        return list(self._drawn[1])


class SensitivityView(View):
    """What becomes of the loss at each learning rate: a curve for each optimizer, and its best rate.

    Args:
        on: as for `simulate`, or what `tune_learning_rates` gave.
        optimizers: as for `simulate`.
        starts: how many starts, spread at random around the function's own, each curve is the median of; the band holds the
            middle half of them.
        **arguments: those of `tune_learning_rates`: steps, learning_rates, judged_by, repeats, seed.

    Attributes:
        found: what `tune_learning_rates` gave.
    """

    def __init__(
        self, on: On | Sensitivity = "rosenbrock", optimizers: Any = DEFAULT, starts: int = 16, **arguments: Any
    ) -> None:
        ours = {
            name: value for name, value in arguments.items() if name in inspect.signature(tune_learning_rates).parameters
        }
        if isinstance(on, Sensitivity):
            if ours:
                raise ValueError(f"{', '.join(ours)}: `on` has been found already; leave them out")
            self.found = on
        else:
            where = function(on)
            if "start" not in ours:
                ours["start"] = _starts_around(where, whole("starts", starts, low=1), int(ours.get("seed", 0)))
            self.found = tune_learning_rates(where, optimizers, **ours)
        super().__init__(**{name: value for name, value in arguments.items() if name not in ours})

    def scene(self) -> Scene:
        found, where = self.found, self.found.trajectories.function
        least = _least(where, found.losses)
        quartiles = np.maximum(found.quartiles.astype(np.float64) - least, LEAST)
        top = (
            max(float(np.quantile(quartiles[np.isfinite(quartiles)], 0.98)), 10 * LEAST)
            if np.isfinite(quartiles).any()
            else 1.0
        )
        shown = np.where(np.isfinite(quartiles), np.minimum(quartiles, 30 * top), np.nan)
        layers: list[Layer] = []
        best_x, best_y, words = [], [], []
        for i, name in enumerate(found.names):
            low, middle, high = shown[i].T
            layers.append(Band(found.learning_rates, low, high, style=i))
            layers.append(Line(found.learning_rates, middle, name=name, style=i))
            if np.isfinite(found.best[i]):
                k = int(np.argmin(np.abs(found.learning_rates - found.best[i])))
                best_x.append(found.best[i])
                best_y.append(middle[k])
                words.append(f"{name}: best rate {found.best[i]:.3g}")
        layers.append(Points(best_x, best_y, style="ink", marker="star", size=9, words=words))
        rates = found.learning_rates
        panel = Panel(
            Axis("learning rate", float(rates.min()), float(rates.max()), scale="log"),
            Axis.over(_loss_label(where) + f", after {found.trajectories.steps} steps", shown, scale="log"),
            layers,
        )
        return Scene([panel], f"Which rates work on {where.name}", width=8.5, height=4.8, description=self.describe())

    def describe(self) -> str:
        found = self.found
        parts = [f"Loss after {found.trajectories.steps} steps on {found.trajectories.function.name}, by learning rate."]
        for i, name in enumerate(found.names):
            median = found.quartiles[i, :, 1]
            if not np.isfinite(found.best[i]):
                parts.append(f"{name}: diverged at every rate.")
                continue
            # Rates at which it is at most ten times as far from the least as at its best: how easy it is to choose one.
            least = _least(found.trajectories.function, found.losses)
            k = int(np.nanargmin(np.where(np.isfinite(median), median, np.nan)))
            good = found.learning_rates[(median - least) <= 10 * max(float(median[k] - least), LEAST)]
            parts.append(
                f"{name}: best {median[k]:.4g} at {found.best[i]:.3g}; within ten times of it from {good.min():.3g} to "
                f"{good.max():.3g}."
            )
        return " ".join(parts)


class BasinMap(View):
    """Which minimum an optimizer reaches from every point of the plane, at rates that a slider moves.

    Args:
        on: as for `simulate`.
        optimizers: names, or as for `simulate`; a choice shows one of them.
        learning_rates: those of the slider; None is 13 from a thirtieth of each one's best to thirty times it.
        n: points along each side, >= 2.
        steps: >= 1.
        tolerance: as for `basin_map`.

    Attributes:
        basins: by optimizer and rate, what `basin_map` found.
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
        given = _named(optimizers)
        if learning_rates is None:
            starts = _starts_around(self.function, 16, 0)
            best = tune_learning_rates(self.function, given, starts, steps).best
            factors = 10 ** np.linspace(-1.5, 1.5, 13)
            rates = [np.nan_to_num(rate, nan=RATES[0]) * factors for rate in best]
            self._relative = True
        else:
            rates = [np.asarray(learning_rates, dtype=np.float64)] * len(given)
            self._relative = False
        self.learning_rates = dict(zip(given, rates, strict=True))
        self.basins: dict[str, list[Basins]] = {
            name: [
                basin_map(self.function, _with_rate(arguments, rate, name), n, steps, tolerance=tolerance)
                for rate in self.learning_rates[name].tolist()
            ]
            for name, arguments in given.items()
        }
        super().__init__(**others)

    def scene(self) -> Scene:
        names = list(self.basins)
        n_rates = len(self.learning_rates[names[0]])
        choice = Control("optimizer", "optimizer", names, kind="choice")
        if self._relative:
            values = [_rounded(factor) for factor in (10 ** np.linspace(-1.5, 1.5, n_rates)).tolist()]
            rate = Control("rate", "learning rate, times the best", values, n_rates // 2)
        else:
            rate = Control("rate", "learning rate", [_rounded(each) for each in self.learning_rates[names[0]].tolist()])
        first = self.basins[names[0]][0]
        minima = first.minima
        reached = np.array([[basin.reached for basin in self.basins[name]] for name in names], dtype=np.int16)
        steps = np.array([[basin.steps for basin in self.basins[name]] for name in names], dtype=np.float32)
        steps = np.where(steps < 0, np.nan, np.maximum(steps, 1))
        by = ("optimizer", "rate")
        x, y = _edges(first.x), _edges(first.y)
        words = [f"({minimum.x:.3g}, {minimum.y:.3g})" for minimum in minima]
        found = Heatmap(reached, x, y, palette="categories", words=words, label="minimum reached", by=by)
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
        blank = Axis("", 0, 1)
        panels = [
            _plane(self.function, [found, stars], title="which minimum is reached", row=0),
            _plane(self.function, [duration, stars], title="how soon", row=0, column=1),
            Panel(blank, blank, [notes], row=1, columns=2, frame=False),
        ]
        return Scene(
            panels,
            f"Where optimizers end on {self.function.name}",
            [choice, rate],
            width=11,
            height=5.4,
            heights=(12, 1),
            description=self.describe(),
        )

    def describe(self) -> str:
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


class Playground(TrajectoryView):
    """One optimizer opened up, beside others: its hyper-parameters as sliders, what is inside each update, and its rule.

    Where Python is at hand, function, optimizer and hyper-parameters can be changed and the start moved; the step's slider
    and the trajectories work without.

    Args:
        on, start, steps, seed: as for `TrajectoryView`.
        optimizer: the one to look into: a name, or a class or instance of your own.
        against: optimizers that run beside it, each at its own best rate.
        settings: hyper-parameters of `optimizer`; without a "learning_rate" the best one is found.

    Attributes:
        trace: what `trace_updates` found.
        settings: the hyper-parameters in use.
    """

    def __init__(
        self,
        on: On = "rosenbrock",
        optimizer: Any = "adam",
        against: Any = ("sgd",),
        start: Sequence[float] | None = None,
        steps: int = 200,
        *,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._klass = _class_of(optimizer)
        self.settings = dict(settings or {})
        self._against = _named(against)
        self._chosen = _label_of(optimizer)
        super().__init__(on, self._all(), start, steps, factors=(1.0,), seed=seed, **others)

    @property
    def sliders(self) -> list[SearchRange]:
        """The hyper-parameters that can be set, as `search_ranges` finds them."""
        return [setting for setting in search_ranges(self._klass) if setting.scale != "flag"]

    def scene(self) -> Scene:
        trajectories, trace = self.trajectories, self.trace
        moments = _moments(trajectories.steps)
        step = Control("step", "step", moments, min(len(moments) - 1, 12), kind="play", seconds=8)
        surface = self._surface()
        curves: list[Layer] = []
        number = np.arange(trajectories.steps + 1)
        for i, name in enumerate(trajectories.names):
            path = trajectories.paths[i, 0, 0]
            surface.append(Line(path[:, 0], path[:, 1], name=name, style=i, upto="step", head=True))
            losses = _above(trajectories.losses[i, 0, 0], trajectories)
            curves.append(Line(number, losses, style=i, width=1, alpha=0.3))
            curves.append(Line(number, losses, name=name, style=i, upto="step"))
        surface += self._arrows(trace, moments)
        surface.append(self._start_point())
        curves.append(RefLine(np.array(moments)[:, None], by=("step",), style="quiet"))
        blank = Axis("", 0, 1)
        numbers = Text(
            [_numbers(trace, min(moment, trajectories.steps - 1)) for moment in moments], 0.02, 0.5, by=("step",), fixed=True
        )
        source = Text(_source(self._klass), 0.0, 0.5, fixed=True, size=7.5)
        panels = [
            _plane(self.function, surface, click=Click(event="start"), rows=2),
            Panel(
                Axis("step", 0, trajectories.steps), _loss_axis(trajectories, trajectories.losses[:, 0, 0]), curves, column=1
            ),
            Panel(blank, blank, [numbers], title=f"inside this update of {self._chosen}", row=1, column=1, frame=False),
            Panel(blank, blank, [source], title="its rule, as it is compiled", row=2, columns=2, frame=False),
        ]
        controls = [step, *self._remote_controls()]
        lines = _source(self._klass).count("\n") + 1
        below = 0.145 * lines + 0.5
        return Scene(
            panels,
            f"{self._chosen} on {self.function.name}",
            controls,
            [Button("best", "find the best rates from here")],
            width=11,
            height=5.4 + below,
            widths=(1.2, 1),
            heights=(2.9, 2.5, below),
            description=self.describe(),
        )

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Set the function, the optimizer, or one of its hyper-parameters."""
        if name == "function":
            self.function = FUNCTIONS[value]
            self._start = self.function.start
            self._find_rates()
        elif name == "optimizer":
            self._klass, self._chosen, self.settings = registered()[value], value, {}
            self._optimizers, self._rates = self._all(), {}
            self._find_rates()
        elif name.startswith("setting "):
            setting = next((each for each in self.sliders if each.name == name[8:]), None)
            if setting is None:  # of the optimizer before
                return
            self.settings[setting.name] = setting.values[index]
            self._optimizers = self._all()
            if setting.name == "learning_rate":
                self._rates[self._chosen] = float(setting.values[index])
        else:
            return
        self._run()
        self.refresh()

    def on_button(self, name: str) -> None:
        if name == "best":
            self.settings.pop("learning_rate", None)
            self._optimizers = self._all()
        super().on_button(name)

    def _run(self) -> None:
        super()._run()
        own = self.settings | {"optimizer": self._klass, "learning_rate": self._rates[self._chosen]}
        self.trace: UpdateTrace = trace_updates(self.function, own, self._start, self._steps, seed=self._seed)

    def _all(self) -> dict[str, Any]:
        others = {name: given for name, given in self._against.items() if name != self._chosen}
        return {self._chosen: {"optimizer": self._klass} | self.settings} | others

    def _remote_controls(self) -> list[Control]:
        names = list(FUNCTIONS)
        known = [name for name, klass in registered().items() if _can_be_opened(klass)]
        controls = []
        if self.function in FUNCTIONS.values():
            here = next(name for name, each in FUNCTIONS.items() if each is self.function)
            controls.append(Control("function", "function", names, names.index(here), kind="choice", remote=True))
        if self._chosen in known:
            controls.append(Control("optimizer", "optimizer", known, known.index(self._chosen), kind="choice", remote=True))
        for setting in self.sliders:
            value = (
                self._rates[self._chosen]
                if setting.name == "learning_rate"
                else self.settings.get(setting.name, setting.default)
            )
            index = int(np.argmin([abs(float(each) - float(value)) for each in setting.values]))
            values = [float(each) for each in setting.values]
            controls.append(Control(f"setting {setting.name}", setting.name, values, index, remote=True))
        return controls

    def _arrows(self, trace: UpdateTrace, moments: Sequence[int]) -> list[Layer]:
        """Down the gradient, down its average, and the update; each as long at its longest as a fifth of the picture."""
        last = len(trace.updates) - 1
        at = np.minimum(moments, last)
        places = trace.points[at]
        width, height = (high - low for low, high in (self.function.xlim, self.function.ylim))
        quantities = {"down the gradient": -trace.gradients[at]}
        for name, state in trace.states.items():
            if name in ("mean", "momentum", "m", "velocity") and state.ndim == 2:
                quantities[f"down its average, {name}"] = -state[at + 1]
        quantities["update"] = trace.updates[at]
        layers: list[Layer] = []
        for k, (name, vectors) in enumerate(quantities.items()):
            # Lengths differ by many orders of magnitude on the way, so that only the direction is shown.
            size = np.hypot(vectors[:, 0] / width, vectors[:, 1] / height)
            with np.errstate(divide="ignore", invalid="ignore"):
                shown = vectors / size[:, None] * (0.16 - 0.02 * k)
            layers.append(
                Arrows(
                    places[:, :1], places[:, 1:], shown[:, :1], shown[:, 1:],
                    by=("step",), style=len(self.trajectories.names) + k, name=f"{name} (direction)",
                )
            )  # fmt: skip
        return layers


def _surface(where: Function, xlim: tuple[float, float], ylim: tuple[float, float]) -> list[Layer]:
    x, y = np.linspace(*xlim, GRID), np.linspace(*ylim, GRID)
    points = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1))
    with torch.no_grad():
        height = where(points).numpy()
    stars: list[Layer] = []
    if where.minima:
        words = [f"minimum {minimum.value:.4g}" for minimum in where.minima]
        stars.append(
            Points(
                [m.x for m in where.minima], [m.y for m in where.minima], style="ink", marker="star", size=10, words=words
            )
        )
    return [*surface_layers(x, y, height), *stars]


def _plane(where: Function, layers: Sequence[Layer], **others: Any) -> Panel:
    return Panel(Axis("x", *where.xlim), Axis("y", *where.ylim), layers, **others)


def _least(where: Function, losses: np.ndarray) -> float:
    """What losses are measured from, so that they can be on a log scale."""
    if where.minima:
        return min(minimum.value for minimum in where.minima)
    finite = losses[np.isfinite(losses)]
    return float(finite.min()) if finite.size else 0.0


def _above(losses: np.ndarray, trajectories: Trajectories) -> np.ndarray:
    """Some of the losses of trajectories, above the least there is."""
    height = losses.astype(np.float64) - _least(trajectories.function, trajectories.losses)
    return np.where(np.isfinite(height), np.maximum(height, LEAST), np.nan)


def _loss_axis(trajectories: Trajectories, losses: np.ndarray) -> Axis:
    """With room for all of these, but for what is far above the losses at the start or hardly above the least."""
    height = _above(losses, trajectories)
    highest = 100 * np.nanmax(height[..., 0])
    return Axis.over(_loss_label(trajectories.function), np.clip(height, 1e-9, max(highest, 1e-8)), scale="log")


def _loss_label(where: Function) -> str:
    return "f(x, y) above its minimum" if where.minima else "f(x, y) above the least seen"


def _moments(steps: int) -> list[int]:
    n = min(steps + 1, MOMENTS)
    return sorted({round(steps * k / (n - 1)) for k in range(n)})


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _edges(centres: np.ndarray) -> list[float]:
    half = float(centres[1] - centres[0]) / 2
    return [float(centres[0]) - half, float(centres[-1]) + half]


def _named(optimizers: Any) -> dict[str, Any]:
    if isinstance(optimizers, str):
        return {optimizers: {}}
    if isinstance(optimizers, Mapping):
        return dict(optimizers)
    return {_label_of(each): {} if isinstance(each, str) else each for each in optimizers}


def _label_of(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__.lower()


def _class_of(optimizer: Any) -> type[Optimizer]:
    if isinstance(optimizer, str):
        return type(create(optimizer))
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer
    raise TypeError(f"optimizer must be a name or a subclass of Optimizer, got {optimizer!r}")


def _can_be_opened(klass: type[Optimizer]) -> bool:
    from ..kernels import Rule
    from ..trainer.optimizer import RuleOptimizer

    return issubclass(klass, RuleOptimizer) and isinstance(getattr(klass, "rule", None), Rule)


def _has_rate(given: Any) -> bool:
    return isinstance(given, Mapping) and "learning_rate" in given


def _with_rate(given: Any, rate: float, label: str | None = None) -> Any:
    """What is to run, at this rate."""
    own: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"optimizer": given}
    if label is not None and "optimizer" not in own:
        own["optimizer"] = label
    return own | {"learning_rate": rate}


def _starts_around(where: Function, n: int, seed: int, start: Sequence[float] | None = None) -> np.ndarray:
    """A start, by default the function's, and others within a sixth of the drawn part around it: [n, 2]."""
    spread = [(high - low) / 12 for low, high in (where.xlim, where.ylim)]
    drawn = np.random.default_rng(seed).uniform(-1, 1, (n, 2)) * spread
    drawn[0] = 0
    return (np.asarray(where.start if start is None else start) + drawn).astype(np.float32)


def _numbers(trace: UpdateTrace, t: int) -> str:
    """What went into update number t, from 0, as a table."""
    rows = [("point", trace.points[t]), ("gradient", trace.gradients[t])]
    rows += [(name, state[t + 1]) for name, state in trace.states.items()]
    if trace.preconditioners is not None:
        rows.append(("scaled by", trace.preconditioners[t]))
    rows.append(("update", trace.updates[t]))
    lines = [f"update {t + 1:<10}{'x':>12}{'y':>12}"]
    for name, values in rows:
        each = [values] if np.ndim(values) == 0 else values
        lines.append(f"{name[:16]:<17}" + "".join(f"{value:>12.4g}" for value in each))
    return "\n".join(lines)


def _source(klass: type[Optimizer]) -> str:
    lines = rule_source(klass).rstrip().split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith("@"))
