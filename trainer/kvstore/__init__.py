"""Stores: values by key, which sum what the replicas of a model push, and may update themselves with an optimizer.

Names and semantics are those of MXNet's kvstore; `create` makes one by its name.
"""

from ..compression import (
    CompressedAllReduce,
    Compressor,
    create_compressor,
    ddp_hook,
    register_compressor,
    registered_compressors,
)
from .allreduce import CollectiveStore
from .base import KVStore, KVStoreBase, register, register_updater, registered
from .create import create
from .local import LocalStore
from .server import ServerStore, Staleness, serve

__all__ = [
    "CollectiveStore",
    "CompressedAllReduce",
    "Compressor",
    "KVStore",
    "KVStoreBase",
    "LocalStore",
    "ServerStore",
    "Staleness",
    "create",
    "create_compressor",
    "ddp_hook",
    "register",
    "register_compressor",
    "register_updater",
    "registered",
    "registered_compressors",
    "serve",
]
