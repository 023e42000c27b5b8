"""LoopControl: how a `LiveLoop` starts, goes on and is waited for; all loops that there are, and which of them may step."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from ..render.notebook import has_front_end, request, running_event_loop, watch_cell
from .executor import SliceExecutor
from .runner import ENDED, StepRunner, say_paused
from .screen import Screen
from .steps import StepSource, weakly

__all__ = ["LoopControl", "Loops", "loops", "stop_loops"]

_loops: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count()


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
        number: in which order loops have been made.
        cell_is_gone: whether marimo has run the cell again that made the loop, or deleted it: nobody has the loop then.
    """

    def __init__(self, loop: Any, source: StepSource, model: Sequence[Any]) -> None:
        self.remark = ""
        self.number = next(_numbers)
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
        self._stop_others()
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
        self._stop_others()
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

    @property
    def can_go_on(self) -> bool:
        """Whether there may be steps to come."""
        status = self._runner.status
        return status in ("ready", "paused") or (status == "failed" and not self._is_replaced and self._source.can_renew)

    def _stop_others(self) -> None:
        """End running loops that train with this one's trainer, or draw in its view: there is one that steps, the last."""
        trainer, view = self._loop.rate.trainer, self._screen.view
        for other in loops():
            shares = [
                *(["trainer"] if trainer is not None and other.rate.trainer is trainer else []),
                *(["view"] if view is not None and other.screen.view is view else []),
            ]
            if other is not self._loop and other.status == "running" and shares:
                other.control.remark = f"loop {self._loop.run.name!r} has begun with its {shares[0]}"
                other.stop()
                self.remark = f"loop {other.run.name!r} with the same {shares[0]} was stopped after step {other.n_steps:,}"


class Loops(list[Any]):
    """Loops with what they do in words; in a notebook each has a button that stops it."""

    def __repr__(self) -> str:
        return "\n".join(map(_in_words, self)) or "no loop is running or paused"

    def _ipython_display_(self) -> None:
        if not self or not has_front_end():
            raise NotImplementedError  # by which IPython is told to show the words of `repr`
        import ipywidgets as widgets
        from IPython.display import display

        display(widgets.VBox([_row(widgets, loop) for loop in self]))


def loops() -> Loops:
    """The live loops that are running or paused, in the order in which they were made, whatever still refers to them.

    Example:
        >>> from tristep import viz
        >>> for loop in viz.loops():
        ...     loop.stop()
    """
    found = [loop for loop in _loops if loop.status in ("running", "paused")]
    return Loops(sorted(found, key=lambda loop: loop.control.number))


def _in_words(loop: Any) -> str:
    return f"{loop.run.name}: {loop.status}, step {loop.n_steps:,}, mode {loop.mode!r}"


def _row(widgets: Any, loop: Any) -> Any:
    button, label = widgets.Button(description="Stop"), widgets.Label(_in_words(loop))

    def stop(_: Any) -> None:
        loop.stop()
        button.disabled, label.value = True, _in_words(loop)

    button.on_click(stop)
    return widgets.HBox([button, label])


def stop_loops(cell: str | None = None) -> None:
    """Stop the loops that this cell has made; None: all."""
    for loop in loops():
        if cell in (None, loop.cell):
            loop.stop()
