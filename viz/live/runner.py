"""StepRunner: takes steps in a task, a thread or the calling cell, until it is paused, stopped, or they end."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..render.notebook import running_event_loop
from .gate import StepGate
from .interrupts import gets_signals, interrupts

__all__ = ["ENDED", "StepListener", "StepRunner"]

ENDED = ("stopped", "finished", "failed")
SLICE = 0.02  # seconds of steps between two looks at what else there is to do


class StepListener(Protocol):
    """What takes the steps, and is told how the runner is."""

    def take_step(self) -> Any:
        """Take one step, whose value `record` gets. StopIteration: there are no more."""

    def record(self, value: Any) -> None:
        """A step has been taken."""

    def after_slice(self, turn: int) -> None:
        """Some steps have been taken; the next ones wait for this."""

    def on_end(self, status: str) -> None:
        """It has ended: "stopped", "finished" or "failed"."""

    def on_status(self, interrupted: bool) -> None:
        """Another status has been taken up, after an interrupt or not."""


class StepRunner:
    """Takes steps one after the other, wherever its mode says.

    Args:
        listener: what takes the steps.
        mode: "auto", "task", "thread" or "block".
        name: of tasks and threads.
        clock: what tells the time, in seconds.

    Attributes:
        status: "ready", "running", "paused", "stopped", "finished" or "failed".
        n_steps: how many steps led to where it is.
        exception: what ended it, if "failed".
        limit: how many steps it takes until the next pause; None: there is no limit.
        gate: keeps steps and others from each other.
        event_loop: that of the task; what asks for steps may run in another one.
    """

    def __init__(self, listener: StepListener, mode: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.mode, self.clock, self.gate = mode, clock, StepGate()
        self.status = "ready"
        self.n_steps = 0
        self.exception: BaseException | None = None
        self.event_loop = running_event_loop()
        self._listener, self._name = listener, name
        self.limit: int | None = None
        self._asked: str | None = None  # a status that is to be taken up after the current step
        self._interrupted = False
        self._breakable = False  # whether a second interrupt breaks off what runs
        self._turn = 0  # how often it has been set going; what ran before a pause must not run on after it
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._since = (0, 0.0)  # step and time when it began to run

    @property
    def is_breakable(self) -> bool:
        """Whether an interrupt may break off a step at this moment."""
        return self._breakable

    @property
    def steps_per_second(self) -> float:
        """Since it began to run, or was resumed."""
        step, then = self._since
        return (self.n_steps - step) / max(self.clock() - then, 1e-9) if self.status == "running" else 0.0

    def is_on(self, turn: int) -> bool:
        """Whether it still runs as it was set going in this turn."""
        return self.status == "running" and self._turn == turn

    def find_event_loop(self) -> None:
        """The one it was made in runs the task, as long as it runs itself; else the one that runs here."""
        if self.event_loop is None or not self.event_loop.is_running():
            self.event_loop = running_event_loop() or self.event_loop
        if self.event_loop is None or self.event_loop.is_closed():
            raise RuntimeError("mode='task' needs a running event loop, as a notebook has: use 'thread' or 'block'")

    def go(self, limit: int | None = None) -> None:
        """Run on, for so many steps if there is a limit. With mode="block" this returns when it does not run any more."""
        if self.mode == "task":
            self.find_event_loop()
        with self.gate:
            if self.status == "running":  # by now; several threads may ask
                return
            self.limit = self.limit if limit is None else limit
            self.exception, self._asked, self._interrupted = None, None, False
            self.status, self._turn = "running", self._turn + 1
            self._since = (self.n_steps, self.clock())
            turn = self._turn
        if self.mode == "block":
            self._run_here()
        elif self.mode == "thread":
            # With a copy of the context, or what a step prints finds no cell.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run_here,), name=f"LiveLoop {self._name}", daemon=True).start()
        elif self.event_loop is running_event_loop():
            self._make_task(turn)
        else:
            assert self.event_loop is not None
            self.event_loop.call_soon_threadsafe(self._make_task, turn)

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
        if self._interrupted and self._breakable and self.gate.in_step:
            raise KeyboardInterrupt
        self.ask_later("paused")
        self._interrupted = True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it does not run any more. Of a task, the rest is run right here."""
        here = running_event_loop()
        if self.mode == "block" or (self.mode == "task" and here is not None and here is self.event_loop):
            self._run_here(timeout)
        else:
            self.gate.wait_for(lambda: self.status != "running", timeout)

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

    def _make_task(self, turn: int) -> None:
        assert self.event_loop is not None
        if self.is_on(turn):
            self._task = self.event_loop.create_task(self._run_in_task(turn), name=f"LiveLoop {self._name}")

    def _run_here(self, timeout: float | None = None) -> None:
        until, turn = None if timeout is None else self.clock() + timeout, self._turn
        with self._pausing_interrupts():
            while self.is_on(turn) and (until is None or self.clock() < until):
                self._run_slice(turn, until)

    async def _run_in_task(self, turn: int) -> None:
        with interrupts.paused(self):
            try:
                while self.is_on(turn):
                    with interrupts.taken():
                        self._run_slice(turn)
                    await asyncio.sleep(0)
            except asyncio.CancelledError:  # the event loop ends
                self.ask("paused")
                raise

    def _run_slice(self, turn: int, until: float | None = None) -> None:
        end = self.clock() + SLICE
        while self.is_on(turn):
            self._take_step(turn)
            now = self.clock()
            if now >= end or (until is not None and now >= until):
                self._listener.after_slice(turn)
                break

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
                self._breakable = True
                value = self._listener.take_step()
            finally:
                self._breakable = False
            self.n_steps += 1
            self._listener.record(value)
        except StopIteration:
            return "finished"
        except KeyboardInterrupt:
            self._breakable, self._interrupted = False, True
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
            self._listener.on_end(status)

    def _settle(self) -> None:
        """Tell of the status, also those who wait for it."""
        interrupted, self._interrupted = self._interrupted, False
        self._listener.on_status(interrupted)
        with self.gate:
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            loop.call_soon_threadsafe(_set_done, future)

    @contextmanager
    def _pausing_interrupts(self) -> Iterator[None]:
        """A context in which a first Ctrl-C pauses, and a second one, in the same step, breaks it off."""
        if not gets_signals():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
