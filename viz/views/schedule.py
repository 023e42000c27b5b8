"""ScheduleView: past and future learning rates over the updates."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...trainer import Trainer, validation
from ...trainer.lr_scheduler import LRScheduler, create
from ...trainer.optimizer.multi import parts_of
from ..record import Recorder, Run
from ..record.series import POINTS
from ..scene import Axis, Control, Layer, Line, Panel, RefLine, Scene
from ..style import COLOURS, DASHES
from .run_view import checked_run, take_in
from .series import (
    SOLID_GREY,
    axis_from_zero,
    drawable,
    middle_steps,
    not_positive,
    scalar_panel,
    scale_control,
    smoothing_control,
    spread,
)
from .view import View

__all__ = ["Schedule", "ScheduleView", "TorchSchedule"]

TorchSchedule = torch.optim.lr_scheduler.LRScheduler
Schedule = str | Callable[[int], float] | Trainer | TorchSchedule


class ScheduleView(View):
    """Learning rates of one or several schedules over the number of updates.

    A `Trainer`'s past rates are a solid line, and its future rates a dashed one. The `schedules` of its other settings are
    drawn below, a panel for each setting. A torch schedule shows only future rates, which come from a copy of it, so that
    the schedule and its optimizer do not change.

    Args:
        schedules: a callable from the number of updates to a learning rate, such as the schedules of
            `tristep.lr_scheduler`; the name of one of these, such as "cosine", which then ends at `n_updates`, or at 1,000;
            a `Trainer`; a schedule of `torch.optim.lr_scheduler`; or a dict of these by name.
        n_updates: the last update drawn, >= 1; None takes it from the lengths of the schedules.
        scale: the initial scale of the learning rates, "linear" or "log", which a choice changes.
        loss: a `Recorder`, a `Run` or a `LiveLoop`, whose losses and past learning rates are drawn too.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: an argument has the wrong type, or a schedule depends on losses, as torch's `ReduceLROnPlateau` does.
        ValueError: an argument is out of its range, there is nothing to draw, or no schedule tells `n_updates`.

    Example:
        >>> from tristep.viz import ScheduleView
        >>> print(ScheduleView({"halved": lambda update: 0.1 / 2 ** (update // 30)}, 90).describe())
        halved: from 0.1 to 0.0125 up to update 90
    """

    def __init__(
        self,
        schedules: Schedule | Mapping[str, Schedule],
        n_updates: int | None = None,
        *,
        scale: str = "linear",
        loss: Recorder | Run | None = None,
        **settings: Any,
    ) -> None:
        self.scale = validation.choice("scale", scale, ("linear", "log"))
        named = _named(schedules, 1000 if n_updates is None else n_updates)
        self.schedules = validation.nonempty("schedules", named, ": there is nothing to draw; give a schedule")
        loss = None if loss is None else checked_run(loss, "loss")
        self._recorders = [loss] if isinstance(loss, Recorder) else []
        self._run = loss.run if isinstance(loss, Recorder) else loss
        self._wanted = None if n_updates is None else validation.integer("n_updates", n_updates, low=1)
        self._n_updates()  # raises if the number of updates is unknown
        super().__init__(**settings)

    def take_in(self, wait: bool) -> bool:
        return take_in(self._recorders, wait)

    def on_control(self, name: str, value: Any, index: int) -> None:
        if name == "scale":
            self.scale = value
            super().refresh()

    def scene(self) -> Scene:
        n = self._n_updates()
        numbers = spread(1, n, POINTS)
        layers: list[Layer] = []
        values: list[np.ndarray] = []
        others: dict[str, list[Line]] = {}  # by setting
        now = None
        for i, (name, schedule) in enumerate(self.schedules.items()):
            if isinstance(schedule, Trainer):
                now = schedule.optimizer.num_update
                lines, of_lines = self._of_trainer(schedule, "learning_rate", schedule.optimizer.rate_at, numbers, name, i)
                layers += lines
                values += of_lines
                for setting, function in _other_schedules(schedule).items():
                    lines, _ = self._of_trainer(schedule, setting, function, numbers, name, i)
                    others.setdefault(setting, []).extend(lines)
                continue
            if isinstance(schedule, TorchSchedule):
                x, rates = _torch_rates(schedule, n)
            else:
                x, rates = numbers, _rates(schedule, numbers)
            layers.append(Line(x, drawable(rates), name=name, style=i, marker=len(x) == 1))
            values.append(rates)
        marks = [RefLine([float(now)], style="quiet", label="now")] if now is not None and 0 < now < n else []
        layers += marks
        across = Axis("update", 0.0, float(n))
        if self.scale == "log" and any((rates > 0).any() for rates in values):
            vertical = Axis.over("learning rate", *values, scale="log", margin=0.05)
        else:
            vertical = axis_from_zero("learning rate", *values)
        lines = [layer for layer in layers if isinstance(layer, Line)]
        zeros = [([np.asarray(line.x)[np.asarray(line.y) <= 0]], line.style) for line in lines]
        layers += not_positive(across, vertical, zeros)
        smoothing = smoothing_control([] if self._run is None else [self._run], ["loss"])
        panels = [Panel(across, vertical, layers)]
        for setting, of_setting in others.items():
            upright = Axis.over(setting, *[np.asarray(line.y) for line in of_setting], margin=0.06)
            panels.append(Panel(across, upright, [*of_setting, *marks], row=len(panels)))
        loss = _loss_panel(self._run, across, smoothing)
        panels += [] if loss is None else [replace(loss, row=len(panels))]
        panels[:-1] = [replace(panel, x=replace(across, label="")) for panel in panels[:-1]]
        return Scene(
            panels,
            controls=[*([] if loss is None else [smoothing]), scale_control(self.scale, "scale of rates")],
            height=3.6 + 1.3 * (len(panels) - 1),
            description=self.describe(),
        )

    def describe(self) -> str:
        """Return a line about each schedule, with its first, highest and last learning rate."""
        n = self._n_updates()
        lines, few = [], spread(1, n, 200)
        for name, schedule in self.schedules.items():
            others: dict[str, Callable[[int], float]] = {}
            if isinstance(schedule, Trainer):
                rates, others = _rates(schedule.optimizer.rate_at, few), _other_schedules(schedule)
                name = f"{name}, now after update {schedule.optimizer.num_update:,}"
            elif isinstance(schedule, TorchSchedule):
                rates = _torch_rates(schedule, n)[1]
            else:
                rates = _rates(schedule, few)
            lines.append(f"{name}: {_words(rates)} up to update {n:,}")
            lines += [f"{setting} of {name}: {_words(_rates(each, few))}" for setting, each in others.items()]
        return "\n".join(lines)

    def _of_trainer(
        self, trainer: Trainer, setting: str, function: Callable[[int], float], numbers: np.ndarray, name: str, style: int
    ) -> tuple[list[Line], list[np.ndarray]]:
        """Return the lines of a setting, past and to come, and their values."""
        past, before = self._past(trainer, setting, function, numbers)
        lines = [Line(past, drawable(before), name=name, style=style, marker=len(past) == 1)] if len(past) else []
        to_come = numbers[numbers > trainer.optimizer.num_update]
        if len(past) and len(to_come):
            to_come = np.concatenate([past[-1:], to_come])
        rates = _rates(function, to_come)
        dashed = f"{name}, to come" if len(past) else name
        lines.append(Line(to_come, drawable(rates), name=dashed, style=_dashed(style), marker=len(to_come) == 1))
        return lines, [before, rates]

    def _past(
        self, trainer: Trainer, setting: str, function: Callable[[int], float], numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the past updates and a setting's values: the recorded ones, or else the schedule's."""
        recorded = None if self._run is None else self._run.scalars.get(setting)
        if recorded is not None and len(recorded):
            curve = recorded.curve()
            return middle_steps(curve), curve.mean
        past = numbers[numbers <= trainer.optimizer.num_update]
        return past, _rates(function, past)

    def _n_updates(self) -> int:
        if self._wanted is not None:
            return self._wanted
        lengths: list[int] = []
        for schedule in self.schedules.values():
            rule: Any = schedule.optimizer.lr_scheduler if isinstance(schedule, Trainer) else schedule
            others = _all_schedules(schedule) if isinstance(schedule, Trainer) else []
            lengths += [int(each.max_update) for each in others if hasattr(each, "max_update")]
            lengths += [int(getattr(rule, name)) for name in ("max_update", "total_steps", "T_max") if hasattr(rule, name)]
            lengths += [int(max(rule.step) * 1.2)] if isinstance(getattr(rule, "step", None), list) else []
            lengths += [2 * schedule.optimizer.num_update] if isinstance(schedule, Trainer) else []
        if not max(lengths, default=0):
            raise ValueError("n_updates is missing: none of the schedules says how long it is")
        return max(lengths)


def _all_schedules(trainer: Trainer) -> list[Any]:
    return [schedule for part in parts_of(trainer.optimizer) for schedule in part.schedules.values()]


def _other_schedules(trainer: Trainer) -> dict[str, Callable[[int], float]]:
    """Return the schedules of a trainer's settings other than the learning rate, by name."""
    names = trainer.optimizer.scheduled_at(max(trainer.optimizer.num_update, 1))
    return {name: partial(_value_at, trainer, name) for name in names}


def _value_at(trainer: Trainer, name: str, num_update: int) -> float:
    return trainer.optimizer.scheduled_at(num_update)[name]


def _loss_panel(run: Run | None, across: Axis, smoothing: Control) -> Panel | None:
    series = None if run is None else run.scalars.get("loss")
    if series is None or not len(series):
        return None
    curve = series.curve()
    drawn = [("loss", curve, middle_steps(curve), SOLID_GREY)]
    return replace(scalar_panel("loss", drawn, across, smoothing), row=1)


def _scheduler(name: str, n_updates: int) -> LRScheduler:
    """Create a schedule by its registered name; `n_updates` is its `max_update`, if it has this parameter."""
    parameters = inspect.signature(LRScheduler.registry.lookup(name)).parameters.values()
    with_end = any(each.name == "max_update" or each.kind is each.VAR_KEYWORD for each in parameters)
    arguments = {"max_update": n_updates} if with_end else {}
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if missing := [each for each in needed if each not in arguments]:
        values = ", ".join(f"{each}=..." for each in missing)
        raise TypeError(f"{name!r} needs {', '.join(missing)}, such as tristep.lr_scheduler.create({name!r}, {values})")
    return create(name, **arguments)


def _named(schedules: Any, n_updates: int) -> dict[str, Any]:
    if not isinstance(schedules, Mapping):
        schedules = {_name(schedules): schedules}
    schedules = {name: _scheduler(each, n_updates) if isinstance(each, str) else each for name, each in schedules.items()}
    for name, schedule in schedules.items():
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(f"{name}: ReduceLROnPlateau needs losses, so nobody knows what it will do")
        allowed = "a name, a callable from the number of updates to a rate, a Trainer, or a schedule of torch"
        validation.instance(f"schedules[{name!r}]", schedule, (Callable, Trainer, TorchSchedule), allowed)
    return dict(schedules)


def _name(schedule: Any) -> str:
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Trainer):
        return type(schedule.optimizer).__name__
    name = getattr(schedule, "__name__", type(schedule).__name__)
    return "schedule" if name == "<lambda>" else str(name).removesuffix("Scheduler")


def _rates(schedule: Callable[[int], float], numbers: np.ndarray) -> np.ndarray:
    if isinstance(schedule, LRScheduler) and type(schedule).__call__ is LRScheduler.__call__:
        return np.asarray(schedule(numbers))
    return np.array([float(schedule(int(n))) for n in numbers])


def _torch_rates(schedule: TorchSchedule, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return future updates and the learning rates of the first parameter group, from a copy of the schedule."""
    parts: Any = getattr(schedule, "_schedulers", ())  # a ChainedScheduler has no counter
    first = max(int(getattr(each, "last_epoch", 0)) for each in (schedule, *parts)) + 1
    rates = _future_rates(schedule, n - first)
    numbers = np.arange(first, first + len(rates))
    keep = spread(0, len(rates) - 1, POINTS)
    return numbers[keep], np.array(rates)[keep]


def _future_rates(scheduler: TorchSchedule, n: int) -> list[float]:
    """Return the present rate and those after each of n steps of a copy; fewer if the schedule ends before."""
    optimizer = scheduler.optimizer
    dummy = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in optimizer.param_groups], lr=0.1)
    for group, original in zip(dummy.param_groups, optimizer.param_groups, strict=True):
        group.update({key: copy.deepcopy(value) for key, value in original.items() if key not in ("params", "param_names")})
    dummy.defaults = dict(optimizer.defaults)
    twin = copy.deepcopy(scheduler, {id(optimizer): dummy})
    rates = [float(dummy.param_groups[0]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that optimizer.step() was not called
        for _ in range(n):
            try:
                twin.step()
            except ValueError:  # the schedule has ended
                break
            rates.append(float(dummy.param_groups[0]["lr"]))
    return rates


def _dashed(style: int) -> int:
    """Return the style number of a dashed line in the colour of `style`."""
    same_colour = [number for number in range(style % len(COLOURS), len(DASHES), len(COLOURS)) if number != style]
    return next(number for number in same_colour if DASHES[number] != "-")


def _words(rates: np.ndarray) -> str:
    k = int(rates.argmax())
    peak = "" if k in (0, len(rates) - 1) else f" by way of {rates[k]:.3g}"
    return f"from {rates[0]:.3g}{peak} to {rates[-1]:.3g}"
