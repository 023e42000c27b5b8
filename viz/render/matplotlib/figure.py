"""matplotlib figures and axes in our style.

Styles are set on artists, because matplotlib's rcParams are global and belong to the user. Figures are not made by pyplot,
which would keep them alive.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image

from ...style import THEMES

__all__ = ["LOCK", "Figure", "quieten"]

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
