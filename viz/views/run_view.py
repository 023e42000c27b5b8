"""The base classes of views of recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..record import Recorder, Run, RunSet, diagnose
from ..scene import Panel
from .rows import Rows
from .view import View

__all__ = ["OneRunView", "RunView", "Runs", "checked_run", "checked_runs", "take_in"]

Runs = Recorder | Run | RunSet | Iterable[Recorder | Run]


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
        self._said: tuple[int, str] | None = None  # how long the runs were, and what was to be said then
        self._kept: dict[int, tuple[Any, Any]] = {}  # by the run what a panel was made of, and the panel
        super().__init__(**settings)

    @property
    def run(self) -> Run:
        """The first run."""
        return self.runs[0]

    def describe(self) -> str:
        """What there is to be seen, and what looks wrong, in sentences."""
        self.take_in(wait=True)
        return self._words()

    def take_in(self, wait: bool) -> bool:
        return take_in(self._recorders, wait)

    def _words(self) -> str:
        lines = []
        for run in self.runs:
            lines.append(f"{run.name}: {_described(run)}")
            lines += [f"- {note}" for note in diagnose(run)]
        return "\n".join(lines)

    def description(self) -> str:
        """As `describe`, but of a live run up to a twentieth of its length ago, as each frame of a picture has it."""
        length = sum(run.last_step or 0 for run in self.runs)
        if self._said is None or not self._said[0] <= length <= 1.05 * self._said[0]:
            self._said = length, self._words()
        return self._said[1]

    def title(self, what: str) -> str:
        """What stands above the picture: what it shows, and of which runs, where these have names of their own."""
        names = [run.name for run in self.runs]
        if names == ["run"]:
            return what
        return f"{what}: {', '.join(names) if len(names) <= 4 else f'{len(names)} runs'}"

    def _kept_panel(self, make: Callable[[Run, Rows], Panel | None], rows: Rows, run: Run | None = None) -> Panel | None:
        """A panel of histograms, which come seldom, created again only when there are more."""
        run = self.run if run is None else run
        number = sum(map(len, run.histograms.values()))
        if id(run) not in self._kept or self._kept[id(run)][0] != number:
            self._kept[id(run)] = number, make(run, rows)
        panel: Panel | None = self._kept[id(run)][1]
        return panel


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
