"""What is drawn in a panel: lines, bands, heatmaps, points, arrows, reference lines and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .palettes import PALETTES, palette_colours

__all__ = ["Arrows", "Band", "Heatmap", "Layer", "Line", "Points", "RefLine", "State", "Text"]

ROLES = ("ink", "quiet", "grid")  # colours that a theme has in addition to those of the lines
State = Mapping[str, int]


@dataclass(frozen=True)
class Layer:
    """Something drawn in a panel.

    The arrays of a layer have its own dimensions, given with each, and in front of them one for each control named in `by`,
    in that order; an array that none of them changes may leave all of these out.

    Args:
        name: what the legend and readouts call it; empty: it is not mentioned.
        style: a line's number, which gives colour and dashes, or "ink", "quiet" or "grid".
        by: names of the controls whose indices choose what is drawn.
        legend_by: the name of a control whose value the legend puts behind the name; None for none.
    """

    name: str = field(default="", kw_only=True)
    legend_by: str | None = field(default=None, kw_only=True)
    style: int | str = field(default=0, kw_only=True)
    by: tuple[str, ...] = field(default=(), kw_only=True)

    arrays: ClassVar[Mapping[str, int]] = {}  # names of the fields that are arrays, and how many dimensions are their own

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", tuple(self.by))
        if not (isinstance(self.style, int) and self.style >= 0) and self.style not in ROLES:
            raise ValueError(f"style={self.style!r}: must be a line's number or one of {', '.join(map(repr, ROLES))}")
        for name, own in self.arrays.items():
            given = getattr(self, name)
            array = np.array(given, dtype=object) if name == "texts" else np.asarray(given)
            if name != "texts" and array.dtype not in (np.uint8, np.int16, np.int32):
                array = array.astype(np.float32, copy=False)
            if array.ndim not in (own, own + len(self.by)):
                raise ValueError(
                    f"{type(self).__name__}.{name} has shape {array.shape}: it must have {own} dimensions of its own"
                    + (f", and in front of them one for each of {', '.join(map(repr, self.by))}" if self.by else "")
                )
            object.__setattr__(self, name, array)

    def chosen(self, name: str, state: State) -> np.ndarray:
        """The array of this name as the controls choose it, without the dimensions in front."""
        array: np.ndarray = getattr(self, name)
        if array.ndim == self.arrays[name]:
            return array
        return array[tuple(state[control] for control in self.by)]


@dataclass(frozen=True)
class Line(Layer):
    """A line through points, with gaps where a coordinate is not finite.

    Args:
        x, y: [n].
        upto: the name of a control: only the points up to the one whose number is the control's value are drawn.
        head: put a dot on the last point drawn.
        marker: put a dot on every point.
        width: in points of 1/72 inch.
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
    """Values as colours, in cells that fill a rectangle; cells of non-finite values stay empty.

    Args:
        values: [n_rows, n_columns], the first row lowest; of "categories" integers from 0, below 0 for none.
        x, y: [2], where the first cell begins and the last one ends, on the axes' scales.
        palette: "sequential", "diverging", "categories", or "quiet", on which lines can be seen.
        limits: the values of the first and the last colour; None: the least and the largest there are, of a "diverging"
            palette as far below 0 as above.
        scale: of the colours, "linear" or "log".
        label: what the colours show, with the unit; stands at their bar. Empty: there is none.
        words: of "categories", what each number means.
        alpha: opacity, in (0, 1].
    """

    values: Any
    x: Any
    y: Any
    palette: str = "sequential"
    limits: tuple[float, float] | None = None
    scale: str = "linear"
    label: str = ""
    words: Sequence[str] = ()
    alpha: float = 1.0

    arrays: ClassVar[Mapping[str, int]] = {"values": 2, "x": 1, "y": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.palette not in PALETTES:
            raise ValueError(f"palette={self.palette!r}: must be one of {', '.join(map(repr, PALETTES))}")
        if self.limits is None:
            values = self.values[np.isfinite(self.values)]
            if self.scale == "log":
                values = values[values > 0]
            low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
            if self.palette == "diverging":
                high = max(abs(low), abs(high))
                low = -high
            if not low < high:
                low, high = (low / 2, low * 2) if self.scale == "log" else (low - 0.5, low + 0.5)
            object.__setattr__(self, "limits", (low, high))

    def colours(self, theme: str = "light") -> np.ndarray:
        """uint8 [n, 3], from the first colour to the last; of "categories" those of the theme's lines."""
        return palette_colours(self.palette, theme).copy()


@dataclass(frozen=True)
class Points(Layer):
    """Single points.

    Args:
        x, y: [n].
        size: across, in points of 1/72 inch.
        marker: "dot", "ring", "cross" or "star".
        words: for each what a readout says of it; empty for nothing.
        drag: the name under which Python gets (number, x, y) of a point that has been moved; None: they stay.
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
        if self.marker not in ("dot", "ring", "cross", "star"):
            raise ValueError(f"marker={self.marker!r}: must be 'dot', 'ring', 'cross' or 'star'")


@dataclass(frozen=True)
class Arrows(Layer):
    """Arrows from places, by amounts, both in the axes' units. Those that are not finite are left out.

    Args:
        x, y, dx, dy: [n].
        width: of the shaft, in points of 1/72 inch.
    """

    x: Any
    y: Any
    dx: Any
    dy: Any
    width: float = 2.0

    arrays: ClassVar[Mapping[str, int]] = {"x": 1, "y": 1, "dx": 1, "dy": 1}


@dataclass(frozen=True)
class RefLine(Layer):
    """Straight lines across the panel.

    Args:
        at: [n], where they cross the axis.
        axis: which one, "x" or "y".
        label: stands at the line.
        width: in points of 1/72 inch.
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
        texts: str [], one text; may have several lines.
        x, y: [], where, as shares of the panel from its lower left corner.
        align: "left", "center" or "right" of them is at x; the middle of the lines is at y.
        size: in points of 1/72 inch.
        fixed: whether all letters are of equal width.
    """

    texts: Any
    x: Any
    y: Any
    style: int | str = field(default="ink", kw_only=True)
    align: str = "left"
    size: float = 9.0
    fixed: bool = False

    arrays: ClassVar[Mapping[str, int]] = {"texts": 0, "x": 0, "y": 0}
