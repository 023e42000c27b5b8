"""The parts of a scene besides layers: axes, controls, buttons, clicks, listings and notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...trainer.validation import choice, integer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LARGEST", "LEAST", "Axis", "Button", "Click", "Control", "Listing", "Note", "RunTable"]

LARGEST, LEAST = 3e38, 1e-37  # the largest number that a scene can hold, and the least above 0
KINDS = ("slider", "choice", "play", "text")


@dataclass(frozen=True)
class Axis:
    """The x or y axis of a panel.

    Args:
        label: the label with its unit, such as "time (s)".
        low, high: the ends of the axis: finite, low < high, and > 0 with scale "log".
        scale: "linear" or "log".
        ticks: pairs of a value and its text, for ticks that are words; None lets the renderer choose numbers.
        upwards: whether values grow upwards or to the right; False reverses the axis.

    Raises:
        ValueError: `low`, `high` or `scale` is invalid.
    """

    label: str
    low: float
    high: float
    scale: str = "linear"
    ticks: Sequence[tuple[float, str]] | None = None
    upwards: bool = True

    def __post_init__(self) -> None:
        choice("scale", self.scale, ("linear", "log"))
        low, high = float(self.low), float(self.high)
        if not (math.isfinite(low) and math.isfinite(high) and low < high and (self.scale == "linear" or low > 0)):
            above = ", above 0 on a log scale" if self.scale == "log" else ""
            raise ValueError(f"axis {self.label!r} from {self.low!r} to {self.high!r}: must be finite, low < high{above}")

    @classmethod
    def over(cls, label: str, *values: Any, scale: str = "linear", margin: float = 0.04, ticks: Any = None) -> Axis:
        """Make an axis that covers values.

        Args:
            label, scale, ticks: as for `Axis`.
            *values: arrays of any shape. Non-finite values are ignored, and values <= 0 with scale "log". Values nearer to 0
                than 1e-37 count as 0.
            margin: the free space at each end, as a share of the range of the values.
        """
        arrays = [np.asarray(array, dtype=np.float64).ravel() for array in values]
        together = np.concatenate(arrays) if arrays else np.zeros(0)
        together = together[np.isfinite(together)]
        together = np.where(np.abs(together) < LEAST, 0.0, together)
        if scale == "log":
            together = np.log10(np.minimum(together[together > 0], LARGEST))
        low, high = (float(together.min()), float(together.max())) if together.size else (0.0, 1.0)
        reach = (high - low) * margin if high > low else (0.5 if scale == "log" else (abs(high) or 1.0) * 0.5)
        low, high = low - reach, high + reach
        if scale == "log":
            low, high = 10.0**low, 10.0**high
        return cls(label, low, high, scale, ticks)


@dataclass(frozen=True)
class Control:
    """A control that the user sets: a slider, a drop-down, a slider with a play button, or a text field.

    Args:
        name: the name by which layers refer to it.
        label: the text next to it.
        values: the numbers or words to choose from, at least one.
        index: the index of the initial value.
        kind: "slider", "choice" (a drop-down), "play" (a slider that can run by itself), or "text" (a field that shows the
            only value, and sends Python what is typed).
        remote: whether Python is told of every change, for what only Python can compute. No layer may depend on a remote
            control. Pages without Python leave it out.
        seconds: how long "play" takes from the first value to the last.
        texts: what to show for each value; empty means the value itself.
        typed: whether a remote slider also has a field to type a number; Python gets the text.

    Raises:
        ValueError: an argument is invalid; the message names it and the control.
    """

    name: str
    label: str
    values: Sequence[float] | Sequence[str]
    index: int = 0
    kind: str = "slider"
    remote: bool = False
    seconds: float = 5.0
    texts: Sequence[str] = ()
    typed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", list(self.values))
        if self.texts and len(self.texts) != len(self.values):
            raise ValueError(f"texts of control {self.name!r} are {len(self.texts)}: must be one for each of its values")
        if (self.typed or self.kind == "text") and not self.remote:
            raise ValueError(f"control {self.name!r} is typed, which only Python can act on: it must be remote")
        choice(f"control {self.name!r}: kind", self.kind, KINDS)
        integer(f"control {self.name!r}: index", self.index, 0, len(self.values) - 1)

    def words(self, index: int) -> str:
        """Return a value as text."""
        value = self.values[index]
        if self.texts:
            return self.texts[index]
        if isinstance(value, str):
            return value
        return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"


@dataclass(frozen=True)
class Button:
    """A button, which calls Python. Pages without Python leave it out.

    Args:
        name: the name that Python gets when it is pressed.
        label: the text on it.
        enabled: False makes it grey.
    """

    name: str
    label: str
    enabled: bool = True


@dataclass(frozen=True)
class Click:
    """The effect of a click on a panel (or Enter at its cursor): it sets controls, or sends the position to Python.

    Args:
        control: the control to set to its value nearest to the click; values that are words count as 0, 1, ...
        along: the axis along which `control` is set, "x" or "y".
        other: a control to set along the other axis; None for none.
        event: the name under which Python gets the position (x, y); None if the click only sets controls.
        does: what Python does then, such as "move the start", for the hint below the picture.
    """

    control: str | None = None
    along: str = "x"
    other: str | None = None
    event: str | None = None
    does: str = ""


@dataclass(frozen=True)
class Listing:
    """Text below the picture that the user may unfold and copy, such as code.

    Args:
        title: its heading.
        text: its lines.
    """

    title: str
    text: str


class Note(str):
    """A sentence below the picture; a click on it shows what it is about.

    Args:
        words: the sentence.
        sets: the controls that the click sets: value indices by control name.
        x: where the click puts the cursor, on the x axis of the first panel that covers it; None leaves the cursor.
    """

    sets: Mapping[str, int]
    x: float | None

    def __new__(cls, words: str, sets: Mapping[str, int] | None = None, x: float | None = None) -> Self:
        note = super().__new__(cls, words)
        note.sets, note.x = dict(sets or {}), x
        return note


@dataclass(frozen=True)
class RunTable:
    """A table of runs beside the picture, searched and sorted by the user, which chooses the runs that are drawn.

    The layers of run i have `run=i`. They are in the table rather than in the legend; pictures without a table, such as
    images, draw those of `shown` alone and have them in the legend.

    Args:
        names: the runs' names, one for each row.
        columns: the further columns by their headings: a number or words for each run.
        shown: the numbers of the runs that are drawn at first.

    Raises:
        ValueError: a column has not one entry for each run, or `shown` has a number without a run.
    """

    names: Sequence[str]
    columns: Mapping[str, Sequence[float | str]]
    shown: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", [str(name) for name in self.names])
        columns = {heading: [_entry(value) for value in values] for heading, values in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "shown", sorted({int(k) for k in self.shown}))
        for heading, values in self.columns.items():
            if len(values) != len(self.names):
                raise ValueError(
                    f"columns[{heading!r}] has {len(values)} entries: must be one for each of {len(self.names)} runs"
                )
        for k in self.shown:
            integer("shown: number of a run", k, 0, len(self.names) - 1)


def _entry(value: Any) -> float | str:
    """Return a table's entry as JSON can have it."""
    if isinstance(value, str):
        return value
    return float(value) if math.isfinite(value) else "not finite"
