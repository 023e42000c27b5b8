"""Matplotlib artists that draw the layers of a scene."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke
from matplotlib.quiver import Quiver
from matplotlib.text import Text as MatplotlibText
from matplotlib.transforms import Bbox

from ...scene import Arrows, Band, Heatmap, Line, Points, RefLine, Scene, State, Text
from ...style import THEMES, line_style
from .text import put, text_width, wrapped

__all__ = [
    "ArrowsArtist",
    "BandArtist",
    "HeatmapArtist",
    "LayerArtist",
    "LineArtist",
    "PointsArtist",
    "RefLineArtist",
    "TextArtist",
    "colour_and_dashes",
]


class LayerArtist:
    """Base class: the matplotlib artists of layer `i` of a panel. Subclasses make them in `make`, and pass data in `set`.

    `pictured`: whether the panel has a heatmap, from which lines need to be set off.
    """

    cheap = True  # whether passing the same data again takes less time than comparing it with the last data

    def __init__(self, axes: Axes, layer: Any, theme: str, i: int, pictured: bool) -> None:
        self.axes, self.theme, self.pictured = axes, THEMES[theme], pictured
        self.colour, self.dashes = colour_and_dashes(layer.style, theme)
        self.zorder = 1 + i / 1000
        self.artists: list[Artist] = []
        self._shown: tuple[Any, ...] | None = None
        self._edges: np.ndarray | None = None  # limits of the axes, [2, 2]
        self.make(layer)

    def show(self, scene: Scene, layer: Any, state: State, moving: bool) -> bool:
        """Pass the layer's data to the artists. Returns whether it has changed, or may have, if `moving`."""
        data = self.data(scene, layer, state)
        if self._shown is not None and not (moving and self.cheap) and all(map(_same, data, self._shown)):
            return False
        changed, self._shown = self._shown is not None, data
        self.set(layer, *data)
        return changed

    def forget(self) -> None:
        """Make the next `show` pass all data, because the limits of the axes have changed."""
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
        """Return the points within the limits of the axes. Markers on the edge are not clipped."""
        # The limits are rounded as the points are, so that a point on the edge is not beyond it.
        if self._edges is None:
            self._edges = np.sort(np.array([self.axes.get_xlim(), self.axes.get_ylim()], np.float32), axis=1)
        (left, right), (low, high) = self._edges
        within = (left <= x) & (x <= right) & (low <= y) & (y <= high)
        return x[within], y[within]

    def outline(self, width: float) -> list[Any]:
        """Return path effects that set a line off from a heatmap behind it; hairlines get none."""
        if not self.pictured or width < 1:
            return []
        dashes = {"dash_offset": 0, "dash_list": None}
        return [Stroke(linewidth=width + 1.8, foreground=self.theme.background, alpha=0.75, dashes=dashes), Normal()]


class LineArtist(LayerArtist):
    def make(self, layer: Line) -> None:
        look = {"linestyle": self.dashes, "linewidth": layer.width, "alpha": layer.alpha, "markersize": 4}
        look["marker"] = "o" if layer.marker else ""
        self.line = self.add_line(**look, path_effects=self.outline(layer.width))
        if layer.head:
            self.head = self.add_line(marker="o", markersize=2.5 + 2 * layer.width, markeredgecolor=self.theme.background)
            self.head.set(markeredgewidth=0.8, clip_on=False)

    def data(self, scene: Scene, layer: Line, state: State) -> tuple[Any, ...]:
        return scene.drawn(layer, state)

    def set(self, layer: Line, *data: Any) -> None:
        x, y = data
        is_finite = np.concatenate([[False], np.isfinite(x) & np.isfinite(y), [False]])
        finite = np.flatnonzero(is_finite[1:-1])
        lone = np.flatnonzero(is_finite[1:-1] & ~is_finite[:-2] & ~is_finite[2:])  # no line goes through them
        self.line.set_data(x, y)
        self.line.set_markevery(None if layer.marker else lone.tolist())
        marker = "o" if layer.marker or lone.size else ""
        if marker != self.line.get_marker():
            self.line.set_marker(marker)
        if layer.head:
            self.head.set_data(*self.inside(x[finite[-1:]], y[finite[-1:]]))


class BandArtist(LayerArtist):
    def make(self, layer: Band) -> None:
        self.area = PolyCollection([], facecolor=self.colour, alpha=layer.alpha, linewidth=0, zorder=self.zorder)
        self.axes.add_collection(self.area, autolim=False)
        self.artists.append(self.area)

    def set(self, layer: Band, *data: Any) -> None:
        x, low, high = (np.asarray(values, dtype=np.float64) for values in data)
        finite = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        if self.axes.get_yscale() == "log":  # a band down to 0 extends below the axes
            low, high = (np.where(values > 0, values, 1e-300) for values in (low, high))
        runs = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(np.int8))).reshape(-1, 2)
        self.area.set_verts(
            [np.stack([np.r_[x[a:b], x[a:b][::-1]], np.r_[low[a:b], high[a:b][::-1]]], axis=1) for a, b in runs if b - a > 1]
        )


