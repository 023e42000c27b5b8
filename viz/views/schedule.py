"""ScheduleView: past and future learning rates over the updates, and an editor of schedules."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...trainer import Trainer, validation
from ...trainer.lr_scheduler import InterpolatedScheduler, LRScheduler, create
from ..record import Recorder, Run
from ..record.series import POINTS
from ..scene import Axis, Button, Click, Control, Layer, Line, Listing, Panel, Points, RefLine, Scene
from ..simulate.schedules import simulate_scheduler
from ..style import COLOURS, DASHES
from .run_view import checked_run, take_in
from .series import SOLID_GREY, axis_from_zero, drawable, middle_steps, not_positive, scalar_panel, smoothing_control, spread
from .view import View

__all__ = ["Schedule", "ScheduleView", "TorchSchedule"]

TorchSchedule = torch.optim.lr_scheduler.LRScheduler
Schedule = str | Callable[[int], float] | Trainer | TorchSchedule


class ScheduleView(View):
    """Learning rates of one or several schedules over the number of updates.

    A `Trainer`'s past rates are a solid line, and its future rates a dashed one. A torch schedule shows only future rates,
    which come from a copy of it, so that the schedule and its optimizer do not change. With `knots`, the user can draw a
    piecewise schedule through these points: drag them, or call `move`; add a point by a double click, or by Enter at the
    keyboard's cursor; remove the selected point, or the one moved or added last, by a button. The code that makes the
    schedule is shown below.

    Args:
        schedules: a callable from the number of updates to a learning rate, such as the schedules of
            `tristep.lr_scheduler`; the name of one of these, such as "cosine", which then ends at `n_updates`, or at 1,000;
            a `Trainer`; a schedule of `torch.optim.lr_scheduler`; or a dict of these by name. None draws only `knots`.
        n_updates: the last update drawn, >= 1; None takes it from the lengths of the schedules and the last knot.
        knots: the draggable points, at least two pairs (update count, learning rate) with increasing update counts.
        scale: the scale of the learning rates, "linear" or "log", and of the interpolation between knots.
        loss: a `Recorder`, a `Run` or a `LiveLoop`, whose losses and past learning rates are drawn too.
        **settings: `name`, `theme` and `budget` of `View`.

    Attributes:
        knots: the current points. Points that the user has placed have rates rounded to three digits.

    Raises:
        TypeError: an argument has the wrong type, or a schedule depends on losses, as torch's `ReduceLROnPlateau` does.
        ValueError: an argument is out of its range, there is nothing to draw, or no schedule tells `n_updates`.

    Example:
        >>> from tristep.viz import ScheduleView
        >>> view = ScheduleView(knots=[(0, 0.02), (100, 0.5), (1000, 0.0)])
        >>> view.schedule(50)
        0.26
        >>> print(view.code())
        from tristep.lr_scheduler import InterpolatedScheduler
        <BLANKLINE>
        schedule = InterpolatedScheduler(step=[100, 1000], rates=[0.5, 0.0], base_lr=0.02)
    """

    def __init__(
        self,
        schedules: Schedule | Mapping[str, Schedule] | None = None,
        n_updates: int | None = None,
        *,
        knots: Sequence[tuple[int, float]] | None = None,
        scale: str = "linear",
        loss: Recorder | Run | None = None,
        **settings: Any,
    ) -> None:
        self.scale = validation.choice("scale", scale, ("linear", "log"))
        self.schedules = _named(schedules, 1000 if n_updates is None else n_updates)
        self.knots = None if knots is None else _checked_knots(knots, self.scale)
        if not self.schedules and self.knots is None:
            raise ValueError("schedules is empty: there is nothing to draw; give a schedule, or knots")
        loss = None if loss is None else checked_run(loss, "loss")
        self._recorders = [loss] if isinstance(loss, Recorder) else []
        self._run = loss.run if isinstance(loss, Recorder) else loss
        self._wanted = None if n_updates is None else validation.integer("n_updates", n_updates, low=1)
        self._n_updates()  # raises if the number of updates is unknown
        self._trainer = next((item for item in self.schedules.values() if isinstance(item, Trainer)), None)
        self._chosen = 0  # the number of the selected knot
        self._top = max((rate for _, rate in self.knots or ()), default=0.0)
        super().__init__(**settings)

    @property
    def schedule(self) -> InterpolatedScheduler:
        """The schedule that interpolates between the knots.

        Raises:
            ValueError: the view has no knots.
        """
        if self.knots is None:
            raise ValueError("this view has no knots to make a schedule of: give it knots=[(0, 0.1), (1000, 0.01)], say")
        numbers, rates = [number for number, _ in self.knots], [rate for _, rate in self.knots]
        first = 1 if numbers[0] == 0 else 0  # `base_lr` is the rate before the first knot
        return InterpolatedScheduler(numbers[first:], rates[first:], self.scale, base_lr=rates[0])

    def code(self) -> str:
        """Return Python source code that creates `schedule`.

        Raises:
            ValueError: the view has no knots.
        """
        return f"from tristep.lr_scheduler import InterpolatedScheduler\n\nschedule = {self.schedule!r}"

    def move(self, number: int, update: float, rate: float) -> None:
        """Move a knot, which stays between its neighbours and at a rate >= 0, or > 0 on a log scale.

        Args:
            number: the index of the knot, from 0.
            update, rate: the new update count and learning rate; each is clipped to its allowed range.

        Raises:
            ValueError: the view has no knot `number`, or an argument is not finite.
        """
        knots = self._with_knot(number)
        update, rate = validation.number("update", update), validation.number("rate", rate)
        low = knots[number - 1][0] + 1 if number else 0
        high = knots[number + 1][0] - 1 if number + 1 < len(knots) else None
        place = max(round(update), low)
        least = self._top * 1e-6 or 1e-12
        knots[number] = (place if high is None else min(place, high), max(rate, least if self.scale == "log" else 0.0))

    def add(self, update: float, rate: float) -> int:
        """Add a knot, or change the rate of the knot at this update.

        Args:
            update, rate: the update count, >= 0, and the learning rate, >= 0, or > 0 on a log scale; each is clipped to its
                allowed range.

        Returns:
            The index of the knot, from 0.

        Raises:
            ValueError: the view has no knots, or an argument is not finite.
        """
        self.schedule  # raises without knots  # noqa: B018
        assert self.knots is not None
        update, rate = validation.number("update", update), validation.number("rate", rate)
        place = max(round(update), 0)
        number = int(np.searchsorted([at for at, _ in self.knots], place))
        if number == len(self.knots) or self.knots[number][0] != place:
            self.knots.insert(number, (place, 0.0))
        self.move(number, place, rate)
        return number

    def remove(self, number: int) -> None:
        """Remove the knot of index `number`, from 0.

        Raises:
            ValueError: the view has no such knot, or fewer than two would be left.
        """
        knots = self._with_knot(number)
        if len(knots) <= 2:
            raise ValueError("a schedule has two knots or more: add one first")
        del knots[number]
        self._chosen = min(self._chosen, len(knots) - 1)

    def _with_knot(self, number: int) -> list[tuple[int, float]]:
        if self.knots is None or not 0 <= number < len(self.knots):
            raise ValueError(f"number={number!r}: there is no such knot; there are {len(self.knots or ())}")
        return self.knots

    def apply(self, trainer: Trainer) -> None:
        """Set `schedule` as the learning-rate schedule of a trainer, from its next update on.

        Raises:
            TypeError: `trainer` is not a `Trainer`.
            ValueError: the view has no knots.
        """
        validation.instance("trainer", trainer, Trainer, "a Trainer")
        trainer.optimizer.lr_scheduler = self.schedule

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        if event == "knot" and self.knots is not None and number < len(self.knots):
            self._chosen = number
            self.move(number, x, _rounded(y))
            super().refresh()

    def on_click(self, event: str, x: float, y: float) -> None:
        if event == "knot" and self.knots is not None:
            self._chosen = self.add(x, _rounded(y))
            super().refresh()

    def on_control(self, name: str, value: Any, index: int) -> None:
        if name == "knot":
            self._chosen = index
            super().refresh()

    def on_button(self, name: str) -> None:
        if name == "remove" and self.knots is not None and len(self.knots) > 2:
            self.remove(self._chosen)
            super().refresh()
        if name == "apply" and self._trainer is not None:
            self.apply(self._trainer)
            super().refresh()

    def take_in(self, wait: bool) -> bool:
        return take_in(self._recorders, wait)

    def scene(self) -> Scene:
        n = self._n_updates()
        numbers = spread(1, n, POINTS)
        layers: list[Layer] = []
        values: list[np.ndarray] = []
        now = None
        for i, (name, schedule) in enumerate(self.schedules.items()):
            if isinstance(schedule, Trainer):
                now = schedule.optimizer.num_update
                past, before = self._past(schedule, numbers)
                values.append(before)
                if len(past):
                    layers.append(Line(past, drawable(before), name=name, style=i, marker=len(past) == 1))
                to_come = numbers[numbers > now]
                if len(past) and len(to_come):
                    to_come = np.concatenate([past[-1:], to_come])
                rates = _rates(schedule.optimizer.rate_at, to_come)
                dashed = f"{name}, to come" if len(past) else name
                layers.append(Line(to_come, drawable(rates), name=dashed, style=_dashed(i), marker=len(to_come) == 1))
            elif isinstance(schedule, TorchSchedule):
                x, rates = _torch_rates(schedule, n)
                layers.append(Line(x, drawable(rates), name=name, style=i, marker=len(x) == 1))
            else:
                rates = _rates(schedule, numbers)
                layers.append(Line(numbers, drawable(rates), name=name, style=i, marker=len(numbers) == 1))
            values.append(rates)
        if self.knots is not None:
            i = len(self.schedules)
            rates = np.asarray(self.schedule(numbers))
            x, y = np.array(self.knots, dtype=np.float64).T
            layers.append(Line(numbers, rates, style=i, name="by hand"))
            words = [f"update {number:,}: {rate:.3g}" for number, rate in self.knots]
            layers.append(Points(x, y, size=9, style=i, drag="knot", words=words))
            chosen = self.knots[self._chosen]
            layers.append(Points([chosen[0]], [chosen[1]], size=15, style=i, marker="ring"))
            values += [rates, y, np.array([1.25 * self._top])]  # room above, into which to drag points
        if now is not None and 0 < now < n:
            layers.append(RefLine([float(now)], style="quiet", label="now"))
        across = Axis("update", 0.0, float(n)) if self.knots is None else Axis("update", -0.02 * n, 1.02 * n)
        if self.scale == "log" and any((rates > 0).any() for rates in values):
            vertical = Axis.over("learning rate", *values, scale="log", margin=0.15 if self.knots else 0.05)
        else:
            vertical = axis_from_zero("learning rate", *values)
        lines = [layer for layer in layers if isinstance(layer, Line)]
        zeros = [([np.asarray(line.x)[np.asarray(line.y) <= 0]], line.style) for line in lines]
        layers += not_positive(across, vertical, zeros)
        smoothing = smoothing_control([] if self._run is None else [self._run], ["loss"])
        loss = _loss_panel(self._run, across, smoothing)
        click = None if self.knots is None else Click(event="knot", double=True, does="add a knot")
        panels = [Panel(across if loss is None else replace(across, label=""), vertical, layers, click=click)]
        panels += [] if loss is None else [loss]
        controls, buttons, listings = [] if loss is None else [smoothing], [], []
        if self.knots is not None:
            words = [f"{k + 1}: {rate:.3g} at update {number:,}" for k, (number, rate) in enumerate(self.knots)]
            controls.append(Control("knot", "knot", words, self._chosen, "choice", remote=True))
            buttons.append(Button("remove", "Remove this knot", len(self.knots) > 2))
            listings.append(Listing("code of the schedule by hand", self.code(), folded=False))
            if self._trainer is not None:
                buttons.append(Button("apply", "Use it", self._trainer.optimizer.lr_scheduler != self.schedule))
        return Scene(
            panels,
            controls=controls,
            buttons=buttons,
            listings=listings,
            height=3.6 if loss is None else 4.9,
            description=self.describe(),
        )

    def describe(self) -> str:
        """Return a line about each schedule, with its first, highest and last learning rate."""
        n = self._n_updates()
        lines, few = [], spread(1, n, 200)
        for name, schedule in self.schedules.items():
            if isinstance(schedule, Trainer):
                rates = _rates(schedule.optimizer.rate_at, few)
                name = f"{name}, now after update {schedule.optimizer.num_update:,}"
            elif isinstance(schedule, TorchSchedule):
                rates = _torch_rates(schedule, n)[1]
            else:
                rates = _rates(schedule, few)
            lines.append(f"{name}: {_words(rates)} up to update {n:,}")
        if self.knots is not None:
            lines.append(f"by hand: {', '.join(f'{rate:.3g} at {number:,}' for number, rate in self.knots)}")
        return "\n".join(lines)

    def _past(self, trainer: Trainer, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the past updates and their learning rates: the recorded ones, or else the schedule's."""
        recorded = None if self._run is None else self._run.scalars.get("learning_rate")
        if recorded is not None and len(recorded):
            curve = recorded.curve()
            return middle_steps(curve), curve.mean
        past = numbers[numbers <= trainer.optimizer.num_update]
        return past, _rates(trainer.optimizer.rate_at, past)

    def _n_updates(self) -> int:
        if self._wanted is not None:
            return self._wanted
        lengths = [self.knots[-1][0]] if self.knots is not None else []
        for schedule in self.schedules.values():
            rule: Any = schedule.optimizer.lr_scheduler if isinstance(schedule, Trainer) else schedule
            lengths += [int(getattr(rule, name)) for name in ("max_update", "total_steps", "T_max") if hasattr(rule, name)]
            lengths += [int(max(rule.step) * 1.2)] if isinstance(getattr(rule, "step", None), list) else []
            lengths += [2 * schedule.optimizer.num_update] if isinstance(schedule, Trainer) else []
        if not max(lengths, default=0):
            raise ValueError("n_updates is missing: none of the schedules says how long it is")
        return max(lengths)


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
    if schedules is None:
        return {}
    if not isinstance(schedules, Mapping):
        schedules = {_name(schedules): schedules}
    schedules = {name: _scheduler(each, n_updates) if isinstance(each, str) else each for name, each in schedules.items()}
    for name, schedule in schedules.items():
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(f"{name}: ReduceLROnPlateau needs losses, so nobody knows what it will do")
        if not (callable(schedule) or isinstance(schedule, (Trainer, TorchSchedule))):
            raise TypeError(
                f"schedules must be names, callables from the number of updates to a rate, Trainers, or schedules of torch, "
                f"got {type(schedule).__name__} for {name!r}"
            )
    return dict(schedules)


