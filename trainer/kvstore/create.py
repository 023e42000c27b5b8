"""Creation of stores by name, and of the synchronization that a trainer's arguments `kvstore` and so on ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...kernels.messages import listed, one_of
from ..optimizer import Optimizer
from ..optimizer.settings import warn_once
from ..step.replica import Replica
from ..validation import boolean, choice, instance
from .base import LOCAL, SYNCHRONOUS, KVStore
from .local import LocalStore
from .sync import GradientSync, KVStoreSync, ReplicasSync, updates_on_store


def create(name: str = "local", *, timeout: float | None = None) -> KVStore:
    """Return a new store.

    Args:
        name: the kind of store, in upper or lower case:
            "local", "local_update_cpu", "local_allreduce_cpu": sums on the CPU.
            "device", "nccl", "local_allreduce_device": sums on the device of the values.
            "teststore": sums, and stores nothing.
            "dist", "dist_sync", "dist_device_sync": sums over all processes, which torchrun has started.
            "dist_async", "dist_device_async": updates on a server, the last of these processes, in which this call does
                not return.
            Or the name of a registered store.
        timeout: for "dist_async" and "dist_device_async" the seconds, > 0, after which a silent process counts as lost;
            None means 30 minutes. Other stores of several processes have the time limit of their process group.

    Raises:
        TypeError: `name` is no string.
        ValueError: there is no such store (where MXNet would make a local one), or `timeout` is not positive or not for
            this store.
        RuntimeError: the store is for several processes, but torchrun has not started this one.

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
    instance("name", name, str, "a string, such as 'local'")
    kind = name.lower()
    klass = _class_of(kind)
    if klass is None:
        raise ValueError(f"name={name!r}:{one_of(kind, _known_names())}. {KVStore.kv_registry.hint}")
    return klass.open(kind, timeout)


def _class_of(name: str) -> type[KVStore] | None:
    """Return the class of stores with this lower-case name, or None for an unknown name."""
    if name not in _OWN:
        return KVStore.kv_registry.find(name)
    if name in KVStore.kv_registry:
        return KVStore.kv_registry[name]
    if name in LOCAL:
        return LocalStore
    from .allreduce import CollectiveStore  # imported only for several processes

    return CollectiveStore


def _known_names() -> list[str]:
    return [*_OWN, *(name for name in KVStore.kv_registry.names() if name not in _OWN)]


_OWN = (*LOCAL, *SYNCHRONOUS)


def check_one_reduces(kvstore: Any) -> None:
    """Refuse a store that reduces gradients across processes: DistributedDataParallel already does."""
    asked = _class_of(kvstore.lower()) if isinstance(kvstore, str) else kvstore
    if getattr(asked, "several_processes", False):
        raise ValueError(
            f"kvstore={kvstore!r} with a DistributedDataParallel module: gradients would be reduced twice; use "
            "kvstore=None, or give the module inside, ddp.module"
        )


def check_store(kvstore: Any, compression_params: Any, update_on_kvstore: Any, replicas: int) -> str | KVStore | None:
    """Check a trainer's arguments about stores, with so many `replicas` in this process.

    Return the name of a store in lower case, or the store that was given; None if a single replica needs no store.
    """
    asked: Any = kvstore  # a class or an instance of one
    if kvstore is not None and not isinstance(kvstore, KVStore):
        if not isinstance(kvstore, str):
            names = listed(map(repr, _known_names()))
            raise TypeError(f"kvstore={kvstore!r}: must be None or a name, one of {names}; or a KVStore")
        asked, kvstore = _class_of(kvstore.lower()), kvstore.lower()
        if asked is None:
            choice("kvstore", kvstore, _known_names(), ignore_case=True, more=KVStore.kv_registry.hint)
    if update_on_kvstore is not None:
        boolean("update_on_kvstore", update_on_kvstore)
    if compression_params is not None:
        if asked is not None and asked.in_step:
            from ..compression import create_compressor  # few need it

            create_compressor(compression_params)
        else:
            (asked or KVStore).check_compression(compression_params)
    is_name = isinstance(kvstore, str)
    if kvstore is None or (is_name and replicas == 1 and not asked.several_processes):
        several = "without a store each copy is updated by itself"
        why = several if replicas > 1 else "a single copy of a model needs no store"
        if update_on_kvstore:
            raise ValueError(f"update_on_kvstore=True with kvstore={kvstore!r}: {why}, so no store can update; leave it out")
        if compression_params is not None:
            warn_once(
                f"compression_params={compression_params!r} with kvstore={kvstore!r} has no effect: {why}, so no gradient "
                "is sent; leave it out"
            )
        return None
    updates = updates_on_store(kvstore, asked, update_on_kvstore)
    _check_methods(kvstore, asked, updates, compression_params is not None)
    if compression_params is not None and is_name and asked is LocalStore and "device" not in kvstore:
        raise ValueError(
            f"compression_params={compression_params!r} with kvstore={kvstore!r}, which does not compress gradients: use "
            "'device', or leave it out"
        )
    return kvstore


def _check_methods(kvstore: Any, store: Any, updates: bool, compresses: bool) -> None:
    """Raise TypeError if a store, or a class of stores, does not define the methods that a trainer needs."""
    klass: type[KVStore] = store if isinstance(store, type) else type(store)
    if klass.sync_class is not None or klass.in_step:  # which may use other methods
        return

    def lacks(*methods: str) -> bool:
        return any(getattr(klass, method) is getattr(KVStore, method) for method in methods)

    missing = []
    if lacks("broadcast") and lacks("init", "pull"):
        missing.append("broadcast(), or init() and pull()")
    if lacks("pushpull") and lacks("push", "pull"):
        missing.append("pushpull(), or push() and pull()")
    if updates and lacks("set_optimizer"):
        missing.append("set_optimizer(), or is_capable() that returns False")
    if compresses and lacks("set_gradient_compression"):
        missing.append("set_gradient_compression(), for compression_params")
    if missing:
        raise TypeError(f"kvstore={kvstore!r}: {klass.__name__} must define {'; '.join(missing)}")


def sync_for(
    kvstore: str | KVStore | None,
    replicas: list[Replica],
    optimizer: Optimizer,
    compression_params: Mapping[str, Any] | None,
    update_on_kvstore: bool | None,
    engine: str | None,
) -> GradientSync:
    """Return the synchronization of gradients for a trainer.

    `kvstore` is the result of `check_store`; `replicas` are those in this process.
    """
    if kvstore is None:
        return (ReplicasSync if len(replicas) > 1 else GradientSync)(replicas, optimizer)
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
        if updates_on_store(kvstore, asked, update_on_kvstore):
            from .zero import ZeroSync as Kind
        else:
            from .allreduce import AllReduceSync as Kind  # type: ignore[assignment]  # the other's base
        return Kind(store.group, replicas[0], optimizer, compression_params, engine)

    def make(sparse: bool) -> tuple[KVStore, bool]:
        made: Any = create(store) if isinstance(store, str) else store
        largest = max(param.numel() for param in replicas[0].params)
        return made, updates_on_store(kvstore, made, update_on_kvstore, sparse, largest)

    return (asked.sync_class or KVStoreSync)(make, replicas, optimizer, compression_params, engine)