class HeatmapArtist(LayerArtist):
    cheap = False

    def make(self, layer: Heatmap) -> None:
        colours = ListedColormap(layer.colours("dark" if self.theme is THEMES["dark"] else "light") / 255)
        limits = layer.limits or ()
        norm = LogNorm(*limits) if layer.scale == "log" else Normalize(*limits)
        look: dict[str, Any] = {"cmap": colours, "norm": norm, "zorder": self.zorder}
        self.image = AxesImage(self.axes, origin="lower", interpolation="nearest", **look)
        self.image.set_clip_path(self.axes.patch)
        self.axes.add_image(self.image)
        # Cells have equal sizes on the axes' scales, so the rectangle is given in scaled coordinates.
        self.image.set_transform(self.axes.transLimits + self.axes.transAxes)
        self.artists.append(self.image)

    def data(self, scene: Scene, layer: Heatmap, state: State) -> tuple[Any, ...]:
        return *super().data(scene, layer, state), layer.limits

    def set(self, layer: Heatmap, *data: Any) -> None:
        values, x, y, _ = data
        self.image.set_data(values)
        self.image.set_clim(layer.limits)
        (left, bottom), (right, top) = self.axes.transScale.transform(np.stack([x, y], axis=1))
        self.image.set_extent((left, right, bottom, top))


class PointsArtist(LayerArtist):
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


class ArrowsArtist(LayerArtist):
    def make(self, layer: Arrows) -> None:
        self.arrows: Quiver | None = None

    def set(self, layer: Arrows, *data: Any) -> None:
        x, y, dx, dy = (np.asarray(values, dtype=np.float64) for values in data)
        drawable = np.isfinite(x + y + dx + dy)
        for axis, start, by in ((self.axes.xaxis, x, dx), (self.axes.yaxis, y, dy)):
            if axis.get_scale() == "log":
                drawable &= (start > 0) & (start + by > 0)
        places = np.stack([x[drawable], y[drawable]], axis=1)
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
            self.arrows = Quiver(self.axes, places[:, 0], places[:, 1], dx[drawable], dy[drawable], **look)
            self.axes.add_collection(self.arrows, autolim=False)
            self.artists[:] = [self.arrows]
        else:
            self.arrows.XY = places
            self.arrows.set_offsets(places)
            self.arrows.set_UVC(dx[drawable], dy[drawable])


class RefLineArtist(LayerArtist):
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
        """Place the label next to the line, inside the axes and clear of the boxes in `taken`, or hide it."""
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
        candidates = [Bbox.from_bounds(*place, width, height) for place in places]
        candidates = [each for each in candidates if each.x0 >= box.x0 and each.x1 <= box.x1 + 1 and each.y0 >= box.y0 - 1]
        candidates = [each for each in candidates if each.y1 <= box.y1 + 1]
        free = [each for each in candidates if not any(each.overlaps(other.padded(-0.5)) for other in taken)]
        if not free:  # no label is better than two illegible ones
            self.label.set_visible(False)
            return
        taken.append(free[0])
        x, y = self.axes.transAxes.inverted().transform((free[0].x0, free[0].y0))
        self.label.set_position((x, y))


class TextArtist(LayerArtist):
    cheap = False

    def make(self, layer: Text) -> None:
        self.layer = layer
        backed = self.theme.background if self.axes.axison else None
        self.words = _words(self.axes, "", size=layer.size, color=self.colour, zorder=4, backed=backed)
        self.words.set(ha=layer.align, va="center")
        self.artists.append(self.words)
        self.text = ""

    def set(self, layer: Text, *data: Any) -> None:
        self.layer, self.text = layer, str(data[0])
        self.words.set_position((float(data[1]), float(data[2])))
        self.fit()

    def fit(self) -> None:
        """Break lines that are too long for the panel, or make text in a fixed-width font smaller."""
        figure: Any = self.axes.figure
        x, _ = self.words.get_position()
        share = {"left": 1 - x, "right": x, "center": 2 * min(x, 1 - x)}[self.layer.align]
        room = max(share * self.axes.get_window_extent().width / figure.dpi, 0.3)
        if self.layer.fixed:
            widest = max(
                (text_width(figure, row, self.layer.size, fixed=True) for row in self.text.split("\n")), default=0.0
            )
            put(self.words, self.text, fixed=True)
            self.words.set_fontsize(self.layer.size * min(1.0, max(room / widest, 0.6) if widest else 1.0))
        else:
            put(self.words, "\n".join(wrapped(figure, row, room, self.layer.size) for row in self.text.split("\n")))


ARTISTS: dict[type, type[LayerArtist]] = {
    Arrows: ArrowsArtist,
    Band: BandArtist,
    Heatmap: HeatmapArtist,
    Line: LineArtist,
    RefLine: RefLineArtist,
    Points: PointsArtist,
    Text: TextArtist,
}


def colour_and_dashes(style: int | str, theme: str) -> tuple[str, Any]:
    if isinstance(style, str):
        return getattr(THEMES[theme], style), "-"
    look = line_style(style, theme)
    return look["color"], look["linestyle"]


def _words(axes: Axes, text: str, backed: str | None, **look: Any) -> MatplotlibText:
    """Add text to axes, positioned in fractions of the axes, on a translucent box of the colour `backed`."""
    back = {"facecolor": backed, "edgecolor": "none", "alpha": 0.75, "pad": 1.0} if backed else None
    words = axes.text(0, 0, "", transform=axes.transAxes, bbox=back, **look)
    put(words, text)
    return words


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")
