"""LiveView: a view of what a live loop records, and what steers the loop."""

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
MULTIPLIERS = [2.0 ** (k / 2) for k in range(-12, 13)]  # that the view's slider has; 1 is among them


class LiveView(View):
    """Another view with the status of a live loop above it, and controls that steer the loop.

    The status is the step, the speed and the share of the time that drawing takes, or the error that a step raised. Buttons
    pause, resume, take one step, stop, keep a snapshot, branch here or at the chosen snapshot, and go on with the chosen
    run where it was left. A slider sets the multiplier of the learning rate.

    Args:
        loop: the `LiveLoop` whose `view` this is.
        of: the other view; None: a `LossView` of all runs of the loop. A view of runs of the loop shows its branches, too; a
            view of one run shows the current run.
        **settings: as for `View`.

    Attributes:
        of: the other view.
        message: the answer to the last button; empty if there is none.
    """

    def __init__(self, loop: Any, of: View | None = None, **settings: Any) -> None:
        self.loop, self.message = loop, ""
        self.of = LossView(loop.runs) if of is None else of
        self._is_default = of is None
        self._chosen = {"from": "", "with": ""}  # the names of a snapshot and of a run
        super().__init__(**settings)

    def scene(self) -> Scene:
        """The picture as data."""
        loop = self.loop
        with loop.at_rest():  # no step records anything
            self._take_in_runs()
            scene = self.of.scene()
        status = Panel(Axis("", 0, 1), Axis("", 0, 1), [Text(self.status(), 0.0, 0.5)], frame=False, columns=scene.grid[1])
        controls = [*scene.controls]
        if loop.rate.trainer is not None:
            nearest = int(np.argmin([abs(value - loop.multiplier) for value in MULTIPLIERS]))
            base = None if loop.rate.is_scheduled else loop.rate.now
            # A schedule's rate changes with each step, but the slider's texts stay: the status shows it.
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
            description=self.status() if self._is_default else f"{self.status()}\n{scene.description}",
        )

    def _take_in_runs(self) -> None:
        """Let the other view show the branches."""
        view, runs = self.of, list(self.loop.runs)
        if isinstance(view, RunView) and any(run is each for run in view.runs for each in runs):
            others = [run for run in runs if all(run is not each for each in view.runs)]
            view.runs = [self.loop.run] if isinstance(view, OneRunView) else [*view.runs, *others]

    def _choice(self, name: str) -> tuple[list[str], str]:
        """The names of snapshots, or of runs if there are several; and which is chosen, else the last or the present one."""
        loop = self.loop
        names = list(loop.snapshots) if name == "from" else [run.name for run in loop.runs]
        if name == "with" and len(names) == 1:
            names = []
        usual = loop.run.name if name == "with" else names[-1] if names else ""
        return names, self._chosen[name] if self._chosen[name] in names else usual

    def _actions(self) -> list[tuple[Button, Callable[[], str | None]]]:
        """The buttons, and what each does; this may return a message."""
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
        """Redraw this view, and the other one where it is shown by itself."""
        self.of.refresh()
        super().refresh()

    def catch_up(self) -> None:
        """Draw now what `refresh` has postponed."""
        self.of.catch_up()
        super().catch_up()

    def at_rest(self) -> AbstractContextManager[None]:
        """Between two steps: a step may draw, too, so nobody may lock the view and then wait for the step to end."""
        return self.loop.at_rest()

    def is_live(self) -> bool:
        """Whether the loop is running."""
        return self.loop.status == "running"

    def picture_seconds(self) -> float:
        """A minute while the loop runs: each frame differs, and drawing the picture takes a tenth of a second or more."""
        return 60.0 if self.is_live() else 0.0

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that runs the steps."""
        return self.loop.event_loop

    def status(self) -> str:
        """The status of the loop, in words."""
        loop = self.loop
        if loop.exception is not None:
            return f"{loop.run.name}: failed after step {loop.n_steps:,}\n{_traceback(loop.exception)}"
        words = [f"{loop.run.name}: {loop.status}", f"step {loop.n_steps:,}"]
        if loop.status == "running":
            speed = loop.steps_per_second
            words.append(f"{speed:,.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s")
        rate = loop.rate.last
        if loop.status in ("ready", "paused") and loop.rate.now is not None:
            rate = loop.rate.now * loop.multiplier  # which may have been set since the last step
        if rate is not None:
            multiplied = "" if loop.multiplier == 1 else f" (× {loop.multiplier:.3g})"
            words.append(f"learning rate {rate:.4g}{multiplied}")
        words.append(f"drawing {100 * self.cost:.1f} % of the time")
        if loop.unseen_from is not None:
            words.append(f"no page showed it after step {loop.unseen_from:,}")
        if loop.remark:
            words.append(loop.remark)
        return ", ".join(words) + (f"\n{self.message}" if self.message else "")

    def describe(self) -> str:
        """The status of the loop, and what the other view shows, in sentences."""
        self.loop.take_in()
        with self.loop.at_rest():  # `describe` draws the other view's scene
            self._take_in_runs()
            return f"{self.status()}\n{self.of.describe()}"

    def on_control(self, name: str, value: Any, index: int) -> None:
        """Set the multiplier, or remember the choice for a button; other controls are passed on to the other view."""
        if name == "multiplier":
            self.loop.multiplier = float(value)
        elif name in self._chosen:
            self._chosen[name] = str(value)
        else:
            self.of.on_control(name, value, index)
        self.refresh()  # while the loop is paused, no step does it

    def on_button(self, name: str) -> None:
        """Do what the button says; if that is impossible, the picture says why."""
        loop, action = self.loop, next((action for button, action in self._actions() if button.name == name), None)
        if action is None:
            self.of.on_button(name)
        else:
            if loop.mode in ("auto", "block") and running_event_loop() is not None:
                loop.mode = "task"  # no cell runs that could be blocked, and a button must not block the kernel
            try:
                self.message = action() or ""
                if name in ("branch", "back", "pick"):
                    self._chosen["with"] = ""
            except RuntimeError as error:
                self.message = str(error)
        self.refresh()

    def on_click(self, event: str, x: float, y: float) -> None:
        """Passed on to the other view."""
        self.of.on_click(event, x, y)
        self.refresh()

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        """Passed on to the other view."""
        self.of.on_drag(event, number, x, y)
        self.refresh()

    def on_entry(self, name: str, text: str) -> None:
        """Passed on to the other view."""
        self.of.on_entry(name, text)
        self.refresh()


def _traceback(error: BaseException) -> str:
    """The exception, and the last line of the user's own code in its traceback."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and _PACKAGE not in Path(frame.filename).parents
    ]
    words = f"{type(error).__name__}: {error}"
    if not own:
        return words
    last = own[-1]
    return f"{words}\n{Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")
