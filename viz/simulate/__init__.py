"""Simulations: optimizers on functions of two variables, and the loss of a network over a plane of its weights."""

from .catalog import FUNCTIONS, function, ill_conditioned_bowl, noisy_ravine
from .functions import Function, Minimum
from .hyperparameters import SearchRange, search_ranges
from .landscape import LossPlane, WeightPath, loss_plane
from .learning_rates import RATES, Sensitivity, tune_learning_rates
from .trajectories import Simulation, Trajectories, simulate
from .updates import UpdateTrace, rule_source, trace_updates

__all__ = [
    "FUNCTIONS",
    "RATES",
    "Function",
    "LossPlane",
    "Minimum",
    "SearchRange",
    "Sensitivity",
    "Simulation",
    "Trajectories",
    "UpdateTrace",
    "WeightPath",
    "function",
    "ill_conditioned_bowl",
    "loss_plane",
    "noisy_ravine",
    "rule_source",
    "search_ranges",
    "simulate",
    "trace_updates",
    "tune_learning_rates",
]
