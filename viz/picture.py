"""Pictures of scenes by matplotlib: a figure to keep, and one that is drawn again quickly whenever something changes."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AxesAxis
from matplotlib.axis import XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.patheffects import Normal, Stroke
from matplotlib.quiver import Quiver
from matplotlib.spines import Spine
from matplotlib.text import Text as TextArtist
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from .scene import Arrows, Axis, Band, Heatmap, Layer, Line, Panel, Points, RefLine, Scene, State, Text
from .style import LOCK, THEMES, Figure, line_style, quieten

__all__ = ["Picture", "draw"]


def draw(scene: Scene, state: State | None = None, theme: str = "light") -> Figure:
    """A scene as a matplotlib figure; its axes are in the order of the panels, and after them the bars of colours.

    Args:
        scene: what is to be seen.
        state: by the name of a control the index of its value; those left out are as at first.
        theme: "light" or "dark".

    Raises:
        ValueError: there is no such theme, control or value.

    Example:
        >>> from tristep.viz import Axis, Line, Panel, Scene, draw
        >>> line = Line([0, 1, 2], [4, 2, 1], name="sgd")
        >>> figure = draw(Scene([Panel(Axis("update", 0, 2), Axis("loss", 1, 4, "log"), [line])]))
        >>> figure.axes[0].get_ylabel()
        'loss'
    """
    return Picture(scene, state, theme).figure


class Picture:
    """A scene's figure that follows the controls and the data.

    What does not change is drawn once and kept as pixels; what does is drawn on top of it. Axes that come to reach from or
    to other values are drawn anew, and so is everything if the scene is another one in more than its numbers.

    Args:
        scene, state, theme: as for `draw`.
        dpi: pixels per inch.
        values: whether the values of the controls stand below.

    Attributes:
        figure: the matplotlib figure as it is now.

    Example:
        >>> from tristep.viz.picture import Picture
        >>> from tristep.viz.scene import Axis, Control, Line, Panel, Scene
        >>> power = Control("power", "power", [1, 2, 3])
        >>> line = Line([0, 1, 2], [[0, 1, 2], [0, 1, 4], [0, 1, 8]], by=("power",))
        >>> picture = Picture(Scene([Panel(Axis("x", 0, 2), Axis("y", 0, 8), [line])], controls=[power]))
        >>> pngs = []
        >>> for index in range(3):
        ...     picture.show(state={"power": index})
        ...     pngs.append(picture.png())
    """

    figure: Figure
    _scene: Scene
    _background: np.ndarray | None  # the pixels of what does not change; None: they have to be drawn
    _calls: dict[Artist, tuple[Any, list[_Call]]]  # of artists above these, a line's marker and what a renderer was told

    def __init__(
        self, scene: Scene, state: State | None = None, theme: str = "light", dpi: float = 100.0, values: bool = True
    ) -> None:
        if theme not in THEMES:
            raise ValueError(f"theme={theme!r}: must be one of {', '.join(map(repr, THEMES))}")
        self._theme, self._dpi, self._with_values = theme, dpi, values
        with LOCK:
            self._begin(scene, scene.state(**(state or {})))

    def show(self, scene: Scene | None = None, state: State | None = None) -> None:
        """Take what another state or another scene has; `figure` has it at once, and `png` draws it.

        Args:
            scene: None for the one there is.
            state: by the name of a control the index of its value; those left out are as at first.
        """
        with LOCK:
            scene = self._scene if scene is None else scene
            wanted = scene.state(**(state or {}))
            if scene is not self._scene and _structure(scene) != _structure(self._scene):
                self._begin(scene, wanted)
                return
            moved = scene is not self._scene and _bounds(scene) != _bounds(self._scene)
            self._scene, self._state = scene, wanted
            if moved:
                self._arrange()
            self._update(labels=moved)

    def png(self) -> bytes:
        """The picture as a PNG file, packed quickly rather than well."""
        with LOCK:
            return _packed(self._pixels())

    def _begin(self, scene: Scene, state: dict[str, int]) -> None:
        self._scene, self._state = scene, state
        self.figure = Figure(scene.width, scene.height, THEMES[self._theme].background)
        self.figure.set_dpi(self._dpi)
        self._panels = [_DrawnPanel(self.figure, panel, self._theme) for panel in scene.panels]
        for drawn in self._panels:
            drawn.add_bars()
        self._words: list[Artist] = []  # title and legend
        self._values = self._text(0, 0, "", size=8.5, va="bottom", color=THEMES[self._theme].quiet)
        # What has ever changed is expected to change again, and so is what depends on a control.
        self._moving = {
            (i, j)
            for i, panel in enumerate(scene.panels)
            for j, layer in enumerate(panel.layers)
            if layer.by or (isinstance(layer, Line) and layer.upto is not None)
        }
        self._arrange()
        self._update(labels=True)

    def _update(self, labels: bool) -> None:
        """Hand the data to the artists. Labels that stand at marks are put in their places where a mark has moved."""
        for i, (panel, drawn) in enumerate(zip(self._scene.panels, self._panels, strict=True)):
            marks_moved = False
            for j, (layer, kept) in enumerate(zip(panel.layers, drawn.layers, strict=True)):
                if kept.show(self._scene, layer, self._state, (i, j) in self._moving):
                    marks_moved |= isinstance(layer, RefLine)
                    if (i, j) not in self._moving:
                        self._moving.add((i, j))
                        self._background = None
            if labels or marks_moved:
                drawn.place_labels()
        self._values.set_text(self._said())

    def _pixels(self) -> np.ndarray:
        """uint8 [height, width, 4]; valid until the next drawing."""
        canvas = _canvas(self.figure)
        moving = self._moving_artists()
        if self._background is None:
            for artist in moving:
                artist.set_animated(True)  # which leaves it out
            canvas.draw()
            for artist in moving:
                artist.set_animated(False)
            self._calls = {}
            pixels = np.asarray(canvas.buffer_rgba())
            self._background = pixels.copy()
        else:
            pixels = np.asarray(canvas.buffer_rgba())
            pixels[:] = self._background
        renderer = _renderer(self.figure)
        for artist, changes in moving.items():
            if changes and not isinstance(artist, Line2D):
                artist.draw(renderer)
            elif artist.get_visible():
                self._draw_again(artist, renderer)
        return pixels

    def _draw_again(self, artist: Artist, renderer: Any) -> None:
        """Draw what differs from before in its points at most.

        Most of the time of drawing a line goes into finding out how it looks, which is kept here.
        """
        if not isinstance(artist, Line2D):
            look, points = None, None
        else:
            look = artist.get_marker()
            if look not in ("", "None") and artist.get_path_effects():  # which draw each marker by itself
                artist.draw(renderer)
                return
            data = np.array([artist.get_xdata(orig=True), artist.get_ydata(orig=True)], dtype=np.float64)
            if data.size == 0:
                return
            points = Path(artist.get_transform().transform_non_affine(data.T))
        before = self._calls.get(artist)
        if before is None or before[0] != look:
            heard: Any = _Heard(renderer)
            artist.draw(heard)
            self._calls[artist] = look, heard.calls
            return
        for name, given, named in before[1]:
            if points is not None:
                place = {"draw_path": 1, "draw_markers": 3}[name]
                given = (*given[:place], points, *given[place + 1 :])
            getattr(renderer, name)(*given, **named)

    def _moving_artists(self) -> dict[Artist, bool]:
        """What is drawn above the background, and whether it changes.

        It is in matplotlib's order: in each axes all from the first that changes on.
        """
        found: dict[Artist, bool] = {}
        for i, drawn in enumerate(self._panels):
            moving = {artist for j, kept in enumerate(drawn.layers) if (i, j) in self._moving for artist in kept.artists}
            if moving:
                order = drawn.in_order()
                first = min(order.index(artist) for artist in moving)
                found |= {artist: artist in moving for artist in order[first:]}
        if self._values.get_text():
            found[self._values] = True
        return found

    def _arrange(self) -> None:
        """Put words and axes where all of them have room. Lengths are in inches."""
        self._background = None
        scene, theme = self._scene, THEMES[self._theme]
        for panel, drawn in zip(scene.panels, self._panels, strict=True):
            drawn.set_limits(panel)
        for artist in self._words:
            artist.remove()
        self._words = []
        top = scene.height - MARGIN
        if scene.title:
            title = self._text(MARGIN, top, self._wrapped(scene.title, 13, "bold"), size=13, weight="bold", color=theme.ink)
            self._words.append(title)
            top -= self._height(title) + 0.08
        top = self._add_legend(top)
        self._values.set(text=self._said(), position=(MARGIN, 0.06))
        bottom = 0.06 + self._height(self._values) + 0.06 if self._values.get_text() else MARGIN

        n_rows, n_columns = scene.grid
        widths = np.array(scene.widths or [1.0] * n_columns) / sum(scene.widths or [1.0] * n_columns)
        heights = np.array(scene.heights or [1.0] * n_rows) / sum(scene.heights or [1.0] * n_rows)
        around = [(0.6, 0.45, 0.2, 0.3)] * len(scene.panels)  # left, bottom, right and top of each: a first guess
        for turn in range(3):  # how much room words take depends on how much they are given
            before, after = np.zeros(n_columns), np.zeros(n_columns)
            above, below = np.zeros(n_rows), np.zeros(n_rows)
            for panel, room in zip(scene.panels, around, strict=True):
                last_column, last_row = panel.column + panel.columns - 1, panel.row + panel.rows - 1
                before[panel.column] = max(before[panel.column], room[0])
                below[last_row] = max(below[last_row], room[1])
                after[last_column] = max(after[last_column], room[2])
                above[panel.row] = max(above[panel.row], room[3])
            free = scene.width - 2 * MARGIN - before.sum() - after.sum() - GAP * (n_columns - 1)
            x = widths * max(free, 0.3 * n_columns)
            free = top - bottom - above.sum() - below.sum() - GAP * (n_rows - 1)
            y = heights * max(free, 0.3 * n_rows)
            left = MARGIN + np.cumsum(before + x + after + GAP) - GAP - after - x
            high = top - np.cumsum(above + y + below + GAP) + GAP + below + y
            for panel, drawn in zip(scene.panels, self._panels, strict=True):
                last_column, last_row = panel.column + panel.columns - 1, panel.row + panel.rows - 1
                right, low = left[last_column] + x[last_column], high[last_row] - y[last_row]
                drawn.place(left[panel.column], low, right, high[panel.row])
            if turn < 2:
                given, around = around, [drawn.measure() for drawn in self._panels]
                if np.allclose(given, around, rtol=0, atol=0.5 / self.figure.dpi):  # half a pixel
                    break

    def _add_legend(self, top: float) -> float:
        """Rows of names with samples of what they name, below `top`; returns where the rows end."""
        x, y, size = MARGIN, top - 0.1, 9.5
        theme = THEMES[self._theme]
        entries: list[tuple[str, int | str, Layer]] = list(self._scene.legend())
        met = {(name, style) for name, style, _ in entries}
        for panel in self._scene.panels:
            for layer in panel.layers:
                if isinstance(layer, Heatmap) and layer.palette == "categories":
                    for i, word in enumerate(layer.words):
                        if (word, i) not in met:
                            met.add((word, i))
                            entries.append((word, i, layer))
        for name, style, layer in entries:
            shown = self._shortened(name, size, self._scene.width - 2 * MARGIN - SAMPLE - 0.08)
            width = SAMPLE + 0.08 + self._width(shown, size)
            if x > MARGIN and x + width > self._scene.width - MARGIN:
                x, y = MARGIN, y - 0.21
            for artist in _samples(layer, style, self._theme, x, y):
                artist.set_transform(self.figure.dpi_scale_trans)
                self._words.append(self.figure.add_artist(artist))
            text = self._text(x + SAMPLE + 0.08, y, shown, size=size, color=theme.ink, va="center_baseline")
            self._words.append(text)
            x += width + 0.22
        return y - 0.18 if entries else top

    def _said(self) -> str:
        """The values of the controls in words."""
        if not self._with_values:
            return ""
        settable = [control for control in self._scene.controls if not control.remote and len(control.values) > 1]
        words = [f"{control.label}: {control.words(self._state[control.name])}" for control in settable]
        return self._wrapped("   ".join(words), 8.5)

    def _text(self, x: float, y: float, words: str, **look: Any) -> TextArtist:
        look = {"va": "top", "parse_math": False, **look}
        return self.figure.text(x, y, words, transform=self.figure.dpi_scale_trans, **look)

    def _height(self, text: TextArtist) -> float:
        return text.get_window_extent(_renderer(self.figure)).height / self.figure.dpi

    def _width(self, words: str, size: float, weight: str = "normal") -> float:
        return _text_width(self.figure, words, size, weight)

    def _wrapped(self, words: str, size: float, weight: str = "normal") -> str:
        return _wrapped(self.figure, words, self._scene.width - 2 * MARGIN, size, weight)

    def _shortened(self, words: str, size: float, width: float) -> str:
        return _shortened(self.figure, words, width, size)


# Lengths in inches.
MARGIN = 0.12  # around all
GAP = 0.16  # between panels with their words
SAMPLE = 0.3  # a piece of line in the legend
BAR = 0.12  # the width of a bar of colours
NUMERIC = re.compile(r"[-+−0-9.,e%kMG ]*")


class _DrawnPanel:
    """A panel's axes, with the artists of its layers and the bars that say what its colours mean."""

    def __init__(self, figure: Figure, panel: Panel, theme: str) -> None:
        self.figure, self.panel, self.theme = figure, panel, theme
        self.axes = axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
        quieten(axes, theme=theme)
        colours = THEMES[theme]
        # Below everything that can change, so that it need not be drawn again.
        self.title = axes.set_title("", loc="left", y=1, pad=5, color=colours.ink, fontsize=10.5, zorder=0.4)
        self.title.set_parse_math(False)
        axes.xaxis.label.set_parse_math(False)
        axes.yaxis.label.set_parse_math(False)
        for spec, set_scale in ((panel.x, axes.set_xscale), (panel.y, axes.set_yscale)):
            if spec.scale == "log":
                set_scale("log", nonpositive="mask")
        pictured = any(isinstance(layer, Heatmap) for layer in panel.layers)
        if not pictured:
            axes.grid(axis="y", color=colours.grid, linewidth=0.8)
        if panel.equal:
            axes.set_aspect("equal", adjustable="box")
        if not panel.frame:
            axes.set_axis_off()
        self.layers = [ARTISTS[type(layer)](axes, layer, theme, i, pictured) for i, layer in enumerate(panel.layers)]
        self.bars: list[Axes] = []

    def add_bars(self) -> None:
        for layer in self.panel.layers:
            if isinstance(layer, Heatmap) and layer.label and layer.palette != "categories":
                bar = self.figure.add_axes((0.9, 0.1, 0.02, 0.8))
                quieten(bar, size=8, theme=self.theme)
                bar.set_yscale(layer.scale)
                ramp = AxesImage(bar, extent=(0, 1, 0, 1), origin="lower", interpolation="nearest", zorder=1)
                ramp.set_data(layer.colours(self.theme)[:, None])
                ramp.set_transform(bar.transAxes)
                bar.add_image(ramp)
                bar.set(xlim=(0, 1), xticks=[])
                bar.yaxis.tick_right()
                bar.yaxis.set_label_position("right")
                bar.yaxis.label.set_parse_math(False)
                for spine in bar.spines.values():
                    spine.set_visible(False)
                self.bars.append(bar)

    def set_limits(self, panel: Panel) -> None:
        self.panel = panel
        for kept in self.layers:
            kept.forget()
        for spec, set_limits in ((panel.x, self.axes.set_xlim), (panel.y, self.axes.set_ylim)):
            set_limits(*((spec.low, spec.high) if spec.upwards else (spec.high, spec.low)))
        for bar, layer in zip(self.bars, self._with_bars(), strict=True):
            bar.set_ylim(*_limits(layer))

    def place(self, left: float, bottom: float, right: float, top: float) -> None:
        """Put the axes between these edges, in inches, and give them ticks and words for which there is room."""
        width, height = self.figure.get_size_inches()
        self.axes.set_position((left / width, bottom / height, (right - left) / width, (top - bottom) / height))
        self.axes.apply_aspect()
        box = self.axes.get_position()
        across, upwards = box.width * width, box.height * height
        self.title.set_text(_wrapped(self.figure, self.panel.title, across, 10.5))
        _set_ticks(self.axes.xaxis, self.panel.x, across)
        _set_ticks(self.axes.yaxis, self.panel.y, upwards)
        self.axes.set_xlabel(_wrapped(self.figure, self.panel.x.label, across, 10))
        self.axes.set_ylabel(_wrapped(self.figure, self.panel.y.label, upwards, 10))
        x = box.x1 * width + 0.1
        for bar, layer in zip(self.bars, self._with_bars(), strict=True):
            bar.set_position((x / width, box.y0, BAR / width, box.height))
            _set_ticks(bar.yaxis, Axis(layer.label, *_limits(layer), layer.scale), upwards)
            bar.set_ylabel(_wrapped(self.figure, layer.label, upwards, 9), fontsize=9)
            x += BAR + self._sizes(bar)[2] + 0.1

    def measure(self) -> tuple[float, float, float, float]:
        """How far, in inches, the words reach to the left, below, to the right and above the room given to the axes."""
        left, bottom, right, top = self._sizes(self.axes)
        if self.bars:
            right = max(right, 0.1 + sum(BAR + self._sizes(bar)[2] for bar in self.bars) + 0.1 * (len(self.bars) - 1))
        # Axes of equal units are smaller than that room, and their words may stand in what they leave.
        width, height = self.figure.get_size_inches()
        given, taken = self.axes.get_position(original=True), self.axes.get_position()
        across, upwards = (given.width - taken.width) * width / 2, (given.height - taken.height) * height / 2
        return max(left - across, 0.0), max(bottom - upwards, 0.0), max(right - across, 0.0), max(top - upwards, 0.0)

    def place_labels(self) -> None:
        """Put the labels of marks where they cover neither each other nor the edge."""
        renderer = _renderer(self.figure)
        box = self.axes.get_window_extent(renderer)
        taken: list[Bbox] = []
        for kept in self.layers:
            if isinstance(kept, _DrawnMark) and kept.label is not None:
                kept.place_label(renderer, box, taken)
            elif isinstance(kept, _DrawnWords):
                kept.fit()

    def in_order(self) -> list[Artist]:
        """The artists in the order in which matplotlib draws them."""
        artists = [artist for artist in self.axes.get_children() if artist is not self.axes.patch]
        if not self.axes.axison:
            artists = [artist for artist in artists if not isinstance(artist, (Spine, AxesAxis))]
        return sorted(artists, key=lambda artist: artist.get_zorder())

    def _with_bars(self) -> list[Heatmap]:
        images = [layer for layer in self.panel.layers if isinstance(layer, Heatmap)]
        return [layer for layer in images if layer.label and layer.palette != "categories"]

    def _sizes(self, axes: Axes) -> tuple[float, float, float, float]:
        renderer = _renderer(self.figure)
        parts = [axis.get_tightbbox(renderer) for axis in (axes.xaxis, axes.yaxis) if axes.axison]
        if axes is self.axes and self.title.get_text():
            parts.append(self.title.get_window_extent(renderer))
        box = axes.get_window_extent(renderer)
        # Where there are none, the box itself; also half of what is drawn on its edge.
        whole = Bbox.union([box.padded(0.03 * self.figure.dpi), *(part for part in parts if part is not None)])
        sizes: Any = (box.x0 - whole.x0, box.y0 - whole.y0, whole.x1 - box.x1, whole.y1 - box.y1)
        return tuple(size / self.figure.dpi for size in sizes)


