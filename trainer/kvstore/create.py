"""Stores by name."""

from __future__ import annotations

from ..validation import did_you_mean
from . import allreduce_store, local, server
from .base import KVStore

__all__ = ["create"]


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
    if timeout is not None and (kind in KVStore.kv_registry or kind not in server.NAMES):
        raise ValueError(
            f"timeout={timeout!r} with name={name!r}: it is for {' and '.join(map(repr, server.NAMES))}; others have that "
            "of their process group, see torch.distributed.init_process_group"
        )
    if kind in KVStore.kv_registry:
        store = KVStore.kv_registry[kind]()
        if not store.type:  # it may be a property, as in MXNet
            store.type = kind
        return store
    if kind in local.NAMES:
        return local.LocalStore(kind)
    if kind in allreduce_store.NAMES:
        return allreduce_store.CollectiveStore(kind)
    if kind in server.NAMES:
        return server.connect(kind) if timeout is None else server.connect(kind, timeout)
    known = [*local.NAMES, *allreduce_store.NAMES, *server.NAMES, *KVStore.kv_registry]
    raise ValueError(f"name={name!r}: must be one of {', '.join(map(repr, known))}.{did_you_mean(kind, known)}")
