"""Ctrl-C and the notebook's interrupt button, for loops in the background."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...trainer.interrupts import gets_signals, give_back
from ..render.notebook import in_notebook
from .runner import StepRunner

__all__ = ["Interrupts", "interrupts"]


class Interrupts:
    """Takes Ctrl-C for the tasks of the main thread: it pauses them all.

    Between two slices, too, it does so where nobody else would take it: a kernel ignores it while no cell runs. While one
    does, the kernel puts a handler of its own in place, and afterwards back what was there, SIG_IGN or this.
    """

    def __init__(self) -> None:
        self._runners: list[StepRunner] = []
        self._taken = 0

    def __call__(self, number: int, frame: Any) -> None:
        self._taken += 1
        for runner in sorted(self._runners, key=lambda runner: runner.is_breakable):  # last the one that may raise
            runner.interrupt()

    @contextmanager
    def paused(self, runner: StepRunner) -> Iterator[None]:
        """A context in which an interrupt pauses this one."""
        if not gets_signals():
            yield
            return
        self._runners.append(runner)
        try:
            yield
        finally:
            self._runners.remove(runner)
            if not self._runners:
                give_back({signal.SIGINT: signal.SIG_IGN}, self)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context, of a slice, in which they come here whoever else would take them."""
        if not gets_signals():
            yield
            return
        taken, before = self._taken, signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            if before is not signal.SIG_IGN and before is not self:
                give_back({signal.SIGINT: before}, self)
                cell_awaits = callable(before) and before is not signal.default_int_handler and in_notebook()
                if self._taken != taken and cell_awaits:
                    signal.raise_signal(signal.SIGINT)  # which the cell is to have as well


interrupts = Interrupts()