_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class _Heard:
    """A renderer that keeps what it is told to draw."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self.calls: list[_Call] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._renderer, name)
        if not name.startswith("draw_"):
            return method

        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            return method(*given, **named)

        return call


class _Drawn:
    """The artists of a layer."""

    def __init__(self, axes: Axes, layer: Any, theme: str, i: int, pictured: bool) -> None:
        self.axes, self.theme, self.pictured = axes, THEMES[theme], pictured
        self.colour, self.dashes = _look(layer.style, theme)
        self.zorder = 1 + i / 1000
        self.artists: list[Artist] = []
        self._shown: tuple[Any, ...] | None = None
        self._edges: np.ndarray | None = None  # of the axes, [2, 2]
        self.make(layer)

    # Whether it takes longer to find out that nothing has changed than to hand over the same again.
    cheap = True

    def show(self, scene: Scene, layer: Any, state: State, moving: bool) -> bool:
        """Hand the layer's data to the artists; returns whether they had others before, or may have if it is moving."""
        data = self.data(scene, layer, state)
        if self._shown is not None and not (moving and self.cheap) and all(map(_same, data, self._shown)):
            return False
        changed, self._shown = self._shown is not None, data
        self.set(layer, *data)
        return changed

    def forget(self) -> None:
        """Let the next `show` hand over all of it: the axes reach from or to something else."""
        self._shown = self._edges = None

    def data(self, scene: Scene, layer: Any, state: State) -> tuple[Any, ...]:
        return tuple(layer.chosen(name, state) for name in layer.arrays)

    def make(self, layer: Any) -> None:
        raise NotImplementedError

    def set(self, layer: Any, *data: Any) -> None:
        raise NotImplementedError

    def add_line(self, **look: Any) -> Line2D:
        line = self.axes.add_line(Line2D([], [], color=self.colour, zorder=self.zorder, **look))
        self.artists.append(line)
        return line

    def inside(self, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """The points that are not beyond the axes. Those on the edge are drawn whole."""
        # Rounded as the points are: one on the edge must not be beyond it.
        if self._edges is None:
            self._edges = np.sort(np.array([self.axes.get_xlim(), self.axes.get_ylim()], np.float32), axis=1)
        (left, right), (low, high) = self._edges
        there = (left <= x) & (x <= right) & (low <= y) & (y <= high)
        return x[there], y[there]

    def outline(self, width: float) -> list[Any]:
        """What sets a line off from the colours behind it; hairlines are to be quiet."""
        if not self.pictured or width < 1:
            return []
        dashes = {"dash_offset": 0, "dash_list": None}
        return [Stroke(linewidth=width + 1.8, foreground=self.theme.background, alpha=0.75, dashes=dashes), Normal()]


class _DrawnLine(_Drawn):
    def make(self, layer: Line) -> None:
        look = {"linestyle": self.dashes, "linewidth": layer.width, "alpha": layer.alpha, "markersize": 4}
        self.line = self.add_line(**look, path_effects=self.outline(layer.width))
        if layer.head:
            self.head = self.add_line(marker="o", markersize=2.5 + 2 * layer.width, markeredgecolor=self.theme.background)
            self.head.set(markeredgewidth=0.8, clip_on=False)

    def data(self, scene: Scene, layer: Line, state: State) -> tuple[Any, ...]:
        return scene.drawn(layer, state)

    def set(self, layer: Line, *data: Any) -> None:
        x, y = data
        there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        self.line.set_data(x, y)
        marker = "o" if layer.marker or there.size == 1 else ""  # a line through one point would not be seen
        if marker != self.line.get_marker():
            self.line.set_marker(marker)
        if layer.head:
            self.head.set_data(*self.inside(x[there[-1:]], y[there[-1:]]))


class _DrawnBand(_Drawn):
    def make(self, layer: Band) -> None:
        self.area = PolyCollection([], facecolor=self.colour, alpha=layer.alpha, linewidth=0, zorder=self.zorder)
        self.axes.add_collection(self.area, autolim=False)
        self.artists.append(self.area)

    def set(self, layer: Band, *data: Any) -> None:
        x, low, high = (np.asarray(values, dtype=np.float64) for values in data)
        there = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        if self.axes.get_yscale() == "log":  # what reaches down to 0 goes on below the axes
            low, high = (np.where(values > 0, values, 1e-300) for values in (low, high))
        runs = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8))).reshape(-1, 2)
        self.area.set_verts(
            [np.stack([np.r_[x[a:b], x[a:b][::-1]], np.r_[low[a:b], high[a:b][::-1]]], axis=1) for a, b in runs if b - a > 1]
        )


