"""tristep.viz: records training, and shows it in notebooks as pictures with controls.

It imports ``tristep.trainer`` and ``tristep.kernels``; no core package imports it. It needs the extra ``notebook``, and is
imported on first use.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.viz'; import it by that name (imported as {__name__!r})")

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("matplotlib") is None:
    raise ModuleNotFoundError(
        "tristep.viz draws with matplotlib, which is missing: pip install 'tristep[notebook]'", name="matplotlib"
    )

from ..trainer import contrib_names
from .live import LiveLoop, LiveView, Snapshot, loops
from .record import Curve, Recorder, Run, RunSet, Series, diagnose
from .render.renderers import Capabilities, capabilities, set_renderer
from .scene import (
    Arrows,
    Axis,
    Band,
    Button,
    Click,
    Control,
    Heatmap,
    Layer,
    Line,
    Listing,
    Panel,
    Points,
    RefLine,
    Scene,
    Text,
)
from .simulate import (
    FUNCTIONS,
    Function,
    LossPlane,
    Minimum,
    SearchRange,
    Sensitivity,
    Trajectories,
    UpdateTrace,
    WeightPath,
    function,
    ill_conditioned_bowl,
    loss_plane,
    noisy_ravine,
    rule_source,
    search_ranges,
    simulate,
    trace_updates,
    tune_learning_rates,
)
from .views import (
    ActivationsView,
    Dashboard,
    FrameBudget,
    LossPlaneView,
    LossView,
    LRFinderView,
    OrthogonalizationView,
    Playground,
    ScheduleView,
    SensitivityView,
    SingularValues,
    SweepView,
    TensorHeatmap,
    TrajectoryView,
    UpdateRatioView,
    View,
    WeightsView,
    plot_training,
)

if TYPE_CHECKING:
    from ..contrib.exercises import Exercises
    from ..contrib.imported_runs import read_run
    from ..contrib.racing.race_view import RaceView
    from .render.matplotlib import Figure, draw

__all__ = [
    "FUNCTIONS",
    "ActivationsView",
    "Arrows",
    "Axis",
    "Band",
    "Button",
    "Capabilities",
    "Click",
    "Control",
    "Curve",
    "Dashboard",
    "Exercises",
    "Figure",
    "FrameBudget",
    "Function",
    "Heatmap",
    "LRFinderView",
    "Layer",
    "Line",
    "Listing",
    "LiveLoop",
    "LiveView",
    "LossPlane",
    "LossPlaneView",
    "LossView",
    "Minimum",
    "OrthogonalizationView",
    "Panel",
    "Playground",
    "Points",
    "RaceView",
    "Recorder",
    "RefLine",
    "Run",
    "RunSet",
    "Scene",
    "ScheduleView",
    "SearchRange",
    "Sensitivity",
    "SensitivityView",
    "Series",
    "SingularValues",
    "Snapshot",
    "SweepView",
    "TensorHeatmap",
    "Text",
    "Trajectories",
    "TrajectoryView",
    "UpdateRatioView",
    "UpdateTrace",
    "View",
    "WeightPath",
    "WeightsView",
    "capabilities",
    "diagnose",
    "draw",
    "function",
    "ill_conditioned_bowl",
    "loops",
    "loss_plane",
    "noisy_ravine",
    "plot_training",
    "read_run",
    "rule_source",
    "search_ranges",
    "set_renderer",
    "simulate",
    "trace_updates",
    "tune_learning_rates",
]


if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """Import and return a name of matplotlib's renderer or of `tristep.contrib`."""
        if name in ("Figure", "draw"):  # matplotlib takes long to import, and a canvas needs none
            globals()[name] = getattr(import_module(".render.matplotlib", __name__), name)
            return globals()[name]
        entry = contrib_names.load("viz", name) if name in __all__ else None
        if entry is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = entry
        return entry
