"""Stores by name, and the synchronization that a trainer's arguments about stores ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer import Optimizer
from ..replica import Replica
from ..validation import boolean, choice, did_you_mean
from .base import ASYNCHRONOUS, LOCAL, SYNCHRONOUS, KVStore, registered
from .local import LocalStore, LocalSync
from .sync import GradientSync, KVStoreSync, updates_on_store


def create(name: str = "local", *, timeout: float | None = None) -> KVStore:
    """Make a store.

    Args:
        name: in any case. "local" adds up on the CPU, and so do "local_update_cpu" and "local_allreduce_cpu"; "device",
            "nccl" and "local_allreduce_device" where the values are; "teststore" adds up and stores nothing; "dist",
            "dist_sync" and "dist_device_sync" over all processes, which torchrun has started; "dist_async" and
            "dist_device_async" on servers, the last of these processes, in which this does not come back; or a registered
            store's.
        timeout: of "dist_async" and "dist_device_async" the seconds, > 0, after which a process that has not been heard of
            counts as lost; None means 30 minutes. Others have the time limit of their process group.

    Raises:
        TypeError: `name` is no string.
        ValueError: no such store (MXNet makes a local one of any word), or a time limit that does not fit.
        RuntimeError: a store of several processes, and there is but this one.

    Example:
        >>> import torch
        >>> from tristep import kvstore
        >>> store = kvstore.create("device")
        >>> store.init(3, torch.ones(2))
        >>> store.push(3, [torch.ones(2), torch.full((2,), 4.0)])
        >>> out = torch.zeros(2)
        >>> store.pull(3, out)
        >>> out
        tensor([5., 5.])

    Source: MXNet 1.9.1, `mx.kv.create`.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, such as 'local', got {type(name).__name__}")
    kind = name.lower()
    klass = KVStore.kv_registry.get(kind) if kind in KVSTORES else KVStore.kv_registry.find(kind)
    if timeout is not None and (klass is not None or kind not in ASYNCHRONOUS):
        raise ValueError(
            f"timeout={timeout!r} with name={name!r}: it is for {' and '.join(map(repr, ASYNCHRONOUS))}; others have that "
            "of their process group, see torch.distributed.init_process_group"
        )
    if klass is not None:
        store = klass()
        if not store.type:  # it may be a property, as in MXNet
            store.type = kind
        return store
    if kind in LOCAL:
        return LocalStore(kind)
    if kind in SYNCHRONOUS:
        from .allreduce import CollectiveStore  # what is for several processes is imported where there are some

        return CollectiveStore(kind)
    if kind in ASYNCHRONOUS:
        from . import server

        return server.connect(kind) if timeout is None else server.connect(kind, timeout)
    known = [*KVSTORES, *KVStore.kv_registry.names()]
    raise ValueError(f"name={name!r}: must be one of {', '.join(map(repr, known))}.{did_you_mean(kind, known)}")


KVSTORES = (*LOCAL, *SYNCHRONOUS, *ASYNCHRONOUS)


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
    if kvstore is not None and not isinstance(kvstore, KVStore):
        name = kvstore.lower() if isinstance(kvstore, str) else None
        if name is None or not (name in KVSTORES or KVStore.kv_registry.find(name)):
            known = [*KVSTORES, *(each for each in KVStore.kv_registry.names() if each not in KVSTORES)]
            if name is None:
                listed = ", ".join(map(repr, known))
                raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {listed}; or a KVStore")
            choice("kvstore", kvstore, known, ignore_case=True)
        kvstore = name
    if update_on_kvstore is not None:
        boolean("update_on_kvstore", update_on_kvstore)
    if compression_params is not None:
        _check_compression(kvstore, compression_params)
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
        capable = registered().get(kvstore, LocalStore).is_capable("optimizer")
    else:
        capable = kvstore.is_capable("optimizer")
    updates_on_store(kvstore, capable, update_on_kvstore)
    names = [name for name in LOCAL if name not in registered()]
    if compression_params is not None and kvstore in names and "device" not in kvstore:
        raise ValueError(
            f"compression_params={compression_params!r} with kvstore={kvstore!r}, which does not compress gradients: use "
            "'device', or leave it out"
        )
    return kvstore


def _check_compression(kvstore: Any, compression_params: Any) -> None:
    from ..compression import local_compression
    from .compressed import check_compression
    from .server import ServerStore, compressor_of

    of_servers = (_is_dist(kvstore) and not _is_synchronous(kvstore)) or isinstance(kvstore, ServerStore)
    check = compressor_of if of_servers else check_compression if _is_synchronous(kvstore) else local_compression
    check(compression_params)


def _is_dist(kvstore: Any) -> bool:
    return isinstance(kvstore, str) and kvstore.startswith("dist") and kvstore not in registered()


def _is_synchronous(kvstore: Any) -> bool:
    """Whether the store is one of several processes that are synchronous."""
    return getattr(kvstore, "in_step", False) or (_is_dist(kvstore) and "async" not in kvstore)


def sync_for(
    kvstore: str | KVStore | None,
    replicas: list[Replica],
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
        store: Any = create(kvstore) if isinstance(kvstore, str) else kvstore
        if updates_on_store(store, True, update_on_kvstore):
            from .zero import ZeroSync as Kind
        else:
            from .allreduce import AllReduceSync as Kind  # type: ignore[assignment]  # the other's base
        return Kind(store.group, replicas[0], optimizer, compression_params, engine)
    if kvstore is None:
        return GradientSync(len(replicas))
    if _is_dist(kvstore):  # in a server's process this does not come back
        kvstore = create(kvstore)  # type: ignore[arg-type]

    def make(sparse: bool) -> tuple[KVStore, bool]:
        store: Any = create(kvstore) if isinstance(kvstore, str) else kvstore
        largest = max(param.numel() for param in replicas[0].params)
        return store, updates_on_store(kvstore, store.is_capable("optimizer"), update_on_kvstore, sparse, largest)

    klass = registered().get(kvstore, LocalStore) if isinstance(kvstore, str) else type(kvstore)
    kind: type[KVStoreSync] = LocalSync
    if not issubclass(klass, LocalStore):
        from .server import ServerStore, ServerSync

        kind = ServerSync if issubclass(klass, ServerStore) else KVStoreSync
    return kind(make, replicas, optimizer, compression_params, engine)
