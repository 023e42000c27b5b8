"""The interface of a store, and the registry of stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ...kernels.messages import listed
from ..optimizer import Optimizer, Updater
from ..registry import Registry
from ..validation import choice

LOCAL = ("local", "device", "nccl", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device")
SYNCHRONOUS = ("dist", "dist_sync", "dist_device_sync")

Key = int | str
CAPABILITIES = ("optimizer",)
_Value = TypeVar("_Value")
_Store = TypeVar("_Store", bound="type[KVStore]")


class KVStore:
    """Base class of stores: tensors by key, which sum what replicas push and may be updated by an optimizer.

    Keys are all int or all str. Each method takes one key with its value, or a list of keys with a list of values.

    A subclass marked with `@KVStore.register` can be made by its lower-case name, with `create` or as `Trainer(kvstore=)`.
    It defines `broadcast` and `pushpull`, or else `init`, `push` and `pull`, which these two call by default. If it also
    defines `set_optimizer`, the trainer lets it update the weights, unless `update_on_kvstore` is False. Other methods are
    needed only if they are used. `LocalStore` defines all of them; a subclass of it with `takes_lists = False` and its own
    `push` can update, save and load. `KVStoreBase` is an alias of this class.

    A trainer with n replicas uses the indices of the parameters as keys, and makes these calls:

    - Before the first step, `set_optimizer(optimizer)` if the store updates; then for each key `broadcast(key, weight,
      weights)`, with the first replica's weight and the weights of all replicas, which have the same values.
    - At each step, for each key: `pushpull(key, gradients, out=out, priority=-key)`, with lists of n tensors, which may be
      the same tensors. The sum of the gradients goes to every tensor of `out`; if the store updates, `out` are the weights,
      and get the updated weight.
    - If the store updates: `replace(keys, weights)`, with lists, before each step. In a store without this method, a step
      after the user has changed weights raises RuntimeError.
    - `save_optimizer_states` and `load_optimizer_states`, when states of a store that updates are saved and loaded;
      `set_gradient_compression`, before the first step, for `compression_params`.

    Attributes:
        kv_registry: the registered classes by name.
        takes_lists: whether a trainer passes all keys of a step in one call, with a list of values for each key; otherwise
            it makes one call per key, with the negated parameter index as priority.
        several_processes: whether the store connects processes, so that a trainer with a single replica needs it, too.
        asynchronous: whether these processes do not wait for each other, so that only the store can update the weights.
        sync_class: the subclass of `KVStoreSync` through which a trainer uses the store; None for `KVStoreSync` itself.
        type: the name that the store was created by.
        rank: the number of this process among the processes that share the store, from 0.
        num_workers: the number of these processes.
        in_step: whether the store connects synchronous processes, which all make the same calls, and sums by collectives
            of its process group `group`.

    Example:
        >>> import torch, tristep
        >>> from tristep import kvstore
        >>> @kvstore.register
        ... class SumStore(kvstore.KVStore):
        ...     def __init__(self):
        ...         self.weights = {}
        ...
        ...     def set_optimizer(self, optimizer):
        ...         self.updater = tristep.optimizer.get_updater(optimizer)
        ...
        ...     def init(self, key, value):
        ...         self.weights[key] = value.detach().clone()
        ...
        ...     def push(self, key, value, priority=0):
        ...         self.updater(key, sum(value), self.weights[key])  # updates the weight in place
        ...
        ...     def pull(self, key, out, priority=0, ignore_sparse=True):
        ...         for tensor in out:
        ...             tensor.copy_(self.weights[key])
        >>> nets = [torch.nn.ParameterList([torch.ones(1)]) for _ in range(2)]
        >>> trainer = tristep.Trainer(nets, "sgd", {"learning_rate": 0.25}, kvstore="sumstore")
        >>> for net in nets:
        ...     net[0].grad = torch.ones(1)
        >>> trainer.step(batch_size=1)
        >>> [net[0].item() for net in nets]
        [0.5, 0.5]
    """

    kv_registry: ClassVar[Registry[type[KVStore]]]
    takes_lists: ClassVar[bool] = False
    several_processes: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    sync_class: ClassVar[Any] = None
    type = ""
    in_step = False
    rank = 0
    num_workers = 1

    @staticmethod
    def register(klass: _Store) -> _Store:
        """Register a store class under its lower-case name; a class decorator.

        A class that is registered under the same name is replaced, with a warning.
        """
        return KVStore.kv_registry.register(klass, stacklevel=3)

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """Return a new store of this class; `create` calls it.

        Args:
            name: the name that was asked for, in lower case; a class may be registered under several names.
            timeout: seconds after which another process counts as lost; None for the default.

        Raises:
            ValueError: `timeout` is given, but stores of this class have no time limit of their own.
        """
        if timeout is not None:
            raise ValueError(
                f"timeout={timeout!r} with name={name!r}: only stores such as 'dist_async' take it; others use the time "
                "limit of their process group, see torch.distributed.init_process_group"
            )
        store = cls()
        if not store.type:  # it may be a property, as in MXNet
            store.type = name
        return store

    @classmethod
    def check_compression(cls, compression_params: Mapping[str, Any]) -> None:
        """Check the argument of `set_gradient_compression` before a store is made.

        Args:
            compression_params: the type of the compression and its options, such as {"type": "2bit", "threshold": 0.5}.

        Raises:
            TypeError: it is no dict, or an option has a wrong type.
            ValueError: this class does not compress, or the type or an option is unknown or out of range.
        """
        from ..compression import local_compression  # few need it

        local_compression(compression_params)

    def init(self, key: Any, value: Any) -> None:
        """Store a copy of the first value of a key. To be called once for each key, before `push` and `pull`."""
        raise _missing(self, "init")

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum the values of a key, one tensor or a list with a tensor for each replica, and update the stored value.

        Without an updater the sum replaces the stored value; otherwise `updater(key, sum, stored)` is called.
        """
        raise _missing(self, "push")

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored value to `out`, a tensor or a list of tensors; sparse tensors are skipped if `ignore_sparse`."""
        raise _missing(self, "pull")

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push `value`, then pull into `out`; None pulls into the pushed tensors."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Store the first value of a key, then copy it to `out`, a tensor or a list with a tensor for each replica."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update stored values by this optimizer from now on, with the pushed sums as gradients."""
        raise _missing(self, "set_optimizer")

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Update stored values by `updater(key, pushed, stored)` from now on; it changes `stored` in place."""
        raise _missing(self, "set_updater")

    def _set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Call `set_updater`; MXNet's tutorial of its KVStore uses this name."""
        self.set_updater(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushed gradients from now on by the method `compression_params["type"]`."""
        raise _missing(self, "set_gradient_compression")

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file, atomically."""
        raise _missing(self, "save_optimizer_states")

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote."""
        raise _missing(self, "load_optimizer_states")

    def replace(self, key: Any, value: Any) -> None:
        """Overwrite stored values without calling the updater, whose states stay as they are.

        Raises:
            RuntimeError: stores of this class cannot do so.
        """
        raise RuntimeError(
            f"a store of type {self.type!r} does not take other values once it is filled: do not change weights while the "
            "store updates them, or make a new trainer afterwards"
        )

    def barrier(self) -> None:  # one process has nothing to wait for
        """Wait until all workers have called this method."""

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Return whether stores of this class have a capability; a subclass may override it.

        Args:
            capability: "optimizer", in upper or lower case: the store can update what it stores, since it defines
                `set_optimizer`.

        Raises:
            ValueError: `capability` is another word.
        """
        choice("capability", capability, CAPABILITIES, ignore_case=True)
        return cls.set_optimizer is not KVStore.set_optimizer


def _missing(store: KVStore, method: str) -> NotImplementedError:
    return NotImplementedError(f"a store of type {store.type or type(store).__name__!r} does not define {method}()")


KVStore.kv_registry = Registry(
    "store", KVStore, hint="A class of your own needs @tristep.kvstore.register", contrib="stores"
)
KVStoreBase = KVStore
register = KVStore.register


def registered() -> dict[str, type[KVStore]]:
    """Return the registered store classes by name; those of `tristep.contrib` are registered when they are first used."""
    return dict(sorted(KVStore.kv_registry.items()))


def pairs(key: Any, value: Any, what: str) -> list[tuple[Key, list[torch.Tensor]]]:
    """Return the keys of a call, each with its list of tensors.

    `value` is a tensor or a list of tensors for a single key; for a list of keys a list with one of these for each. `what`
    is the name of the argument in messages.
    """
    if isinstance(key, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(key) != len(value):
            count = len(value) if isinstance(value, (list, tuple)) else 1
            raise ValueError(f"{len(key)} keys came with {count} for {what}: there must be one, or a list, for each key")
        entries = list(zip(key, value, strict=True))
    else:
        entries = [(key, value)]
    listed = []
    for name, values in entries:
        if isinstance(name, bool) or not isinstance(name, (int, str)):
            raise TypeError(f"key must be an int or a string, got {name!r} ({type(name).__name__})")
        tensors = list(values) if isinstance(values, (list, tuple)) else [values]
        if not tensors:
            raise ValueError(f"{what} of key {name!r} is empty")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{what} of key {name!r} must be a tensor or a list of them, got {type(tensor).__name__}")
        listed.append((name, tensors))
    return listed


def new_values(key: Any, value: Any, known: Collection[Key]) -> dict[Key, torch.Tensor]:
    """Return the tensor of each new key in a call of `init`; raise if a key is in `known` or comes twice."""
    entries = pairs(key, value, "value")
    keys = [name for name, _ in entries]
    for name, tensors in entries:
        if len(tensors) != 1:
            raise ValueError(f"value of key {name!r} is a list of {len(tensors)}: init takes one tensor for each key")
        if name in known or keys.count(name) > 1:
            raise ValueError(f"key {name!r} has been initialized already: init takes each key once")
    if len({type(name) for name in (*keys, *known)}) > 1:
        raise TypeError("keys must be all int or all str in one store, these are of both kinds")
    return {name: tensors[0].detach() for name, tensors in entries}


def known_values(key: Any, value: Any, what: str, stored: Mapping[Key, Any]) -> list[tuple[Key, list[torch.Tensor]]]:
    """Return the keys of a call with their tensors, as `pairs` does; raise if a key is not stored or a shape differs."""
    entries = pairs(key, value, what)
    for name, tensors in entries:
        same_shapes(name, tensors, known_value(name, stored), what)
    return entries


def dense(key: Key, tensor: torch.Tensor, why: str) -> torch.Tensor:
    """Return the tensor unchanged; raise TypeError, whose message ends in `why`, if it is sparse."""
    if tensor.layout != torch.strided:
        raise TypeError(f"value of key {key!r} is sparse ({tensor.layout}): {why}")
    return tensor


def known_value(key: Key, stored: Mapping[Key, _Value]) -> _Value:
    """Return the stored value of a key; raise ValueError if the key has not been initialized."""
    if key not in stored:
        keys = listed(map(repr, stored)) or "none"
        raise ValueError(f"key {key!r} has not been initialized (there are {keys}): call init() first")
    return stored[key]


def same_shapes(key: Key, tensors: Sequence[torch.Tensor], like: Any, what: str) -> None:
    """Raise ValueError unless all tensors have the shape of the stored value `like`."""
    for tensor in tensors:
        if tensor.shape != like.shape:
            raise ValueError(f"{what} of key {key!r} is {tuple(tensor.shape)}, the stored value is {tuple(like.shape)}")


def renamed(states: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return collected states with parameters renamed by the dict `names`, from old to new names."""
    by_name = ("counts", "parameters", "layout", "state")
    return {
        section: {names.get(name, name): value for name, value in part.items()} if section in by_name else part
        for section, part in states.items()
    }


def optimizer_updater(updater: Any) -> Updater:
    """Return a store's updater if it is an optimizer's; raise RuntimeError if not, as there are no states then."""
    if not isinstance(updater, Updater):
        raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
    return updater
