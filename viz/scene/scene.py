"""A scene: a whole picture as plain data, with the controls that change it.

A view describes its picture once, and each renderer draws the same scene. A scene holds everything that its controls can
show: arrays have one more dimension in front for each control.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from ...kernels.messages import listed, there_are
from ...trainer.validation import instance, integer, nonempty
from ..style import DASHES, THEMES
from .controls import Axis, Button, Click, Control, Listing, Note, RunTable
from .layers import LAYERS, Heatmap, Layer, Line, State, Text
from .palettes import palette_in_hex

__all__ = ["Panel", "Scene"]

FORMAT = 1


@dataclass(frozen=True)
class Panel:
    """A pair of axes and the layers drawn in them.

    Args:
        x, y: the axes.
        layers: the layers, the lowest first.
        title: stands above the panel.
        row, column: its cell in the scene's grid, from 0 at the top left.
        rows, columns: how many cells it spans.
        equal: whether both axes have the same scale, so that circles are round.
        click: the effect of a click; None for none.
        frame: False hides the axes, for panels of text.
        legend: None puts the names of its layers into the legend of the scene. A string gives the panel a legend of its own:
            the name of a control, at whose value of x the legend shows each line's y, or "" for names alone.
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

    def __post_init__(self) -> None:
        for name, axis in (("x", self.x), ("y", self.y)):
            instance(f"Panel: {name}", axis, Axis, "an Axis, such as Axis.over('step', steps)", shown=True)
        _list_of("Panel: layers", self.layers, Layer, "a list of layers, such as [Line(steps, losses)]")
        if unknown := [type(each).__name__ for each in self.layers if type(each) not in LAYERS]:
            raise TypeError(
                f"Panel: layers has a {unknown[0]}, which no renderer draws: write a function that returns one of "
                f"{listed(kind.__name__ for kind in LAYERS)}"
            )