class _DrawnImage(_Drawn):
    cheap = False

    def make(self, layer: Heatmap) -> None:
        self.image = AxesImage(self.axes, origin="lower", interpolation="nearest", zorder=self.zorder)
        self.image.set_data(np.zeros((1, 1, 4), np.uint8))
        self.image.set_clip_path(self.axes.patch)
        self.axes.add_image(self.image)
        # Cells are equally large on the axes' scales: the rectangle is handed over in these, as logarithms on a log scale.
        self.image.set_transform(self.axes.transLimits + self.axes.transAxes)
        self.colours = layer.colours("dark" if self.theme is THEMES["dark"] else "light")
        self.artists.append(self.image)

    def data(self, scene: Scene, layer: Heatmap, state: State) -> tuple[Any, ...]:
        return *super().data(scene, layer, state), layer.limits

    def set(self, layer: Heatmap, *data: Any) -> None:
        values, x, y, _ = data
        self.image.set_data(_coloured(values, layer, self.colours))
        (left, bottom), (right, top) = self.axes.transScale.transform(np.stack([x, y], axis=1))
        self.image.set_extent((left, right, bottom, top))


class _DrawnPoints(_Drawn):
    def make(self, layer: Points) -> None:
        look: dict[str, Any] = {"linestyle": "", "markersize": layer.size}
        if layer.marker == "cross":
            look |= {"marker": "x", "markeredgewidth": 2, "path_effects": self.outline(2)}
        elif layer.marker == "ring":
            look |= {"marker": "o", "markeredgewidth": 1.8, "markerfacecolor": self.theme.background}
        else:
            star = layer.marker == "star"
            look |= {"marker": "*" if star else "o", "markeredgewidth": 0.8, "markeredgecolor": self.theme.background}
            look["markersize"] = layer.size * (1.6 if star else 1)
        self.points = self.add_line(**look, clip_on=False)

    def set(self, layer: Points, *data: Any) -> None:
        self.points.set_data(*self.inside(*data))


