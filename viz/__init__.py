"""Pictures of training in a notebook: what is recorded of it, scenes of that, and the views that show them.

Imports ``tristep.trainer`` and ``tristep.kernels``; nothing imports it. It needs the ``notebook`` extra, and so it is
loaded on first use only.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.viz'; import it by that name (imported as {__name__!r})")

try:
    import matplotlib as mpl  # noqa: F401  # asked for here, so that the error can say where it comes from
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tristep.viz draws with matplotlib, which is missing: pip install 'tristep[notebook]'", name=error.name
    ) from error

from .curves import plot_schedules, plot_training
from .picture import draw
from .recorder import Recorder
from .runs import Curve, Run, RunSet, Series
from .scene import Arrows, Axis, Band, Button, Click, Control, Image, Layer, Line, Mark, Panel, Points, Scene, Words
from .style import Figure
from .view import Capabilities, FrameBudget, View, capabilities, use

__all__ = [
    "Arrows",
    "Axis",
    "Band",
    "Button",
    "Capabilities",
    "Click",
    "Control",
    "Curve",
    "Figure",
    "FrameBudget",
    "Image",
    "Layer",
    "Line",
    "Mark",
    "Panel",
    "Points",
    "Recorder",
    "Run",
    "RunSet",
    "Scene",
    "Series",
    "View",
    "Words",
    "capabilities",
    "draw",
    "plot_schedules",
    "plot_training",
    "use",
]
