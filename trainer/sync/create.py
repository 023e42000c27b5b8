"""Chooses a trainer's gradient synchronization from its arguments about stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import kvstore as stores
from ..compression import local_compression
from ..kvstore import KVStore, allreduce_store, local, server
from ..kvstore.server import compressor_of
from ..optimizer import Optimizer
from ..replica import Replica
from ..validation import boolean, choice
from .allreduce import AllReduceSync
from .base import GradientSync
from .compressed import check_compression
from .kvstore import KVStoreSync, updates_on_store
from .none import NoSync
from .zero import ZeroSync

__all__ = ["check_one_reduces", "check_store", "sync_for"]

KVSTORES = (*local.NAMES, *allreduce_store.NAMES, *server.NAMES)


def check_one_reduces(kvstore: Any) -> None:
    """Refuse a store of several processes in addition to torch's own reduction."""
    name = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", None)
    if isinstance(name, str) and name.lower().startswith("dist"):
        raise ValueError(
            f"kvstore={kvstore!r} with a DistributedDataParallel module: gradients would be reduced twice; use "
            "kvstore=None, or give the module inside, ddp.module"
        )


def check_store(kvstore: Any, compression_params: Any, update_on_kvstore: Any, replicas: int) -> str | KVStore | None:
    """The store that is asked for: a name in lower case, the store itself, or None where none is needed."""
    known = [*KVSTORES, *(name for name in stores.registered() if name not in KVSTORES)]
    if kvstore is not None and not isinstance(kvstore, KVStore):
        if not isinstance(kvstore, str):
            listed = ", ".join(map(repr, known))
            raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {listed}; or a KVStore")
        kvstore = choice("kvstore", kvstore, known, ignore_case=True)
    if update_on_kvstore is not None:
        boolean("update_on_kvstore", update_on_kvstore)
    if compression_params is not None:
        of_servers = (_is_dist(kvstore) and not _is_synchronous(kvstore)) or isinstance(kvstore, stores.ServerStore)
        check = compressor_of if of_servers else check_compression if _is_synchronous(kvstore) else local_compression
        check(compression_params)
    is_name = isinstance(kvstore, str)
    dist = _is_dist(kvstore)
    if kvstore is None or (is_name and replicas == 1 and not dist):
        if update_on_kvstore:
            several = "without a store each copy is updated by itself, so none"
            why = several if replicas > 1 else "one copy of a model needs no store, so none"
            raise ValueError(f"update_on_kvstore=True with kvstore={kvstore!r}: {why} can update it; leave it out")
        return None
    if dist:
        capable = True
    elif is_name:
        capable = stores.registered().get(kvstore, stores.LocalStore).is_capable("optimizer")
    else:
        capable = kvstore.is_capable("optimizer")
    updates_on_store(kvstore, capable, update_on_kvstore)
    names = [name for name in local.NAMES if name not in stores.registered()]
    if compression_params is not None and kvstore in names and "device" not in kvstore:
        raise ValueError(
            f"compression_params={compression_params!r} with kvstore={kvstore!r}, which does not compress gradients: use "
            "'device', or leave it out"
        )
    return kvstore


def _is_dist(kvstore: Any) -> bool:
    return isinstance(kvstore, str) and kvstore.startswith("dist") and kvstore not in stores.registered()


def _is_synchronous(kvstore: Any) -> bool:
    """Whether the store is one of several processes that are synchronous."""
    return getattr(kvstore, "in_step", False) or (_is_dist(kvstore) and "async" not in kvstore)


def sync_for(
    kvstore: str | KVStore | None,
    replicas: list[Replica],
    names: list[str],
    optimizer: Optimizer,
    compression_params: Mapping[str, Any] | None,
    update_on_kvstore: bool | None,
    engine: str | None,
) -> GradientSync:
    """What several copies of a model, here or in several processes, or a store that was given, need for a step."""
    if _is_synchronous(kvstore):
        if len(replicas) > 1:
            raise ValueError(
                f"params has {len(replicas)} copies of the model with kvstore={kvstore!r}, which has one in each process: "
                "start more of these, one for each device"
            )
        store: Any = stores.create(kvstore) if isinstance(kvstore, str) else kvstore
        group = store.group
        kind = ZeroSync if updates_on_store(store, True, update_on_kvstore) else AllReduceSync
        return kind(group, replicas[0], names, optimizer, compression_params, engine)
    if kvstore is None:
        return NoSync(len(replicas))
    if _is_dist(kvstore):  # in a server's process this does not come back
        kvstore = stores.create(kvstore)  # type: ignore[arg-type]

    def make(sparse: bool) -> tuple[KVStore, bool]:
        store: Any = stores.create(kvstore) if isinstance(kvstore, str) else kvstore
        largest = max(param.numel() for param in replicas[0].params)
        return store, updates_on_store(kvstore, store.is_capable("optimizer"), update_on_kvstore, sparse, largest)

    return KVStoreSync(make, replicas, optimizer, compression_params, engine)