class _DrawnArrows(_Drawn):
    def make(self, layer: Arrows) -> None:
        self.arrows: Quiver | None = None

    def set(self, layer: Arrows, *data: Any) -> None:
        x, y, dx, dy = (np.asarray(values, dtype=np.float64) for values in data)
        there = np.isfinite(x + y + dx + dy)
        for axis, start, by in ((self.axes.xaxis, x, dx), (self.axes.yaxis, y, dy)):
            if axis.get_scale() == "log":
                there &= (start > 0) & (start + by > 0)
        places = np.stack([x[there], y[there]], axis=1)
        if self.arrows is None or len(places) != self.arrows.N:
            if self.arrows is not None:
                self.arrows.remove()
            look: dict[str, Any] = {
                "angles": "xy",
                "scale_units": "xy",
                "scale": 1,
                "units": "inches",
                "width": layer.width / 72,
            }
            look |= {"headwidth": 4, "headlength": 5, "headaxislength": 4.4, "minlength": 0.5}
            look |= {"edgecolor": self.theme.background, "linewidth": 0.6} if self.pictured else {}
            look |= {"color": self.colour, "zorder": self.zorder}
            self.arrows = Quiver(self.axes, places[:, 0], places[:, 1], dx[there], dy[there], **look)
            self.axes.add_collection(self.arrows, autolim=False)
            self.artists[:] = [self.arrows]
        else:
            self.arrows.XY = places
            self.arrows.set_offsets(places)
            self.arrows.set_UVC(dx[there], dy[there])


