"""LoopControl: how a `LiveLoop` starts, goes on and is waited for; and all loops that there are."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

from ..render.notebook import has_front_end, request, running_event_loop, watch_cell
from .executor import SliceExecutor
from .runner import ENDED, StepRunner, say_paused
from .screen import Screen
from .steps import StepSource, weakly

__all__ = ["LoopControl", "stop_loops"]

_loops: weakref.WeakSet[Any] = weakref.WeakSet()


class LoopControl:
    """Starts and resumes a loop, waits for its end, and raises what a step raised where a person waits for it.

    A notebook keeps whatever it has displayed. So a loop that has ended does not keep what it has trained; it goes on from a
    snapshot as long as somebody else does.

    Args:
        loop: the `LiveLoop`.
        source: of its steps.
        model: trainer, modules and whatever else its steps need.

    Attributes:
        remark: which loop has taken the place of this one, or has given way to it; empty for none.
        cell_is_gone: whether marimo has run the cell again that made the loop, or deleted it: nobody has the loop then.
    """

    def __init__(self, loop: Any, source: StepSource, model: Sequence[Any]) -> None:
        self.remark = ""
        self._model, self._living = list(model), list(map(weakly, model))
        self._is_replaced = False
        self._run_of_cell = request().get("header", {}).get("msg_id")
        self.cell_is_gone = watch_cell()
        self._loop, self._source = loop, source
        self._runner: StepRunner = loop.runner
        self._executor: SliceExecutor = loop.executor
        self._screen: Screen = loop.screen

    def take_place(self) -> None:
        """End the loop that an earlier run of this cell has made; without cells, that of the function of this name."""
        for other in list(_loops):
            control, cell = other.control, self._loop.cell
            if other.cell is None and cell is None:
                is_earlier = control._source.is_redefined(self._source)
            else:
                is_earlier = other.cell == cell and control._run_of_cell != self._run_of_cell
            if is_earlier:
                control._give_way()
                if other.n_steps and other.status == "stopped":
                    self.remark = f"instead of the loop that this cell has made before, stopped after step {other.n_steps:,}"
        _loops.add(self._loop)

    def _give_way(self) -> None:
        """End for good."""
        self.remark = "its cell has been run again, and another loop has taken its place"
        self._runner.ask("stopped")
        self._is_replaced = True
        self.release()
        self._source.forget()
        self._loop.branches.forget()
        if self._runner.exception is not None:
            self._runner.exception.__traceback__ = None  # whose frames have what was trained

    def release(self) -> None:
        """Do not keep what has been trained; to be called when the loop has ended."""
        self._model = []

    def keep(self) -> None:
        """Keep what is trained, to go on with it.

        Raises:
            RuntimeError: it is gone, or another loop has taken this one's place.
        """
        if self._is_replaced:
            raise RuntimeError(f"there is nothing to go on with: {self.remark}")
        model = [living() for living in self._living]
        if any(each is None for each in model):
            raise RuntimeError(
                "there is nothing to go on with: what this loop has trained is gone. A loop that has ended does not keep it"
            )
        self._model = model

    def start(self) -> None:
        """See `LiveLoop.start`."""
        runner, executor = self._runner, self._executor
        if runner.status != "ready":
            raise RuntimeError(f"start() of a loop that is {runner.status} already: resume() goes on with a paused one")
        if executor.mode == "auto":
            executor.mode = "task" if running_event_loop() is not None and has_front_end() else "block"
        if executor.mode == "task":
            executor.find_event_loop()
        for loop in list(_loops):
            if loop.control.cell_is_gone():
                loop.stop()
        self._refuse_shared_trainer()
        runner.n_steps = self._loop.saving.begin() or runner.n_steps
        later = executor.mode == "block" and not has_front_end()  # a picture for the file: that of the end
        if not later:
            self._screen.show()
        self._go()
        if later:
            self._screen.show()
        self._raise_in_cell()

    def go_on(self, limit: int | None) -> None:
        """Go on after a pause, or start; for so many steps if there is a limit."""
        runner = self._runner
        if runner.status == "running":
            return
        if runner.status == "ready":
            runner.limit = limit
            self._loop.start()
            return
        stopped_between = runner.status in ("paused", "failed")
        if stopped_between:
            self.keep()
        if not stopped_between or not self._source.renew():
            why = "its generator has been ended by the exception" if stopped_between else "it has ended"
            raise RuntimeError(f"there is nothing to go on with: {why}. branch() goes back to a snapshot where there is one")
        self._refuse_shared_trainer()
        self._loop.saving.go_on()
        self._go(limit)
        self._raise_in_cell()

    def reopen(self) -> None:
        """Pause a loop that has ended, where it is back at a moment from which there are steps to come."""
        if self._runner.status in ENDED:
            if self._source.renew():
                self._runner.status, self._runner.exception = "paused", None
            else:
                self.release()

    def wait(self, timeout: float | None) -> bool:
        """See `LiveLoop.wait`."""
        runner = self._runner
        if runner.gate.in_step:
            raise RuntimeError("wait() in a step, which it would wait for")
        if runner.status == "ready":
            self._loop.start()
        if runner.status == "running":
            try:
                self._executor.wait(timeout)
            except KeyboardInterrupt:
                self._pause()
        self._raise()
        return runner.status in ENDED

    async def wait_for_end(self) -> Any:
        """See `LiveLoop.__await__`."""
        if self._runner.status == "ready":
            self._loop.start()
        try:
            await self._runner.wait_for_end()
        except asyncio.CancelledError:  # Ctrl-C in a cell that awaits
            if self._runner.status == "running":
                self._pause()
            raise
        self._raise()
        return self._loop

    def _go(self, limit: int | None = None) -> None:
        self._screen.unseen_from = None
        self._executor.go(limit)

    def _pause(self) -> None:
        self._runner.ask("paused")
        say_paused(self._runner.n_steps)

    def _raise(self) -> None:
        if self._runner.status == "failed" and self._runner.exception is not None:
            raise self._runner.exception

    def _raise_in_cell(self) -> None:
        if self._executor.mode == "block":
            self._raise()

    def _refuse_shared_trainer(self) -> None:
        trainer = self._loop.rate.trainer
        for loop in list(_loops):
            same = trainer is not None and loop.rate.trainer is trainer
            if same and loop is not self._loop and loop.status == "running":
                raise RuntimeError(f"{loop!r} trains with this trainer at this moment: pause or stop it first")


def stop_loops(cell: str | None = None) -> None:
    """Stop the loops that this cell has made; None: all."""
    for loop in list(_loops):
        if cell in (None, loop.cell) and loop.status in ("running", "paused"):
            loop.stop()
