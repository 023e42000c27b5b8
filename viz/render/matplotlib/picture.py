"""Draw scenes as matplotlib figures: once (`draw`), or again and again, quickly, as data and controls change (`Picture`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import PatchCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text as MatplotlibText

from ...scene import Arrows, Band, Heatmap, Layer, Line, Panel, Points, RefLine, Scene, State
from ...style import THEMES
from .artists import colour_and_dashes, limits_of
from .figure import LOCK, Figure
from .panel import PanelAxes, scaled_images
from .png import encode_png
from .text import agg_canvas, agg_renderer, put, shortened, text_height, text_width, wrapped

__all__ = ["Picture", "draw"]


def draw(scene: Scene, state: State | None = None, theme: str = "light") -> Figure:
    """Draw a scene as a matplotlib figure; its `axes` are the panels, in order, followed by the colour bars.

    Args:
        scene: the scene to draw.
        state: index of the value of each control, by the control's name. Default: the controls' first settings.
        theme: "light" (default) or "dark".

    Raises:
        ValueError: there is no such theme, control or value.

    Example:
        >>> from tristep.viz import Axis, Line, Panel, Scene, draw
        >>> line = Line([0, 1, 2], [4, 2, 1], name="sgd")
        >>> figure = draw(Scene([Panel(Axis("update", 0, 2), Axis("loss", 1, 4, "log"), [line])]))
        >>> figure.axes[0].get_ylabel()
        'loss'
    """
    return Picture(scene, state, theme, quick=False).figure


class Picture:
    """A scene's matplotlib figure that is redrawn quickly as controls and data change.

    Artists that do not change are drawn once and kept as pixels; the others are drawn on top. New limits of axes redraw the
    axes. A scene that differs in more than its numbers redraws everything.

    Args:
        dpi: pixels per inch.
        values: whether to write the values of the controls below the panels.
        quick: whether one artist of ours draws the ticks and labels of axes, because each of matplotlib's takes half a
            millisecond. Users can change matplotlib's only.
    """

    figure: Figure
    scene: Scene
    _background: np.ndarray | None  # pixels of the artists that do not change; None: not drawn yet

    def __init__(
        self,
        scene: Scene,
        state: State | None = None,
        theme: str = "light",
        dpi: float = 100.0,
        values: bool = True,
        quick: bool = True,
    ) -> None:
        if theme not in THEMES:
            raise ValueError(f"theme={theme!r}: must be one of {', '.join(map(repr, THEMES))}")
        self._theme, self._dpi, self._with_values, self._quick = theme, dpi, values, quick
        with LOCK:
            scene = scene.without_table()
            self._begin(scene, scene.state(**(state or {})))

    def show(self, scene: Scene | None = None, state: State | None = None) -> None:
        """Update `figure` for another state (default: the controls' first settings) or scene; the next `png` draws it."""
        with LOCK:
            scene = self.scene if scene is None else scene.without_table()
            wanted = scene.state(**(state or {}))
            if scene is not self.scene and _structure(scene) != _structure(self.scene):
                self._begin(scene, wanted)
                return
            moved = scene is not self.scene and _bounds(scene) != _bounds(self.scene)
            self.scene, self.state = scene, wanted
            self.figure.alt = scene.alt
            if moved:
                self._arrange()
            self._update(labels=moved)

    def png(self) -> bytes:
        """Draw the picture, and return it as a PNG file, compressed quickly rather than well."""
        with LOCK:
            return encode_png(self._pixels())

    def _begin(self, scene: Scene, state: dict[str, int]) -> None:
        self.scene, self.state = scene, state
        self.figure = Figure(scene.width, scene.height, THEMES[self._theme].background)
        self.figure.alt = scene.alt
        self.figure.set_dpi(self._dpi)
        self._panels = [PanelAxes(self.figure, panel, self._theme, self._quick) for panel in scene.panels]
        for axes in self._panels:
            axes.add_bars()
        self._words: list[Artist] = []  # title and legend
        # Names in legends that change with a control or the data, their layers, and the `legend` of their panels.
        self._named: list[tuple[MatplotlibText, Layer, str | None]] = []
        self._values = self._text(0, 0, "", size=8.5, va="bottom", color=THEMES[self._theme].quiet)
        # Panel and layer of data that have changed before, and so may change again, or that depend on a control.
        self._moving = {
            (i, j)
            for i, panel in enumerate(scene.panels)
            for j, layer in enumerate(panel.layers)
            if layer.by or (isinstance(layer, Line) and layer.upto is not None)
        }
        self._arrange()
        self._update(labels=True)

    def _update(self, labels: bool) -> None:
        """Pass the data to the artists. Place the labels of marks again if a mark has moved, or if `labels` is true."""
        for i, (panel, axes) in enumerate(zip(self.scene.panels, self._panels, strict=True)):
            marks_moved = False
            for j, (layer, layer_artist) in enumerate(zip(panel.layers, axes.layers, strict=True)):
                if layer_artist.show(self.scene, layer, self.state, (i, j) in self._moving):
                    marks_moved |= isinstance(layer, RefLine)
                    if (i, j) not in self._moving:
                        self._moving.add((i, j))
                        self._background = None
            if labels or marks_moved:
                axes.place_labels()
        for text, layer, at in self._named:
            put(text, self.scene.named(layer, self.state, at))
        put(self._values, self._said())

    def _pixels(self) -> np.ndarray:
        """Draw, and return the pixels, uint8 [height, width, 4], a buffer that the next drawing overwrites."""
        canvas = agg_canvas(self.figure)
        moving = self._moving_artists()
        if self._background is None:
            for artist in moving:
                artist.set_animated(True)  # leaves it out
            canvas.draw()
            for artist in moving:
                artist.set_animated(False)
            pixels = np.asarray(canvas.buffer_rgba())
            self._background = pixels.copy()
        else:
            pixels = np.asarray(canvas.buffer_rgba())
            pixels[:] = self._background
        renderer = agg_renderer(self.figure)
        for artist in moving:
            artist.draw(renderer)
        return pixels

    def _moving_artists(self) -> list[Artist]:
        """Return the artists to draw above the background, in matplotlib's order: in each axes from the first moving on."""
        artists: list[Artist] = []
        for i, axes in enumerate(self._panels):
            moving = {artist for j, layer in enumerate(axes.layers) if (i, j) in self._moving for artist in layer.artists}
            if moving:
                order = axes.in_order()
                artists += order[min(order.index(artist) for artist in moving) :]
        return [*artists, *(text for text, *_ in self._named), *([self._values] if self._values.get_text() else [])]

    def _arrange(self) -> None:
        """Place the text and the axes so that all have room. Lengths are in inches."""
        self._background = None
        scene, theme = self.scene, THEMES[self._theme]
        for panel, drawn in zip(scene.panels, self._panels, strict=True):
            drawn.set_limits(panel)
        for artist in (*self._words, *(words for words, *_ in self._named)):
            artist.remove()
        self._words, self._named = [], []
        lines = [wrapped(self.figure, note, scene.width - 2 * MARGIN, 9) for note in scene.notes]
        noted = [self._text(MARGIN, 0, words, size=9, va="bottom", color=theme.ink) for words in lines]
        heights = [text_height(note) + 0.06 for note in noted]
        words = wrapped(self.figure, scene.title, scene.width - 2 * MARGIN, 13, "bold")
        title = self._text(MARGIN, 0, words, size=13, weight="bold", color=theme.ink)
        shared = [panel for panel in scene.panels if panel.legend is None]
        rows = self._legend_rows(scene.legend(shared), scene.width - 2 * MARGIN, LARGE)
        put(self._values, self._said())
        free = scene.width - 2 * MARGIN - text_width(self.figure, scene.title, 13, "bold")
        is_beside = text_width(self.figure, self._said(), 8.5) + 0.3 < free  # the title
        bottom = MARGIN if is_beside else 0.06 + text_height(self._values) + 0.06
        titled = text_height(title) + 0.08 if words else text_height(self._values) + 0.08 if is_beside else 0.0
        named = len(rows) * LARGE * ROW + (0.07 if rows else 0)
        own = {panel.row for panel in scene.panels if panel.legend is not None and (_ramps(panel) or scene.legend([panel]))}
        # Words do not make panels smaller.
        height = scene.height + titled + named + len(own) * SMALL * ROW + bottom - MARGIN + sum(heights)
        self.figure.set_size_inches(scene.width, height)
        top = height - MARGIN
        title.set_position((MARGIN, top))
        self._words.append(title)
        self._values.set(x=scene.width - MARGIN if is_beside else MARGIN, ha="right" if is_beside else "left")
        self._values.set(y=top - 0.02 if is_beside else 0.06, va="top" if is_beside else "bottom")
        self._add_legend(rows, MARGIN, top - titled, LARGE)
        top -= titled + named
        for note, high in zip(reversed(noted), reversed(heights), strict=True):
            note.set_position((MARGIN, bottom))
            bottom += high
        self._words += noted

        n_rows, n_columns = scene.grid
        widths = np.array(scene.widths or [1.0] * n_columns) / sum(scene.widths or [1.0] * n_columns)
        tall = np.array(scene.heights or [1.0] * n_rows) / sum(scene.heights or [1.0] * n_rows)
        around = [(0.6, 0.45, 0.2, 0.3)] * len(scene.panels)  # space at the left, bottom, right and top: a first guess
        for turn in range(3):  # labels wrap, so the space that they take depends on the size of the axes
            before, after = np.zeros(n_columns), np.zeros(n_columns)
            above, below = np.zeros(n_rows), np.zeros(n_rows)
            for panel, room in zip(scene.panels, around, strict=True):
                last_column, last_row = panel.column + panel.columns - 1, panel.row + panel.rows - 1
                before[panel.column] = max(before[panel.column], room[0])
                below[last_row] = max(below[last_row], room[1])
                after[last_column] = max(after[last_column], room[2])
                above[panel.row] = max(above[panel.row], room[3])
            free = scene.width - 2 * MARGIN - before.sum() - after.sum() - GAP[0] * (n_columns - 1)
            x = widths * max(free, 0.3 * n_columns)
            free = top - bottom - above.sum() - below.sum() - GAP[1] * (n_rows - 1)
            y = tall * max(free, 0.3 * n_rows)
            left = MARGIN + np.cumsum(before + x + after + GAP[0]) - GAP[0] - after - x
            high = top - np.cumsum(above + y + below + GAP[1]) + GAP[1] + below + y
            for panel, drawn in zip(scene.panels, self._panels, strict=True):
                last_column, last_row = panel.column + panel.columns - 1, panel.row + panel.rows - 1
                right, low = left[last_column] + x[last_column], high[last_row] - y[last_row]
                drawn.place(left[panel.column], low, right, high[panel.row], not self._repeats_x(panel))
            if turn < 2:
                given, around = around, [drawn.measure() for drawn in self._panels]
                for k, drawn in enumerate(self._panels):
                    if drawn.panel.legend is not None:
                        *sides, over = around[k]
                        around[k] = (sides[0], sides[1], sides[2], over + len(self._own_rows(drawn)) * SMALL * ROW)
                if np.allclose(given, around, rtol=0, atol=0.5 / self.figure.dpi):  # half a pixel
                    break
        for drawn in self._panels:
            if drawn.panel.legend is not None:
                rows, (left, _, _, over), box = self._own_rows(drawn), drawn.measure(), drawn.axes.get_position()
                self._add_legend(rows, box.x0 * scene.width - left, box.y1 * height + over + len(rows) * SMALL * ROW, SMALL)

    def _repeats_x(self, panel: Panel) -> bool:
        """Return whether the panel below has the same x axis at the same place, and so shows its numbers, too."""
        return not panel.x.label and any(
            (below.row, below.column, below.columns) == (panel.row + panel.rows, panel.column, panel.columns)
            and (below.x.low, below.x.high, below.x.scale) == (panel.x.low, panel.x.high, panel.x.scale)
            and below.frame
            and below.x.ticks is None is panel.x.ticks
            for below in self.scene.panels
        )

    def _own_rows(self, drawn: PanelAxes) -> list[list[_Key]]:
        """Return a panel's own legend, at most two rows, as wide as the panel with its labels.

        Values are left out where they would need a second row, and names are shortened where they would need a third.
        """
        left, _, right, _ = drawn.measure()
        width = drawn.axes.get_position().width * self.scene.width + left + right
        entries = _ramps(drawn.panel) | self.scene.legend([drawn.panel])
        rows = self._legend_rows(entries, width, SMALL, drawn.panel.legend)
        if len(rows) > 1:
            rows = self._legend_rows(entries, width, SMALL)
        if len(rows) > 2:
            room = width / -(-len(entries) // 2) - SAMPLES[SMALL] - 2 * BESIDE[SMALL] - 0.01
            rows = self._legend_rows(entries, width, SMALL, most=max(room, 0.3))
        return rows[:2]

    def _legend_rows(
        self,
        entries: Mapping[tuple[str, int | str], Layer],
        width: float,
        size: float,
        at: str | None = None,
        most: float = math.inf,
    ) -> list[list[_Key]]:
        """Arrange a legend, layers by name and style, in rows of this width; `width` and `most`, for a name, are in inches.

        `at` is the `legend` of the only panel, for values of its lines.
        """
        rows: list[list[_Key]] = []
        left = 0.0
        for (name, style), layer in entries.items():
            control = next((each for each in self.scene.controls if each.name == layer.legend_by), None)
            if control is not None:
                states = [{control.name: index} for index in range(len(control.values))]
                name = max((self.scene.named(layer, state) for state in states), key=len)
            if is_live := control is not None or bool(at and isinstance(layer, Line)):
                if at:  # values that change must not move the legend
                    name = f"{name} 0.00012" if self._quick else self.scene.named(layer, self.state, at)
            sample = SAMPLES[size] * (4 if style == RAMP else 1)
            name = shortened(self.figure, name, min(width - sample - BESIDE[size], most), size)
            long = sample + text_width(self.figure, name, size) + 2 * BESIDE[size]
            if not rows or left + long - BESIDE[size] > width:
                rows.append([])
                left = 0.0
            rows[-1].append(_Key(left, sample, name, style, layer, at, is_live))
            left += long
        return rows

    def _add_legend(self, rows: list[list[_Key]], x: float, top: float, size: float) -> None:
        """Draw the rows of a legend, downwards from the position (x, top): a sample of each layer, then its name."""
        y = top - size * ROW / 2
        for row in rows:
            for key in row:
                for artist in _samples(key.layer, key.style, self._theme, x + key.left, y, key.sample):
                    artist.set_transform(self.figure.dpi_scale_trans)
                    self._words.append(self.figure.add_artist(artist))
                look = {"size": size, "color": THEMES[self._theme].ink, "va": "center_baseline"}
                words = self._text(x + key.left + key.sample + 0.6 * BESIDE[size], y, key.name, **look)
                if key.is_live:
                    self._named.append((words, key.layer, key.at))
                else:
                    self._words.append(words)
            y -= size * ROW

    def _said(self) -> str:
        if not self._with_values:
            return ""
        settable = [control for control in self.scene.controls if not control.remote and len(control.values) > 1]
        words = [f"{control.label}: {control.words(self.state[control.name])}" for control in settable]
        return wrapped(self.figure, "   ".join(words), self.scene.width - 2 * MARGIN, 8.5)

    def _text(self, x: float, y: float, words: str, **look: Any) -> MatplotlibText:
        text = self.figure.text(x, y, "", transform=self.figure.dpi_scale_trans, **{"va": "top", **look})
        put(text, words)
        return text


class _Key(NamedTuple):
    """The entry of a layer in a legend."""

    left: float  # distance from the left end of the row, in inches
    sample: float  # length of the sample
    name: str  # the longest one, if it changes
    style: int | str
    layer: Layer
    at: str | None  # the `legend` of the layer's panel
    is_live: bool  # whether the name changes with a control or with the data


LARGE, SMALL = 9.5, 8.0  # font sizes of legends: of the whole picture, of a panel
RAMP = "ramp"  # the style of a legend's entry for the colours of an image
# Lengths in inches.
ROW = 0.0221  # height of a legend's row per point of its font size
MARGIN = 0.12  # around the picture
GAP = 0.16, 0.08  # between panels with their labels, side by side and one below the other
SAMPLES = {LARGE: 0.4, SMALL: 0.22}  # length of a line's sample in a legend, by its font size
BESIDE = {
    LARGE: 0.145,
    SMALL: 0.095,
}  # 0.6 of it is between sample and name, the rest and as much again before the next sample


def _ramps(panel: Panel) -> dict[tuple[str, int | str], Layer]:
    """Return the legend's entries for the colours of images, by name and style."""
    entries: dict[tuple[str, int | str], Layer] = {}
    for image in scaled_images(panel):
        low, high = (f"{end:.2g}" if abs(end) < 1000 else f"{end:,.0f}" for end in limits_of(image))
        entries[f"{image.label}: {low} to {high}", RAMP] = image
    return entries


def _samples(layer: Layer, style: int | str, theme: str, x: float, y: float, wide: float) -> list[Artist]:
    """Make the sample of a layer before its name in the legend: left end at (x, y), this width, in inches."""
    if isinstance(layer, Heatmap) and style == RAMP:
        colours = layer.colours(theme) / 255
        edges = np.linspace(x, x + wide, len(colours) + 1)
        boxes = [Rectangle((left, y - 0.05), right - left, 0.1) for left, right in pairwise(edges)]
        return [PatchCollection(boxes, facecolors=colours, linewidths=0)]
    colour, dashes = colour_and_dashes(style, theme)
    if isinstance(layer, Heatmap) and layer.palette != "categories":
        colour = "#" + bytes(layer.colours(theme)[-1]).hex()
    line = Line2D([x, x + wide], [y, y], color=colour, linestyle=dashes, linewidth=1.8)
    if isinstance(layer, (Band, Heatmap)):
        alpha = layer.alpha if isinstance(layer, Heatmap) else min(2 * layer.alpha, 1)
        return [Rectangle((x, y - 0.05), wide, 0.1, facecolor=colour, alpha=alpha, linewidth=0)]
    if isinstance(layer, Points):
        markers = {"dot": "o", "ring": "o", "cross": "x", "star": "*"}
        line.set(
            xdata=[x + wide / 2], ydata=[y], marker=markers[layer.marker], markersize=9 if layer.marker == "star" else 6.5
        )
        line.set(markeredgewidth=1.8 if layer.marker in ("ring", "cross") else 0)
        if layer.marker == "ring":
            line.set_markerfacecolor(THEMES[theme].background)
    elif isinstance(layer, Arrows):
        line.set(xdata=[x, x + wide - 0.06], linestyle="-")
        return [line, Line2D([x + wide - 0.06], [y], color=colour, marker=">", markersize=6, linestyle="")]
    elif isinstance(layer, Line):
        line.set(linewidth=max(layer.width, 1), alpha=layer.alpha, marker="o" if layer.marker else "", markersize=4)
    elif isinstance(layer, RefLine):
        line.set(linewidth=max(layer.width, 1))
    return [line]


def _structure(scene: Scene) -> Any:
    """Return everything of a scene except its numbers: a change of it needs a new figure."""
    panels = []
    for panel in scene.panels:
        layers = [
            (
                type(layer),
                [getattr(layer, each.name) for each in fields(layer) if each.name not in (*layer.arrays, "limits")],
            )
            for layer in panel.layers
        ]
        axes = [(axis.label, axis.scale, axis.upwards) for axis in (panel.x, panel.y)]
        places = (panel.row, panel.column, panel.rows, panel.columns, panel.equal, panel.frame, panel.legend)
        panels.append((axes, layers, panel.title, places))
    controls = [(control.name, control.label, control.unit, control.remote) for control in scene.controls]
    words = [scene.title, *scene.notes]
    return panels, controls, words, scene.width, scene.height, list(scene.widths), list(scene.heights)


def _bounds(scene: Scene) -> Any:
    """Return the limits of all axes and colour scales, and the ticks."""
    axes = [axis for panel in scene.panels for axis in (panel.x, panel.y)]
    ticks = [None if axis.ticks is None else [tuple(tick) for tick in axis.ticks] for axis in axes]
    limits = [layer.limits for panel in scene.panels for layer in panel.layers if isinstance(layer, Heatmap)]
    return [(axis.low, axis.high) for axis in axes], ticks, limits
