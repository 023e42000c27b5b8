"""tristep: Gluon's `Trainer` for PyTorch, with fused updates in Triton.

This file has the public names, most of which are imported on first use. There are three sub-packages, each of which may
import only the ones before it: `tristep.kernels` (update rules and their engines), `tristep.trainer` (`Trainer`, optimizers,
schedules, stores) and `tristep.viz` (pictures and widgets, which need the extra `notebook`). `tristep.integrations` has
modules for other training libraries.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import kernels, trainer
from .kernels import rule
from .trainer import CheckpointManager, StaleGradientError, Telemetry, Trainer, UpdateOnKVStoreError

if TYPE_CHECKING:  # imported on first use
    from . import amp, init, initializer, integrations, kv, kvstore, lr_scheduler, optim, optimizer, viz
    from .trainer import (
        clip_global_norm,
        collect_params,
        fit,
        layer_groups,
        load_mxnet_params,
        lr_find,
        race,
        replicate,
        split_and_load,
        split_data,
        sweep,
    )

__all__ = [
    "CheckpointManager",
    "StaleGradientError",
    "Telemetry",
    "Trainer",
    "UpdateOnKVStoreError",
    "amp",
    "clip_global_norm",
    "collect_params",
    "fit",
    "init",
    "initializer",
    "integrations",
    "kernels",
    "kv",
    "kvstore",
    "layer_groups",
    "load_mxnet_params",
    "lr_find",
    "lr_scheduler",
    "optim",
    "optimizer",
    "race",
    "replicate",
    "rule",
    "split_and_load",
    "split_data",
    "sweep",
    "trainer",
    "viz",
]

try:
    __version__ = version("tristep")
except PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+uninstalled"

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in trainer.ON_FIRST_USE:
            globals()[name] = getattr(trainer, name)
            return globals()[name]
        return import_module(f"{__name__}.{name}")


def load_ipython_extension(shell: Any) -> None:
    """Add tristep's magics to IPython; `%load_ext tristep` calls it."""
    import_module(f"{__name__}.viz.live.extension").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove everything that `load_ipython_extension` added; `%unload_ext tristep` calls it."""
    import_module(f"{__name__}.viz.live.extension").unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
