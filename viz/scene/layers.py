"""The layers of a panel: lines, bands, heatmaps, points, arrows, reference lines and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...kernels.messages import listed
from ...trainer.validation import choice
from .palettes import PALETTES, palette_colours

__all__ = ["LAYERS", "Arrows", "Band", "Heatmap", "Layer", "Line", "Points", "RefLine", "State", "Text"]

ROLES = ("ink", "quiet", "grid")  # a theme's colours besides those of lines
State = Mapping[str, int]  # the index of each control's value, by name


@dataclass(frozen=True)
class Layer:
    """The base class of everything that is drawn in a panel.

    Subclasses document the shapes of their arrays. With `by=("a", "b")` an array has two more dimensions in front, one for
    each control; the controls' values index them. An array that does not depend on controls may leave these dimensions out.

    Args:
        name: its name in the legend and in readouts; "" leaves it out of both.
        style: the number of a line style (colour and dashes), >= 0, or "ink", "quiet" or "grid".
        by: names of the controls that choose what is drawn.
        legend_by: the name of a control whose value follows the name in the legend; None for none.
        run: the row of the scene's `RunTable` that chooses whether it is drawn; None always draws it.

    Raises:
        ValueError: `style` is invalid, or an array has the wrong number of dimensions.
    """

    name: str = field(default="", kw_only=True)
    legend_by: str | None = field(default=None, kw_only=True)
    style: int | str = field(default=0, kw_only=True)
    by: tuple[str, ...] = field(default=(), kw_only=True)
    run: int | None = field(default=None, kw_only=True)

    arrays: ClassVar[Mapping[str, int]] = {}  # the fields that are arrays, and their dimensions without controls

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", tuple(self.by))
        if not (isinstance(self.style, int) and self.style >= 0) and self.style not in ROLES:
            raise ValueError(f"style={self.style!r}: must be a line's number or one of {listed(map(repr, ROLES))}")
        for name, ndim in self.arrays.items():
            value = getattr(self, name)
            array = np.array(value, dtype=object) if name == "texts" else np.asarray(value)
            if name != "texts" and array.dtype not in (np.uint8, np.int16, np.int32):
                array = _floats(array)
            if array.ndim not in (ndim, ndim + len(self.by)):
                raise ValueError(
                    f"{type(self).__name__}.{name} has shape {array.shape}: it must have {ndim} dimensions of its own"
                    + (f", and in front of them one for each of {', '.join(map(repr, self.by))}" if self.by else "")
                )
            object.__setattr__(self, name, array)

    def chosen(self, name: str, state: State) -> np.ndarray:
        """Return the array `name` for the given values of the controls, without the dimensions of controls."""
        array: np.ndarray = getattr(self, name)
        if array.ndim == self.arrays[name]:
            return array
        return array[tuple(state[control] for control in self.by)]


@dataclass(frozen=True)
class Line(Layer):
    """A line through points, with gaps at points that are not finite.

    Args:
        x, y: [n].
        upto: the name of a control whose value is the index of the last point to draw; None draws all points.
        head: draw a dot on the last point.
        marker: draw a dot on every point.
        width: in points (1/72 inch).
        alpha: opacity, in (0, 1].
    """

    x: Any
    y: Any
    upto: str | None = None
    head: bool = False
    marker: bool = False
    width: float = 1.8
    alpha: float = 1.0

    arrays: ClassVar[Mapping[str, int]] = {"x": 1, "y": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (n := self.x.shape[-1]) != self.y.shape[-1]:
            raise ValueError(f"Line {self.name!r}: x has {n} points and y has {self.y.shape[-1]}, must be as many")


@dataclass(frozen=True)
class Band(Layer):
    """The area between two lines.

    Args:
        x, low, high: [n].
        alpha: opacity, in (0, 1].
    """

    x: Any
    low: Any
    high: Any
    alpha: float = 0.18

    arrays: ClassVar[Mapping[str, int]] = {"x": 1, "low": 1, "high": 1}


@dataclass(frozen=True)
class Heatmap(Layer):
    """A grid of cells, coloured by value. Cells with non-finite values stay empty.

    Args:
        values: [n_rows, n_columns], the lowest row first.
        x, y: [2], where the first cell begins and the last one ends, in units of the axes.
        palette: "sequential", or "quiet" (pale, for lines on top).
        limits: the values of the first and the last colour; None means the range of the values.
        scale: the scale of the colours, "linear" or "log".
        label: the label of the colour bar, with the unit; "" for no bar.
    """

    values: Any
    x: Any
    y: Any
    palette: str = "sequential"
    limits: tuple[float, float] | None = None
    scale: str = "linear"
    label: str = ""

    arrays: ClassVar[Mapping[str, int]] = {"values": 2, "x": 1, "y": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("palette", self.palette, PALETTES)
        if self.limits is None:
            values = self.values[np.isfinite(self.values)]
            if self.scale == "log":
                values = values[values > 0]
            low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
            if not low < high:
                low, high = (low / 2, low * 2) if self.scale == "log" else (low - 0.5, low + 0.5)
            object.__setattr__(self, "limits", (low, high))

    def colours(self, theme: str = "light") -> np.ndarray:
        """Return the palette as RGB, uint8 [n, 3]."""
        return palette_colours(self.palette, theme).copy()


@dataclass(frozen=True)
class Points(Layer):
    """Single points.

    Args:
        x, y: [n].
        size: the diameter, in points (1/72 inch).
        marker: "dot", "ring", "cross" or "star".
        words: a text for each point, for readouts; empty for none.
        drag: makes the points draggable: the name under which Python gets (index, x, y) of a moved point; None for fixed
            points.
    """

    x: Any
    y: Any
    size: float = 7.0
    marker: str = "dot"
    words: Sequence[str] = ()
    drag: str | None = None

    arrays: ClassVar[Mapping[str, int]] = {"x": 1, "y": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("marker", self.marker, ("dot", "ring", "cross", "star"))


@dataclass(frozen=True)
class Arrows(Layer):
    """Arrows from (x, y) to (x + dx, y + dy). Arrows that are not finite are left out.

    Args:
        x, y, dx, dy: [n], in units of the axes.
        width: the width of the shaft, in points (1/72 inch).
    """

    x: Any
    y: Any
    dx: Any
    dy: Any
    width: float = 2.0

    arrays: ClassVar[Mapping[str, int]] = {"x": 1, "y": 1, "dx": 1, "dy": 1}


@dataclass(frozen=True)
class RefLine(Layer):
    """Reference lines: straight lines across the whole panel.

    Args:
        at: [n], their positions on the axis.
        axis: the axis that they cross, "x" or "y".
        label: a text at the line.
        width: in points (1/72 inch).
    """

    at: Any
    axis: str = "x"
    label: str = ""
    width: float = 1.0

    arrays: ClassVar[Mapping[str, int]] = {"at": 1}


@dataclass(frozen=True)
class Text(Layer):
    """Text in a panel.

    Args:
        texts: one text, str []; may have several lines.
        x, y: its position [], from 0 at the panel's left or bottom to 1 at its right or top.
        align: which part of the text is at x: "left", "center" or "right". Its vertical middle is at y.
        size: in points (1/72 inch).
        fixed: whether to use a fixed-width font.

    A text of the name "status" is marked as a past one on a page that does not hear of Python any more.
    """

    texts: Any
    x: Any
    y: Any
    style: int | str = field(default="ink", kw_only=True)
    align: str = "left"
    size: float = 9.0
    fixed: bool = False

    arrays: ClassVar[Mapping[str, int]] = {"texts": 0, "x": 0, "y": 0}


def _floats(array: np.ndarray) -> np.ndarray:
    """Convert to float32; integers of which it does not have all, such as steps above 2**24, to float64."""
    floats = array.astype(np.float32, copy=False)
    if floats is array or not (np.abs(floats) >= 2**24).any() or not np.array_equal(array, np.round(array), equal_nan=True):
        return floats
    return array.astype(np.float64, copy=False)


LAYERS = (Line, Band, Heatmap, Points, Arrows, RefLine, Text)  # the classes that renderers draw
