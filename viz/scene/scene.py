"""A scene: a whole picture as plain data, with the controls that change it.

A view says once what is to be seen, and each renderer draws the same scene in its own way. Whatever a control changes is in
the scene beforehand: an array with one more dimension in front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from ..style import DASHES, THEMES
from .controls import Axis, Button, Click, Control, Listing, Note
from .layers import Heatmap, Layer, Line, State, Text
from .palettes import palette_in_hex

__all__ = ["Panel", "Scene"]

FORMAT = 1


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
        legend: None: its names are in the legend of the whole picture. Else they stand above the panel, and behind that of a
            line its value where the control of this name is along x; empty: without values.
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
    legend: str | None = None


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
        listings: code and the like, below the controls; not in an image.
        notes: what is to be known before one believes the picture, each in a sentence, or a `Note` that leads to it; below
            the picture, in an image, too.
        message: what there is to be said to a person who has just done something; not in an image.

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
    listings: Sequence[Listing] = ()
    message: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.panels:
            raise ValueError("panels is empty: there is nothing to draw")
        names = [control.name for control in self.controls] + [button.name for button in self.buttons]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"there are two controls or buttons of the name {min(twice)!r}")
        sizes = {control.name: len(control.values) for control in self.controls}
        for note in self.notes:
            for control, index in note.sets.items() if isinstance(note, Note) else ():
                if not 0 <= index < sizes.get(control, 0):
                    raise ValueError(f"note {note[:40]!r} sets {control!r} to value {index}: there is none")
        for panel in self.panels:
            for name in () if panel.click is None else (panel.click.control, panel.click.other):
                if name is not None and name not in sizes:
                    raise ValueError(f"a click is to set {name!r}: there is no such control")
            if panel.legend and panel.legend not in sizes:
                raise ValueError(f"a legend is to show values at {panel.legend!r}: there is no such control")
            for layer in panel.layers:
                more = [layer.legend_by, layer.upto if isinstance(layer, Line) else None]
                asked = [*layer.by, *(each for each in more if each is not None)]
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

    def named(self, layer: Layer, state: State, at: str | None = None) -> str:
        """What a legend calls a layer while the controls are set like this.

        Args:
            at: the control at whose value along x that of a line stands behind its name; None or empty: none.
        """
        words = layer.name
        controls = {control.name: control for control in self.controls}
        if layer.legend_by is not None:
            words += f" ({controls[layer.legend_by].words(state[layer.legend_by])})"
        if at and isinstance(layer, Line):
            x, y = self.drawn(layer, state)
            k = int(np.searchsorted(x, float(controls[at].values[state[at]]), side="right")) - 1
            words += f" {y[k]:.3g}" if k >= 0 and np.isfinite(y[k]) else " –"
        return words

    @property
    def alt(self) -> str:
        """The picture in words: its title, its description, and the notes that this has not."""
        return ". ".join(
            [self.title, self.description, *(each for each in self.notes if each not in self.description)]
        ).strip(". ")

    def legend(self, panels: Sequence[Panel]) -> dict[tuple[str, int | str], Layer]:
        """By name and style the first layer of these panels that has them; words of categories have numbers as styles."""
        found: dict[tuple[str, int | str], Layer] = {}
        for layer in (layer for panel in panels for layer in panel.layers if not isinstance(layer, Text)):
            if layer.name:
                found.setdefault((layer.name, layer.style), layer)
            if isinstance(layer, Heatmap) and layer.palette == "categories":
                for i, word in enumerate(layer.words):
                    found.setdefault((word, i), layer)
        return found

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
            if isinstance(value, Note):
                return {"words": str(value), "sets": value.sets, "x": value.x}
            if isinstance(value, np.ndarray):
                if value.dtype == object:
                    return value.tolist()
                if id(value) not in places:
                    places[id(value)] = len(buffers)
                    buffers.append(np.ascontiguousarray(value).reshape(value.shape))  # which has made [1] of []
                return {"array": places[id(value)]}
            if isinstance(value, (Layer, Panel, Axis, Control, Button, Click, Listing)):
                kind: Any = type(value)
                named = {name: plain(getattr(value, name)) for name in _field_names(kind)}
                if isinstance(value, Layer):
                    named["kind"] = type(value).__name__.lower()
                if isinstance(value, Heatmap):
                    named["colours"] = {theme: palette_in_hex(value.palette, theme) for theme in THEMES}
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
        text = json.dumps(header, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        words = text.encode("utf-8", "backslashreplace")  # of half a surrogate pair, which JSON has as an escape
        parts = [struct.pack("<I", len(words)), words, bytes(-(4 + len(words)) % 8)]
        for array in buffers:
            parts += [array.tobytes(), bytes(-array.nbytes % 8)]
        return b"".join(parts)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))
