"""The look of pictures: themes, colours and dash patterns."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["COLOURS", "DASHES", "GRID", "INK", "QUIET", "THEMES", "Theme", "line_style"]


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, as "#rrggbb".

    `ink` is for titles and labels, `quiet` for ticks, explanations and the frame of the axes, `colours` for lines, in order.
    """

    background: str
    ink: str
    quiet: str
    grid: str
    colours: tuple[str, ...]


# A test measures what we ask of a theme. Any two line colours differ by more than 20 in Lab, also as people with any kind
# of colour blindness see them. Lines have a contrast to the background of at least 3:1, text of 4.5:1. The first eight lines
# also differ in grayscale, by 20 in lightness or by dashes whose gaps do not coincide. Hues are similar in both themes.
THEMES = {
    "light": Theme(
        background="#ffffff",
        ink="#22242c",
        quiet="#63666f",
        grid="#e4e5ea",
        colours=("#2050da", "#e8710a", "#147b51", "#c86eab", "#9a3412", "#159ae9", "#7a3f9f", "#32343f"),
    ),
    "dark": Theme(
        background="#16181d",
        ink="#e8e9ed",
        quiet="#a3a6b0",
        grid="#2f323a",
        colours=("#5062f5", "#ff922a", "#9effce", "#ffa6dc", "#d6573f", "#3bb0ff", "#a055b2", "#7f8092"),
    ),
}
_ON_AND_OFF: tuple[tuple[float, ...], ...] = (
    (), (4.5, 2.5), (1.2, 1.5), (5, 2, 1.2, 2), (2.5, 1.8), (4, 1.8, 1.2, 1.8, 1.2, 1.8), (8, 4), (1.2, 2.8)
)  # fmt: skip
# The dash pattern of line i, in line widths. Patterns shift by one each time the colours repeat, so pairs repeat late.
DASHES: tuple[Any, ...] = tuple(
    (0, _ON_AND_OFF[(i + i // 8) % 8]) if (i + i // 8) % 8 else "-" for i in range(8 * len(_ON_AND_OFF))
)

COLOURS, INK, QUIET, GRID = (getattr(THEMES["light"], name) for name in ("colours", "ink", "quiet", "grid"))


def line_style(i: int, theme: str = "light") -> dict[str, Any]:
    """Return colour and dashes of line `i` as arguments of matplotlib's `Line2D`; the first 64 lines differ."""
    colours = THEMES[theme].colours
    return {"color": colours[i % len(colours)], "linestyle": DASHES[i % len(DASHES)]}


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name == "quieten":  # it needs matplotlib, which is imported when a picture is drawn
            return import_module("..render.matplotlib.figure", __name__).quieten
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
