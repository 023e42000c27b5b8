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
    """Another view while a live loop trains, and what steers the loop.

    Above it stands how far the loop is, how fast, and which share of the time drawing takes; if a step has raised an error,
    that. Buttons pause, resume, take one step, stop, keep a snapshot, branch here or from the snapshot that is chosen, and
    go on with the run that is chosen where it was left; a slider sets the multiplier of the rate.

    Args:
        loop: a `LiveLoop`, which has this as its `view`.
        of: the other view; None is a `LossView` of all its runs. If it shows a run of the loop, it shows branches, too;
            one that shows a single run has the present one.
        **settings: as for `View`.

    Attributes:
        of: the other view.
        message: what the last button has to say; empty for nothing.
    """

    def __init__(self, loop: Any, of: View | None = None, **settings: Any) -> None:
        self.loop, self.message = loop, ""
        self.of = LossView(loop.runs) if of is None else of
        self._is_default = of is None
        self._chosen = {"from": "", "with": ""}  # a snapshot, a run
        super().__init__(**settings)

    def scene(self) -> Scene:
        """The picture as data."""
        loop = self.loop
        with loop.at_rest():  # nothing is recorded meanwhile
            self._take_in_runs()
            scene = self.of.scene()
        status = Panel(Axis("", 0, 1), Axis("", 0, 1), [Text(self.status(), 0.0, 0.5)], frame=False, columns=scene.grid[1])
        controls = [*scene.controls]
        if loop.rate.trainer is not None:
            nearest = int(np.argmin([abs(value - loop.multiplier) for value in MULTIPLIERS]))
            base = None if loop.rate.is_scheduled else loop.rate.now
            # With a schedule another rate at each step, which stands in the status; a slider's words stay.
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
            buttons=[*scene.buttons, *self._buttons()],
            height=scene.height + height,
            heights=[height / scene.height * sum(shares), *shares],
            description=self.status() if self._is_default else f"{self.status()}\n{scene.description}",
        )

    def _take_in_runs(self) -> None:
        """Let the other view show branches."""
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

    def _buttons(self) -> list[Button]:
        loop = self.loop
        running, goes_on = loop.status == "running", loop.status != "running" and loop.can_go_on
        named = [("pause", "Pause", running), ("resume", "Resume", goes_on), ("one step", "Step", goes_on)]
        named.append(("stop", "Stop", not loop.has_ended))
        if loop.rate.trainer is not None:
            named += [("snapshot", "Snapshot", True), ("branch", "Branch here", True)]
            named += [("back", "Back to snapshot", True)] if loop.snapshots else []
            runs, chosen = self._choice("with")
            named += [("pick", "Go on with run", chosen != loop.run.name)] if runs else []
        return [Button(*each) for each in named]

    def take_in(self, wait: bool) -> bool:
        self.loop.take_in(wait)
        return self.of.take_in(wait)

    def refresh(self) -> None:
        """Draw what is to be seen now, here and where the other view is shown by itself."""
        self.of.refresh()
        super().refresh()

    def catch_up(self) -> None:
        """Draw now what `refresh` has put off."""
        self.of.catch_up()
        super().catch_up()

    def at_rest(self) -> AbstractContextManager[None]:
        """Between two steps: a step may draw, too, so nobody may have the view and wait for its end."""
        rest: AbstractContextManager[None] = self.loop.at_rest()
        return rest

    def is_live(self) -> bool:
        """Whether the loop is running."""
        return bool(self.loop.status == "running")

    def picture_seconds(self) -> float:
        """A minute while the loop runs: every frame is another one, and to draw a picture takes a quarter of a second."""
        return 60.0 if self.is_live() else 0.0

    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The one that runs the steps."""
        found: asyncio.AbstractEventLoop | None = self.loop.event_loop
        return found

    def status(self) -> str:
        """How far the loop is, in words."""
        loop = self.loop
        if loop.exception is not None:
            return f"{loop.run.name}: failed after step {loop.n_steps:,}\n{_traceback(loop.exception)}"
        words = [f"{loop.run.name}: {loop.status}", f"step {loop.n_steps:,}"]
        if loop.status == "running":
            speed = loop.steps_per_second
            words.append(f"{speed:,.0f} steps/s" if speed >= 100 else f"{speed:.3g} steps/s")
        rate = loop.rate.last
        if loop.status in ("ready", "paused") and loop.rate.now is not None:
            rate = loop.rate.now * loop.multiplier  # whatever has been set since the last step
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
        """How far the loop is, and what there is to be seen, in sentences."""
        self.loop.take_in()
        self._take_in_runs()
        return f"{self.status()}\n{self.of.describe()}"

    def on_control(self, name: str, value: Any, index: int) -> None:
        """The multiplier of the rate, or a choice for a button; others are the other view's."""
        if name == "multiplier":
            self.loop.multiplier = float(value)
        elif name in self._chosen:
            self._chosen[name] = str(value)
        else:
            self.of.on_control(name, value, index)
        self.refresh()  # no step does it for a loop that is paused

    def on_button(self, name: str) -> None:
        """What the buttons do; what cannot be done is said in the picture."""
        loop = self.loop
        act: dict[str, Callable[[], Any]] = {
            "pause": loop.pause,
            "resume": loop.resume,
            "one step": loop.step,
            "stop": loop.stop,
            "snapshot": lambda: f"snapshot {loop.snapshot().name!r}",
            "branch": lambda: f"now in {loop.branch().name!r}",
            "back": lambda: f"now in {loop.branch(at=at).name!r}, from snapshot {at!r}",
            "pick": lambda: f"now in {loop.pick(self._choice('with')[1]).name!r}",
        }
        if name not in act:
            self.of.on_button(name)
        else:
            at = self._choice("from")[1]
            if loop.mode in ("auto", "block") and running_event_loop() is not None:
                loop.mode = "task"  # here there is no cell to be blocked, and pressing a button must not last
            try:
                said = act[name]()
                self.message = said if isinstance(said, str) else ""
                self._chosen["with"] = "" if name in ("branch", "back", "pick") else self._chosen["with"]
            except RuntimeError as error:
                self.message = str(error)
        self.refresh()

    def on_click(self, event: str, x: float, y: float) -> None:
        """The other view's."""
        self.of.on_click(event, x, y)
        self.refresh()

    def on_drag(self, event: str, number: int, x: float, y: float) -> None:
        """The other view's."""
        self.of.on_drag(event, number, x, y)
        self.refresh()

    def on_entry(self, name: str, text: str) -> None:
        """The other view's."""
        self.of.on_entry(name, text)
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
