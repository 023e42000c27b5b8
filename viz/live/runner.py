"""StepRunner: takes steps until it is paused, stopped, or they end, records what they yield, and lets the view follow."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...trainer.interrupts import gets_signals
from .gate import StepGate
from .learning_rates import LearningRate
from .recording import StepRecording
from .saving import StepSaving
from .steps import StepSource

__all__ = ["ENDED", "StepRunner", "say_paused"]

ENDED = ("stopped", "finished", "failed")
SLICE = 0.02  # seconds of steps between two looks at what else there is to do


class StepRunner:
    """Takes steps one after the other, in slices, which a `SliceExecutor` asks for.

    Args:
        loop: the `LiveLoop` whose steps these are; it lives as long as they run.
        source, rate, recording, saving: parts of it.
        clock: what tells the time, in seconds.

    Attributes:
        status: "ready", "running", "paused", "stopped", "finished" or "failed".
        n_steps: how many steps led to where it is.
        exception: what ended it, if "failed".
        limit: how many steps it takes until the next pause; None: there is no limit.
        turn: how often it has been set going; what ran before a pause must not run on after it.
        gate: keeps steps and others from each other.
        is_breakable: whether an interrupt may break off what runs at this moment.
    """

    def __init__(
        self,
        loop: Any,
        source: StepSource,
        rate: LearningRate,
        recording: StepRecording,
        saving: StepSaving,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.gate = clock, StepGate()
        self.status = "ready"
        self.n_steps = 0
        self.exception: BaseException | None = None
        self.limit: int | None = None
        self.turn = 0
        self.is_breakable = False
        self._loop, self._source, self._rate, self._recording, self._saving = loop, source, rate, recording, saving
        self._asked: str | None = None  # a status that is to be taken up after the current step
        self._interrupted = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._since = (0, 0.0)  # step and time when it began to run

    @property
    def steps_per_second(self) -> float:
        """Since it began to run, or was resumed."""
        step, then = self._since
        return (self.n_steps - step) / max(self.clock() - then, 1e-9) if self.status == "running" else 0.0

    def is_on(self, turn: int) -> bool:
        """Whether it still runs as it was set going in this turn."""
        return self.status == "running" and self.turn == turn

    def begin(self, limit: int | None = None) -> int | None:
        """Begin to run, for so many steps if there is a limit. Gives the turn; None: it runs already."""
        with self.gate:
            if self.status == "running":  # by now; several threads may ask
                return None
            self.limit = self.limit if limit is None else limit
            self.exception, self._asked, self._interrupted = None, None, False
            self.status, self.turn = "running", self.turn + 1
            self._since = (self.n_steps, self.clock())
            return self.turn

    def run_slice(self, turn: int, until: float | None = None) -> None:
        """Take steps for a moment, as long as this turn is on, or until this time."""
        end = self.clock() + SLICE
        while self.is_on(turn):
            self._take_step(turn)
            now = self.clock()
            if now >= end or (until is not None and now >= until):
                self._after_slice(turn)
                break

    def ask(self, status: str) -> None:
        """Take up "paused" or "stopped": when this returns the current step has ended; called in a step, after it."""
        if self.gate.in_step:
            self._asked = status
            return
        with self.gate.at_rest():
            if not (self.status == "running" or (status == "stopped" and self.status in ("ready", "paused"))):
                return
            self._set_status(status)
        self._settle()

    def ask_later(self, status: str) -> None:
        """Take up a status after the current step, unless another one has been asked for."""
        self._asked = self._asked or status

    def interrupt(self) -> None:
        """What a signal does, wherever the main thread is: it must not wait for anything."""
        if self.status != "running":
            return
        if self._interrupted and self.is_breakable and self.gate.in_step:
            raise KeyboardInterrupt
        self.ask_later("paused")
        self._interrupted = True

    async def wait_for_end(self) -> None:
        """Wait until it has ended, while the event loop runs on."""
        here = asyncio.get_running_loop()
        while True:
            with self.gate:
                if self.status in ENDED:
                    return
                future: asyncio.Future[None] = here.create_future()
                self._waiting.append((here, future))
            await future

    def _take_step(self, turn: int) -> None:
        entered = self.gate.enter(lambda: self._asked is None and self.is_on(turn))
        if not entered and not self.is_on(turn):
            return
        outcome: str | None = None
        try:
            if entered:
                outcome = self._take_one()
        except BaseException as error:
            outcome, self.exception = "failed", error
            raise
        finally:
            with self.gate:
                if entered:
                    self.gate.leave()
                outcome = self._asked if outcome is None else outcome
                if outcome is not None:
                    self._set_status(outcome)
            if outcome is not None:
                self._settle()

    def _take_one(self) -> str | None:
        """Take a step; the status that it leads to, None if it runs on."""
        try:
            try:
                self.is_breakable = True
                value = self._take()
            finally:
                self.is_breakable = False
            self.n_steps += 1
            self._record(value)
        except StopIteration:
            return "finished"
        except KeyboardInterrupt:
            self.is_breakable, self._interrupted = False, True
            return "paused"
        except Exception as error:
            self.exception = error
            return "failed"
        if self.limit is None:
            return None
        self.limit -= 1
        return "paused" if self.limit <= 0 else None

    def _set_status(self, status: str) -> None:
        """Take up a status between two steps. `_settle` is to follow, without the lock."""
        self.status, self._asked, self.limit = status, None, None
        if status in ENDED:
            self._on_end(status)

    def _settle(self) -> None:
        """Tell of the status, also those who wait for it."""
        interrupted, self._interrupted = self._interrupted, False
        self._on_status(interrupted)
        with self.gate:
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            loop.call_soon_threadsafe(_set_done, future)

    def _take(self) -> Any:
        """Take one step at the multiplied learning rate. StopIteration: there are no more."""
        return self._rate.take(self._source.take)

    def _record(self, value: Any) -> None:
        """Note what the step has yielded, and save if it is time."""
        self._recording.note(self.n_steps, value, self._rate.last)
        self._saving.after_step(value)

    def _after_slice(self, turn: int) -> None:
        """Some steps have been taken, and the next ones wait for this: let the view follow."""
        if self._recording.recorder is None:
            with self.gate.at_rest():
                self._recording.look()
        self._loop.screen.refresh(turn)
        self._loop.screen.look_around()
        if self._loop.control.cell_is_gone():
            self.ask_later("stopped")

    def _on_end(self, status: str) -> None:
        """Wait for what has been recorded and saved, and close a generator that is not at its end."""
        self._recording.finish()
        try:
            self._saving.end(status)
        except Exception as error:
            self.status, self.exception = "failed", error
        if status == "stopped":
            self._source.close()
        self._loop.control.release()

    def _on_status(self, interrupted: bool) -> None:
        """Another status has been taken up, after an interrupt or not: show it."""
        with self.gate.at_rest():
            self._recording.flush()
        self._loop.screen.refresh()
        if interrupted and self.status == "paused":  # it may have been the last step
            say_paused(self.n_steps)
        unseen = self._loop.mode == "task" and self._loop.screen.view is None
        if self.status == "failed" and unseen and self.exception is not None:
            traceback.print_exception(self.exception)


def say_paused(step: int) -> None:
    """Print that an interrupt has paused the loop, where the person is who has interrupted it."""
    if gets_signals():
        print(f"paused after step {step}; loop.resume() goes on")


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
