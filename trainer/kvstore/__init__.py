"""Key-value stores, which sum the gradients that a model's replicas push and may update the weights with an optimizer.

Names and semantics follow MXNet's kvstore. `create` returns a store by its name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import KVStore, KVStoreBase, register, registered
from .create import create
from .local import LocalStore
from .sync import GradientSync, KVStoreSync

if TYPE_CHECKING:
    from ...contrib.compression import ddp_hook
    from ...contrib.server import ServerStore, Staleness, serve
    from ..compression import (
        CompressedAllReduce,
        Compressor,
        create_compressor,
        register_compressor,
        registered_compressors,
    )
    from .allreduce import CollectiveStore

__all__ = [
    "CollectiveStore",
    "CompressedAllReduce",
    "Compressor",
    "GradientSync",
    "KVStore",
    "KVStoreBase",
    "KVStoreSync",
    "LocalStore",
    "ServerStore",
    "Staleness",
    "create",
    "create_compressor",
    "ddp_hook",
    "register",
    "register_compressor",
    "registered",
    "registered_compressors",
    "serve",
]

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """Import names for several processes on first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = dict.fromkeys(("ServerStore", "Staleness", "serve"), "tristep.contrib.server")
        modules |= {"CollectiveStore": ".allreduce", "ddp_hook": "tristep.contrib.compression"}
        globals()[name] = getattr(import_module(modules.get(name, "..compression"), __name__), name)
        return globals()[name]