class _DrawnMark(_Drawn):
    cheap = False

    def make(self, layer: RefLine) -> None:
        self.along, self.label = layer.axis, None
        transform = self.axes.get_xaxis_transform() if layer.axis == "x" else self.axes.get_yaxis_transform()
        look = {"linestyle": self.dashes, "linewidth": layer.width, "path_effects": self.outline(layer.width)}
        self.line = self.add_line(transform=transform, **look)
        if layer.label:
            colour = self.theme.quiet if layer.style == "grid" else self.theme.ink
            self.label = _words(self.axes, layer.label, size=8.5, color=colour, zorder=4, backed=self.theme.background)
            self.artists.append(self.label)

    def set(self, layer: RefLine, *data: Any) -> None:
        at = np.asarray(data[0], dtype=np.float64)
        across, along = np.repeat(at, 3), np.tile([0, 1, np.nan], len(at))
        self.line.set_data(*((across, along) if self.along == "x" else (along, across)))
        at = at[np.isfinite(at)]
        self.at = float(at[0]) if at.size else np.nan

    def place_label(self, renderer: Any, box: Bbox, taken: list[Bbox]) -> None:
        """Put the label at the line, inside the axes and clear of those that have places already."""
        assert self.label is not None
        self.label.set_visible(False)
        scaled = self.axes.transData.transform((self.at, self.at)) if np.isfinite(self.at) else (np.nan, np.nan)
        x, y = scaled
        inside = box.x0 <= x <= box.x1 if self.along == "x" else box.y0 <= y <= box.y1
        if not inside:
            return
        self.label.set_visible(True)
        self.label.set(position=(0, 0), ha="left", va="bottom")
        size = self.label.get_window_extent(renderer)
        width, height, gap = size.width, size.height, 3 * renderer.points_to_pixels(1)
        places = []
        if self.along == "x":
            for row in range(12):
                low = box.y1 - (row + 1) * (height + gap)
                places += [(x + gap, low), (x - gap - width, low)]
        else:
            for column in range(6):
                left = box.x1 - (column + 1) * (width + gap)
                places += [(left, y + gap), (left, y - gap - height)]
        found = [Bbox.from_bounds(*place, width, height) for place in places]
        found = [each for each in found if each.x0 >= box.x0 and each.x1 <= box.x1 + 1 and each.y0 >= box.y0 - 1]
        found = [each for each in found if each.y1 <= box.y1 + 1]
        free = [each for each in found if not any(each.overlaps(other.padded(-0.5)) for other in taken)]
        if not free:  # better no label than two that cannot be read
            self.label.set_visible(False)
            return
        taken.append(free[0])
        x, y = self.axes.transAxes.inverted().transform((free[0].x0, free[0].y0))
        self.label.set_position((x, y))


