"""The size of text, and text that fits into a given width."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from ...style import Figure

__all__ = ["agg_canvas", "agg_renderer", "shortened", "text_height", "text_size", "text_width", "wrapped"]


MOST_WIDTHS = 4096
_widths: dict[tuple[str, float, str, bool, float], float] = {}  # measuring takes half a millisecond

_heights: dict[tuple[float, float], tuple[float, float]] = {}


def agg_canvas(figure: Figure) -> FigureCanvasAgg:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return canvas


def agg_renderer(figure: Figure) -> Any:
    return agg_canvas(figure).get_renderer()


def text_width(figure: Figure, words: str, size: float, weight: str = "normal", fixed: bool = False) -> float:
    """In inches."""
    key = words, size, weight, fixed, figure.dpi
    found = _widths.get(key)
    if found is None:
        font = FontProperties(family="DejaVu Sans Mono" if fixed else None, size=size, weight=weight)
        found = agg_renderer(figure).get_text_width_height_descent(words, font, ismath=False)[0] / figure.dpi
        if len(_widths) > MOST_WIDTHS:
            _widths.clear()
        _widths[key] = found
    return found


def text_size(figure: Figure, size: float) -> tuple[float, float]:
    """How high a line of this size is, and how much of that is below its base line, in inches."""
    key = size, figure.dpi
    if key not in _heights:
        _, height, below = agg_renderer(figure).get_text_width_height_descent("lp", FontProperties(size=size), ismath=False)
        _heights[key] = height / figure.dpi, below / figure.dpi
    return _heights[key]


def text_height(text: Text) -> float:
    """Of a text of a figure as it is drawn, in inches."""
    figure: Any = text.figure
    return text.get_window_extent(agg_renderer(figure)).height / figure.dpi


def wrapped(figure: Figure, words: str, width: float, size: float, weight: str = "normal") -> str:
    """The words in lines that are no longer than this, in inches, unless a word is."""
    if text_width(figure, words, size, weight) <= width:
        return words
    lines = [""]
    for word in words.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and text_width(figure, longer, size, weight) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(line.rstrip() for line in lines)


def shortened(figure: Figure, words: str, width: float, size: float) -> str:
    """The words, or both ends of them if they are longer than this, in inches."""
    kept = len(words)
    shown = words
    while text_width(figure, shown, size) > width and kept > 2:
        kept -= 1
        shown = words[: (kept + 1) // 2] + "…" + words[len(words) - kept // 2 :]
    return shown
