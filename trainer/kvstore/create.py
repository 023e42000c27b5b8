"""Stores by name, and the synchronization that a trainer's arguments about stores ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer import Optimizer
from ..replica import Replica
from ..validation import boolean, choice, did_you_mean
from .base import LOCAL, SYNCHRONOUS, KVStore
from .local import LocalStore
from .sync import GradientSync, KVStoreSync, updates_on_store


def create(name: str = "local", *, timeout: float | None = None) -> KVStore:
    """Make a store.

    Args:
        name: in any case. "local" adds up on the CPU, and so do "local_update_cpu" and "local_allreduce_cpu"; "device",
            "nccl" and "local_allreduce_device" where the values are; "teststore" adds up and stores nothing; "dist",
            "dist_sync" and "dist_device_sync" over all processes, which torchrun has started; "dist_async" and
            "dist_device_async" on servers, the last of these processes, in which this does not come back; or a registered
            store's, or a plugin's.
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
    klass = _class_of(kind)
    if klass is None:
        known = _known_names()
        raise ValueError(f"name={name!r}: must be one of {', '.join(map(repr, known))}.{did_you_mean(kind, known)}")
    return klass.open(kind, timeout)


def _class_of(name: str) -> type[KVStore] | None:
    """The class of the stores of this name, in lower case; None for an unknown one."""
    if name not in _OWN:
        return KVStore.kv_registry.find(name)
    if name in KVStore.kv_registry:
        return KVStore.kv_registry[name]
    if name in LOCAL:
        return LocalStore
    from .allreduce import CollectiveStore  # what is for several processes is imported where there are some

    return CollectiveStore


def _known_names() -> list[str]:
    return [*_OWN, *(name for name in KVStore.kv_registry.names() if name not in _OWN)]


_OWN = (*LOCAL, *SYNCHRONOUS)


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
    asked: Any = kvstore  # a class or an instance of one
    if kvstore is not None and not isinstance(kvstore, KVStore):
        if not isinstance(kvstore, str):
            listed = ", ".join(map(repr, _known_names()))
            raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {listed}; or a KVStore")
        asked, kvstore = _class_of(kvstore.lower()), kvstore.lower()
        if asked is None:
            choice("kvstore", kvstore, _known_names(), ignore_case=True)
    if update_on_kvstore is not None:
        boolean("update_on_kvstore", update_on_kvstore)
    if compression_params is not None:
        if asked is not None and asked.in_step:
            from .compressed import check_compression as check
        else:
            check = (asked or KVStore).check_compression
        check(compression_params)
    is_name = isinstance(kvstore, str)
    if kvstore is None or (is_name and replicas == 1 and not asked.several_processes):
        if update_on_kvstore:
            several = "without a store each copy is updated by itself, so none"
            why = several if replicas > 1 else "one copy of a model needs no store, so none"
            raise ValueError(f"update_on_kvstore=True with kvstore={kvstore!r}: {why} can update it; leave it out")
        return None
    updates_on_store(kvstore, asked.is_capable("optimizer"), update_on_kvstore)
    if compression_params is not None and is_name and asked is LocalStore and "device" not in kvstore:
        raise ValueError(
            f"compression_params={compression_params!r} with kvstore={kvstore!r}, which does not compress gradients: use "
            "'device', or leave it out"
        )
    return kvstore


def sync_for(
    kvstore: str | KVStore | None,
    replicas: list[Replica],
    optimizer: Optimizer,
    compression_params: Mapping[str, Any] | None,
    update_on_kvstore: bool | None,
    engine: str | None,
) -> GradientSync:
    """What several copies of a model, here or in several processes, or a store that was given, need for a step."""
    if kvstore is None:
        return GradientSync(len(replicas))
    store: Any = kvstore
    asked: Any = _class_of(kvstore) if isinstance(kvstore, str) else kvstore
    if asked.in_step and len(replicas) > 1:
        raise ValueError(
            f"params has {len(replicas)} copies of the model with kvstore={kvstore!r}, which has one in each process: "
            "start more of these, one for each device"
        )
    if isinstance(kvstore, str) and asked.several_processes:  # in a server's process this does not come back
        store = create(kvstore)
    if asked.in_step:
        if updates_on_store(store, True, update_on_kvstore):
            from .zero import ZeroSync as Kind
        else:
            from .allreduce import AllReduceSync as Kind  # type: ignore[assignment]  # the other's base
        return Kind(store.group, replicas[0], optimizer, compression_params, engine)

    def make(sparse: bool) -> tuple[KVStore, bool]:
        made: Any = create(store) if isinstance(store, str) else store
        largest = max(param.numel() for param in replicas[0].params)
        return made, updates_on_store(kvstore, made.is_capable("optimizer"), update_on_kvstore, sparse, largest)

    return (asked.sync_class or KVStoreSync)(make, replicas, optimizer, compression_params, engine)
