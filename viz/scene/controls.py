"""What a person sets in a scene, and the axes of its panels: `Axis`, `Control`, `Button`, `Click`, `Listing` and `Note`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Axis", "Button", "Click", "Control", "Listing", "Note"]

KINDS = ("slider", "choice", "play", "text")


@dataclass(frozen=True)
class Axis:
    """One direction of a panel.

    Args:
        label: what it shows, with its unit.
        low, high: what the panel reaches from and to, finite, low < high; above 0 on a log scale.
        scale: "linear" or "log".
        ticks: values and their words, where these are not to be numbers; None leaves it to the renderer.
        upwards: whether values grow upwards, or to the right.
    """

    label: str
    low: float
    high: float
    scale: str = "linear"
    ticks: Sequence[tuple[float, str]] | None = None
    upwards: bool = True

    def __post_init__(self) -> None:
        if self.scale not in ("linear", "log"):
            raise ValueError(f"scale={self.scale!r}: must be 'linear' or 'log'")
        low, high = float(self.low), float(self.high)
        if not (math.isfinite(low) and math.isfinite(high) and low < high and (self.scale == "linear" or low > 0)):
            above = ", above 0 on a log scale" if self.scale == "log" else ""
            raise ValueError(f"axis {self.label!r} from {self.low!r} to {self.high!r}: must be finite, low < high{above}")

    @classmethod
    def over(cls, label: str, *values: Any, scale: str = "linear", margin: float = 0.04, ticks: Any = None) -> Axis:
        """An axis on which all of these finite values, above 0 on a log scale, have room."""
        known = [np.asarray(array, dtype=np.float64).ravel() for array in values]
        together = np.concatenate(known) if known else np.zeros(0)
        together = together[np.isfinite(together)]
        if scale == "log":
            together = np.log10(together[together > 0])
        low, high = (float(together.min()), float(together.max())) if together.size else (0.0, 1.0)
        reach = (high - low) * margin if high > low else (0.5 if scale == "log" else (abs(high) or 1.0) * 0.5)
        low, high = low - reach, high + reach
        if scale == "log":
            low, high = 10.0 ** max(low, -300.0), 10.0 ** min(high, 300.0)
        return cls(label, low, high, scale, ticks)


@dataclass(frozen=True)
class Control:
    """Something a person sets: a slider, a choice of words, a slider that plays by itself, or a field to type into.

    Args:
        name: by which layers refer to it.
        label: the text next to it.
        values: what it steps through, numbers or words, at least one.
        index: which of them is set at first.
        kind: "slider", "choice", "play", or "text": a field that shows the one value; Python gets what is typed.
        unit: stands behind a number.
        remote: whether Python is told of every change; nothing in the scene depends on it. Without Python it is left out.
        seconds: how long "play" takes from the first value to the last.
        texts: what the label shows for each value, where that is not the number; empty for the numbers.
        typed: whether the number of a remote slider can be typed, too; Python gets the text.
    """

    name: str
    label: str
    values: Sequence[float] | Sequence[str]
    index: int = 0
    kind: str = "slider"
    unit: str = ""
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
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of control {self.name!r}: must be one of {', '.join(map(repr, KINDS))}")
        if not 0 <= self.index < len(self.values):
            raise ValueError(f"index={self.index!r} of control {self.name!r}: must be from 0 to {len(self.values) - 1}")

    def words(self, index: int) -> str:
        """A value as the control's label shows it."""
        value = self.values[index]
        if self.texts:
            return self.texts[index]
        if isinstance(value, str):
            return value
        number = f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
        return f"{number} {self.unit}" if self.unit else number


@dataclass(frozen=True)
class Button:
    """Something to be pressed; Python is told. It is left out where there is no Python.

    Args:
        name: under which Python is told.
        label: what stands on it.
        enabled: whether it does something now; else it is grey.
    """

    name: str
    label: str
    enabled: bool = True


@dataclass(frozen=True)
class Click:
    """What a click into a panel, or Enter on its cursor, does: set a control to what is nearest, or tell Python.

    Args:
        control: the one to be set; its values are compared with the place along `along`, "x" or "y"; words are numbered.
        other: another one, which the place in the other direction sets in the same way.
        event: the name under which Python gets the place instead, as (x, y).
        double: whether it takes a double click, or Enter, to tell Python.
        does: what Python then does, in words, such as "move the start"; stands below the picture.
    """

    control: str | None = None
    along: str = "x"
    other: str | None = None
    event: str | None = None
    double: bool = False
    does: str = ""


@dataclass(frozen=True)
class Listing:
    """Lines of code or the like below the picture, to be copied.

    Args:
        title: what they are.
        text: the lines.
        folded: whether only the title is to be seen at first.
    """

    title: str
    text: str
    folded: bool = True


class Note(str):
    """A sentence below the picture that leads to what it tells of, when it is clicked.

    Args:
        words: the sentence.
        sets: by the names of controls the indices that they are set to.
        x: the place along the first panel that has it, where the cursor is put; None: none.
    """

    sets: Mapping[str, int]
    x: float | None

    def __new__(cls, words: str, sets: Mapping[str, int] | None = None, x: float | None = None) -> Self:
        note = super().__new__(cls, words)
        note.sets, note.x = dict(sets or {}), x
        return note
