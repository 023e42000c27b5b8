"""Playground: one optimizer in detail, with its hyper-parameters, the terms of each update, and its update rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Rule
from ...trainer.optimizer import Optimizer, create, registered
from ..scene import Arrows, Button, Control, Layer, Listing, RefLine, Scene, Text
from ..simulate import FUNCTIONS, SearchRange, UpdateTrace, function, rule_source, search_ranges, trace_updates
from ..simulate.candidates import named_optimizers
from ..simulate.presets import PRESETS, named
from .functions import On, function_panel, loss_panel, ways
from .series import words_panel
from .trajectories import MOVING, TrajectoryView, moments_of

__all__ = ["Playground"]

AVERAGES = ("mean", "mom", "momentum", "m", "velocity", "fast", "slow")  # names of states that average gradients
# Attributes that a typed entry changes; they are restored if the entry cannot be used.
CHANGED = ("function", "settings", "found", "_start", "_rates", "_optimizers")


class Playground(TrajectoryView):
    """One optimizer in detail, compared to others: sliders for its hyper-parameters, the terms of each update, and its rule.

    With a Python kernel, the user can change function, optimizer, hyper-parameters and start, by sliders or by typing; a
    message below says why an entry cannot be used. The step slider and the trajectories work without a kernel.

    Args:
        on: the function: a name, an expression, a `Function` or a callable, as for `simulate`.
        optimizer: the optimizer to look into: a name, or a subclass of `Optimizer`.
        against: optimizers to compare it with, each at its best learning rate, as for `simulate`.
        start: the start (x, y); None is the function's own.
        steps: the number of steps, >= 1.
        seed: the seed of the function's noise.
        settings: hyper-parameters of `optimizer`; without a "learning_rate" the best one found is used.
        **others: `name`, `theme` and `budget` of `View`.

    Attributes:
        trace: the terms of each update, an `UpdateTrace`.
        settings: the current hyper-parameters.

    Raises:
        TypeError: `optimizer` is neither a name nor a subclass of `Optimizer`.
    """

    instead_of: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("lr", "learning_rate"), 'Write settings={"learning_rate": 0.1}.'
    )

    shape: ClassVar[float] = 0.75

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
        self._klass, self.settings = _resolved(optimizer, settings or {})
        self._against = named_optimizers(against) if against else {}
        self._chosen = _label_of(optimizer)
        self._refused: dict[str, str] = {}  # the rejected text by field
        self._why = ""
        super().__init__(on, self._all(), start, steps, factors=(1.0,), seed=seed, **others)

    @property
    def sliders(self) -> list[SearchRange]:
        """The hyper-parameters that have a slider, with their ranges from `search_ranges`."""
        return [setting for setting in search_ranges(self._klass) if setting.scale != "boolean"]

    def scene(self) -> Scene:
        trajectories, trace = self.trajectories, self.trace
        moments = moments_of(trajectories.steps)
        step = Control("step", "step", moments, min(len(moments) - 1, 12), kind="play", seconds=8)
        paths, curves = ways(trajectories, 0)
        surface = [*self._surface(), *paths, *self._arrows(trace, moments), self._start_point()]
        whole = [replace(line, name="", upto=None, width=1, alpha=0.3) for line in curves]
        current = RefLine(np.array(moments)[:, None], by=("step",), style="quiet")
        losses = [*itertools.chain(*zip(whole, curves, strict=True)), current]
        numbers = Text(
            [_numbers(trace, min(moment, trajectories.steps - 1)) for moment in moments], 0.02, 0.5, by=("step",), fixed=True
        )
        panels = [
            function_panel(self._plane, surface, click=MOVING, rows=2),
            loss_panel(trajectories, trajectories.losses[:, 0, 0], losses, column=1),
            words_panel(numbers, title=f"inside this update of {self._chosen}", row=1, column=1),
        ]
        controls = [step, *self._remote_controls()]
        lines = rule_source(self._klass).rstrip().split("\n")
        rule = [line for line in lines if not line.lstrip().startswith("@")]
        return Scene(
            panels,
            f"{self._chosen} on {self.function.name}",
            controls,
            [Button("best", "find the best rates from here")],
            width=8.8,
            height=5.9,
            widths=(1.2, 1),
            heights=(3.6, 1.9),
            description=self.describe(),
            listings=[Listing("its rule, as it is compiled", "\n".join(rule))],
            message=self._why or self.found,
        )

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Set the function, the optimizer, or one of its hyper-parameters, and rerun."""
        if name == "function" and value not in FUNCTIONS:  # the typed expression, which is in use already
            return
        if name == "function":
            self.function = FUNCTIONS[value]
            self._start = self.function.start
            self._find_rates()
        elif name == "optimizer":
            self._klass, self.settings = _resolved(value, {})
            self._chosen = value
            self._optimizers, self._rates = self._all(), {}
            self._find_rates()
        elif name.startswith("setting "):
            setting = next((each for each in self.sliders if each.name == name[8:]), None)
            if setting is None:  # a slider of the previous optimizer
                return
            self._set(setting.name, float(value))
        else:
            return
        self._run()
        self.refresh()

    def on_entry(self, name: str, text: str) -> None:
        """Set a typed function, start coordinate or hyper-parameter and rerun, or show why it cannot be used."""
        previous = {key: copy(value) for key, value in vars(self).items() if key in CHANGED}
        try:
            if name == "expression":
                self._set_function(text)
            elif name in ("start x", "start y"):
                x, y = self._start
                value = _number(name, text)
                self._start = (value, y) if name == "start x" else (x, value)
                self._check_start()
            else:
                self._set(name.removeprefix("setting "), _number(name.removeprefix("setting "), text))
            self._run()
            self._surface()
        except (TypeError, ValueError) as error:
            vars(self).update(previous)
            self._refused, self._why = {name: text}, str(error)
        self.refresh()

    def _set(self, name: str, value: float) -> None:
        """Set a hyper-parameter; raise TypeError or ValueError if the optimizer lacks it or does not accept the value."""
        setting = next((each for each in self.sliders if each.name == name), None)
        if setting is None:
            raise ValueError(f"{self._chosen} has no {name}")
        used = int(value) if setting.scale == "integer" and value == int(value) else value
        arguments: dict[str, Any] = {name: used}
        self._klass(**arguments)
        self.settings[name] = used
        self._optimizers = self._all()
        if name == "learning_rate":
            self._rates[self._chosen] = value

    def _set_function(self, text: str) -> None:
        """Set the function: a named one with its own limits and start, an expression with the current ones."""
        new = function(text)
        if new in FUNCTIONS.values():
            self._start = new.start
        else:
            x, y = self._start
            new = replace(new, xlim=self.function.xlim, ylim=self.function.ylim, start=(x, y))
        self.function = new
        self._check_start()
        self._find_rates()

    def _check_start(self) -> None:
        value = float(self.function(torch.tensor(self._start, dtype=torch.float64)))
        if not math.isfinite(value):
            x, y = self._start
            raise ValueError(f"f({x:.4g}, {y:.4g}) is {value}: start where the function has a finite value")

    def on_button(self, name: str) -> None:
        """Find the best learning rates from the current start, and rerun the optimizers."""
        if name == "best":
            self.settings.pop("learning_rate", None)
            self._optimizers = self._all()
        super().on_button(name)

    def _run(self) -> None:
        super()._run()
        self._refused, self._why = {}, ""
        settings = self.settings | {"optimizer": self._klass, "learning_rate": self._rates[self._chosen]}
        self.trace: UpdateTrace = trace_updates(self.function, settings, self._start, self._steps, seed=self._seed)

    def _all(self) -> dict[str, Any]:
        compared = {name: optimizer for name, optimizer in self._against.items() if name != self._chosen}
        return {self._chosen: {"optimizer": self._klass} | self.settings} | compared

    def _remote_controls(self) -> list[Control]:
        names, fields = list(FUNCTIONS), self._refused
        by_rule = {name for name, klass in registered().items() if isinstance(getattr(klass, "rule", None), Rule)}
        menu = sorted(by_rule | PRESETS.keys())
        controls = []
        if self.function not in FUNCTIONS.values():
            names.append(self.function.name)
        here = next((name for name, each in FUNCTIONS.items() if each is self.function), self.function.name)
        controls.append(Control("function", "function", names, names.index(here), kind="choice", remote=True))
        default = self.function.expression if isinstance(self.function.expression, str) else ""
        controls.append(_field("expression", "f(x, y) =", fields.get("expression", default)))
        if self._chosen in menu:
            controls.append(Control("optimizer", "optimizer", menu, menu.index(self._chosen), kind="choice", remote=True))
        for setting in self.sliders:
            value = (
                self._rates[self._chosen]
                if setting.name == "learning_rate"
                else self.settings.get(setting.name, setting.default)
            )
            values = sorted({*map(float, setting.values), float(value)})
            name, index = f"setting {setting.name}", values.index(float(value))
            controls.append(Control(name, setting.name, values, index, remote=True, typed=True))
        for name, value in zip(("start x", "start y"), self._start, strict=True):
            controls.append(_field(name, name, fields.get(name, f"{value:.4g}")))
        return controls

    def _arrows(self, trace: UpdateTrace, moments: Sequence[int]) -> list[Layer]:
        """Return arrows of equal length along the negative gradient, its negative average, and the update."""
        last = len(trace.updates) - 1
        at = np.minimum(moments, last)
        places = trace.points[at]
        width, height = (min(self._plane.size),) * 2 if self._plane.equal else self._plane.size
        quantities = {"down the gradient": -trace.gradients[at]}
        for name, state in trace.states.items():
            if name in AVERAGES and state.shape == trace.points.shape:
                # Optimizers average gradients or steps: the first product with a gradient tells the sign.
                along = (state[1:] * trace.gradients).sum(axis=1)
                ways = np.sign(along[along != 0])
                quantities[f"down its average, {name}"] = -state[at + 1] * (ways[0] if ways.size else 1.0)
        quantities["update"] = trace.updates[at]
        layers: list[Layer] = []
        for k, (name, vectors) in enumerate(quantities.items()):
            # Lengths vary by many orders of magnitude along a path, so only directions are shown.
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


def _field(name: str, label: str, shown: str) -> Control:
    return Control(name, label, [shown], kind="text", remote=True)


def _number(name: str, text: str) -> float:
    try:
        value = float(text.replace("−", "-"))  # pictures write this minus sign
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}={text!r}: must be a finite number")
    return value


def _label_of(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__.lower()


def _resolved(optimizer: Any, settings: Mapping[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the hyper-parameters of an optimizer; its name may be a preset's."""
    kind, arguments = named(optimizer, settings) if isinstance(optimizer, str) else (optimizer, dict(settings))
    if isinstance(kind, str):
        return type(create(kind)), arguments
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind, arguments
    raise TypeError(f"optimizer must be a name or a subclass of Optimizer, got {optimizer!r}")


def _numbers(trace: UpdateTrace, t: int) -> str:
    """Return a table of the terms of update number t, from 0."""
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
