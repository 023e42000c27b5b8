"""How our pictures look: themes, colours and dashes, the figure, and the axes' quiet frame. For the views.

Everything is set on the artists themselves, because matplotlib's settings are global and belong to the user, and no
figure is made by pyplot, which would keep it alive.
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
        background: of all.
        ink: words that matter.
        quiet: words that explain, and the axes' frame.
        grid: lines behind all.
        colours: of the lines, in their order.
    """

    background: str
    ink: str
    quiet: str
    grid: str
    colours: tuple[str, ...]


# Of a theme's line colours any two differ by more than 20 in Lab, also as people see them who lack one kind of cone, and
# each stands out from the background by 3 to 1 or more, words by 4.5 to 1. The first eight lines differ in grey, too, by
# 20 in lightness or by dashes, of which one leaves free what the other covers. A test measures all of it. A line has nearly
# the same hue in both.
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
# Of line number i, in the line's widths: from one round of colours to the next they are moved by one.
DASHES: tuple[Any, ...] = tuple(
    (0, _ON_AND_OFF[(i + i // 8) % 8]) if (i + i // 8) % 8 else "-" for i in range(8 * len(_ON_AND_OFF))
)

COLOURS, INK, QUIET, GRID = (getattr(THEMES["light"], name) for name in ("colours", "ink", "quiet", "grid"))

# Held while matplotlib draws or measures: its caches of fonts and texts are shared by all figures and not made for
# several threads, and a front end may call from another one than the cell's.
LOCK = threading.RLock()


class Figure(MatplotlibFigure):
    """A matplotlib figure that a notebook shows as it is, without pyplot; `savefig` writes it to a file.

    Attributes:
        alt: the picture in words, for pages that show it; empty for none.
    """

    alt = ""

    def __init__(self, width: float, height: float, background: str = THEMES["light"].background) -> None:
        """Sizes in inches."""
        super().__init__(figsize=(width, height), dpi=100, facecolor=background)
        FigureCanvasAgg(self)

    def png(self, dpi: float, colours: int = 256) -> bytes:
        """The picture as a PNG file with a palette, which is a third as long as one without.

        Args:
            dpi: pixels per inch, > 0.
            colours: in the palette, from 8 to 256.
        """
        drawn, file = io.BytesIO(), io.BytesIO()
        with LOCK:
            self.savefig(drawn, format="png", dpi=dpi)
        few = _with_few_colours(Image.open(drawn).convert("RGB"), colours)
        few.save(file, format="png", optimize=True)
        return file.getvalue()

    def _repr_png_(self, scale: float = 1.5) -> tuple[bytes, dict[str, Any]]:
        # More pixels than the space has points, for screens that show them.
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        about = {"width": width, "height": height} | ({"alt": self.alt} if self.alt else {})
        return self.png(scale * self.dpi, 256 if scale > 1 else 96), about


def line_style(i: int, theme: str = "light") -> dict[str, Any]:
    """Colour and dashes of line number `i`. There are 64 of them before a pair comes again."""
    colours = THEMES[theme].colours
    return {"color": colours[i % len(colours)], "linestyle": DASHES[i % len(DASHES)]}


def quieten(axes: Axes, size: float = 9, theme: str = "light") -> None:
    """Leave of the frame what the eye needs: two thin lines and small ticks, grid lines behind all."""
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
    """The picture in so many colours: three quarters for what there is most of, the others for what is unlike that.

    Median cut alone gives all of them to a large shaded surface, and none to a thin line on it.
    """
    palette: list[int] = []
    rare = number // 4
    for method, n in ((Image.Quantize.MEDIANCUT, number - rare), (Image.Quantize.MAXCOVERAGE, rare)):
        palette += (image.quantize(n, method, dither=Image.Dither.NONE).getpalette() or [])[: 3 * n]
    pixels = np.asarray(image).astype(np.int32)
    colours, where = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True)
    wanted = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.float32)
    there = np.array(palette, dtype=np.float32).reshape(-1, 3)
    nearest = ((there**2).sum(axis=1) - 2 * wanted @ there.T).argmin(axis=1).astype(np.uint8)
    few = Image.fromarray(nearest[where.reshape(pixels.shape[:2])])
    few.putpalette(palette)
    return few
