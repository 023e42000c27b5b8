"""Draw a scene with characters, for a terminal."""

from __future__ import annotations

import numpy as np

from ..scene import Axis, Band, Heatmap, Line, Panel, Points, RefLine, Scene, State

__all__ = ["in_characters"]

WIDTH, HEIGHT = 72, 14  # the size of a panel in characters, without its axes
SHADES = " .:-=+*#%@"  # for heatmaps, from the smallest to the largest value
SIGNS = "ox+*#@%&"  # for lines, by style
ROLES = {"ink": "/", "quiet": ":", "grid": "."}
MARKERS = {"dot": "o", "ring": "O", "cross": "x", "star": "*"}


def in_characters(scene: Scene) -> str:
    """Return the panels as text, one below the other, each with the ends of its axes and a legend."""
    state = scene.state()
    scene = scene.without_table()
    pictures = [_panel(scene, panel, state) for panel in scene.panels if panel.frame]
    return "\n\n".join([scene.title] * bool(scene.title) + pictures)


def _panel(scene: Scene, panel: Panel, state: State) -> str:
    cells = np.full((HEIGHT, WIDTH), " ", dtype="<U1")
    keys = []
    for layer in panel.layers:
        if isinstance(layer, Heatmap):
            _shade(cells, panel, layer, state)
        elif isinstance(layer, RefLine):
            at = _shares(panel.x if layer.axis == "x" else panel.y, layer.chosen("at", state))
            place = at[(at >= 0) & (at < 1)]
            if layer.axis == "x":
                cells[:, (place * WIDTH).astype(int)] = "|"
            else:
                cells[HEIGHT - 1 - (place * HEIGHT).astype(int)] = "-"
        elif isinstance(layer, Points) or (isinstance(layer, Line) and (layer.name or isinstance(layer.style, int))):
            x, y = (
                scene.drawn(layer, state)
                if isinstance(layer, Line)
                else (layer.chosen("x", state), layer.chosen("y", state))
            )
            x, y = _shares(panel.x, x), _shares(panel.y, y)
            sign = SIGNS[layer.style % len(SIGNS)] if isinstance(layer.style, int) else ROLES[layer.style]
            if isinstance(layer, Points):
                sign = MARKERS[layer.marker]
            else:
                x, y = _filled(x), _filled(y)
            seen = (x >= 0) & (x <= 1) & (y >= 0) & (y <= 1)
            across = np.minimum((x[seen] * WIDTH).astype(int), WIDTH - 1)
            cells[HEIGHT - 1 - np.minimum((y[seen] * HEIGHT).astype(int), HEIGHT - 1), across] = sign
        if layer.name and not isinstance(layer, (Band, Heatmap)):
            keys.append(f"{sign} {layer.name}" if isinstance(layer, (Line, Points)) else layer.name)
    (low, high), (left, right) = _ends(panel.y), _ends(panel.x)
    margin = max(len(low), len(high))
    ends = [high, *[""] * (HEIGHT - 2), low] if panel.y.upwards else [low, *[""] * (HEIGHT - 2), high]
    rows = [f"{end:>{margin}} |{''.join(row)}".rstrip() for end, row in zip(ends, cells, strict=True)]
    words = f"{left}{panel.x.label.center(WIDTH - len(left) - len(right))}{right}"
    above = [f"{panel.title or panel.y.label}{':  ' + ',  '.join(dict.fromkeys(keys)) if keys else ''}"]
    return "\n".join([*above, *rows, f"{'':>{margin}} +{'-' * WIDTH}", f"{'':>{margin}}  {words}"])


def _ends(axis: Axis) -> tuple[str, str]:
    return (axis.ticks[0][1], axis.ticks[-1][1]) if axis.ticks else (f"{axis.low:.3g}", f"{axis.high:.3g}")


def _shares(axis: Axis, values: np.ndarray) -> np.ndarray:
    """Return the positions of values on an axis, from 0 at the left or bottom to 1; NaN for values that have none."""
    ends = np.array([axis.low, axis.high], dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    if axis.scale == "log":
        ends, values = np.log(ends), np.log(np.where(values > 0, values, np.nan))
    shares = (values - ends[0]) / (ends[1] - ends[0])
    return shares if axis.upwards else 1 - shares


def _filled(shares: np.ndarray) -> np.ndarray:
    """Interpolate a line's points, so densely that no character of the line is skipped."""
    between = np.arange(WIDTH) / WIDTH
    return np.append(shares[:-1, None] * (1 - between) + shares[1:, None] * between, shares)


def _shade(cells: np.ndarray, panel: Panel, layer: Heatmap, state: State) -> None:
    values = layer.chosen("values", state).astype(np.float64)
    low, high = layer.limits or (0.0, 1.0)
    if layer.palette == "categories":
        low, high = -0.5, max(len(layer.words), 1) - 0.5
    share = _shares(Axis("", low, high, layer.scale), values)
    across, up = (np.sort(_shares(axis, layer.chosen(name, state))) for axis, name in ((panel.x, "x"), (panel.y, "y")))
    columns = ((np.arange(WIDTH) + 0.5) / WIDTH - across[0]) / (across[1] - across[0]) * values.shape[1]
    rows = ((np.arange(HEIGHT)[::-1] + 0.5) / HEIGHT - up[0]) / (up[1] - up[0]) * values.shape[0]
    rows = rows if panel.y.upwards else values.shape[0] - rows
    inside = ((rows >= 0) & (rows < values.shape[0]))[:, None] & (columns >= 0) & (columns < values.shape[1])
    chosen = share[rows.clip(0, values.shape[0] - 1).astype(int)][:, columns.clip(0, values.shape[1] - 1).astype(int)]
    filled = inside & np.isfinite(chosen) & (chosen > -1e-9 if layer.palette == "categories" else True)
    cells[filled] = np.array(list(SHADES))[(chosen[filled].clip(0, 1) * (len(SHADES) - 1) + 0.5).astype(int)]