def _name(schedule: Any) -> str:
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Trainer):
        return type(schedule.optimizer).__name__
    name = getattr(schedule, "__name__", type(schedule).__name__)
    return "schedule" if name == "<lambda>" else str(name).removesuffix("Scheduler")


def _checked_knots(knots: Any, scale: str) -> list[tuple[int, float]]:
    try:
        pairs = [(number, rate) for number, rate in knots]
    except (TypeError, ValueError):
        raise TypeError(f"knots={knots!r}: must be pairs (update count, learning rate)") from None
    if len(pairs) < 2:
        raise ValueError(f"knots={knots!r}: must be two or more")
    checked = [
        (validation.integer(f"knots[{k}][0]", number, low=0), validation.number(f"knots[{k}][1]", rate, low=0))
        for k, (number, rate) in enumerate(pairs)
    ]
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(checked)):
        raise ValueError(f"knots={knots!r}: numbers of updates must increase")
    if scale == "log" and min(rate for _, rate in checked) == 0:
        raise ValueError(f"knots={knots!r}: rates must all be above 0 with scale='log'")
    return checked


def _rounded(rate: float) -> float:
    """Round a rate to three digits, the precision of a drag by hand."""
    return float(f"{rate:.3g}")


def _rates(schedule: Callable[[int], float], numbers: np.ndarray) -> np.ndarray:
    if isinstance(schedule, LRScheduler) and type(schedule).__call__ is LRScheduler.__call__:
        return np.asarray(schedule(numbers))
    return np.array([float(schedule(int(n))) for n in numbers])


def _torch_rates(schedule: TorchSchedule, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return future updates and the learning rates of the first parameter group, from a copy of the schedule."""
    parts: Any = getattr(schedule, "_schedulers", ())  # a ChainedScheduler has no counter
    first = max(int(getattr(each, "last_epoch", 0)) for each in (schedule, *parts)) + 1
    rates = simulate_scheduler(schedule, n - first)
    numbers = np.arange(first, first + len(rates))
    keep = spread(0, len(rates) - 1, POINTS)
    return numbers[keep], np.array(rates)[keep]


def _dashed(style: int) -> int:
    """Return the style number of a dashed line in the colour of `style`."""
    same_colour = [number for number in range(style % len(COLOURS), len(DASHES), len(COLOURS)) if number != style]
    return next(number for number in same_colour if DASHES[number] != "-")


def _words(rates: np.ndarray) -> str:
    k = int(rates.argmax())
    peak = "" if k in (0, len(rates) - 1) else f" by way of {rates[k]:.3g}"
    return f"from {rates[0]:.3g}{peak} to {rates[-1]:.3g}"
