"""Draws what run.py wrote.

python benchmarks/plot.py benchmarks/results/cpu.json       writes cpu.png next to it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from tristep.viz.render.matplotlib.figure import Figure, quieten
from tristep.viz.style import COLOURS, INK, QUIET, line_style

__all__ = ["draw"]

PEERS = ("tristep", "torch fused", "torch foreach", "torch loop")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw those of the parts that are there: steps, growth, clipping, storage, rules."""
    figure = Figure(13, 17)
    grid = figure.add_gridspec(4, 2, height_ratios=(1.1, 1, 1, 2.6), hspace=0.42, wspace=0.42)
    grid.update(left=0.17, right=0.97, top=0.94, bottom=0.04)
    figure.text(0.02, 0.975, "tristep's step compared with its peers'", color=INK, fontsize=15, weight="bold")
    figure.text(0.02, 0.96, results["machine"], color=QUIET, fontsize=8)
    drawn = {
        "steps": (_steps, grid[0, 0], "A step of AdamW: times as long as tristep's"),
        "clip": (_clip, grid[0, 1], "Clipping by the norm and AdamW: torch's time over tristep's"),
        "growth": (_growth, (grid[1, 0], grid[1, 1]), ""),
        "stored": (_stored, grid[2, :], "AdamW in low precision: µs of a step, and its share of a copy of as many bytes"),
        "rules": (_rules, grid[3, :], "Every rule: share of a copy of its own bytes, and peers' times over its"),
    }
    for part, (function, where, title) in drawn.items():
        if part in results:
            found = results[part]["found"]
            places = where if isinstance(where, tuple) else (where,)
            all_axes = [figure.add_subplot(place) for place in places]
            for axes in all_axes:
                quieten(axes, 8)
                axes.set_title(title, loc="left", color=INK, fontsize=10)
            function(*all_axes, found)
    path.write_bytes(figure.png(100))
    print(f"drawn to {path}")


def _steps(axes: Axes, found: Mapping[str, Any]) -> None:
    peers = PEERS[1:]
    for k, peer in enumerate(peers):
        pairs = [(i, row["us"][peer] / row["us"]["tristep"]) for i, row in enumerate(found.values()) if peer in row["us"]]
        _bars(axes, pairs, k, len(peers), peer)
    _names(axes, list(found))
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _clip(axes: Axes, found: Mapping[str, Any]) -> None:
    _bars(axes, list(enumerate(row["us"]["torch fused"] / row["us"]["tristep"] for row in found.values())), 0, 2, "both")
    _bars(axes, list(enumerate(row["clip alone, torch / tristep"] for row in found.values())), 1, 2, "clipping alone")
    _names(axes, list(found))
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _growth(by_tensors: Axes, by_elements: Axes, found: Mapping[str, Any]) -> None:
    many = [row for row in found.values() if row["tensors"] > 1]
    one = [row for row in found.values() if row["tensors"] == 1]
    for axes, rows, key, what in (
        (by_tensors, many, "tensors", "tensors of 1,024 elements"),
        (by_elements, one, "elements", "elements of one tensor"),
    ):
        for k, peer in enumerate(PEERS[:3]):
            axes.plot(
                [row[key] for row in rows], [row["us"][peer] for row in rows], label=peer, linewidth=1.8, **line_style(k)
            )
        copies = [row["us"]["tristep"] * row["of copy"] for row in rows]
        axes.plot(
            [row[key] for row in rows], copies, label="a copy of as many bytes", color=QUIET, linewidth=1, linestyle=":"
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(what, color=QUIET, fontsize=8)
        axes.set_title("A step of AdamW, µs", loc="left", color=INK, fontsize=10)
        axes.legend(frameon=False, fontsize=8)


def _stored(axes: Axes, found: Mapping[str, Any]) -> None:
    for i, row in enumerate(found.values()):
        axes.barh(i, row["us"], height=0.7, color=COLOURS[0] if i < len(found) - _peers(found) else COLOURS[1])
        note = f"{row['bytes an element']:.3g} bytes, {row['of copy']:.2f} of a copy"
        axes.text(row["us"], i, f"  {note}", va="center", color=QUIET, fontsize=8)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.margins(x=0.25)


def _peers(found: Mapping[str, Any]) -> int:
    """How many rows are not tristep's; these come last."""
    return sum(name.startswith(("torch", "optimi", "bitsandbytes")) for name in found)


def _rules(axes: Axes, found: Mapping[str, Any]) -> None:
    names = sorted(found, key=lambda name: -found[name]["of copy"])
    for i, name in enumerate(names):
        axes.barh(i, found[name]["of copy"], height=0.7, color=COLOURS[0])
        note = ", ".join(f"{peer} x {ratio:.1f}" for peer, ratio in found[name]["peers / tristep"].items())
        axes.text(found[name]["of copy"], i, f"  {note}", va="center", color=QUIET, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(1, color=QUIET, linewidth=0.8, linestyle=":")
    axes.margins(x=0.3)


def _bars(axes: Axes, pairs: list[tuple[int, float]], k: int, n: int, label: str) -> None:
    """Horizontal bars number `k` of `n` in each row, on a logarithmic axis that begins at tristep's own time."""
    height = 0.8 / n
    places = [i + (k - (n - 1) / 2) * height for i, _ in pairs]
    axes.barh(places, [ratio for _, ratio in pairs], height=0.92 * height, color=COLOURS[k + 1], label=label)
    for place, (_, ratio) in zip(places, pairs, strict=True):
        axes.text(max(ratio, 1), place, f" {ratio:.3g}", va="center", color=QUIET, fontsize=7)


def _names(axes: Axes, names: list[str]) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.15)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        draw(json.loads(file.read_text(encoding="utf-8")), file.with_suffix(".png"))
