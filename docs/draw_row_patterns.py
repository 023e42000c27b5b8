"""Draws docs/images/row_patterns.png: which rows of a fused matrix some patterns take for which separate matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tristep.trainer.optimizer.row_splits import row_pattern
from tristep.viz.render.matplotlib.figure import Figure
from tristep.viz.style import COLOURS, INK, QUIET

PICTURE = Path(__file__).parent / "images" / "row_patterns.png"
ROWS = 12
PATTERNS = {
    "part=3 row -> part row": ("queries, keys and values,\none after the other; the same as 3", "qkv"),
    "(row part=2) -> part row": ("two matrices with\nrows in turn", ("w1", "w3")),
    "(head=3 row) -> head row": ("three heads", ("h0", "h1", "h2")),
    "(head=3 part=2 row)\n-> part (head row)": ("a query and a gate of each head:\nall queries, all gates", ("q", "gate")),
    "(head=3 part=2 row)\n-> part head row": ("the same, each head's\nby itself", ("q0", "q1", "q2", "g0", "g1", "g2")),
}


def main() -> None:
    figure = Figure(12.5, 4.6)
    figure.text(0.015, 0.94, "Rows of one weight, and the matrices that a pattern makes of them", color=INK, fontsize=13)
    for k, (pattern, (what, names)) in enumerate(PATTERNS.items()):
        axes = figure.add_axes((0.015 + 0.197 * k, 0.02, 0.19, 0.87))
        axes.set_xlim(0, 10)
        axes.set_ylim(0, 20)
        axes.axis("off")
        axes.text(0, 19.6, f'"{pattern}"', family="monospace", fontsize=8.5, color=INK, va="top")
        axes.text(0, 17.2, what, fontsize=8.5, color=QUIET, va="top")
        draw(axes, pattern, names)
    PICTURE.write_bytes(figure.png(100))
    print(f"drawn to {PICTURE}")


def draw(axes: Any, pattern: str, names: Any) -> None:
    """Draw the fused rows on the left, and the separate matrices on the right, with the rows' numbers."""
    found = row_pattern("split", pattern.replace("\n", " "))
    order = found.arranged(torch.arange(ROWS).view(1, ROWS, 1)).flatten().tolist()
    parts = found.parts(ROWS)
    size, gap = ROWS // parts, 0.5
    for place, row in enumerate(order):
        part = place // size
        colour = COLOURS[part]
        right = 14.4 - place - gap * part * (2.0 / max(1, parts - 1)) + 0.2
        for left, height in ((0.2, 14.2 - row), (5.4, right)):
            axes.add_patch(_box(left, height, colour))
            axes.text(left + 1.4, height + 0.41, str(row), color="white", fontsize=7, ha="center", va="center")
        axes.plot([3.1, 5.3], [14.2 - row + 0.41, right + 0.41], color=colour, linewidth=0.8, alpha=0.7)
        if place % size == 0:
            axes.text(8.5, right + 0.41, names[part], color=colour, fontsize=8, va="center")


def _box(left: float, bottom: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), 2.8, 0.82, color=colour, linewidth=0)


if __name__ == "__main__":
    main()
