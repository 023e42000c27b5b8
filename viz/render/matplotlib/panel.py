"""The matplotlib axes of a panel, with ticks, labels and colour bars."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis as AxesAxis
from matplotlib.colorbar import Colorbar
from matplotlib.gridspec import SubplotSpec
from matplotlib.spines import Spine
from matplotlib.transforms import Bbox, ScaledTranslation, blended_transform_factory

from ...scene import Axis, Heatmap, Panel
from ...style import THEMES
from .artists import ARTISTS, RefLineArtist, TextArtist
from .figure import Figure, quieten
from .text import agg_renderer, put, wrapped
from .ticks import set_ticks

__all__ = ["PanelAxes", "scaled_images"]

BAR, GAP, APART = 0.12, 0.1, 0.8  # in inches: width of a colour bar, its distance from the axes, that of the next one


class PanelAxes:
    """The matplotlib axes of a panel, with the artists of its layers and its colour bars."""

    def __init__(self, figure: Figure, cell: SubplotSpec, panel: Panel, theme: str) -> None:
        self.figure, self.cell, self.panel, self.theme = figure, cell, panel, theme
        self.axes = axes = figure.add_subplot(cell)
        self.title = axes.set_title("", loc="left")
        quieten(axes, theme=theme)
        for spec, set_scale in ((panel.x, axes.set_xscale), (panel.y, axes.set_yscale)):
            if spec.scale == "log":
                set_scale("log", nonpositive="mask")
        pictured = any(isinstance(layer, Heatmap) for layer in panel.layers)
        if not pictured:
            axes.grid(axis="y", color=THEMES[theme].grid, linewidth=0.8)
        if panel.equal:
            axes.set_aspect("equal", adjustable="box")
        if not panel.frame:
            axes.set_axis_off()
        self.layers = [ARTISTS[type(layer)](axes, layer, theme, i, pictured) for i, layer in enumerate(panel.layers)]
        # None of these reaches beyond ticks and labels, and to measure them takes long; without these, words may.
        if panel.frame:
            for artist in (*axes.spines.values(), *(artist for layer in self.layers for artist in layer.artists)):
                artist.set_in_layout(False)
        drawn = {id(layer): artist for layer, artist in zip(panel.layers, self.layers, strict=True)}
        self.bars = [self._bar(drawn[id(layer)], GAP + k * APART) for k, layer in enumerate(self._with_bars())]

    def _bar(self, drawn: Any, left: float) -> Colorbar:
        edge: Any = self.axes.transAxes
        place = blended_transform_factory(self.figure.dpi_scale_trans + ScaledTranslation(1, 0, edge), edge)
        return self.figure.colorbar(drawn.image, cax=self.axes.inset_axes((left, 0, BAR, 1), transform=place))

    def set_limits(self, panel: Panel) -> None:
        self.panel = panel
        for layer_artist in self.layers:
            layer_artist.forget()
        for spec, set_limits in ((panel.x, self.axes.set_xlim), (panel.y, self.axes.set_ylim)):
            set_limits(*((spec.low, spec.high) if spec.upwards else (spec.high, spec.low)))

    def set_ticks(self, with_x: bool) -> None:
        """Return to the place in the grid, with ticks, and their labels below the axes if `with_x`."""
        self.axes.set_subplotspec(self.cell)
        self.width, upwards = self._lengths()
        set_ticks(self.axes.xaxis, self.panel.x, self.width)
        self.axes.tick_params(axis="x", labelbottom=with_x)
        set_ticks(self.axes.yaxis, self.panel.y, upwards)
        for bar, layer in zip(self.bars, self._with_bars(), strict=True):
            bar.mappable.set_clim(layer.limits)  # which makes new ticks
            set_ticks(bar.ax.yaxis, Axis(layer.label, *bar.mappable.get_clim(), layer.scale), upwards)
            quieten(bar.ax, size=8, theme=self.theme)
            bar.outline.set_visible(False)
        self.wrap()

    def set_title(self, above: float) -> None:
        """Put the title this far above the axes, in inches."""
        # Drawn below everything that can change, so it stays in the background.
        look: dict[str, Any] = {"color": THEMES[self.theme].ink, "fontsize": 10.5, "zorder": 0.4, "y": 1}
        put(self.axes.set_title(self.title.get_text(), loc="left", pad=5 + 72 * above, **look), self.title.get_text())

    def wrap(self) -> bool:
        """Wrap the title and the labels to the axes' lengths. Return whether a line ends elsewhere than before."""
        across, upwards = self._lengths()
        texts = [(self.title, self.panel.title, across, 10.5)]
        texts += [
            (self.axes.xaxis.label, self.panel.x.label, across, 10),
            (self.axes.yaxis.label, self.panel.y.label, upwards, 10),
        ]
        bars = zip(self.bars, self._with_bars(), strict=True)
        texts += [(bar.ax.yaxis.label, layer.label, upwards, 9) for bar, layer in bars]
        before = [text.get_text() for text, *_ in texts]
        for text, words, length, size in texts:
            put(text, wrapped(self.figure, words, length, size))
        return before != [text.get_text() for text, *_ in texts]

    def _lengths(self) -> np.ndarray:
        self.axes.apply_aspect()
        return np.array(self.axes.get_position().size) * self.figure.get_size_inches()

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
        # The patch is the lowest, and colour bars and the legend are beside and above the axes.
        beside = {self.axes.patch, self.axes.get_legend(), *self.axes.child_axes}
        artists = [artist for artist in self.axes.get_children() if artist not in beside]
        if not self.axes.axison:
            artists = [artist for artist in artists if not isinstance(artist, (Spine, AxesAxis))]
        return sorted(artists, key=lambda artist: artist.get_zorder())

    def _with_bars(self) -> list[Heatmap]:
        """Return the layers with a bar of colours beside the axes; a panel's own legend has them instead, as it is wider."""
        return scaled_images(self.panel) if self.panel.legend is None else []


def scaled_images(panel: Panel) -> list[Heatmap]:
    """Return the heatmaps whose colours need a scale: a bar, or an entry in the panel's own legend."""
    return [layer for layer in panel.layers if isinstance(layer, Heatmap) and layer.label]
