"""Draw scenes as matplotlib figures: once (`draw`), or again and again, quickly, as data and controls change (`Picture`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec, SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text as MatplotlibText
from matplotlib.transforms import ScaledTranslation

from ....trainer.validation import choice
from ...scene import Arrows, Heatmap, Layer, Line, Panel, RefLine, Scene, State
from ...style import THEMES
from .artists import colour_and_dashes
from .figure import LOCK, Figure
from .panel import PanelAxes, scaled_images
from .png import encode_png
from .text import agg_canvas, agg_renderer, put, shortened, text_height, text_width, wrapped

__all__ = ["Picture", "draw"]


def draw(scene: Scene, state: State | None = None, theme: str = "light") -> Figure:
    """Draw a scene as a matplotlib figure; its `axes` are the panels, in order, and their `child_axes` the colour bars.

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
    return Picture(scene, state, theme, still=True).figure


class Picture:
    """A scene's matplotlib figure that is redrawn quickly as controls and data change.

    Artists that do not change are drawn once and kept as pixels; the others are drawn on top. New limits of axes redraw the
    axes. A scene that differs in more than its numbers redraws everything.

    Args:
        dpi: pixels per inch.
        still: whether no control will be moved: the values of the controls stand above or below the panels, and legends have
            no room for other values.
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
        still: bool = False,
    ) -> None:
        choice("theme", theme, THEMES)
        self._theme, self._dpi, self._still = theme, dpi, still
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
            else:
                self._update()

    def png(self) -> bytes:
        """Draw the picture, and return it as a PNG file, compressed quickly rather than well."""
        with LOCK:
            return encode_png(self._pixels())

    def _begin(self, scene: Scene, state: dict[str, int]) -> None:
        self.scene, self.state = scene, state
        self.figure = Figure(scene.width, scene.height, THEMES[self._theme].background)
        self.figure.alt = scene.alt
        self.figure.set_dpi(self._dpi)
        cells = _cells(scene, self.figure)
        self._panels = [PanelAxes(self.figure, *both, self._theme) for both in zip(cells, scene.panels, strict=True)]
        self._words: list[Artist] = []  # title and legend
        # Names in legends that change with a control or the data: layer, `legend` of the panel, and longest name of each.
        self._named: list[tuple[MatplotlibText, Layer, str | None, str]] = []
        self._values = self._text(0, 0, "", size=8.5, va="bottom", color=THEMES[self._theme].quiet)
        # Panel and layer of data that have changed before, and so may change again, or that depend on a control.
        self._moving = {
            (i, j)
            for i, panel in enumerate(scene.panels)
            for j, layer in enumerate(panel.layers)
            if layer.by or (isinstance(layer, Line) and layer.upto is not None)
        }
        self._arrange()

    def _update(self) -> None:
        """Pass the data to the artists. Place the labels of marks again if a mark has moved."""
        for i, (panel, axes) in enumerate(zip(self.scene.panels, self._panels, strict=True)):
            marks_moved = False
            for j, (layer, layer_artist) in enumerate(zip(panel.layers, axes.layers, strict=True)):
                if layer_artist.show(self.scene, layer, self.state, (i, j) in self._moving):
                    marks_moved |= isinstance(layer, RefLine)
                    if (i, j) not in self._moving:
                        self._moving.add((i, j))
                        self._background = None
            if marks_moved:
                axes.place_labels()
        self._say()

    def _say(self) -> None:
        """Write what changes with the controls: names in legends and the values."""
        for text, layer, at, _ in self._named:
            put(text, self.scene.named(layer, self.state, at))
        put(self._values, self._said())

    def _pixels(self) -> np.ndarray:
        """Draw, and return the pixels, uint8 [height, width, 4], a buffer that the next drawing overwrites."""
        canvas = agg_canvas(self.figure)
        moving = self._moving_artists()
        if self._background is None:
            for artist in moving:
                artist.set_animated(True)  # leaves it out
            for text, *_, longest in self._named:  # a legend draws its words whatever they are
                put(text, longest)
                text.set_visible(False)
            canvas.draw()
            for artist in moving:
                artist.set_animated(False)
            for text, *_ in self._named:
                text.set_visible(True)
            self._say()
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
        wide = scene.width - 2 * MARGIN
        for artist in self._words:
            artist.remove()
        self._words, self._named = [], []
        for panel, drawn in zip(scene.panels, self._panels, strict=True):
            drawn.set_limits(panel)
            drawn.set_ticks(not self._repeats_x(panel))
        self._update()
        look: dict[str, Any] = {"size": 13, "weight": "bold", "color": theme.ink}
        title = self._text(MARGIN, 0, wrapped(self.figure, scene.title, wide, 13, "bold"), **look)
        notes = "\n".join(wrapped(self.figure, note, wide, 9) for note in scene.notes)
        noted = self._text(MARGIN, 0, notes, size=9, va="bottom", color=theme.ink, linespacing=1.35)
        free = wide - text_width(self.figure, scene.title, 13, "bold")
        said = self._said()
        is_beside = "\n" not in said and text_width(self.figure, said, 8.5) + 0.3 < free  # the title
        below = 0.0 if is_beside else text_height(self._values) + 0.06
        titled = max(text_height(title) if scene.title else 0.0, text_height(self._values) if is_beside else 0.0)
        titled += 0.08 if titled else 0.0
        shared = scene.legend([panel for panel in scene.panels if panel.legend is None])
        named = self._add_legend(self.figure, shared, wide, LARGE)
        own = dict.fromkeys(range(scene.grid[0]), 0.0)  # the height of the highest legend of each row's panels
        for panel, drawn in zip(scene.panels, self._panels, strict=True):
            entries = {} if panel.legend is None else _ramps(panel) | scene.legend([panel])
            above = self._add_legend(drawn.axes, entries, drawn.width + BESIDE, SMALL, panel.legend)
            own[panel.row] = max(own[panel.row], above)
            drawn.set_title(above)
        top, bottom = MARGIN + titled + named, MARGIN + below + (text_height(noted) + 0.06 if notes else 0.0)
        height = scene.height + top + bottom - 2 * MARGIN + sum(own.values())  # words do not make panels smaller
        self.figure.set_size_inches(scene.width, height)
        title.set_position((MARGIN, height - MARGIN))
        self._values.set(x=scene.width - MARGIN if is_beside else MARGIN, ha="right" if is_beside else "left")
        self._values.set(y=height - MARGIN - 0.02 if is_beside else 0.06, va="top" if is_beside else "bottom")
        noted.set_position((MARGIN, MARGIN + below))
        for legend in self.figure.legends:
            legend.set_bbox_to_anchor((MARGIN, height - MARGIN - titled), self.figure.dpi_scale_trans)
        self._words += [title, noted]
        rest = 1 - 2 * (MARGIN - PADS[0]) / scene.width, 1 - (top + bottom - 2 * PADS[1]) / height
        rect = (MARGIN - PADS[0]) / scene.width, (bottom - PADS[1]) / height, *rest
        layout = ConstrainedLayoutEngine(w_pad=PADS[0], h_pad=PADS[1], wspace=0, hspace=0, rect=rect)
        layout.execute(self.figure)
        if sum(drawn.wrap() for drawn in self._panels):  # after all have
            layout.execute(self.figure)
        for drawn in self._panels:
            drawn.place_labels()
        self._say()

    def _repeats_x(self, panel: Panel) -> bool:
        """Return whether the panel below has the same x axis at the same place, and so shows its numbers, too."""
        return not panel.x.label and any(
            (below.row, below.column, below.columns) == (panel.row + panel.rows, panel.column, panel.columns)
            and (below.x.low, below.x.high, below.x.scale) == (panel.x.low, panel.x.high, panel.x.scale)
            and below.frame
            and below.x.ticks is None is panel.x.ticks
            for below in self.scene.panels
        )

    def _add_legend(
        self,
        parent: Axes | Figure,
        entries: Mapping[tuple[str, int | str], Layer],
        width: float,
        size: float,
        at: str | None = None,
    ) -> float:
        """Add a legend, of layers by name and style, in as few rows as fit into a width. Return its height.

        `at` is the `legend` of the only panel, for values of lines; they are left out where they would need a second row.
        """
        if not entries:
            return 0.0
        words = [self._longest(name, layer, at) for (name, _), layer in entries.items()]
        n = self._columns(words, width, size)
        if at and n < len(words):
            at, words = None, [self._longest(name, layer, None) for (name, _), layer in entries.items()]
            n = self._columns(words, width, size)
        words = [shortened(self.figure, each, width - sum(LENGTHS[size]) * size / 72, size) for each in words]
        handles = [self._handle(layer, style) for (_, style), layer in entries.items()]
        look: dict[str, Any] = dict(zip(("handlelength", "handletextpad", "columnspacing"), LENGTHS[size], strict=True))
        look |= {"ncols": n, "frameon": False, "borderpad": 0, "labelspacing": 0.3}
        look |= {
            "fontsize": size,
            "labelcolor": THEMES[self._theme].ink,
            "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)},
        }
        if isinstance(parent, Figure):
            look |= {"loc": "upper left", "borderaxespad": 0}
        else:
            place = parent.transAxes + ScaledTranslation(-BESIDE, 0, self.figure.dpi_scale_trans)
            look |= {"loc": "lower left", "bbox_to_anchor": (0, 1), "bbox_transform": place, "borderaxespad": 0.4}
        legend = parent.legend(handles, ["-"] * len(words), **look)  # it would leave out a name that begins with "_"
        for text, name, layer in zip(legend.texts, words, entries.values(), strict=True):
            put(text, name)
            if layer.legend_by is not None or (at and isinstance(layer, Line)):
                self._named.append((text, layer, at, name))
        self._words.append(legend)
        return legend.get_window_extent(agg_renderer(self.figure)).height / self.figure.dpi + 0.05

    def _columns(self, words: list[str], width: float, size: float) -> int:
        """Return the largest number of a legend's columns that fit into a width."""
        lengths = [text_width(self.figure, each, size) + sum(LENGTHS[size]) * size / 72 for each in words]
        fit = (n for n in range(len(words), 1, -1) if sum(map(max, np.array_split(lengths, n))) <= width)
        return next(fit, 1)

    def _longest(self, name: str, layer: Layer, at: str | None) -> str:
        """Return the longest name that a layer has in the legend, whatever the controls."""
        for control in self.scene.controls:
            if control.name == layer.legend_by:
                states = [{control.name: index} for index in range(len(control.values))]
                name = max((self.scene.named(layer, state) for state in states), key=len)
        if at and isinstance(layer, Line):
            return self.scene.named(layer, self.state, at) if self._still else f"{name} 0.00012"
        return name

    def _handle(self, layer: Layer, style: int | str) -> Any:
        """Return what matplotlib makes a layer's sample in a legend from: the layer's artist, if it knows the kind."""
        colour: Any = colour_and_dashes(style, self._theme)[0] if style != RAMP else None
        if isinstance(layer, Heatmap):
            colours = layer.colours(self._theme) / 255
            if style == RAMP:
                return tuple(Patch(color=each) for each in colours[::16])
            return Patch(color=colours[-1])
        if isinstance(layer, Arrows):
            return Line2D([], [], color=colour, linewidth=2, marker=">")
        panels = zip(self.scene.panels, self._panels, strict=True)
        layers = (both for panel, drawn in panels for both in zip(panel.layers, drawn.layers, strict=True))
        return next(drawn.artists[0] for each, drawn in layers if each is layer)

    def _said(self) -> str:
        if not self._still:
            return ""
        settable = [control for control in self.scene.controls if not control.remote and len(control.values) > 1]
        words = [f"{control.label}: {control.words(self.state[control.name])}" for control in settable]
        return wrapped(self.figure, "   ".join(words), self.scene.width - 2 * MARGIN, 8.5)

    def _text(self, x: float, y: float, words: str, **look: Any) -> MatplotlibText:
        text = self.figure.text(x, y, "", transform=self.figure.dpi_scale_trans, **{"va": "top", **look})
        put(text, words)
        return text


