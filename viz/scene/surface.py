"""Layers that show a function of two variables: a heatmap and contour lines."""

from __future__ import annotations

from typing import Any

import numpy as np
from contourpy import contour_generator

from .layers import Heatmap, Layer, Line

__all__ = ["level_lines", "surface_layers"]

CONTOURS = 14


def level_lines(x: Any, y: Any, values: Any, levels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the contour lines of a function on a grid as one line: x and y, float32 [n_points], NaN between pieces.

    The grid `x`, `y` is [n_columns] and [n_rows], increasing; `values` is [n_rows, n_columns].
    """
    generator = contour_generator(x, y, np.ma.masked_invalid(np.asarray(values, dtype=np.float64)), name="serial")
    gap = np.full((1, 2), np.nan)
    pieces = [np.zeros((0, 2))]
    for level in levels:
        for line in generator.lines(level):
            pieces += [np.asarray(line), gap]
    points = np.concatenate(pieces)
    return points[:, 0].astype(np.float32), points[:, 1].astype(np.float32)


def surface_layers(x: Any, y: Any, values: Any, *, label: str = "") -> list[Layer]:
    """Return a heatmap and contour lines of a surface, such as a loss over two weights.

    Colours show the height above the lowest value, on a log scale. `x` and `y` are the centers of the cells, increasing and
    evenly spaced; `values` is [n_rows, n_columns], and cells with non-finite values stay empty. The 14 contours are at
    quantiles, so each encloses the same additional area. `label`, with the unit, is that of the colour bar; "" for no bar.
    """
    x, y, values = (np.asarray(array, dtype=np.float64) for array in (x, y, values))
    finite = values[np.isfinite(values)]
    least = float(finite.min()) if finite.size else 0.0
    height = values - least
    above = height[np.isfinite(height) & (height > 0)]
    low = max(float(np.quantile(above, 0.002)), 1e-12) if above.size else 1.0
    high = float(above.max()) if above.size and above.max() > low else 10 * low
    dx, dy = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
    colours = Heatmap(
        np.maximum(height, low),
        [x[0] - dx, x[-1] + dx],
        [y[0] - dy, y[-1] + dy],
        palette="quiet",
        scale="log",
        limits=(low, high),
        label=label,
    )
    heights = np.quantile(above, np.linspace(0, 1, CONTOURS + 2)[1:-1]) if above.size else []
    line_x, line_y = level_lines(x, y, height, heights)
    return [colours, Line(line_x, line_y, style="quiet", width=0.5, alpha=0.6)]
