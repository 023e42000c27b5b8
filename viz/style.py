"""The look of pictures: themes, colours, dash patterns, and matplotlib figures.

Styles are set on artists, because matplotlib's rcParams are global and belong to the user. Figures are not made by pyplot,
which would keep them alive.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image

__all__ = ["COLOURS", "DASHES", "GRID", "INK", "LOCK", "QUIET", "THEMES", "Figure", "Theme", "line_style", "quieten"]


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, as "#rrggbb".

    Args:
        background: the background of the whole picture.
        ink: titles and labels.
        quiet: ticks, explanations and the frame of the axes.
        grid: grid lines.
        colours: the colours of lines, in order.
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

# Held while matplotlib draws or measures text. Its caches of fonts and texts are shared by all figures and are not
# thread-safe, and a front end may call from another thread than the cell's.
LOCK = threading.RLock()


class Figure(MatplotlibFigure):
    """A matplotlib figure that a notebook displays without pyplot; `savefig` writes it to a file.

    Args:
        width, height: the size in inches.
        background: the background colour.

    Attributes:
        alt: alternative text for pages that show the picture; "" for none.
    """

    alt = ""

    def __init__(self, width: float, height: float, background: str = THEMES["light"].background) -> None:
        super().__init__(figsize=(width, height), dpi=100, facecolor=background)
        FigureCanvasAgg(self)

    def png(self, dpi: float, colours: int = 256) -> bytes:
        """Return the picture as a PNG file with a palette, a third of the size of one without.

        Args:
            dpi: pixels per inch, > 0.
            colours: the size of the palette, from 8 to 256.
        """
        drawn, file = io.BytesIO(), io.BytesIO()
        with LOCK:
            self.savefig(drawn, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})  # it is read at once
        few = _with_few_colours(Image.open(drawn).convert("RGB"), colours)
        few.save(file, format="png")
        return file.getvalue()

    def _repr_png_(self, scale: float = 1.5) -> tuple[bytes, dict[str, Any]]:
        # More pixels than CSS pixels, for screens of high resolution.
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        about = {"width": width, "height": height} | ({"alt": self.alt} if self.alt else {})
        return self.png(scale * self.dpi, 256 if scale > 1 else 96), about


def line_style(i: int, theme: str = "light") -> dict[str, Any]:
    """Return colour and dashes of line `i` as arguments of matplotlib's `Line2D`; the first 64 lines differ."""
    colours = THEMES[theme].colours
    return {"color": colours[i % len(colours)], "linestyle": DASHES[i % len(DASHES)]}


def quieten(axes: Axes, size: float = 9, theme: str = "light") -> None:
    """Reduce the frame of axes to two thin lines with small ticks, with the grid behind everything."""
    colours = THEMES[theme]
    axes.set_facecolor(colours.background)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=colours.quiet, linewidth=0.6)
    axes.tick_params(which="both", color=colours.quiet, labelcolor=colours.quiet, labelsize=size, width=0.6, length=3)
    axes.tick_params(which="minor", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=colours.ink, fontsize=size + 1)


def _with_few_colours(image: Image.Image, number: int) -> Image.Image:
    """Reduce an image to a palette: three quarters for frequent colours, a quarter for rare ones.

    Median cut alone would spend the whole palette on a large shaded surface, and nothing on a thin line on it.
    """
    palette: list[int] = []
    rare = number // 4
    for method, n in ((Image.Quantize.MEDIANCUT, number - rare), (Image.Quantize.MAXCOVERAGE, rare)):
        palette += (image.quantize(n, method, dither=Image.Dither.NONE).getpalette() or [])[: 3 * n]
    pixels = np.asarray(image).astype(np.int32)
    codes = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    # Tables by color code: to sort the codes takes ten times as long.
    is_used, places = np.zeros(1 << 24, dtype=bool), np.zeros(1 << 24, dtype=np.uint8)
    is_used[codes] = True
    used = np.flatnonzero(is_used)
    wanted = np.stack([used >> 16, used >> 8 & 255, used & 255], axis=1).astype(np.float32)
    available = np.array(palette, dtype=np.float32).reshape(-1, 3)
    places[used] = ((available**2).sum(axis=1) - 2 * wanted @ available.T).argmin(axis=1)
    few = Image.fromarray(places[codes])
    few.putpalette(palette)
    return few