LARGE, SMALL = 9.5, 8.0  # font sizes of legends: of the whole picture, of a panel
# Lengths in legends, in units of the font size: of a sample, between it and its name, and between columns.
LENGTHS = {LARGE: (2.8, 0.6, 1.6), SMALL: (2.0, 0.5, 1.2)}
RAMP = "ramp"  # the style of a legend's entry for the colours of an image
MARGIN = 0.12  # around the picture, in inches
BESIDE = 0.45  # how far legends of panels reach over the labels at the left, in inches
PADS = 0.06, 0.04  # around each panel with its labels, in inches


def _cells(scene: Scene, figure: Figure) -> list[SubplotSpec]:
    """Return the place of each panel in a grid of as few columns and rows as possible.

    The constrained layout gives all columns that a panel spans equal margins, and so twelve columns no room.
    """
    spans, ratios = [], []
    for first, number, n, sizes in (("column", "columns", 1, scene.widths), ("row", "rows", 0, scene.heights)):
        ends = [(getattr(panel, first), getattr(panel, first) + getattr(panel, number)) for panel in scene.panels]
        edges = sorted({0, *(each for pair in ends for each in pair)})
        sizes = sizes or [1.0] * scene.grid[n]
        ratios.append([sum(sizes[low:high]) for low, high in pairwise(edges)])
        spans.append([slice(edges.index(low), edges.index(high)) for low, high in ends])
    # Before their labels are known, axes are somewhat smaller than they will be.
    grid = GridSpec(len(ratios[1]), len(ratios[0]), figure, 0.08, 0.08, 0.92, 0.92, 0, 0, *ratios)
    return [grid[rows, columns] for columns, rows in zip(*spans, strict=True)]


def _ramps(panel: Panel) -> dict[tuple[str, int | str], Layer]:
    """Return the legend's entries for the colours of images, by name and style."""
    entries: dict[tuple[str, int | str], Layer] = {}
    for image in scaled_images(panel):
        low, high = (f"{end:.2g}" if abs(end) < 1000 else f"{end:,.0f}" for end in image.limits or ())
        entries[f"{image.label}: {low} to {high}", RAMP] = image
    return entries


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
    controls = [(control.name, control.label, control.remote) for control in scene.controls]
    words = [scene.title, *scene.notes]
    return panels, controls, words, scene.width, scene.height, list(scene.widths), list(scene.heights)


def _bounds(scene: Scene) -> Any:
    """Return the limits of all axes and colour scales, and the ticks."""
    axes = [axis for panel in scene.panels for axis in (panel.x, panel.y)]
    ticks = [None if axis.ticks is None else [tuple(tick) for tick in axis.ticks] for axis in axes]
    limits = [layer.limits for panel in scene.panels for layer in panel.layers if isinstance(layer, Heatmap)]
    return [(axis.low, axis.high) for axis in axes], ticks, limits
