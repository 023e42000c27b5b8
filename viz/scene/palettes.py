"""Colour palettes of heatmaps."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..style import THEMES

__all__ = ["palette_colours", "palette_in_hex"]

# matplotlib's colormaps; None means a palette made from the theme's colours
PALETTES = {"sequential": "viridis", "quiet": None}
QUIETEST = 0.35  # "quiet" ends at this share of the way from background to quiet colour, so lines stand out from it


@cache
def palette_in_hex(palette: str, theme: str) -> str:
    """Return `palette_colours` as hexadecimal digits, 6 for each colour."""
    return palette_colours(palette, theme).tobytes().hex()


@cache
def palette_colours(palette: str, theme: str) -> np.ndarray:
    """Return the colours of a palette as RGB, uint8 [n, 3]. The array is shared: do not write to it."""
    colors, colormap = THEMES[theme], PALETTES[palette]
    if colormap is None:
        share = np.linspace(0, QUIETEST, 256)[:, None]
        mixed = (1 - share) * _channels(colors.background) + share * _channels(colors.quiet)
    else:
        import matplotlib as mpl  # takes long, and few palettes need it

        mixed = 255 * mpl.colormaps[colormap](np.linspace(0, 1, 256))[:, :3]
    return np.asarray(mixed + 0.5, dtype=np.uint8)


def _channels(colour: str) -> np.ndarray:
    """Convert "#rrggbb" to RGB, float64 [3], from 0 to 255."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)
