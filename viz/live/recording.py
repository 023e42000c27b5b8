"""StepRecording: where the numbers go that steps yield."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..record import Recorder, Run
from ..record.scalars import ScalarBuffer, checked_scalars

__all__ = ["StepRecording"]


class StepRecording:
    """Numbers of steps in a run: a recorder's, or one of its own.

    Args:
        recorder: called after each step that it has not noted itself; None: numbers are put into a run of this name.
        name: of the run, where there is no recorder.

    Attributes:
        run: the `Run` being recorded.
    """

    def __init__(self, recorder: Recorder | None, name: str) -> None:
        self.recorder = recorder
        self.run = Run(name) if recorder is None else recorder.run
        self._scalars = ScalarBuffer()

    @property
    def last_step(self) -> int:
        """The number of the last update that the recorder has noted; 0 without one."""
        return 0 if self.recorder is None else self.recorder.last_step

    def note(self, step: int, value: Any, learning_rate: float | None) -> None:
        """Note what a step has yielded: numbers by name, a loss, or nothing (None, True)."""
        scalars = dict(value) if isinstance(value, Mapping) else {} if value is None or value is True else {"loss": value}
        if learning_rate is not None:
            scalars.setdefault("learning_rate", learning_rate)
        if self.recorder is None:
            self._scalars.add(step, checked_scalars(scalars))
        elif self.recorder.due:
            self.recorder.step(**scalars)

    def look(self) -> None:
        """Take what has arrived into the run. A recorder does so by itself, as often as is worth it."""
        if self.recorder is None:
            self._scalars.look(self.run)

    def flush(self) -> None:
        """Take all numbers into the run; of a recorder, those that have arrived."""
        if self.recorder is None:
            self._scalars.flush(self.run)
        else:
            self.recorder.look()

    def finish(self) -> None:
        """Wait for all that has been recorded."""
        if self.recorder is not None:
            self.recorder.flush()

    def go_on_in(self, run: Run, last_step: int) -> None:
        """Record into another run from now on, after the update of this number."""
        self.run = run
        if self.recorder is not None:
            self.recorder.record_into(run, last_step)