class _DrawnWords(_Drawn):
    cheap = False

    def make(self, layer: Text) -> None:
        self.layer = layer
        backed = self.theme.background if self.axes.axison else None
        self.words = _words(self.axes, "", size=layer.size, color=self.colour, zorder=4, backed=backed)
        self.words.set(ha=layer.align, va="center", family="DejaVu Sans Mono" if layer.fixed else "DejaVu Sans")
        self.artists.append(self.words)
        self.text = ""

    def set(self, layer: Text, *data: Any) -> None:
        self.layer, self.text = layer, str(data[0])
        self.words.set_position((float(data[1]), float(data[2])))
        self.fit()

    def fit(self) -> None:
        """Break lines that are too long for the panel, or where letters stand below each other, make them smaller."""
        figure: Any = self.axes.figure
        x, _ = self.words.get_position()
        share = {"left": 1 - x, "right": x, "center": 2 * min(x, 1 - x)}[self.layer.align]
        room = max(share * self.axes.get_window_extent().width / figure.dpi, 0.3)
        if self.layer.fixed:
            widest = max(
                (_text_width(figure, row, self.layer.size, fixed=True) for row in self.text.split("\n")), default=0.0
            )
            self.words.set(text=self.text, fontsize=self.layer.size * min(1.0, max(room / widest, 0.6) if widest else 1.0))
        else:
            self.words.set_text("\n".join(_wrapped(figure, row, room, self.layer.size) for row in self.text.split("\n")))