@dataclass(frozen=True)
class Scene:
    """A picture as data: panels in a grid, and controls that change them.

    Args:
        panels: the panels, at least one.
        title: stands above the picture.
        controls, buttons: stand below the picture, in this order.
        width, height: the size of the picture in inches, without the controls. Images are higher by their title, their
            legends, the values of the controls and the notes.
        widths, heights: the relative sizes of the grid's columns and rows; empty for equal ones.
        description: the picture in words, for screen readers.
        listings: text to copy, below the controls; images leave it out.
        notes: warnings about what the picture shows, each a sentence or a `Note`; they stand below the picture, also in
            images.
        message: an answer to what the user has just done, such as an error; images leave it out.
        live: whether further pictures come by themselves, such as while a training runs. A page then says so if none does
            and Python does not answer.
        runs: the table that chooses the runs that are drawn; None draws all.

    Raises:
        ValueError: a layer, click, legend or note refers to a control or value that does not exist, two controls have the
            same name, or an array does not have the dimensions of its controls.

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
    live: bool = False
    runs: RunTable | None = None

    def __post_init__(self) -> None:
        _list_of("Scene: panels", self.panels, Panel, "a list of Panels")
        nonempty("panels", self.panels, ": there is nothing to draw")
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """Yield what refers to a control, a value or a run that there is not, or has other dimensions than its controls."""
        names = [control.name for control in self.controls] + [button.name for button in self.buttons]
        if twice := {name for name in names if names.count(name) > 1}:
            yield f"there are two controls or buttons of the name {min(twice)!r}"
        sizes = {control.name: len(control.values) for control in self.controls}
        for note in self.notes:
            for control, index in note.sets.items() if isinstance(note, Note) else ():
                if not 0 <= index < sizes.get(control, 0):
                    yield f"note {note[:40]!r} sets {control!r} to value {index}: there is none"
        for panel in self.panels:
            for name in () if panel.click is None else (panel.click.control, panel.click.other):
                if name is not None and name not in sizes:
                    yield f"a click is to set {name!r}: there is no such control"
            if panel.legend and panel.legend not in sizes:
                yield f"a legend is to show values at {panel.legend!r}: there is no such control"
            for layer in panel.layers:
                which = f"{type(layer).__name__} {layer.name!r}"
                if self.runs is not None and layer.run is not None and not 0 <= layer.run < len(self.runs.names):
                    yield f"{which} is of run {layer.run}: the table has no such row"
                more = [layer.legend_by, layer.upto if isinstance(layer, Line) else None]
                asked = [*layer.by, *(each for each in more if each is not None)]
                if missing := [name for name in asked if name not in sizes]:
                    yield f"{which} depends on {missing[0]!r}: no such control"
                expected = tuple(sizes[name] for name in layer.by)
                for name, ndim in layer.arrays.items():
                    shape = getattr(layer, name).shape
                    if len(shape) > ndim and shape[: len(expected)] != expected:
                        controls = ", ".join(map(repr, layer.by))
                        yield f"{which}: {name} has shape {shape}, but its controls {controls} have {expected} values"

    def choosing(self, shown: Sequence[int]) -> Scene:
        """Return the scene with these runs chosen in its table; numbers without a run are ignored."""
        if self.runs is None:
            return self
        return replace(self, runs=replace(self.runs, shown=[k for k in shown if 0 <= k < len(self.runs.names)]))

    def without_table(self) -> Scene:
        """Return the scene with the chosen runs alone, and a note that says how many of them there are."""
        if self.runs is None:
            return self
        shown = {None, *self.runs.shown}
        panels = [replace(panel, layers=[each for each in panel.layers if each.run in shown]) for panel in self.panels]
        drawn = f"{len(self.runs.shown)} of {len(self.runs.names)} runs are drawn; the table of the interactive view chooses"
        return replace(self, panels=panels, runs=None, notes=[drawn, *self.notes])

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of the grid."""
        rows = max(panel.row + panel.rows for panel in self.panels)
        return rows, max(panel.column + panel.columns for panel in self.panels)

    def state(self, **indices: int) -> dict[str, int]:
        """Return the index of each control's value, by control name.

        Args:
            **indices: indices to set; other controls have their initial value.

        Raises:
            ValueError: a control does not exist, or does not have that many values.
        """
        state = {control.name: control.index for control in self.controls}
        for name, index in indices.items():
            if name not in state:
                raise ValueError(f"{name!r} is no control of this picture.{there_are(name, state)}")
            most = next(len(control.values) for control in self.controls if control.name == name) - 1
            state[name] = integer(name, index, 0, most)
        return state

    def drawn(self, line: Line, state: State) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of a line that are drawn in a state, as x [n] and y [n]; see `Line.upto`."""
        x, y = line.chosen("x", state), line.chosen("y", state)
        if line.upto is not None:
            control = next(control for control in self.controls if control.name == line.upto)
            n = int(float(control.values[state[line.upto]])) + 1
            x, y = x[:n], y[:n]
        return x, y

    def named(self, layer: Layer, state: State, at: str | None = None) -> str:
        """Return the text of a layer in the legend; with `at`, a control, a line's y at the control's value of x follows."""
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
        """The picture in words: its title, its description, and those notes that the description does not contain."""
        return ". ".join(
            [self.title, self.description, *(each for each in self.notes if each not in self.description)]
        ).strip(". ")

    def legend(self, panels: Sequence[Panel]) -> dict[tuple[str, int | str], Layer]:
        """Return the legend of panels: the first layer of each name and style."""
        entries: dict[tuple[str, int | str], Layer] = {}
        for layer in (layer for panel in panels for layer in panel.layers if not isinstance(layer, Text)):
            if layer.name:
                entries.setdefault((layer.name, layer.style), layer)
        return entries

    def to_bytes(self) -> bytes:
        """Serialize the scene for a browser: the length of a header, the header as JSON, and the arrays.

        The length is 4 bytes, little-endian. The header has all fields by name, with {"array": k} in place of an array;
        header["arrays"][k] has the array's "dtype", "shape" and "start". Starts are in bytes from the end of the header, and
        header and arrays are padded to multiples of 8 bytes. header["style"] has the dash patterns, and the colours of the
        themes "light" and "dark"; heatmaps have the colours of their palette for each theme.
        """
        buffers: list[np.ndarray] = []
        places: dict[int, int] = {}

        def plain(value: Any) -> Any:
            if type(value) in (str, float, int, bool):  # the usual case, made fast
                return value
            if isinstance(value, Note):
                return {"words": str(value), "sets": value.sets, "x": value.x}
            if isinstance(value, np.ndarray):
                if value.dtype == object:
                    return value.tolist()
                if id(value) not in places:
                    places[id(value)] = len(buffers)
                    buffers.append(np.ascontiguousarray(value).reshape(value.shape))  # it turns shape [] into [1]
                return {"array": places[id(value)]}
            if isinstance(value, RunTable):
                return {"names": value.names, "columns": list(value.columns.items()), "shown": value.shown}
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
        words = text.encode("utf-8", "backslashreplace")  # a lone surrogate, which JSON can escape
        parts = [struct.pack("<I", len(words)), words, bytes(-(4 + len(words)) % 8)]
        for array in buffers:
            parts += [array.tobytes(), bytes(-array.nbytes % 8)]
        return b"".join(parts)


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _list_of(name: str, values: Any, kind: type, allowed: str) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(each, kind) for each in values):
        raise TypeError(f"{name}={values!r:.80}: must be {allowed}")
