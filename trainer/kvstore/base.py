"""What a store is, and the stores by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..arguments import did_you_mean
from ..optimizer import Optimizer, Updater
from ..registry import Registry

__all__ = ["KVStore", "KVStoreBase", "create", "register", "registered"]

Key = int | str
CAPABILITIES = ("optimizer",)
_Store = TypeVar("_Store", bound="type[KVStore]")


class KVStore:
    """Values by key. Keys are all int or all str; wherever one is taken, so is a list of them, with a list of values.

    A subclass that is marked with `@KVStore.register` is known to `create`, and to a `Trainer`, by its lower-case name. It
    defines `broadcast` and `pushpull`, or `init`, `push` and `pull`, of which these two are made; and `set_optimizer`,
    unless `is_capable("optimizer")` is False. `KVStoreBase` is another name of this class.

    Attributes:
        kv_registry: the registered classes by name.
        takes_lists: whether a trainer may bring all keys of a step in one call, with a list of values for each; otherwise it
            comes key by key, with minus the index as priority.
        type: the name that it was created by.
        rank: of this process among those that share the store, from 0.
        num_workers: how many these are.
        in_step: whether it is of several processes that make the same calls, and adds up by collectives of its `group`.
    """

    kv_registry: ClassVar[Registry[type[KVStore]]]
    takes_lists: ClassVar[bool] = False
    type = ""
    in_step = False
    rank = 0
    num_workers = 1

    @staticmethod
    def register(klass: _Store) -> _Store:
        """Class decorator: make a store known by its name, in lower case.

        Another class of that name is replaced, with a warning.
        """
        return KVStore.kv_registry.register(klass, stacklevel=3)

    def init(self, key: Any, value: Any) -> None:
        """Begin with a copy of this value, or of one for each key. To be called once for each key, before all else."""
        raise _missing(self, "init")

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add up the values of a key, one tensor or a list of one for each copy of the model.

        Without an updater the sum takes the place of what is stored; with one, `updater(key, sum, stored)` is called.
        """
        raise _missing(self, "push")

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy what is stored to `out`, one tensor or a list of them."""
        raise _missing(self, "pull")

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull` into `out`, or into the pushed tensors themselves."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let this optimizer update what is stored with what is pushed."""
        raise _missing(self, "set_optimizer")

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Let `updater(key, pushed, stored)` change what is stored, in place."""
        raise _missing(self, "set_updater")

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what is pushed, as `compression_params["type"]` says."""
        raise _missing(self, "set_gradient_compression")

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file, whole or not at all."""
        raise _missing(self, "save_optimizer_states")

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote."""
        raise _missing(self, "load_optimizer_states")

    def replace(self, key: Any, value: Any) -> None:
        """Let other values take the place of what is stored, whatever the updater; its states stay.

        Raises:
            RuntimeError: this kind of store cannot do so.
        """
        raise RuntimeError(
            f"a store of type {self.type!r} does not take other values once it is filled: weights may not be changed by "
            "hand while it updates them; make a new trainer after that"
        )

    def barrier(self) -> None:  # there is nothing to wait for in one process
        """Wait for all workers."""

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Whether the store can do this: "optimizer", in any case, says that it can update what it stores.

        Raises:
            ValueError: another word.
        """
        if not isinstance(capability, str) or capability.lower() not in CAPABILITIES:
            raise ValueError(f"capability={capability!r}: must be one of {', '.join(map(repr, CAPABILITIES))}")
        return cls._capable(capability.lower())

    @classmethod
    def _capable(cls, capability: str) -> bool:
        return True

    # What follows is for a trainer.

    def _inside(self) -> tuple[Updater, dict[Key, torch.Tensor]] | None:
        """The updater and the values by key, where an optimizer updates them in this process."""
        return None

    def _residuals(self) -> dict[tuple[Any, Any], torch.Tensor]:
        """What compression has kept back so far, by key and source; live."""
        return {}

    def _load_residuals(self, saved: Mapping[Key, Mapping[str, torch.Tensor]]) -> bool:
        """Take over what compression had kept back by key and source; whether the store does so by itself."""
        return False


def _missing(store: KVStore, method: str) -> NotImplementedError:
    return NotImplementedError(f"a store of type {store.type or type(store).__name__!r} does not define {method}()")


KVStore.kv_registry = Registry("store", KVStore)
KVStoreBase = KVStore
register = KVStore.register


def registered() -> dict[str, type[KVStore]]:
    """The stores that were registered, by name."""
    return dict(sorted(KVStore.kv_registry.items()))


def create(name: str = "local", *, timeout: float | None = None) -> KVStore:
    """Make a store.

    Args:
        name: in any case. "local" adds up on the CPU, "device" and "nccl" where the values are; "dist", "dist_sync" and
            "dist_device_sync" over all processes, which torchrun has started; "dist_async" and "dist_device_async" on
            servers, the last of these processes, in which this does not come back; or a registered store's.
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
    from . import collective, local, server

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
    if kind in collective.NAMES:
        return collective.CollectiveStore(kind)
    if kind in server.NAMES:
        return server.connect(kind) if timeout is None else server.connect(kind, timeout)
    known = [*local.NAMES, *collective.NAMES, *server.NAMES, *KVStore.kv_registry]
    raise ValueError(f"name={name!r}: must be one of {', '.join(map(repr, known))}.{did_you_mean(kind, known)}")


def pairs(key: Any, value: Any, what: str) -> list[tuple[Key, list[torch.Tensor]]]:
    """Each key with its list of tensors.

    Raises:
        TypeError, ValueError: keys or values that do not fit.
    """
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(key) != len(value):
            count = len(value) if isinstance(value, (list, tuple)) else 1
            raise ValueError(f"{len(key)} keys came with {count} for {what}: there must be one, or a list, for each key")
        found = list(zip(key, value, strict=True))
    else:
        found = [(key, value)]
    listed = []
    for each, given in found:
        if isinstance(each, bool) or not isinstance(each, (int, str)):
            raise TypeError(f"key must be an int or a string, got {each!r} ({type(each).__name__})")
        tensors = list(given) if isinstance(given, (list, tuple)) else [given]
        if not tensors:
            raise ValueError(f"{what} of key {each!r} is empty")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{what} of key {each!r} must be a tensor or a list of them, got {type(tensor).__name__}")
        listed.append((each, tensors))
    return listed


def same_shapes(key: Key, tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    """An error unless all of these have the shape of what is stored."""
    for tensor in tensors:
        if tensor.shape != like.shape:
            raise ValueError(f"{what} of key {key!r} is {tuple(tensor.shape)}, what is stored is {tuple(like.shape)}")
