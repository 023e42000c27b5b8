"""Training: `Trainer`, optimizers, learning-rate schedules, initializers and stores. Imports `tristep.kernels`."""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.trainer'; import it by that name (imported as {__name__!r})")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoint.folder import Checkpoint
from .loops.manager import CheckpointManager
from .step.telemetry import Telemetry
from .trainer import Trainer
from .utils.errors import StaleGradientError, UpdateOnKVStoreError

if TYPE_CHECKING:
    from ..contrib.mxnet_files import load_mxnet_params
    from ..contrib.racing.result import RaceResult
    from ..contrib.racing.run import race
    from . import amp, initializer, kvstore, lr_scheduler, optim, optimizer
    from .loops.ensemble import Ensemble
    from .loops.fitting import Fit, fit
    from .loops.lr_finder import LRFinder, lr_find
    from .loops.sweeping import Sweep, sweep
    from .step.clipping import clip_global_norm
    from .step.depths import LayerGroups, layer_groups
    from .step.params import collect_params
    from .utils.data_parallel import replicate, split_and_load, split_data

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Ensemble",
    "Fit",
    "LRFinder",
    "LayerGroups",
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
    "layer_groups",
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
    "Ensemble": ".loops.ensemble",
    "Fit": ".loops.fitting",
    "LRFinder": ".loops.lr_finder",
    "LayerGroups": ".step.depths",
    "RaceResult": "tristep.contrib.racing",
    "Sweep": ".loops.sweeping",
    "clip_global_norm": ".step.clipping",
    "collect_params": ".step.params",
    "fit": ".loops.fitting",
    "layer_groups": ".step.depths",
    "load_mxnet_params": "tristep.contrib.mxnet_files",
    "lr_find": ".loops.lr_finder",
    "race": "tristep.contrib.racing",
    "replicate": ".utils.data_parallel",
    "split_and_load": ".utils.data_parallel",
    "split_data": ".utils.data_parallel",
    "sweep": ".loops.sweeping",
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