ARTISTS: dict[type, type[_Drawn]] = {
    Arrows: _DrawnArrows,
    Band: _DrawnBand,
    Heatmap: _DrawnImage,
    Line: _DrawnLine,
    RefLine: _DrawnMark,
    Points: _DrawnPoints,
    Text: _DrawnWords,
}


def _look(style: int | str, theme: str) -> tuple[str, Any]:
    """Colour and dashes."""
    if isinstance(style, str):
        return getattr(THEMES[theme], style), "-"
    look = line_style(style, theme)
    return look["color"], look["linestyle"]


def _samples(layer: Layer, style: int | str, theme: str, x: float, y: float) -> list[Artist]:
    """What stands before a name in the legend, with its left end at a place in inches."""
    colour, dashes = _look(style, theme)
    line = Line2D([x, x + SAMPLE], [y, y], color=colour, linestyle=dashes, linewidth=1.8)
    if isinstance(layer, (Band, Heatmap)):
        alpha = layer.alpha if isinstance(layer, Heatmap) else min(2 * layer.alpha, 1)
        return [Rectangle((x, y - 0.05), SAMPLE, 0.1, facecolor=colour, alpha=alpha, linewidth=0)]
    if isinstance(layer, Points):
        markers = {"dot": "o", "ring": "o", "cross": "x", "star": "*"}
        line.set(
            xdata=[x + SAMPLE / 2], ydata=[y], marker=markers[layer.marker], markersize=9 if layer.marker == "star" else 6.5
        )
        line.set(markeredgewidth=1.8 if layer.marker in ("ring", "cross") else 0)
        if layer.marker == "ring":
            line.set_markerfacecolor(THEMES[theme].background)
    elif isinstance(layer, Arrows):
        line.set(xdata=[x, x + SAMPLE - 0.06], linestyle="-")
        return [line, Line2D([x + SAMPLE - 0.06], [y], color=colour, marker=">", markersize=6, linestyle="")]
    elif isinstance(layer, Line):
        line.set(linewidth=max(layer.width, 1), alpha=layer.alpha, marker="o" if layer.marker else "", markersize=4)
    elif isinstance(layer, RefLine):
        line.set(linewidth=max(layer.width, 1))
    return [line]


def _coloured(values: np.ndarray, layer: Heatmap, colours: np.ndarray) -> np.ndarray:
    """uint8 RGBA [n_rows, n_columns, 4]; what has no colour is clear."""
    there = np.isfinite(values)
    if layer.palette == "categories":
        there &= values >= 0
        index = np.where(there, values, 0).astype(np.intp) % len(colours)
    else:
        low, high = _limits(layer)
        if layer.scale == "log":
            there &= values > 0
            values, low, high = np.log(np.where(there, values, low)), np.log(low), np.log(high)
        share = np.where(there, (values - low) / (high - low), 0.0)
        index = (np.clip(share, 0, 1) * (len(colours) - 1) + 0.5).astype(np.intp)
    pixels = np.empty((*values.shape, 4), np.uint8)
    pixels[..., :3] = colours[index]
    pixels[..., 3] = np.where(there, round(255 * layer.alpha), 0)
    return pixels


def _limits(layer: Heatmap) -> tuple[float, float]:
    assert layer.limits is not None  # the scene has found them
    return layer.limits


def _set_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """As many ticks as there is room for on this length, in inches."""
    axis.set_minor_locator(NullLocator())
    across = isinstance(axis, XAxis)
    if spec.ticks is not None:
        _set_given_ticks(axis, spec, length)
        return
    most = int(np.clip(length / (0.75 if across else 0.36), 2, 9))
    spread = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])
    decades = np.log10(spec.high / spec.low) if spec.scale == "log" else 0.0
    if decades < 0.7:
        axis.set_major_locator(spread)
    elif 3 * decades <= most + 1:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=100))
    elif np.floor(np.log10(spec.high)) - np.ceil(np.log10(spec.low)) >= 1:
        axis.set_major_locator(LogLocator(subs=(1,), numticks=most + 1))
    else:
        axis.set_major_locator(spread)
    axis.set_major_formatter(_Numbers(spec.scale == "log"))


