"""The matplotlib axes of a panel, with ticks, labels and colour bars."""

from __future__ import annotations

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AxesAxis
from matplotlib.image import AxesImage
from matplotlib.spines import Spine
from matplotlib.transforms import Bbox

from ...scene import Axis, Heatmap, Panel
from ...style import THEMES
from .artists import ARTISTS, RefLineArtist, TextArtist, limits_of
from .figure import Figure, quieten
from .scales import ScaleArtist
from .text import agg_renderer, put, text_size, wrapped
from .ticks import choose_ticks, set_ticks

__all__ = ["PanelAxes", "scaled_images"]

BAR = 0.12  # width of a colour bar, in inches
EDGE = 0.03  # half the width of what is drawn on the edge of a panel, in inches


class PanelAxes:
    """The matplotlib axes of a panel, with the artists of its layers and its colour bars.

    If `quick`, one artist of ours draws ticks and labels, instead of matplotlib's, which users can change.
    """

    def __init__(self, figure: Figure, panel: Panel, theme: str, quick: bool) -> None:
        self.scales: dict[Axes, ScaleArtist] = {}  # by axes or colour bar; empty unless `quick`
        self._quick = quick
        self.figure, self.panel, self.theme = figure, panel, theme
        self.axes = axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
        if not quick:
            quieten(axes, theme=theme)
        colours = THEMES[theme]
        # Drawn below everything that can change, so it stays in the background.
        self.title = axes.set_title("", loc="left", y=1, pad=5, color=colours.ink, fontsize=10.5, zorder=0.4)
        for spec, set_scale in ((panel.x, axes.set_xscale), (panel.y, axes.set_yscale)):
            if spec.scale == "log":
                set_scale("log", nonpositive="mask")
        pictured = any(isinstance(layer, Heatmap) for layer in panel.layers)
        if not (pictured or quick):
            axes.grid(axis="y", color=colours.grid, linewidth=0.8)
        if panel.equal:
            axes.set_aspect("equal", adjustable="box")
        if not panel.frame:
            axes.set_axis_off()
        self.layers = [ARTISTS[type(layer)](axes, layer, theme, i, pictured) for i, layer in enumerate(panel.layers)]
        self.bars: list[Axes] = []
        if quick and panel.frame:
            self._scale(axes, grid=not pictured)

    def _scale(self, axes: Axes, **look: Any) -> None:
        axes.set_axis_off()
        self.scales[axes] = ScaleArtist(axes, self.theme, **look)
        axes.add_artist(self.scales[axes])

    def add_bars(self) -> None:
        for layer in self._with_bars():
            bar = self.figure.add_axes((0.9, 0.1, 0.02, 0.8))
            if not self._quick:
                quieten(bar, size=8, theme=self.theme)
            bar.set_yscale(layer.scale)
            ramp = AxesImage(bar, extent=(0, 1, 0, 1), origin="lower", interpolation="nearest", zorder=1)
            ramp.set_data(layer.colours(self.theme)[:, None])
            ramp.set_transform(bar.transAxes)
            bar.add_image(ramp)
            bar.set_xlim(0, 1)
            self.bars.append(bar)
            if self._quick:
                self._scale(bar, size=8.0, right=True)
                continue
            bar.set_xticks([])
            bar.yaxis.tick_right()
            bar.yaxis.set_label_position("right")
            for spine in bar.spines.values():
                spine.set_visible(False)

    def set_limits(self, panel: Panel) -> None:
        self.panel = panel
        for layer_artist in self.layers:
            layer_artist.forget()
        for spec, set_limits in ((panel.x, self.axes.set_xlim), (panel.y, self.axes.set_ylim)):
            set_limits(*((spec.low, spec.high) if spec.upwards else (spec.high, spec.low)))
        for bar, layer in zip(self.bars, self._with_bars(), strict=True):
            bar.set_ylim(*limits_of(layer))

    def place(self, left: float, bottom: float, right: float, top: float, with_x: bool = True) -> None:
        """Place the axes between these edges, in inches, with as many ticks and labels as fit; x has labels if `with_x`."""
        width, height = self.figure.get_size_inches()
        self.axes.set_position((left / width, bottom / height, (right - left) / width, (top - bottom) / height))
        self.axes.apply_aspect()
        box = self.axes.get_position()
        across, upwards = box.width * width, box.height * height
        put(self.title, wrapped(self.figure, self.panel.title, across, 10.5))
        labels = wrapped(self.figure, self.panel.x.label, across, 10), wrapped(self.figure, self.panel.y.label, upwards, 10)
        if self.axes in self.scales:
            scale = self.scales[self.axes]
            scale.x = choose_ticks(self.figure, self.panel.x, across, True)
            if not with_x:
                scale.x = scale.x._replace(words=[""] * len(scale.x.words))
            scale.y = choose_ticks(self.figure, self.panel.y, upwards, False)
            scale.labels = labels
        elif self.panel.frame or not self._quick:
            set_ticks(self.axes.xaxis, self.panel.x, across)
            self.axes.tick_params(axis="x", labelbottom=with_x)
            set_ticks(self.axes.yaxis, self.panel.y, upwards)
            put(self.axes.xaxis.label, labels[0])
            put(self.axes.yaxis.label, labels[1])
        x = box.x1 * width + 0.1
        for bar, layer in zip(self.bars, self._with_bars(), strict=True):
            bar.set_position((x / width, box.y0, BAR / width, box.height))
            spec, label = Axis(layer.label, *limits_of(layer), layer.scale), wrapped(self.figure, layer.label, upwards, 9)
            if bar in self.scales:
                self.scales[bar].y = choose_ticks(self.figure, spec, upwards, False)
                self.scales[bar].labels = ("", label)
            else:
                set_ticks(bar.yaxis, spec, upwards)
                put(bar.yaxis.label, label)
                bar.yaxis.label.set_fontsize(9)
            x += BAR + self._sizes(bar)[2] + 0.1

    def measure(self) -> tuple[float, float, float, float]:
        """Return how far labels reach beyond the space of the axes at the left, bottom, right and top, in inches."""
        left, bottom, right, top = self._sizes(self.axes)
        if self.bars:
            right = max(right, 0.1 + sum(BAR + self._sizes(bar)[2] for bar in self.bars) + 0.1 * (len(self.bars) - 1))
        # Axes with equal units are smaller than their space, and labels may use the rest of it.
        width, height = self.figure.get_size_inches()
        full, actual = self.axes.get_position(original=True), self.axes.get_position()
        across, upwards = (full.width - actual.width) * width / 2, (full.height - actual.height) * height / 2
        return max(left - across, 0.0), max(bottom - upwards, 0.0), max(right - across, 0.0), max(top - upwards, 0.0)

    def place_labels(self) -> None:
        """Place the labels of reference lines so that they cover neither each other nor the edge, and fit texts."""
        renderer = agg_renderer(self.figure)
        box = self.axes.get_window_extent(renderer)
        taken: list[Bbox] = []
        for layer_artist in self.layers:
            if isinstance(layer_artist, RefLineArtist) and layer_artist.label is not None:
                layer_artist.place_label(renderer, box, taken)
            elif isinstance(layer_artist, TextArtist):
                layer_artist.fit()

    def in_order(self) -> list[Artist]:
        """Return the artists in the order in which matplotlib draws them."""
        artists = [artist for artist in self.axes.get_children() if artist is not self.axes.patch]
        if not self.axes.axison:
            artists = [artist for artist in artists if not isinstance(artist, (Spine, AxesAxis))]
        return sorted(artists, key=lambda artist: artist.get_zorder())

    def _with_bars(self) -> list[Heatmap]:
        """Return the layers with a bar of colours beside the axes; a panel's own legend has them instead, as it is wider."""
        return scaled_images(self.panel) if self.panel.legend is None else []

    def _sizes(self, axes: Axes) -> tuple[float, float, float, float]:
        if self._quick:
            return self._quick_sizes(axes)
        renderer = agg_renderer(self.figure)
        parts = [axis.get_tightbbox(renderer) for axis in (axes.xaxis, axes.yaxis) if axes.axison]
        if axes is self.axes and self.title.get_text():
            parts.append(self.title.get_window_extent(renderer))
        box = axes.get_window_extent(renderer)
        # Without labels, the box itself; in any case half the width of what is drawn on its edge.
        whole = Bbox.union([box.padded(EDGE * self.figure.dpi), *(part for part in parts if part is not None)])
        sizes: Any = (box.x0 - whole.x0, box.y0 - whole.y0, whole.x1 - box.x1, whole.y1 - box.y1)
        return tuple(size / self.figure.dpi for size in sizes)

    def _quick_sizes(self, axes: Axes) -> tuple[float, float, float, float]:
        left, bottom, right, top = self.scales[axes].measure() if axes in self.scales else (0.0, 0.0, 0.0, 0.0)
        if axes is self.axes and self.title.get_text():
            line, _ = text_size(self.figure, 10.5)
            top = max(top, 5 / 72 + line * (1 + 1.2 * self.title.get_text().count("\n")))
        return max(left, EDGE), max(bottom, EDGE), max(right, EDGE), max(top, EDGE)


def scaled_images(panel: Panel) -> list[Heatmap]:
    """Return the heatmaps whose colours need a scale: a bar, or an entry in the panel's own legend."""
    images = [layer for layer in panel.layers if isinstance(layer, Heatmap)]
    return [layer for layer in images if layer.label and layer.palette != "categories"]
