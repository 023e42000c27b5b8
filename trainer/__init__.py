"""Training: ``Trainer``, optimizers, learning-rate schedules, initializers and stores.

Imports ``tristep.kernels``.
"""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.trainer'; import it by that name (imported as {__name__!r})")

from . import amp, cost_model, initializer, kvstore, lr_scheduler, optim, optimizer
from .clipping import clip_global_norm
from .collect import collect_params
from .cost_model import estimate_cost
from .data_parallel import replicate, split_and_load, split_data
from .ensemble import Ensemble
from .fit import Fit, fit
from .lr_finder import LRFinder, lr_find
from .mxnet import load_mxnet_params, load_mxnet_states
from .race import BatteryResult, RaceResult, battery, race
from .saving import Checkpoint, CheckpointManager
from .sweep import Sweep, sweep
from .telemetry import Telemetry
from .trainer import StaleGradientError, Trainer, UpdateOnKVStoreError

__all__ = [
    "BatteryResult",
    "Checkpoint",
    "CheckpointManager",
    "Ensemble",
    "Fit",
    "LRFinder",
    "RaceResult",
    "StaleGradientError",
    "Sweep",
    "Telemetry",
    "Trainer",
    "UpdateOnKVStoreError",
    "amp",
    "battery",
    "clip_global_norm",
    "collect_params",
    "cost_model",
    "estimate_cost",
    "fit",
    "initializer",
    "kvstore",
    "load_mxnet_params",
    "load_mxnet_states",
    "lr_find",
    "lr_scheduler",
    "optim",
    "optimizer",
    "race",
    "replicate",
    "split_and_load",
    "split_data",
    "sweep",
]