def _set_given_ticks(axis: AxesAxis, spec: Axis, length: float) -> None:
    """Words at their values: on a short axis turned, and where there is no room at all, every so many."""
    assert spec.ticks is not None
    figure: Any = axis.axes.figure
    scaled = np.log10 if spec.scale == "log" else np.asarray
    low, high = float(scaled(spec.low)), float(scaled(spec.high))
    ticks = sorted((value, words) for value, words in spec.ticks if spec.low <= value <= spec.high)
    places = [length * (float(scaled(value)) - low) / (high - low) for value, _ in ticks]
    width, height = figure.get_size_inches()
    turned = False
    words = [_shortened(figure, text, 0.3 * width, 9) for _, text in ticks]
    needed = [0.15] * len(words)
    if isinstance(axis, XAxis):
        needed = [_text_width(figure, text, 9) + 0.08 for text in words]
        turned = not _fit(places, needed) and not all(NUMERIC.fullmatch(text) for text in words)
        if turned:
            words = [_shortened(figure, text, 0.35 * height, 9) for _, text in ticks]
            needed = [0.24] * len(words)
    every = next((n for n in range(1, len(ticks) + 1) if _fit(places[::n], needed[::n])), 1)
    axis.set_ticks([value for value, _ in ticks][::every], labels=words[::every])
    for label in axis.get_ticklabels():
        label.set_parse_math(False)
        if isinstance(axis, XAxis):
            turn = (
                {"rotation": 40, "ha": "right", "va": "center"} if turned else {"rotation": 0, "ha": "center", "va": "top"}
            )
            label.set(rotation_mode="anchor" if turned else "default", **turn)


def _fit(places: Sequence[float], needed: Sequence[float]) -> bool:
    """Whether words of these lengths, with their middles at these rising places, leave each other room."""
    ends = list(zip(places, needed, strict=True))
    return all(b - a >= (one + other) / 2 for (a, one), (b, other) in pairwise(ends))


class _Numbers(Formatter):
    """Numbers at ticks, in few letters: with powers of ten if one of them would be long without."""

    def __init__(self, log: bool) -> None:
        self._log = log  # there each tick is of another size, and each is written by itself

    def __call__(self, value: float, pos: Any = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Any) -> list[str]:
        words = [f"{value:.10g}" for value in values]
        if any("e" in word or len(word.lstrip("-")) > 6 for word in words):
            parts = [f"{value:.9e}".partition("e") for value in values]
            short = [f"{float(mantissa):.10g}e{int(power)}" if float(mantissa) else "0" for mantissa, _, power in parts]
            words = [a if self._log and "e" not in a and len(a) <= 6 else b for a, b in zip(words, short, strict=True)]
        return [word.replace("-", "−") for word in words]


def _words(axes: Axes, text: str, backed: str | None, **look: Any) -> TextArtist:
    """Words in axes, in shares of them, before a veil of this colour that sets them off from what is drawn."""
    back = {"facecolor": backed, "edgecolor": "none", "alpha": 0.75, "pad": 1.0} if backed else None
    return axes.text(0, 0, text, transform=axes.transAxes, parse_math=False, bbox=back, **look)


def _packed(pixels: np.ndarray) -> bytes:
    """A PNG file (ISO/IEC 15948) of uint8 [height, width, 4] without its opacity.

    Pillow tries five filters on every row to make the file smaller, which takes longer than all the rest.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter's number, 0 for none
    for k in range(3):  # all at once would take five times as long
        rows[:, 1 + k :: 3] = pixels[..., k]
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of red, green and blue
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 1)), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return file


def _canvas(figure: Figure) -> FigureCanvasAgg:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return canvas


def _renderer(figure: Figure) -> Any:
    return _canvas(figure).get_renderer()


def _text_width(figure: Figure, words: str, size: float, weight: str = "normal", fixed: bool = False) -> float:
    """In inches."""
    font = FontProperties(family="DejaVu Sans Mono" if fixed else None, size=size, weight=weight)
    return _renderer(figure).get_text_width_height_descent(words, font, ismath=False)[0] / figure.dpi


def _wrapped(figure: Figure, words: str, width: float, size: float, weight: str = "normal") -> str:
    """The words in lines that are no longer than this, in inches, unless a word is."""
    if _text_width(figure, words, size, weight) <= width:
        return words
    lines = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and _text_width(figure, longer, size, weight) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(line.rstrip() for line in lines)


def _shortened(figure: Figure, words: str, width: float, size: float) -> str:
    """The words, or both ends of them if they are longer than this, in inches."""
    kept = len(words)
    shown = words
    while _text_width(figure, shown, size) > width and kept > 2:
        kept -= 1
        shown = words[: (kept + 1) // 2] + "…" + words[len(words) - kept // 2 :]
    return shown


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")


def _structure(scene: Scene) -> Any:
    """All of a scene but its numbers: with another structure the figure is another one."""
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
        places = (panel.row, panel.column, panel.rows, panel.columns, panel.equal, panel.frame)
        panels.append((axes, layers, panel.title, places))
    controls = [(control.name, control.label, control.unit, control.remote) for control in scene.controls]
    return panels, controls, scene.title, scene.width, scene.height, list(scene.widths), list(scene.heights)


def _bounds(scene: Scene) -> Any:
    """What the axes and the colours reach from and to."""
    axes = [axis for panel in scene.panels for axis in (panel.x, panel.y)]
    ticks = [None if axis.ticks is None else [tuple(tick) for tick in axis.ticks] for axis in axes]
    limits = [layer.limits for panel in scene.panels for layer in panel.layers if isinstance(layer, Heatmap)]
    return [(axis.low, axis.high) for axis in axes], ticks, limits
