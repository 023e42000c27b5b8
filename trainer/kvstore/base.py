"""The interface of a store, and the registry of stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..optimizer import Optimizer, Updater
from ..registry import Registry

LOCAL = ("local", "device", "nccl", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device")
SYNCHRONOUS = ("dist", "dist_sync", "dist_device_sync")

Key = int | str
CAPABILITIES = ("optimizer",)
_Value = TypeVar("_Value")
_Store = TypeVar("_Store", bound="type[KVStore]")


class KVStore:
    """Values by key. Keys are all int or all str; each method also takes a list of keys, with a list of values.

    A subclass that is marked with `@KVStore.register` is known to `create`, and to a `Trainer`, by its lower-case name. It
    defines `broadcast` and `pushpull`, or `init`, `push` and `pull`, which these two call by default; and `set_optimizer`,
    unless it overrides `is_capable` to return False. `KVStoreBase` is another name of this class.

    Attributes:
        kv_registry: the registered classes by name.
        takes_lists: whether a trainer passes all keys of a step in one call, with a list of values for each; otherwise it
            makes one call per key, with minus the index as priority.
        several_processes: whether it connects processes, so that a trainer of a single replica needs it, too.
        sync_class: the subclass of `KVStoreSync` by which a trainer's replicas use it; None for that class itself.
        type: the name that it was created by.
        rank: of this process among those that share the store, from 0.
        num_workers: how many these are.
        in_step: whether it connects synchronous processes, which make the same calls, and sums by collectives of `group`.
    """

    kv_registry: ClassVar[Registry[type[KVStore]]]
    takes_lists: ClassVar[bool] = False
    several_processes: ClassVar[bool] = False
    sync_class: ClassVar[Any] = None
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

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """Make the store that `create` is asked for.

        Args:
            name: the name of the store, in lower case: a class may have several.
            timeout: seconds after which another process counts as lost.

        Raises:
            ValueError: a time limit, where stores of this class have none.
        """
        if timeout is not None:
            raise ValueError(
                f"timeout={timeout!r} with name={name!r}: it is for stores such as 'dist_async'; others have the time limit "
                "of their process group, see torch.distributed.init_process_group"
            )
        store = cls()
        if not store.type:  # it may be a property, as in MXNet
            store.type = name
        return store

    @classmethod
    def check_compression(cls, compression_params: Mapping[str, Any]) -> None:
        """Refuse what `set_gradient_compression` will not take, before there is a store.

        Raises:
            TypeError, ValueError: they do not fit.
        """
        from ..compression import local_compression  # few need it

        local_compression(compression_params)

    def init(self, key: Any, value: Any) -> None:
        """Store a copy of this value, or of one for each key. To be called once for each key, before anything else."""
        raise _missing(self, "init")

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum the values of a key: one tensor, or a list with one for each replica of the model.

        Without an updater the sum replaces what is stored; with one, `updater(key, sum, stored)` is called.
        """
        raise _missing(self, "push")

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy what is stored to `out`, one tensor or a list of them; sparse ones only with `ignore_sparse=False`."""
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

    def _set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """`set_updater`, under the name that MXNet's tutorial of its KVStore calls."""
        self.set_updater(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what is pushed, as `compression_params["type"]` says."""
        raise _missing(self, "set_gradient_compression")

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file, atomically."""
        raise _missing(self, "save_optimizer_states")

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote."""
        raise _missing(self, "load_optimizer_states")

    def replace(self, key: Any, value: Any) -> None:
        """Replace what is stored by other values, whatever the updater; its states stay.

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
        """Whether the store can do this: "optimizer", in any case, means to update what it stores. By default it can.

        Raises:
            ValueError: another word.
        """
        if not isinstance(capability, str) or capability.lower() not in CAPABILITIES:
            raise ValueError(f"capability={capability!r}: must be one of {', '.join(map(repr, CAPABILITIES))}")
        return True


def _missing(store: KVStore, method: str) -> NotImplementedError:
    return NotImplementedError(f"a store of type {store.type or type(store).__name__!r} does not define {method}()")


KVStore.kv_registry = Registry("store", KVStore, group="tristep.stores")
KVStoreBase = KVStore
register = KVStore.register


def registered() -> dict[str, type[KVStore]]:
    """The stores that were registered, by name; of plugins' those that have been used."""
    return dict(sorted(KVStore.kv_registry.items()))


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


def new_values(key: Any, value: Any, known: Collection[Key]) -> dict[Key, torch.Tensor]:
    """The tensor of each key that `init` is called with; `known` are those that are there already.

    Raises:
        TypeError, ValueError: keys or values that do not fit.
    """
    found = pairs(key, value, "value")
    keys = [each for each, _ in found]
    for each, tensors in found:
        if len(tensors) != 1:
            raise ValueError(f"value of key {each!r} is a list of {len(tensors)}: init takes one tensor for each key")
        if each in known or keys.count(each) > 1:
            raise ValueError(f"key {each!r} has been initialized already: init takes each key once")
    if len({type(each) for each in (*keys, *known)}) > 1:
        raise TypeError("keys must be all int or all str in one store, these are of both kinds")
    return {each: tensors[0].detach() for each, tensors in found}


def known_values(key: Any, value: Any, what: str, stored: Mapping[Key, Any]) -> list[tuple[Key, list[torch.Tensor]]]:
    """Each key with its list of tensors, of the shape of what is stored.

    Raises:
        TypeError, ValueError: keys or values that do not fit.
    """
    found = pairs(key, value, what)
    for each, tensors in found:
        same_shapes(each, tensors, known_value(each, stored), what)
    return found


def dense(key: Key, tensor: torch.Tensor, why: str) -> torch.Tensor:
    """The tensor itself.

    Raises:
        TypeError: it is sparse.
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"value of key {key!r} is sparse ({tensor.layout}): {why}")
    return tensor


def known_value(key: Key, stored: Mapping[Key, _Value]) -> _Value:
    """What is stored for a key.

    Raises:
        ValueError: nothing is.
    """
    if key not in stored:
        known = ", ".join(map(repr, list(stored)[:8])) or "none"
        raise ValueError(f"key {key!r} has not been initialized (there are {known}): call init() first")
    return stored[key]


def same_shapes(key: Key, tensors: Sequence[torch.Tensor], like: Any, what: str) -> None:
    """An error unless all of these have the shape of what is stored."""
    for tensor in tensors:
        if tensor.shape != like.shape:
            raise ValueError(f"{what} of key {key!r} is {tuple(tensor.shape)}, what is stored is {tuple(like.shape)}")


def renamed(states: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Collected states whose parameters have other names."""
    by_name = ("counts", "parameters", "layout", "state")
    return {
        what: {names.get(name, name): value for name, value in part.items()} if what in by_name else part
        for what, part in states.items()
    }


def optimizer_updater(updater: Any) -> Updater:
    """A store's updater, if that is an optimizer's.

    Raises:
        RuntimeError: it is not.
    """
    if not isinstance(updater, Updater):
        raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
    return updater
