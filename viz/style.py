"""How our pictures look: the figure, colours and dashes, and the axes' quiet frame. For the views beside this file.

Everything is set on the artists themselves, because matplotlib's settings are global and belong to the user, and no
figure is made by pyplot, which would keep it alive.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image

__all__ = ["COLOURS", "GRID", "INK", "QUIET", "Figure", "line_style", "quieten"]

# Any two differ by more than 20 in Lab, also as people see them who lack one kind of cone, and each stands out from
# white by 3 to 1 or more; a test measures both.
COLOURS = ("#2050da", "#e8710a", "#147b51", "#c86eab", "#9a3412", "#159ae9", "#7a3f9f", "#555868")
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1.2)))

INK = "#22242c"  # words that matter
QUIET = "#63666f"  # words that explain
GRID = "#e4e5ea"


class Figure(MatplotlibFigure):
    """A matplotlib figure that a notebook shows as it is, without pyplot; `savefig` writes it to a file."""

    def __init__(self, width: float, height: float) -> None:
        """Sizes in inches."""
        super().__init__(figsize=(width, height), dpi=100, facecolor="white")
        FigureCanvasAgg(self)

    def png(self, dpi: float) -> bytes:
        """The picture as a PNG file with a palette of 256 colours, which is a third as long as one without.

        Args:
            dpi: pixels per inch, > 0.
        """
        drawn, file = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=dpi)
        image = Image.open(drawn).convert("RGB")
        image.quantize(256, dither=Image.Dither.NONE).save(file, format="png", optimize=True)
        return file.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        # More pixels than the space has points, for screens that show them.
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        return self.png(1.5 * self.dpi), {"width": width, "height": height}


def line_style(i: int) -> dict[str, Any]:
    """Colour and dashes of line number `i`. Forty of them before a pair comes again."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}


def quieten(axes: Axes, size: float = 9) -> None:
    """Leave of the frame what the eye needs: two thin lines and small ticks, grid lines behind all."""
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=QUIET, linewidth=0.6)
    axes.tick_params(which="both", color=QUIET, labelcolor=QUIET, labelsize=size, width=0.6, length=3)
    axes.tick_params(which="minor", length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=size + 1)
