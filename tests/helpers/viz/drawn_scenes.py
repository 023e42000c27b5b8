"""Scenes of one panel, and the pixels of figures that draw scenes, for tests."""

import numpy as np
from matplotlib.text import Text

from tristep.viz.scene import Axis, Panel, Scene

NAN = np.nan
UNIT = Axis("x", 0, 1), Axis("y", 0, 1)


def one_panel(*layers, x=UNIT[0], y=UNIT[1], controls=(), panel=None, **settings):
    return Scene([Panel(x, y, layers, **(panel or {}))], controls=controls, **settings)


def rendered(figure):
    """uint8 RGB [height, width, 3] of a full drawing."""
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def words_of(figure):
    """All texts of a figure: titles, legends, notes, ticks and labels."""
    return [text for text in figure.findobj(Text) if text.get_text()]


def pixel_at(figure, x, y, axes=None):
    """RGB at a place: of the data, or with `axes` of these in shares."""
    pixels = rendered(figure)
    transform = figure.axes[0].transData if axes is None else axes.transAxes
    across, upwards = transform.transform((x, y))
    return pixels[len(pixels) - 1 - int(upwards), int(across)].astype(float)
