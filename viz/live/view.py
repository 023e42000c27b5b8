"""LiveView: losses and learning rates of a live loop, and what steers it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..render.notebook import running_event_loop
from ..scene import Axis, Button, Control, Panel, Scene, Text
from ..views import LossView
from .runner import ENDED

__all__ = ["LiveView"]

_PACKAGE = Path(__file__).parents[2]
MULTIPLIERS = [2.0 ** (k / 2) for k in range(-12, 13)]  # that the view's slider has; 1 is among them


class LiveView(LossView):
    """Losses and learning rates of a live loop while it trains, and what steers it.

    Above them stands how far it is, how fast, and which share of the time drawing takes; if a step has raised an error,
    that. Buttons pause, resume, take one step, stop, keep a snapshot, and branch here; a slider sets the multiplier of the
    rate.

    Args:
        loop: a `LiveLoop`; one that is made with view="live" has this as its `view`.
        **settings: those of `LossView`.

    Attributes:
        message: what the last button has to say; empty for nothing.
    """

    def __init__(self, loop: Any, **settings: Any) -> None:
        self.loop = loop
        self.message = ""
        super().__init__(loop.runs, **settings)

    def scene(self) -> Scene:
        """The picture as data."""
        with self.loop.runner.gate.at_rest():  # nothing is recorded meanwhile
            self.loop.recording.flush()
            self.runs = list(self.loop.runs)
            scene = super().scene()
        status = Panel(Axis("", 0, 1), Axis("", 0, 1), [Text(self.status(), 0.0, 0.5)], frame=False, columns=scene.grid[1])
        controls = [*scene.controls]
        if self.loop.rate.known:
            nearest = int(np.argmin([abs(value - self.loop.multiplier) for value in MULTIPLIERS]))
            base = self.loop.rate.constant
            # With a schedule another rate at each step, which stands in the status; a slider's words stay.
            texts = [f"× {each:.3g}" if base is None else f"{base * each:.3g} (× {each:.3g})" for each in MULTIPLIERS]
            controls.append(Control("multiplier", "learning rate", MULTIPLIERS, nearest, remote=True, texts=texts))
        height = 0.45 if self.loop.exception is None else 0.7
        shares = scene.heights or [1.0] * scene.grid[0]
        return replace(
            scene,
            panels=[status, *(replace(panel, row=panel.row + 1) for panel in scene.panels)],
            controls=controls,
            buttons=self._buttons(),
            height=scene.height + height,
            heights=[height / scene.height * sum(shares), *shares],
        )

    def _buttons(self) -> list[Button]:
        loop, status = self.loop, self.loop.status
        running, ended = status == "running", status in ENDED
        goes_on = not running and loop.control.can_go_on
        named = [("pause", "Pause", running), ("resume", "Resume", goes_on), ("step", "Step", goes_on)]
        named.append(("stop", "Stop", not ended))
        if loop.rate.known:
            named += [("snapshot", "Snapshot", True), ("branch", "Branch here", True)]
        return [Button(*each) for each in named]

    def at_rest(self) -> AbstractContextManager[None]:
        """Between two steps: a step may draw, too, so nobody may have the view and wait for its end."""
        return self.loop.runner.gate.at_rest()

    def is_live(self) -> bool:
        """Whether the loop is running."""
        return self.loop.status == "running"

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The one that runs the steps."""
        return self.loop.executor.event_loop

    def status(self) -> str:
        """How far the loop is, in words."""
        loop = self.loop
        words = [f"{loop.run.name}: {loop.status}", f"step {loop.n_steps:,}"]
        if loop.exception is not None:
            return f"{loop.run.name}: failed after step {loop.n_steps:,}\n{_traceback(loop.exception)}"
        if loop.status == "running":
            speed = loop.steps_per_second
            words.append(f"{speed:,.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s")
        rate = loop.rate.coming if loop.status in ("ready", "paused") else loop.rate.last
        if rate is not None:
            multiplied = "" if loop.multiplier == 1 else f" (× {loop.multiplier:.3g})"
            words.append(f"learning rate {rate:.4g}{multiplied}")
        words.append(f"drawing {100 * self.cost:.1f} % of the time")
        if loop.screen.unseen_from is not None:
            words.append(f"no page showed it after step {loop.screen.unseen_from:,}")
        if loop.control.remark:
            words.append(loop.control.remark)
        return ", ".join(words) + (f"\n{self.message}" if self.message else "")

    def describe(self) -> str:
        """How far the loop is, and what there is to be seen, in sentences."""
        return f"{self.status()}\n{super().describe()}"

    def description(self) -> str:
        """How far the loop is."""
        return self.status()

    def on_control(self, name: str, value: Any, index: int) -> None:
        """The multiplier of the rate."""
        if name == "multiplier":
            self.loop.multiplier = float(value)
            self.refresh()  # no step does it for a loop that is paused
        else:
            super().on_control(name, value, index)

    def on_button(self, name: str) -> None:
        """What the buttons do; what cannot be done is said in the picture."""
        act: dict[str, Callable[[], Any]] = {
            "pause": self.loop.pause,
            "resume": self.loop.resume,
            "step": self.loop.step,
            "stop": self.loop.stop,
            "snapshot": lambda: f"snapshot {self.loop.snapshot().name!r}",
            "branch": lambda: f"now in {self.loop.branch().name!r}",
        }
        if self.loop.mode in ("auto", "block") and running_event_loop() is not None:
            self.loop.mode = "task"  # here there is no cell to be blocked, and pressing a button must not last
        try:
            said = act[name]()
            self.message = said if isinstance(said, str) else ""
        except RuntimeError as error:
            self.message = str(error)
        self.refresh()


def _traceback(error: BaseException) -> str:
    """An exception with the line that raised it, or the last one before it went into a package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if "site-packages" not in frame.filename and _PACKAGE not in Path(frame.filename).parents
    ]
    words = f"{type(error).__name__}: {error}"
    if not own:
        return words
    last = own[-1]
    return f"{words}\n{Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")
