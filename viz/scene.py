"""Scene: a picture as plain data, and the controls that change it. Views make scenes; each tier draws them in its own way.

A view says once what is to be seen, and the same scene becomes a matplotlib figure, a widget, or a page that needs neither
kernel nor network. Whatever a control changes is in the scene beforehand: an array with one more dimension in front.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np

from .style import DASHES, THEMES

__all__ = [
    "Arrows",
    "Axis",
    "Band",
    "Button",
    "Click",
    "Control",
    "Image",
    "Layer",
    "Line",
    "Mark",
    "Panel",
    "Points",
    "Scene",
    "Words",
]

FORMAT = 1
# matplotlib's colormaps; None: made of the theme's colours
PALETTES = {"sequential": "viridis", "diverging": "RdBu_r", "quiet": None, "categories": None}
QUIETEST = 0.35  # how far "quiet" goes from the background to the quiet colour, so that lines stand out from all of it
ROLES = ("ink", "quiet", "grid")  # colours that a theme has besides those of the lines
KINDS = ("slider", "choice", "play")
State = Mapping[str, int]


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
    """Something a person sets: a slider, a choice of words, or a slider that plays by itself.

    Args:
        name: by which layers refer to it.
        label: what stands beside it.
        values: what it steps through, numbers or words, at least one.
        index: which of them is set at first.
        kind: "slider", "choice" or "play".
        unit: stands behind a number.
        remote: whether Python is told of every change; nothing in the scene depends on it. Without Python it is left out.
        seconds: how long "play" takes from the first value to the last.
    """

    name: str
    label: str
    values: Sequence[float] | Sequence[str]
    index: int = 0
    kind: str = "slider"
    unit: str = ""
    remote: bool = False
    seconds: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", list(self.values))
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of control {self.name!r}: must be one of {', '.join(map(repr, KINDS))}")
        if not 0 <= self.index < len(self.values):
            raise ValueError(f"index={self.index!r} of control {self.name!r}: must be from 0 to {len(self.values) - 1}")

    def words(self, index: int) -> str:
        """A value as it stands beside the control."""
        value = self.values[index]
        if isinstance(value, str):
            return value
        number = f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
        return f"{number} {self.unit}" if self.unit else number


@dataclass(frozen=True)
class Button:
    """Something to be pressed; Python is told. It is left out where there is no Python."""

    name: str
    label: str


@dataclass(frozen=True)
class Click:
    """What a click into a panel, or Enter on its cursor, does: set a control to what is nearest, or tell Python.

    Args:
        control: the one to be set; its values are compared with the place along `along`, "x" or "y"; words are numbered.
        other: another one, which the place in the other direction sets in the same way.
        event: the name under which Python gets the place instead, as (x, y).
    """

    control: str | None = None
    along: str = "x"
    other: str | None = None
    event: str | None = None


@dataclass(frozen=True)
class Layer:
    """Something drawn in a panel.

    The arrays of a layer have its own dimensions, given with each, and in front of them one for each control named in `by`,
    in that order; an array that none of them changes may leave all of these out.

    Args:
        name: what the legend and readouts call it; empty: it is not mentioned.
        style: a line's number, which gives colour and dashes, or "ink", "quiet" or "grid".
        by: names of the controls whose indices choose what is drawn.
    """

    name: str = field(default="", kw_only=True)
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
class Image(Layer):
    """Values as colours, in cells that fill a rectangle; what is not finite is left empty.

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
        return _colours(self.palette, theme).copy()


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
class Mark(Layer):
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
class Words(Layer):
    """Words in a panel.

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


@dataclass(frozen=True)
class Panel:
    """One pair of axes with what is drawn in it, in this order.

    Args:
        x, y: the axes.
        layers: what is drawn.
        title: stands above it.
        row, column: its place in the grid, from 0 at the top left.
        rows, columns: how many places it takes.
        equal: whether a unit is as long on one axis as on the other.
        click: what a click does; None: nothing.
        frame: whether axes are drawn; without them it is room for words.
    """

    x: Axis
    y: Axis
    layers: Sequence[Layer]
    title: str = ""
    row: int = 0
    column: int = 0
    rows: int = 1
    columns: int = 1
    equal: bool = False
    click: Click | None = None
    frame: bool = True


@dataclass(frozen=True)
class Scene:
    """All of a picture.

    Args:
        panels: at least one.
        title: stands above all.
        controls, buttons: in the order in which they stand below the picture.
        width, height: in inches, without the controls.
        widths, heights: the shares of the grid's columns and rows; empty for equal ones.
        description: the picture in words, for those who do not see it.

    Raises:
        ValueError: something is called for that is not there, or an array does not fit its controls.

    Example:
        >>> import numpy as np
        >>> from tristep.viz.scene import Axis, Control, Line, Panel, Scene
        >>> x = np.linspace(0, 1, 50)
        >>> power = Control("power", "power", [1, 2, 3])
        >>> curves = Line(x, [x**p for p in power.values], by=("power",), name="x to the power")
        >>> scene = Scene([Panel(Axis("x", 0, 1), Axis("y", 0, 1), [curves])], controls=[power])
        >>> float(curves.chosen("y", scene.state(power=1))[-1])
        1.0
    """

    panels: Sequence[Panel]
    title: str = ""
    controls: Sequence[Control] = ()
    buttons: Sequence[Button] = ()
    width: float = 8.0
    height: float = 4.5
    widths: Sequence[float] = ()
    heights: Sequence[float] = ()
    description: str = ""

    def __post_init__(self) -> None:
        if not self.panels:
            raise ValueError("panels is empty: there is nothing to draw")
        names = [control.name for control in self.controls] + [button.name for button in self.buttons]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"there are two controls or buttons of the name {min(twice)!r}")
        sizes = {control.name: len(control.values) for control in self.controls}
        for panel in self.panels:
            for name in () if panel.click is None else (panel.click.control, panel.click.other):
                if name is not None and name not in sizes:
                    raise ValueError(f"a click is to set {name!r}: there is no such control")
            for layer in panel.layers:
                asked = [*layer.by] + ([layer.upto] if isinstance(layer, Line) and layer.upto is not None else [])
                if missing := [name for name in asked if name not in sizes]:
                    raise ValueError(f"{type(layer).__name__} {layer.name!r} depends on {missing[0]!r}: no such control")
                expected = tuple(sizes[name] for name in layer.by)
                for name, own in layer.arrays.items():
                    shape = getattr(layer, name).shape
                    if len(shape) > own and shape[: len(expected)] != expected:
                        raise ValueError(
                            f"{type(layer).__name__} {layer.name!r}: {name} has shape {shape}, but its controls "
                            f"{', '.join(map(repr, layer.by))} have {expected} values"
                        )

    @property
    def grid(self) -> tuple[int, int]:
        """How many rows and columns there are."""
        rows = max(panel.row + panel.rows for panel in self.panels)
        return rows, max(panel.column + panel.columns for panel in self.panels)

    def state(self, **indices: int) -> dict[str, int]:
        """Which value each control has: as given, else as at first.

        Raises:
            ValueError: no such control, or no such value.
        """
        found = {control.name: control.index for control in self.controls}
        for name, index in indices.items():
            if name not in found:
                raise ValueError(
                    f"{name!r} is no control of this picture; there are {', '.join(map(repr, found)) or 'none'}"
                )
            n = next(len(control.values) for control in self.controls if control.name == name)
            if not 0 <= index < n:
                raise ValueError(f"{name}={index!r}: must be from 0 to {n - 1}")
            found[name] = int(index)
        return found

    def drawn(self, line: Line, state: State) -> tuple[np.ndarray, np.ndarray]:
        """The points of a line that are to be drawn, x and y."""
        x, y = line.chosen("x", state), line.chosen("y", state)
        if line.upto is not None:
            control = next(control for control in self.controls if control.name == line.upto)
            n = int(float(control.values[state[line.upto]])) + 1
            x, y = x[:n], y[:n]
        return x, y

    def legend(self) -> Iterator[tuple[str, int | str, Layer]]:
        """Names that the legend has, each with its style and the first layer that has it."""
        met = set()
        for panel in self.panels:
            for layer in panel.layers:
                if layer.name and not isinstance(layer, (Image, Words)) and (layer.name, layer.style) not in met:
                    met.add((layer.name, layer.style))
                    yield layer.name, layer.style, layer

    def to_bytes(self) -> bytes:
        """All of it for a browser: the length of the header, the header as JSON, and the arrays, each at a multiple of 8.

        The length is 4 bytes, little-endian. The header has all fields by their names; in place of an array stands
        {"array": k}, and header["arrays"][k] has its "dtype", "shape" and "start", in bytes after the header's end, which
        is filled up to a multiple of 8. header["style"] has the dashes, and by a theme's name, "light" or "dark", its
        colours; an image has its own, by theme, too.
        """
        buffers: list[np.ndarray] = []
        places: dict[int, int] = {}

        def plain(value: Any) -> Any:
            if type(value) in (str, float, int, bool):  # most are
                return value
            if isinstance(value, np.ndarray):
                if value.dtype == object:
                    return value.tolist()
                if id(value) not in places:
                    places[id(value)] = len(buffers)
                    buffers.append(np.ascontiguousarray(value).reshape(value.shape))  # which has made [1] of []
                return {"array": places[id(value)]}
            if isinstance(value, (Layer, Panel, Axis, Control, Button, Click)):
                kind: Any = type(value)
                named = {name: plain(getattr(value, name)) for name in _field_names(kind)}
                if isinstance(value, Layer):
                    named["kind"] = type(value).__name__.lower()
                if isinstance(value, Image):
                    named["colours"] = {theme: _colours_in_hex(value.palette, theme) for theme in THEMES}
                return named
            if isinstance(value, (list, tuple)):
                return [plain(each) for each in value]
            return value.item() if isinstance(value, np.generic) else value

        header: dict[str, Any] = {"format": FORMAT} | {name: plain(getattr(self, name)) for name in _field_names(Scene)}
        header["style"] = {"dashes": [[] if dash == "-" else list(dash[1]) for dash in DASHES]}
        header["style"] |= {name: asdict(theme) for name, theme in THEMES.items()}
        header["arrays"], start = [], 0
        for array in buffers:
            header["arrays"].append({"dtype": str(array.dtype), "shape": list(array.shape), "start": start})
            start += -(-array.nbytes // 8) * 8
        words = json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        parts = [struct.pack("<I", len(words)), words, bytes(-(4 + len(words)) % 8)]
        for array in buffers:
            parts += [array.tobytes(), bytes(-array.nbytes % 8)]
        return b"".join(parts)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


@cache
def _colours_in_hex(palette: str, theme: str) -> str:
    return _colours(palette, theme).tobytes().hex()


@cache
def _colours(palette: str, theme: str) -> np.ndarray:
    """A palette's colours, uint8 [n, 3]; the same array every time."""
    own, colormap = THEMES[theme], PALETTES[palette]
    if palette == "categories":
        return np.array([_channels(colour) for colour in own.colours], dtype=np.uint8)
    if colormap is None:
        share = np.linspace(0, QUIETEST, 256)[:, None]
        mixed = (1 - share) * _channels(own.background) + share * _channels(own.quiet)
    else:
        mixed = 255 * mpl.colormaps[colormap](np.linspace(0, 1, 256))[:, :3]
    return np.asarray(mixed + 0.5, dtype=np.uint8)


def _channels(colour: str) -> np.ndarray:
    """Red, green and blue of "#rrggbb", [3], from 0 to 255."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)
