"""Views: interactive pictures of runs, optimizers, schedules and sweeps."""

from .activations import ActivationsView
from .budget import FrameBudget
from .curves import plot_training
from .dashboard import Dashboard
from .heatmap import TensorHeatmap
from .loss import LossView
from .loss_plane import LossPlaneView
from .lr_finder import LRFinderView
from .orthogonalization import OrthogonalizationView, SingularValues
from .playground import Playground
from .schedule import ScheduleView
from .sensitivity import SensitivityView
from .sweep import SweepView
from .trajectories import TrajectoryView
from .view import View
from .weights import UpdateRatioView, WeightsView

__all__ = [
    "ActivationsView",
    "Dashboard",
    "FrameBudget",
    "LRFinderView",
    "LossPlaneView",
    "LossView",
    "OrthogonalizationView",
    "Playground",
    "ScheduleView",
    "SensitivityView",
    "SingularValues",
    "SweepView",
    "TensorHeatmap",
    "TrajectoryView",
    "UpdateRatioView",
    "View",
    "WeightsView",
    "plot_training",
]
