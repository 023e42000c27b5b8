"""SliceExecutor: runs the steps of a loop in a task, a thread or the calling cell."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
import weakref

from ...trainer.interrupts import handled
from ..render.notebook import running_event_loop
from .interrupts import interrupts
from .runner import StepRunner

__all__ = ["SliceExecutor"]


_in_threads: weakref.WeakSet[StepRunner] = weakref.WeakSet()


def _pause_all() -> None:
    """Pause at the end of the program: a thread that is cut off in a step of torch ends it with an abort."""
    for runner in list(_in_threads):
        runner.ask("paused")


class SliceExecutor:
    """Runs the slices of a `StepRunner`, wherever its mode says.

    Args:
        runner: takes the steps.
        mode: "auto", "task", "thread" or "block".
        name: of tasks and threads.

    Attributes:
        mode: as above.
        event_loop: that of the task; what asks for steps may run in another one.
    """

    def __init__(self, runner: StepRunner, mode: str, name: str) -> None:
        self.mode, self.event_loop = mode, running_event_loop()
        self._runner, self._name = runner, name
        self._task: asyncio.Task[None] | None = None

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
        turn = self._runner.begin(limit)
        if turn is None:
            return
        if self.mode == "block":
            self._run_here(turn)
        elif self.mode == "thread":
            # With a copy of the context, or what a step prints finds no cell.
            run = contextvars.copy_context().run
            _in_threads.add(self._runner)
            atexit.unregister(_pause_all)  # last in, first out: before recorders end
            atexit.register(_pause_all)
            threading.Thread(target=run, args=(self._run_here, turn), name=f"LiveLoop {self._name}", daemon=True).start()
        elif self.event_loop is running_event_loop():
            self._make_task(turn)
        else:
            assert self.event_loop is not None
            self.event_loop.call_soon_threadsafe(self._make_task, turn)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it does not run any more. Of a task, the rest is run right here."""
        here, runner = running_event_loop(), self._runner
        if self.mode == "block" or (self.mode == "task" and here is not None and here is self.event_loop):
            self._run_here(runner.turn, timeout)
        else:
            runner.gate.wait_for(lambda: runner.status != "running", timeout)

    def _make_task(self, turn: int) -> None:
        assert self.event_loop is not None
        if self._runner.is_on(turn):
            self._task = self.event_loop.create_task(self._run_in_task(turn), name=f"LiveLoop {self._name}")

    def _run_here(self, turn: int, timeout: float | None = None) -> None:
        runner = self._runner
        until = None if timeout is None else runner.clock() + timeout
        with handled(lambda *_: runner.interrupt()):  # a second one, in the same step, breaks it off
            while runner.is_on(turn) and (until is None or runner.clock() < until):
                runner.run_slice(turn, until)

    async def _run_in_task(self, turn: int) -> None:
        runner = self._runner
        with interrupts.paused(runner):
            try:
                while runner.is_on(turn):
                    with interrupts.taken():
                        runner.run_slice(turn)
                    await asyncio.sleep(0)
            except asyncio.CancelledError:  # the event loop ends
                runner.ask("paused")
                raise
