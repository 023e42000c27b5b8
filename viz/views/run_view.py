"""The base classes of views of recorded runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...trainer.validation import nonempty
from ..record import Recorder, Run, RunSet
from ..record.diagnosis import Finding, findings
from ..record.statistics import trailing_means
from ..scene import Control, Note, Scene
from .rows import Rows
from .series import last_value, scalar_names, smoothing_control
from .view import View

__all__ = ["OneRunView", "RunView", "Runs", "checked_run", "checked_runs", "take_in"]

Runs = Recorder | Run | RunSet | Iterable[Recorder | Run]
MOST_NOTES = 6  # lines below a picture


class RunView(View):
    """The base class of views of one or several runs, which show new data of runs that are still being recorded.

    `runs` is a `Recorder`, a `Run`, a `LiveLoop`, a `RunSet`, or an iterable of recorders, runs and loops.
    """

    scale = "log"

    def __init__(self, runs: Runs, **settings: Any) -> None:
        self._recorders, self.runs = checked_runs(runs)
        self._known: tuple[int, list[list[Finding]]] | None = None  # the runs' total length at the diagnosis; findings
        self._kept: dict[int, tuple[int, Any]] = {}  # by the id of a run: its number of histograms, and their panel
        self._is_describing = False
        super().__init__(**settings)

    @property
    def run(self) -> Run:
        return self.runs[0]

    def on_control(self, name: str, value: Any, index: int) -> None:
        if name == "scale":  # of views that have this control
            self.scale = value
            super().refresh()

    def describe(self) -> str:
        """Return the scene's own words, a line about each run, and a line about each problem found in it."""
        if self._is_describing:  # the scene's own words are these
            return self.description()
        self._is_describing = True
        try:
            return super().describe() or self.description()
        finally:
            self._is_describing = False

    def take_in(self, wait: bool) -> bool:
        if wait:
            self._known = None
        return take_in(self._recorders, wait)

    def description(self) -> str:
        """Return a line about each run and about each problem; the diagnosis may be up to 5 % of the run's length old."""
        lines = []
        for run, problems in zip(self.runs, self._findings(), strict=True):
            lines += [f"{run.name}: {_described(run, self.smoothing())}", *(f"- {problem.words}" for problem in problems)]
        return "\n".join(lines)

    def said(self, scene: Scene, axis: str = "step") -> Scene:
        """Return the scene with `description` after its own words, and with notes on problems below the picture.

        A click on a note selects tensor and step, by the scene's controls "layer" and "step" if it has them. `axis` is the
        quantity on the horizontal axes, such as "step".
        """
        controls = {control.name: control for control in scene.controls}
        rows, several = Rows(self.run), len(self.runs) > 1
        notes = list[Note]()
        for run, problems in zip(self.runs, self._findings(), strict=True):
            for words, parameter, step in problems:
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
        words = self.description()
        if words not in scene.description:
            scene = replace(scene, description=f"{scene.description}\n{words}".lstrip("\n"))
        return replace(scene, notes=notes)

    def smoothing(self) -> Control:
        """Return the control that chooses of how many steps the strong lines and `description` have the average."""
        return smoothing_control(self.runs, scalar_names(self.runs))

    def _findings(self) -> list[list[Finding]]:
        length = sum(run.last_step or 0 for run in self.runs)
        last = self._known
        if last is None or len(last[1]) != len(self.runs) or not last[0] <= length <= 1.05 * last[0]:
            self._known = last = length, [findings(run) for run in self.runs]
        return last[1]

    def title(self, what: str) -> str:
        """Return `what` with the names of the runs, or with their number if more than 4; without for a single "run"."""
        names = [run.name for run in self.runs]
        if names == ["run"]:
            return what
        return f"{what}: {', '.join(names) if len(names) <= 4 else f'{len(names)} runs'}"


class OneRunView(RunView):
    """The base class of views of one run.

    Args:
        run: a `Recorder`, a `Run` or a `LiveLoop`.
        **settings: `name`, `theme` and `budget` of `View`.

    Raises:
        TypeError: `run` is something else.
    """

    def __init__(self, run: Recorder | Run, **settings: Any) -> None:
        super().__init__([checked_run(run)], **settings)


def take_in(recorders: Iterable[Recorder], wait: bool) -> bool:
    """Move recorded measurements from devices into the runs, and return whether none is left to arrive.

    Measurements that have not arrived are waited for only if `wait` is True.
    """
    for recorder in recorders:
        if wait:
            recorder.flush()
        else:
            recorder.poll()
    return not any(recorder.pending for recorder in recorders)


def _recorded(value: Any) -> Any:
    """Return the recorder or the run of a `LiveLoop`, and anything else as it is."""
    if isinstance(value, Recorder) or not isinstance(getattr(value, "run", None), Run):
        return value
    return value.run if value.recorder is None else value.recorder


def checked_run(run: Any, name: str = "run") -> Recorder | Run:
    run = _recorded(run)
    if isinstance(run, (Recorder, Run)):
        return run
    names = [each.name for each in run] if isinstance(run, RunSet) else []
    hint = f": give one of its runs, such as runs[{names[0]!r}]" if names else ""
    raise TypeError(f"{name} must be a Recorder, a Run or a LiveLoop, got {type(run).__name__}{hint}")


def checked_runs(runs: Any) -> tuple[list[Recorder], list[Run]]:
    runs = _recorded(runs)
    listed = (
        [runs] if isinstance(runs, (Recorder, Run)) else list(map(_recorded, runs)) if isinstance(runs, Iterable) else None
    )
    if listed is None or not all(isinstance(each, (Recorder, Run)) for each in listed):
        wrong = runs if listed is None else next(each for each in listed if not isinstance(each, (Recorder, Run)))
        hint = ""
        if isinstance(wrong, (int, float, list, tuple)) or hasattr(wrong, "item"):
            hint = (
                ": LossView takes losses as numbers, of several runs by their names: {'adam': [1.0, 0.5], 'sgd': [1.0, 0.8]}"
            )
        raise TypeError(f"runs must be a Recorder, a Run, a LiveLoop, a RunSet or several, got {type(wrong).__name__}{hint}")
    nonempty("runs", listed, ": there is nothing to draw")
    recorders = [each for each in listed if isinstance(each, Recorder)]
    return recorders, [each.run if isinstance(each, Recorder) else each for each in listed]


def _described(run: Run, smoothing: Control) -> str:
    last, width = run.last_step or 0, float(smoothing.values[smoothing.index])
    words = ["1 step" if last == 1 else f"{last:,} steps"]
    for name in scalar_names([run]):
        curve, end = run.scalars[name].curve(), last_value(run.scalars[name])
        there = np.flatnonzero(np.isfinite(curve.mean))
        if not there.size:
            continue
        k = there[0]
        block = "" if curve.first[k] == curve.last[k] else f" (mean of steps {curve.first[k]:,} to {curve.last[k]:,})"
        average = trailing_means(curve, [width])[0, there[-1]]
        averaged = f" ({smoothing.words(smoothing.index)}: {average:.3g})" if width else ""
        words.append(f"{name} from {curve.mean[k]:.3g}{block} to {end:.3g}{averaged}")
    return ", ".join(words)
