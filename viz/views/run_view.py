"""The base classes of views of recorded runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ..record import Recorder, Run, RunSet
from ..record.diagnosis import Finding, findings
from ..scene import Note, Scene
from .rows import Rows
from .view import View

__all__ = ["OneRunView", "RunView", "Runs", "checked_run", "checked_runs", "take_in"]

Runs = Recorder | Run | RunSet | Iterable[Recorder | Run]
MOST_NOTES = 6  # below a picture


class RunView(View):
    """A view of one or several runs, that takes what is new of those that are still being recorded.

    Args:
        runs: a `Recorder`, a `Run`, a `LiveLoop`, a `RunSet`, or several of the first three.
        **settings: as for `View`.

    Raises:
        TypeError, ValueError: there is none, or something else is among them.
    """

    def __init__(self, runs: Runs, **settings: Any) -> None:
        self._recorders, self.runs = checked_runs(runs)
        self._known: tuple[int, list[list[Finding]]] | None = None  # how long the runs were, and what was found in each
        self._kept: dict[int, tuple[int, Any]] = {}  # by the run how many histograms there were, and their panel
        super().__init__(**settings)

    @property
    def run(self) -> Run:
        """The first run."""
        return self.runs[0]

    def describe(self) -> str:
        """What there is to be seen, and what looks wrong, in sentences."""
        self.take_in(wait=True)
        self._known = None
        return self._words()

    def take_in(self, wait: bool) -> bool:
        return take_in(self._recorders, wait)

    def description(self) -> str:
        """As `describe`, but of a live run what looked wrong up to a twentieth of its length ago."""
        return self._words()

    def _words(self) -> str:
        lines = []
        for run, found in zip(self.runs, self._findings(), strict=True):
            lines += [f"{run.name}: {_described(run)}", *(f"- {each.words}" for each in found)]
        return "\n".join(lines)

    def said(self, scene: Scene, axis: str = "step") -> Scene:
        """The scene with its description, and with what looks wrong below it, where a click leads to the tensor and step.

        Args:
            scene: its control "layer" has the tensors, if it has one, its control "step" steps.
            axis: what horizontal axes show.
        """
        controls = {control.name: control for control in scene.controls}
        rows, several = Rows(self.run), len(self.runs) > 1
        notes = list[Note]()
        for run, found in zip(self.runs, self._findings(), strict=True):
            for words, parameter, step in found:
                sets, x = dict[str, int](), None
                if "layer" in controls and parameter is not None:
                    sets["layer"] = rows.choice_of(parameter)
                if "step" in controls and step is not None:
                    steps = np.asarray(controls["step"].values, dtype=np.float64)
                    sets["step"] = int(np.abs(steps - step).argmin())
                elif axis == "step" and step is not None:
                    x = float(step)
                notes.append(Note(f"{run.name}: {words}" if several else words, sets, x))
        if len(notes) > MOST_NOTES:
            notes[MOST_NOTES:] = [Note(f"and {len(notes) - MOST_NOTES} more: print(view.describe())")]
        return replace(scene, description=self.description(), notes=notes)

    def _findings(self) -> list[list[Finding]]:
        length = sum(run.last_step or 0 for run in self.runs)
        known = self._known
        if known is None or len(known[1]) != len(self.runs) or not known[0] <= length <= 1.05 * known[0]:
            self._known = known = length, [findings(run) for run in self.runs]
        return known[1]

    def title(self, what: str) -> str:
        """What stands above the picture: what it shows, and of which runs, where these have names of their own."""
        names = [run.name for run in self.runs]
        if names == ["run"]:
            return what
        return f"{what}: {', '.join(names) if len(names) <= 4 else f'{len(names)} runs'}"


class OneRunView(RunView):
    """A view of one run.

    Args:
        run: a `Recorder`, a `Run` or a `LiveLoop`.
        **settings: as for `View`.

    Raises:
        TypeError: it is none of these.
    """

    def __init__(self, run: Recorder | Run, **settings: Any) -> None:
        super().__init__([checked_run(run)], **settings)


def take_in(recorders: Iterable[Recorder], wait: bool) -> bool:
    """Take what these have recorded into their runs, all of it if this may wait for a device; whether that was all."""
    for recorder in recorders:
        if wait:
            recorder.flush()
        else:
            recorder.look()
    return not any(recorder.pending for recorder in recorders)


def _recorded(given: Any) -> Any:
    """What a `LiveLoop` records into, in its place."""
    if isinstance(given, Recorder) or not isinstance(getattr(given, "run", None), Run):
        return given
    return given.run if given.recorder is None else given.recorder


def checked_run(run: Any, name: str = "run") -> Recorder | Run:
    run = _recorded(run)
    if isinstance(run, (Recorder, Run)):
        return run
    names = [each.name for each in run] if isinstance(run, RunSet) else []
    hint = f": give one of its runs, such as runs[{names[0]!r}]" if names else ""
    raise TypeError(f"{name} must be a Recorder, a Run or a LiveLoop, got {type(run).__name__}{hint}")


def checked_runs(runs: Any) -> tuple[list[Recorder], list[Run]]:
    runs = _recorded(runs)
    given = (
        [runs] if isinstance(runs, (Recorder, Run)) else list(map(_recorded, runs)) if isinstance(runs, Iterable) else None
    )
    if given is None or not all(isinstance(each, (Recorder, Run)) for each in given):
        wrong = runs if given is None else next(each for each in given if not isinstance(each, (Recorder, Run)))
        raise TypeError(f"runs must be a Recorder, a Run, a LiveLoop, a RunSet or several, got {type(wrong).__name__}")
    if not given:
        raise ValueError("runs is empty: there is nothing to draw")
    recorders = [each for each in given if isinstance(each, Recorder)]
    return recorders, [each.run if isinstance(each, Recorder) else each for each in given]


def _described(run: Run) -> str:
    last = run.last_step or 0
    words = ["1 step" if last == 1 else f"{last:,} steps"]
    for name in ("loss", *(name for name in run.scalars if name not in ("loss", "learning_rate", "epoch", "seconds"))):
        series = run.scalars.get(name)
        values = np.zeros(0) if series is None else series.curve().mean
        values = values[np.isfinite(values)]
        if values.size:
            words.append(f"{name} from {values[0]:.3g} to {values[-1]:.3g}")
    return ", ".join(words)
