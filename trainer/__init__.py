"""Training: `Trainer`, optimizers, learning-rate schedules, initializers and stores. Imports `tristep.kernels`."""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.trainer'; import it by that name (imported as {__name__!r})")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoint.folder import Checkpoint
from .checkpoint.manager import CheckpointManager
from .errors import StaleGradientError, UpdateOnKVStoreError
from .telemetry import Telemetry
from .trainer import Trainer

if TYPE_CHECKING:
    from ..contrib.mxnet_files import load_mxnet_params
    from ..contrib.racing.result import RaceResult
    from ..contrib.racing.run import race
    from . import amp, initializer, kvstore, lr_scheduler, optim, optimizer
    from .clipping import clip_global_norm
    from .data_parallel import replicate, split_and_load, split_data
    from .ensemble import Ensemble
    from .fitting import Fit, fit
    from .lr_finder import LRFinder, lr_find
    from .params import collect_params
    from .sweeping import Sweep, sweep

__all__ = [
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
    "clip_global_norm",
    "collect_params",
    "fit",
    "initializer",
    "kvstore",
    "load_mxnet_params",
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

# Modules of names that are imported on first use, because a `Trainer` does not need them. No module may have the name
# of its function: importing it would bind the name to the module.
ON_FIRST_USE = {
    "Ensemble": ".ensemble",
    "Fit": ".fitting",
    "LRFinder": ".lr_finder",
    "RaceResult": "tristep.contrib.racing",
    "Sweep": ".sweeping",
    "clip_global_norm": ".clipping",
    "collect_params": ".params",
    "fit": ".fitting",
    "load_mxnet_params": "tristep.contrib.mxnet_files",
    "lr_find": ".lr_finder",
    "race": "tristep.contrib.racing",
    "replicate": ".data_parallel",
    "split_and_load": ".data_parallel",
    "split_data": ".data_parallel",
    "sweep": ".sweeping",
}

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in ON_FIRST_USE:
            globals()[name] = getattr(import_module(ON_FIRST_USE[name], __name__), name)
            return globals()[name]
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
