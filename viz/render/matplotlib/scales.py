"""The lines, ticks and labels of axes as one artist, which draws ten times as fast as matplotlib's artists per tick."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.path import Path
from matplotlib.transforms import IdentityTransform

from ...style import THEMES
from .figure import Figure
from .text import font, legible, text_size, text_width
from .ticks import TURN, Ticks

__all__ = ["ScaleArtist"]

TICK, PAD, LABEL_PAD = 3.0, 3.5, 4.0  # lengths in points, as matplotlib has them by default
NONE = Ticks([], [])


class ScaleArtist(Artist):
    """The lines, ticks and labels of axes: x below and y on the left, or only y on the right, as for a colour bar.

    `size` is the font size of tick labels, in points; axis labels are usually larger by 1. `grid` draws lines across the
    axes at the ticks of y. `labels`, of x and y, have line breaks.
    """

    def __init__(self, axes: Axes, theme: str, size: float = 9.0, right: bool = False, grid: bool = False) -> None:
        super().__init__()
        self.x = self.y = NONE
        self.labels = ("", "")
        self._around, self._theme, self._right, self._grid = axes, THEMES[theme], right, grid
        self._size, self._label_size = size, size + (0.0 if size == 9.0 and right else 1.0)
        self.set_zorder(0.5)  # as matplotlib's own, below what is drawn
        self.axes = axes

    def measure(self) -> tuple[float, float, float, float]:
        """Return how far labels reach beyond the left, lower, right and upper edge of the axes, in inches."""
        figure: Any = self._around.figure
        box = self._around.get_window_extent()
        width, height = box.width / figure.dpi, box.height / figure.dpi
        line, _ = text_size(figure, self._size)
        gap = (TICK + PAD) / 72
        side = max((text_width(figure, word, self._size) for word in self.y.words), default=0.0)
        side = side + gap if self.y.words else 0.0
        side += self._label_room(self.labels[1])
        if self._right:
            return 0.0, line / 2, side, line / 2
        left, right, bottom = side, 0.0, 0.0
        lengths = [text_width(figure, word, self._size) for word in self.x.words]
        for at, length in zip(self._shares(self.x, "x"), lengths, strict=True):
            before, after = (length * math.cos(TURN), 0.0) if self.x.turned else (length / 2, length / 2)
            left, right = max(left, before - at * width), max(right, at * width + after - width)
        if any(lengths):
            bottom = gap + (max(lengths) * math.sin(TURN) + line / 2 if self.x.turned else line)
        bottom += self._label_room(self.labels[0])
        ends = [at * height for at in self._shares(self.y, "y")]
        top = max((at + line / 2 - height for at in ends), default=0.0)
        return left, max(bottom, max((line / 2 - at for at in ends), default=0.0)), right, top

    def draw(self, renderer: Any) -> None:
        figure: Any = self._around.figure
        box, point = self._around.get_window_extent(renderer), figure.dpi / 72
        tall = figure.bbox.height
        x, y = (np.array(self._shares(ticks, axis)) for ticks, axis in ((self.x, "x"), (self.y, "y")))
        x, y = box.x0 + x * box.width, box.y0 + y * box.height
        gc = renderer.new_gc()
        gc.set_snap(True)

        def lines(colour: str, width: float, ends: list[tuple[float, float]]) -> None:
            if ends:
                gc.set_foreground(colour)
                gc.set_linewidth(width * point)
                codes = np.tile(np.array([Path.MOVETO, Path.LINETO], np.uint8), len(ends) // 2)
                renderer.draw_path(gc, Path(np.array(ends), codes), IdentityTransform())

        def words(text: str, at: tuple[float, float], size: float, angle: float = 0.0) -> None:
            # At the left end of the base line, of which the place is from above in the renderer.
            renderer.draw_text(gc, at[0], tall - at[1], legible(text), font(text, size=size), angle, ismath=False)

        theme, long = self._theme, TICK * point
        if self._grid:
            lines(theme.grid, 0.8, [end for at in y for end in ((box.x0, at), (box.x1, at))])
        edge = box.x1 if self._right else box.x0
        ends = [end for at in y for end in ((edge, at), (edge + (long if self._right else -long), at))]
        if not self._right:
            ends += [end for at in x for end in ((at, box.y0), (at, box.y0 - long))]
            ends += [(box.x0, box.y0), (box.x0, box.y1), (box.x0, box.y0), (box.x1, box.y0)]
        lines(theme.quiet, 0.6, ends)

        gc.set_foreground(theme.quiet)
        line, below = (each * figure.dpi for each in text_size(figure, self._size))
        gap, rise = (TICK + PAD) * point, line - below
        for at, word in zip(y, self.y.words, strict=True):
            length = text_width(figure, word, self._size) * figure.dpi
            words(word, (edge + gap if self._right else edge - gap - length, at - rise / 2), self._size)
        for at, word in zip(x, self.x.words, strict=True):
            length = text_width(figure, word, self._size) * figure.dpi
            if self.x.turned:  # the right end of the middle line at the tick
                sine, cosine = math.sin(TURN), math.cos(TURN)
                place = at - length * cosine + rise / 2 * sine, box.y0 - gap - length * sine - rise / 2 * cosine
                words(word, place, self._size, math.degrees(TURN))
            else:
                words(word, (at - length / 2, box.y0 - gap - rise), self._size)

        gc.set_foreground(theme.ink)
        self._draw_labels(words, box, figure)
        gc.restore()

    def _draw_labels(self, words: Any, box: Any, figure: Figure) -> None:
        line, below = (each * figure.dpi for each in text_size(figure, self._label_size))
        reach = [each * figure.dpi for each in self.measure()]
        across, upwards = (label.split("\n") if label else [] for label in self.labels)
        for k, text in enumerate(across):  # the last one at the lower end
            length = text_width(figure, text, self._label_size) * figure.dpi
            place = (box.x0 + box.x1 - length) / 2, box.y0 - reach[1] + (len(across) - 1 - k) * 1.2 * line + below
            words(text, place, self._label_size)
        for k, text in enumerate(upwards):  # from left to right
            length = text_width(figure, text, self._label_size) * figure.dpi
            if self._right:
                x = box.x1 + reach[2] - below - (len(upwards) - 1 - k) * 1.2 * line
            else:
                x = box.x0 - reach[0] + k * 1.2 * line + line - below
            words(text, (x, (box.y0 + box.y1 - length) / 2), self._label_size, 90.0)

    def _label_room(self, label: str) -> float:
        """Return the space that an axis label takes, in inches; 0 for an empty label."""
        if not label:
            return 0.0
        figure: Any = self._around.figure
        line, _ = text_size(figure, self._label_size)
        return LABEL_PAD / 72 + line * (1 + 1.2 * label.count("\n"))

    def _shares(self, ticks: Ticks, which: str) -> list[float]:
        if not ticks.values:
            return []
        axis = 0 if which == "x" else 1
        low, high = self._around.get_xlim() if which == "x" else self._around.get_ylim()
        scaled = np.log10 if (self._around.get_xscale(), self._around.get_yscale())[axis] == "log" else np.asarray
        low, high = float(scaled(low)), float(scaled(high))
        shares: list[float] = ((scaled(np.array(ticks.values)) - low) / (high - low)).tolist()
        return shares
