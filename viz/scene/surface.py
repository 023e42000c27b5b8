"""Layers that show a function of two variables: a heatmap and contour lines."""

from __future__ import annotations

from typing import Any

import numpy as np
from contourpy import contour_generator

from .layers import Heatmap, Layer, Line

__all__ = ["level_lines", "surface_layers"]


def level_lines(x: Any, y: Any, values: Any, levels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the contour lines of a function as a single line with gaps.

    Args:
        x, y: the grid, [n_columns] and [n_rows], increasing.
        values: the function's values on the grid, [n_rows, n_columns].
        levels: the values of the contours, [n].

    Returns:
        x and y, float32 [n_points] each, with NaN between pieces.

    Example:
        >>> import numpy as np
        >>> from tristep.viz.scene import level_lines
        >>> side = np.linspace(-2, 2, 81)
        >>> x, y = level_lines(side, side, side[:, None] ** 2 + side**2, [1.0])
        >>> bool(np.allclose(np.hypot(x, y)[np.isfinite(x)], 1, atol=1e-3))
        True
    """
    generator = contour_generator(x, y, np.ma.masked_invalid(np.asarray(values, dtype=np.float64)), name="serial")
    gap = np.full((1, 2), np.nan)
    pieces = [np.zeros((0, 2))]
    for level in levels:
        for line in generator.lines(level):
            pieces += [np.asarray(line), gap]
    points = np.concatenate(pieces)
    return points[:, 0].astype(np.float32), points[:, 1].astype(np.float32)


def surface_layers(
    x: Any, y: Any, values: Any, *, label: str = "", levels: int = 14, by: tuple[str, ...] = ()
) -> list[Layer]:
    """Return a heatmap and contour lines of a surface, such as a loss over two weights.

    Colours show the height above the lowest value, on a log scale.

    Args:
        x, y: the centers of the cells, [n_columns] and [n_rows], increasing and evenly spaced.
        values: [n_rows, n_columns]; cells with non-finite values stay empty.
        label: the label of the colour bar, with the unit; "" for no bar.
        levels: the number of contour lines, >= 0. They are at quantiles, so each encloses the same additional area.
        by: names of controls, for the layers.
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
    heights = np.quantile(above, np.linspace(0, 1, levels + 2)[1:-1]) if above.size and levels else []
    line_x, line_y = level_lines(x, y, height, heights)
    return [colours, Line(line_x, line_y, style="quiet", width=0.5, alpha=0.6)]
