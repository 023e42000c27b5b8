"""Text in figures: its size, shortening to a width, and fonts that have its characters."""

from __future__ import annotations

import unicodedata
import warnings
from functools import lru_cache
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

from .figure import Figure

__all__ = [
    "agg_canvas", "agg_renderer", "font", "legible", "put", "shortened", "text_height", "text_width", "wrapped"
]  # fmt: skip

BOX = "□"

MOST_WIDTHS = 4096
_widths: dict[tuple[str, float, str, bool, float], float] = {}  # measuring takes half a millisecond


def put(text: Text, words: str, fixed: bool = False) -> None:
    """Set the words of a text artist without mathtext, in fonts that have all their characters."""
    text.set(text=legible(words), parse_math=False, family=font(words, fixed).get_family())


def font(words: str, fixed: bool = False, **look: Any) -> FontProperties:
    """Return the usual font, with fallback families for the characters that it lacks."""
    usual = "DejaVu Sans Mono" if fixed else FontProperties().get_family()
    others = [] if words.isascii() else [family for sign in words if (family := _family_of(sign, fixed))]
    return FontProperties(family=[*([usual] if fixed else usual), *dict.fromkeys(others)], **look)


@lru_cache(4096)
def legible(words: str) -> str:
    """Replace characters that no font has by boxes, with a warning, and remove invisible characters."""
    if words.isascii() and words.isprintable():
        return words
    missing = {sign for sign in words if sign != "\n" and _family_of(sign, False) is None}
    invisible = {sign for sign in missing if unicodedata.category(sign) in ("Cc", "Cf", "Me", "Mn")}
    if missing - invisible:
        warnings.warn(  # always the same, and from here, so that Python shows it once
            "no installed font has all signs of a picture, and boxes stand for the others: install one that has them, such "
            "as Noto Sans CJK or Noto Emoji, and start Python again",
            stacklevel=1,
        )
    return "".join("" if sign in invisible else BOX if sign in missing else sign for sign in words)


@lru_cache(4096)
def _family_of(sign: str, fixed: bool) -> str | None:
    """Return the family of a font that has a character: "" for the usual font, None if no font has it."""
    if _has(findfont(font("", fixed)), sign):
        return ""
    fonts = (each for each in fontManager.ttflist if not each.name.startswith("Last Resort"))  # which has boxes for all
    return next((each.name for each in fonts if each.style == "normal" and _has(each.fname, sign)), None)


def _has(file: str, sign: str) -> bool:
    try:
        return bool(get_font(file).get_char_index(ord(sign)))
    except (OSError, RuntimeError):  # it has gone, or is made of pixels, which matplotlib cannot draw
        return False


def agg_canvas(figure: Figure) -> FigureCanvasAgg:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return canvas


def agg_renderer(figure: Figure) -> Any:
    return agg_canvas(figure).get_renderer()


def text_width(figure: Figure, words: str, size: float, weight: str = "normal", fixed: bool = False) -> float:
    """Return the width of a text, in inches."""
    key = words, size, weight, fixed, figure.dpi
    width = _widths.get(key)
    if width is None:
        look = font(words, fixed, size=size, weight=weight)
        width = agg_renderer(figure).get_text_width_height_descent(legible(words), look, ismath=False)[0] / figure.dpi
        if len(_widths) > MOST_WIDTHS:
            _widths.clear()
        _widths[key] = width
    return width


def text_height(text: Text) -> float:
    """Return the height of a figure's text artist, in inches."""
    figure: Any = text.figure
    return text.get_window_extent(agg_renderer(figure)).height / figure.dpi


def wrapped(figure: Figure, words: str, width: float, size: float, weight: str = "normal") -> str:
    """Break text into lines of at most this width, in inches; a longer word has its own line."""
    # matplotlib's `Text(wrap=True)` breaks lines at the edge of the figure only, whichever axes the text belongs to.
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
    """Return the text, with its middle replaced by an ellipsis if it is wider than `width`, in inches."""
    n_kept = len(words)
    shown = words
    while text_width(figure, shown, size) > width and n_kept > 2:
        n_kept -= 1
        shown = words[: (n_kept + 1) // 2] + "…" + words[len(words) - n_kept // 2 :]
    return shown
