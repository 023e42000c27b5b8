"""LiveView: a view of a live loop's runs, with the loop's status and with controls that steer the loop."""

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
from ..views import LossView, View
from ..views.run_view import OneRunView, RunView

__all__ = ["LiveView"]

_PACKAGE = Path(__file__).parents[2]
MULTIPLIERS = [2.0 ** (k / 2) for k in range(-12, 13)]  # the slider's values, with 1 in the middle


class LiveView(View):
    """Another view with the status of a live loop above it, and controls that steer the loop.

    The status is the step, the speed and the share of time spent on drawing, or the error that a step raised. Buttons
    pause, resume, take one step, stop, take a snapshot, branch here or at the chosen snapshot, and continue the chosen run
    where it was left. A slider sets the multiplier of the learning rate.

    Args:
        loop: the `LiveLoop` to show and steer; this is its `view`.
        of: the view to show below the status. Default: None, a `LossView` of all runs of the loop. A view of the loop's runs
            also shows branches made later; a view of one run shows the current run.
        **settings: the arguments of `View`.

    Attributes:
        of: the view below the status.
        message: the answer to the last button; "" if it had none.
    """

    def __init__(self, loop: Any, of: View | None = None, **settings: Any) -> None:
        self.loop, self.message = loop, ""
        self.of = LossView(loop.runs) if of is None else of
        self._is_default = of is None
        self._chosen = {"from": "", "with": ""}  # names of the chosen snapshot and of the chosen run
        super().__init__(**settings)

    def scene(self) -> Scene:
        """Return the scene of the other view, with the status panel, controls and buttons of the loop."""
        loop = self.loop
        with loop.at_rest():  # so that no step records meanwhile
            self._take_in_runs()
            scene = self.of.scene()
        status = Panel(
            Axis("", 0, 1),
            Axis("", 0, 1),
            [Text(self.status(), 0.0, 0.5, name="status")],
            frame=False,
            columns=scene.grid[1],
        )
        controls = [*scene.controls]
        if loop.rate.trainer is not None:
            nearest = int(np.argmin([abs(value - loop.multiplier) for value in MULTIPLIERS]))
            base = None if loop.rate.is_scheduled else loop.rate.now
            # With a schedule the texts have no rate, which would change at each step; the status shows it.
            texts = [f"× {each:.3g}" if base is None else f"{base * each:.3g} (× {each:.3g})" for each in MULTIPLIERS]
            controls.append(Control("multiplier", "learning rate", MULTIPLIERS, nearest, remote=True, texts=texts))
            for name, label in (("from", "snapshot"), ("with", "run")):
                names, chosen = self._choice(name)
                if names:
                    controls.append(Control(name, label, names, names.index(chosen), "choice", remote=True))
        height = 0.45 if loop.exception is None else 0.7
        shares = scene.heights or [1.0] * scene.grid[0]
        return replace(
            scene,
            panels=[status, *(replace(panel, row=panel.row + 1) for panel in scene.panels)],
            controls=controls,
            buttons=[*scene.buttons, *(button for button, _ in self._actions())],
            height=scene.height + height,
            heights=[height / scene.height * sum(shares), *shares],
            live=self.is_live(),
            description=self.status() if self._is_default else f"{self.status()}\n{scene.description}",
        )

    def _take_in_runs(self) -> None:
        """Add new branches to the other view, or switch a view of one run to the current run."""
        view, runs = self.of, list(self.loop.runs)
        if isinstance(view, RunView) and any(run is each for run in view.runs for each in runs):
            new_runs = [run for run in runs if all(run is not each for each in view.runs)]
            view.runs = [self.loop.run] if isinstance(view, OneRunView) else [*view.runs, *new_runs]

    def _choice(self, name: str) -> tuple[list[str], str]:
        """Return the names of snapshots ("from") or runs ("with"), and the chosen name. A single run is no choice: []."""
        loop = self.loop
        names = list(loop.snapshots) if name == "from" else [run.name for run in loop.runs]
        if name == "with" and len(names) == 1:
            names = []
        usual = loop.run.name if name == "with" else names[-1] if names else ""
        return names, self._chosen[name] if self._chosen[name] in names else usual

    def _actions(self) -> list[tuple[Button, Callable[[], str | None]]]:
        """Return the buttons with their actions, which return a message or None."""
        loop = self.loop
        running, goes_on = loop.status == "running", loop.status != "running" and loop.can_go_on
        actions: list[tuple[Button, Callable[[], str | None]]] = [
            (Button("pause", "Pause", running), loop.pause),
            (Button("resume", "Resume", goes_on), loop.resume),
            (Button("one step", "Step", goes_on), loop.step),
            (Button("stop", "Stop", not loop.has_ended), loop.stop),
        ]
        if loop.rate.trainer is not None:
            (snapshots, at), (runs, run) = self._choice("from"), self._choice("with")
            actions.append((Button("snapshot", "Snapshot"), lambda: f"snapshot {loop.snapshot().name!r}"))
            actions.append((Button("branch", "Branch here"), lambda: f"now in {loop.branch().name!r}"))
            if snapshots:
                back = lambda: f"now in {loop.branch(at=at).name!r}, from snapshot {at!r}"  # noqa: E731
                actions.append((Button("back", "Back to snapshot"), back))
            if runs:
                pick = lambda: f"now in {loop.pick(run).name!r}"  # noqa: E731
                actions.append((Button("pick", "Go on with run", run != loop.run.name), pick))
        return actions

    def take_in(self, wait: bool) -> bool:
        self.loop.take_in(wait)
        return self.of.take_in(wait)

    def refresh(self) -> None:
        """Redraw this view, and the other view wherever that is shown separately."""
        self.of.refresh()
        super().refresh()

    def catch_up(self) -> None:
        self.of.catch_up()
        super().catch_up()

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a context that holds the loop between two steps. Enter it before locking the view: steps draw, too."""
        return self.loop.at_rest()

    def is_live(self) -> bool:
        return self.loop.status == "running"

    def picture_seconds(self) -> float:
        """Return 60 while the loop runs, else 0: each frame differs, and drawing its picture takes 0.1 s or more."""
        return 60.0 if self.is_live() else 0.0

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        return self.loop.event_loop

    def status(self) -> str:
        """Return the status of the loop as text."""
        loop = self.loop
        if loop.exception is not None:
            return f"{loop.run.name}: failed after step {loop.n_steps:,}\n{_traceback(loop.exception)}"
        words = [f"{loop.run.name}: {loop.status}", f"step {loop.n_steps:,}"]
        if loop.status == "running":
            speed = loop.steps_per_second
            words.append(f"{speed:,.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s")
        rate = loop.rate.last
        if loop.status in ("ready", "paused") and loop.rate.now is not None:
            rate = loop.rate.now * loop.multiplier  # may have been set since the last step
        if rate is not None:
            multiplied = "" if loop.multiplier == 1 else f" (× {loop.multiplier:.3g})"
            words.append(f"learning rate {rate:.4g}{multiplied}")
        words.append(f"drawing {100 * self.cost:.1f} % of the time")
        if loop.remark:
            words.append(loop.remark)
        return ", ".join(words) + (f"\n{self.message}" if self.message else "")

    def describe(self) -> str:
        """Return the status of the loop and the other view's description as text."""
        self.loop.take_in()
        with self.loop.at_rest():  # `describe` draws the other view's scene
            self._take_in_runs()
            return f"{self.status()}\n{self.of.describe()}"

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Set the multiplier, or store the choice for a button; pass other controls on to the other view."""
        if name == "multiplier":
            self.loop.multiplier = float(value)
        elif name in self._chosen:
            self._chosen[name] = str(value)
        else:
            self.of.on_control(name, value, index)
        self.refresh()  # a paused loop does not redraw

    def on_button(self, name: str) -> None:
        """Do the button's action; if that is impossible, the status shows why."""
        loop, action = self.loop, next((action for button, action in self._actions() if button.name == name), None)
        if action is None:
            self.of.on_button(name)
        else:
            if loop.mode in ("auto", "block") and running_event_loop() is not None:
                loop.mode = "task"  # a button must not block the kernel, as a cell may
            try:
                self.message = action() or ""
                if name in ("branch", "back", "pick"):
                    self._chosen["with"] = ""
            except RuntimeError as error:
                self.message = str(error)
        self.refresh()

    def on_click(self, event: str, x: float, y: float) -> None:
        self.of.on_click(event, x, y)
        self.refresh()

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        self.of.on_drag(event, number, x, y)
        self.refresh()

    def on_entry(self, name: str, text: str) -> None:
        self.of.on_entry(name, text)
        self.refresh()


def _traceback(error: BaseException) -> str:
    """Return the exception, and the last line of the user's code in its traceback, as text."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and _PACKAGE not in Path(frame.filename).parents
    ]
    words = f"{type(error).__name__}: {error}"
    if not frames:
        return words
    last = frames[-1]
    return f"{words}\n{Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")
