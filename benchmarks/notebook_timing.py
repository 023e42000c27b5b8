"""Times by the clock and on the processor, the least of several or the means over pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tristep import Trainer, viz
from tristep.viz import Dashboard, FrameBudget, LiveLoop, Recorder

Row = dict[str, Any]


class Time(NamedTuple):
    """Seconds by the clock, and those of all of the process's threads."""

    clock: float
    processor: float


def row(what: str, time: Time, unit: str, by: Time | None = None) -> Row:
    """A line of the table: a time in seconds or milliseconds, or as a multiple of another."""
    clock, processor = (value * {"ms": 1e3}.get(unit, 1.0) for value in time)
    if by is not None:
        clock, processor = time.clock / by.clock, time.processor / by.processor
    return {"what": what, "clock": clock, "processor": processor, "unit": unit}


class Watched:
    """A recorded training with a live dashboard by a renderer of widgets, which in some of its stretches is not drawn.

    Attributes:
        plain: the mean time of a stretch without the dashboard.
        rate: how many frames its widget gets in a second of the others.
    """

    def __init__(self, step: Callable[[], torch.Tensor], trainer: Trainer, steps: int, renderer: str) -> None:
        self._step, self._trainer, self._steps = step, trainer, steps
        self._recorder = Recorder(trainer)
        self._frames, self._hidden = 0, 0.0
        viz.set_renderer(renderer)
        # Its budget does not see the time in which it is not drawn.
        budget = FrameBudget(most=4, clock=lambda: time.perf_counter() - self._hidden)
        self._view = Dashboard(self._recorder, budget=budget)
        widget = self._view.widget()
        shown, trait = (widget, "payload") if renderer == "canvas" else (widget.children[0], "value")
        shown.observe(self._count, trait)
        self._loop = LiveLoop(self._losses, trainer=trainer, recorder=self._recorder, view=self._view, mode="block")
        self.plain = self.rate = Time(0.0, 0.0)

    def run(self, pairs: int) -> tuple[Time, Time]:
        """What the dashboard adds, as a share, and its standard error."""
        self._order, self._times = orders(pairs + 1), {False: [], True: []}  # type: ignore[var-annotated]
        self._loop.start()
        plain, shown = (np.array(self._times[each][1:]) for each in (False, True))  # the first compile
        self.plain = Time(*plain.mean(axis=0))
        self.rate = Time(*(self._frames / shown.sum(axis=0)))
        return share(plain, shown)

    def _losses(self) -> Iterator[torch.Tensor]:
        for number, drawn in enumerate(self._order):
            self._loop.view = self._view if drawn else None
            if number == 2:
                self._frames = 0
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(self._steps):
                yield self._step()
            took = Time(time.perf_counter() - clock, time.process_time() - processor)
            self._times[drawn].append(took)
            self._hidden += 0.0 if drawn else took.clock
        self._loop.view = None

    def _count(self, change: object) -> None:
        self._frames += 1


def fastest(run: Callable[[], object], times: int) -> Time:
    """The fastest run, after one that is not timed."""
    return in_turns({"": run}, times)[""]


def in_turns(ways: Mapping[str, Callable[[], object]], times: int) -> dict[str, Time]:
    """The fastest run of each way, all taken in turns."""
    found = dict.fromkeys(ways, Time(float("inf"), float("inf")))
    for turn in range(times + 1):
        for name, run in ways.items():
            clock, processor = time.perf_counter(), time.process_time()
            run()
            took = Time(time.perf_counter() - clock, time.process_time() - processor)
            if turn:
                found[name] = Time(*map(min, found[name], took))
    return found


def added(plain: Callable[[], object], more: Callable[[], object], pairs: int) -> tuple[Time, Time, Time]:
    """The mean time of `plain`, what `more` takes above that, as a share, and the standard error of the share."""
    times: dict[bool, list[Time]] = {False: [], True: []}
    for second in orders(pairs + 1):
        clock, processor = time.perf_counter(), time.process_time()
        (more if second else plain)()
        times[second].append(Time(time.perf_counter() - clock, time.process_time() - processor))
    first, other = (np.array(times[each][1:]) for each in (False, True))  # the first ones compile
    return Time(*first.mean(axis=0)), *share(first, other)


def orders(pairs: int) -> list[bool]:
    """Which of two is to run, so many times each: in turns, and each as often before the other as after it."""
    return [bool((k + k // 2) % 2) for k in range(2 * pairs)]


def share(plain: np.ndarray, more: np.ndarray) -> tuple[Time, Time]:
    """By how much times [pairs, 2] are above others, as a share of these, and its standard error."""
    apart = more - plain
    error = apart.std(axis=0, ddof=1) / np.sqrt(len(apart))
    return Time(*(apart.mean(axis=0) / plain.mean(axis=0))), Time(*(error / plain.mean(axis=0)))
