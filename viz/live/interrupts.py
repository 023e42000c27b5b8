"""Ctrl-C and the notebook's interrupt button, for loops."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...trainer.interrupts import gets_signals, give_back
from ..render.notebook import in_notebook

__all__ = ["Interrupts", "interrupts"]


class Interrupts:
    """Takes Ctrl-C for all loops that run in the main thread.

    Between two slices of a task, too, it does so where nobody else would take it: a kernel ignores it while no cell runs.
    While one does, the kernel puts a handler of its own in place, and afterwards back what was there, SIG_IGN or this.
    """

    def __init__(self) -> None:
        self._reached: list[Callable[[], bool]] = []
        self._taken = 0

    def __call__(self, number: int, frame: Any) -> None:
        self._taken += 1
        broken_off = [reached() for reached in self._reached]
        if any(broken_off):
            raise KeyboardInterrupt

    @contextmanager
    def reach(self, interrupt: Callable[[], bool]) -> Iterator[None]:
        """A context in which this is called by an interrupt; it tells whether what runs is to be broken off."""
        if not gets_signals():
            yield
            return
        self._reached.append(interrupt)
        try:
            yield
        finally:
            self._reached.remove(interrupt)
            if not self._reached:
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
