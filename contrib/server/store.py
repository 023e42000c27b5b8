"""A worker's side of a parameter server: a store whose values are on the servers."""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...trainer import checkpoint
from ...trainer.kvstore.base import Key, KVStore, dense, known_values, new_values, renamed
from ...trainer.kvstore.sync import KVStoreSync, Residuals
from ...trainer.lr_scheduler import LRScheduler
from ...trainer.optimizer import MultiOptimizer, Optimizer, Updater
from ...trainer.optimizer.counts import StepCounts
from .client import ServerClient
from .compression import PushCompression, compressor_of
from .core import check_fits, takes_parts
from .job import Roles
from .loop import ServerLoop
from .sharding import Entry, Placement, Shard, join_states, states_of_server, with_tensors, without_tensors
from .transport import Opcode, copy_all

_TAKE_DENSE = "servers take dense tensors; use to_dense()"
_OUTSTANDING = 2  # pushes that a server need not have taken yet when `push` returns
_open: list[ServerStore] = []  # in this process


class Staleness(NamedTuple):
    """How old a worker's gradients were: how often a key was updated between the worker's pull and its push.

    Attributes:
        mean: over all pushes of all keys; 0 without any.
        max: the oldest.
        histogram: how many gradients were so many updates old.
    """

    mean: float
    max: int
    histogram: dict[int, int]


class SyncedSettings:
    """A server's knowledge of a worker's optimizer.

    Args:
        optimizer: the one that the server has been sent.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._settings = {name: value for name, value in optimizer.settings().items() if name != "rescale_grad"}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)
        self._multipliers: dict[Key, tuple[float, float]] = {}

    def changes(self, optimizer: Optimizer, keys: Sequence[Key]) -> dict[str, Any]:
        """What the server does not know yet, for `ServerCore.change`, of these keys' multipliers."""
        changes: dict[str, Any] = {}
        settings, missing = optimizer.settings(), object()
        if settings != self._settings:
            changes["settings"] = {k: v for k, v in settings.items() if self._settings.get(k, missing) != v}
        if _comparable(optimizer.lr_scheduler) != self._lr_scheduler:
            changes["lr_scheduler"] = optimizer.lr_scheduler
        by_name, own = bool(optimizer.lr_mult or optimizer.wd_mult), optimizer.param_dict
        multipliers = {
            key: optimizer.multipliers(key) if by_name or getattr(own.get(key), "__dict__", None) else (1.0, 1.0)
            for key in keys
        }
        if new := {key: pair for key, pair in multipliers.items() if pair != self._multipliers.get(key, (1.0, 1.0))}:
            changes["multipliers"] = new
        return changes

    def record(self, changes: dict[str, Any]) -> None:
        """The server has been sent these."""
        self._settings |= changes.get("settings", {})
        if "lr_scheduler" in changes:
            self._lr_scheduler = _comparable(changes["lr_scheduler"])
        self._multipliers |= changes.get("multipliers", {})

    def record_loaded(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """The server has loaded the schedule and these settings from saved states, as this optimizer has them now."""
        self._settings |= {name: getattr(optimizer, name) for name in names}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)


class ServerStore(KVStore):
    """A worker's side of the servers: what `kvstore.create("dist_async")` makes.

    Each push is applied by the servers as soon as it comes. `push` returns when its values have been copied, and a few may
    be on their way then; an error that a server has with one is raised by the next call that waits for the server: a pull,
    or a push when too many are on their way. `pull` gives values with all of this worker's own pushes in them. One thread at
    a time may use a store.

    The optimizer stays the worker's to change: what has changed of its settings, schedule and multipliers goes along with
    the next push, and counts for all workers from then on, but for `rescale_grad`, which counts for this worker's pushes.

    Attributes:
        rank, num_workers: among the workers alone.
        num_servers: how many servers there are.
        placement: which servers have which elements of each key.

    Source: MXNet 1.9.1, `KVStoreDist` and `KVStoreDistServer`.
    """

    takes_lists = several_processes = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """The store, in a worker. A server serves until all workers have closed theirs, and then ends the process.

        All processes must call it. The processes are those of torch.distributed's default process group, which is made
        from `torchrun`'s environment if there is none.

        Args:
            name: "dist_async" keeps values on the servers' CPUs, "dist_device_async" on their GPUs where they have any.
            timeout: seconds after which a process that has not been heard of counts as lost, > 0; None means 30 minutes.
                One that ends is noticed at once.

        Raises:
            ValueError: fewer processes than servers and one worker, or TRISTEP_NUM_SERVERS is no integer >= 1.
            RuntimeError: the environment says nothing of other processes, or a store is open already.

        Source: MXNet 1.9.1, `mx.kv.create`, and `kvstore_server.py`, which ends a server's process in the same way.
        """
        if _open:
            raise RuntimeError(f"{_open[0]!r} is open: servers serve one store at a time; use it again, or close() it first")
        roles = Roles.of_this_job(timeout)
        if roles.rank >= roles.workers:
            ServerLoop(roles, name).run()
            sys.exit(0)
        return cls(roles, name)

    @classmethod
    def check_compression(cls, compression_params: Mapping[str, Any]) -> None:
        """As for `KVStore.check_compression`: "powersgd" and "auto" do not fit."""
        compressor_of(compression_params)

    def __init__(self, roles: Roles, type: str) -> None:
        self.type = type
        self.rank, self.num_workers, self.num_servers = roles.rank, roles.workers, roles.servers
        self._client = ServerClient(roles, self._follow)
        self.placement = Placement(roles.servers)
        self._optimizer: Optimizer | None = None
        self._synced: list[SyncedSettings] = []  # by server, once there is an optimizer
        self._calls = Counter[str]()  # of what all workers may call, for the servers to do once
        self._has_updater = False
        self._compression: PushCompression | None = None
        _open.append(self)
        atexit.register(self.close)

    def init(self, key: Any, value: Any) -> None:
        """Begin with the value of rank 0. All workers must call it, with values of equal shapes, and wait for each other.

        An array of 1,000,000 elements (MXNET_KVSTORE_BIGARRAY_BOUND) or more is cut over all servers, unless an optimizer
        that needs it whole has been set before.

        Raises:
            TypeError, ValueError: a key of another kind than those before, or one that is there already, or a value that is
                no dense tensor, or is not as on rank 0.
        """
        given = {
            each: dense(each, tensor, _TAKE_DENSE) for each, tensor in new_values(key, value, self.placement.entries).items()
        }
        keys, values = list(given), list(given.values())
        if any(value.is_cuda for value in values):
            self._client.pin_memory()
        entries: dict[Key, Entry] | None = None
        if self.rank == 0:
            entries = self.placement.place(keys, values, not self._has_updater or takes_parts(self._optimizer))
        failure: tuple[str, str] | None = None
        if entries is not None:
            try:
                self._send_values(entries, values)
            except (ValueError, TypeError) as error:  # for all workers, who would wait otherwise
                failure = "TypeError" if isinstance(error, TypeError) else "ValueError", str(error)
        found, failure = self._client.barrier("init", (entries, failure))
        if failure is not None:
            raise (TypeError if failure[0] == "TypeError" else ValueError)(failure[1])
        entries = {each: Entry(torch.Size(shape), dtype, parts) for each, (shape, dtype, parts) in found.items()}
        for each, tensor in zip(keys, values, strict=True):
            if each not in entries or entries[each].shape != tensor.shape or entries[each].dtype != tensor.dtype:
                theirs = f"{tuple(entries[each].shape)}, {entries[each].dtype}" if each in entries else "not there"
                raise ValueError(
                    f"value of key {each!r} is {tuple(tensor.shape)}, {tensor.dtype}; on rank 0 it is {theirs}: all workers "
                    "must have the same model"
                )
        self.placement.entries.update(entries)

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Send gradients, for the servers to update what is stored. `priority` has no meaning here.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been sent.
            RuntimeError: no worker has called `set_optimizer`, or a server had an error with this push or one before.
        """
        keys, totals = self._summed(key, value)
        shards = self._push(Opcode.PUSH, keys, totals)
        for shard in shards:
            self._client.drain(shard.server, _OUTSTANDING if self._has_updater else 0)
        self._client.raise_failure()
        self._has_updater = self._has_updater or not self._client.busy

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As `KVStore.pull`. It waits for the servers, and for this worker's own pushes, but for no other worker.

        Raises:
            TypeError, ValueError: keys or tensors that do not fit; nothing has been changed.
            RuntimeError: a server had an error.
        """
        found = known_values(key, out, "out", self.placement.entries)
        shards = self.placement.shards([each for each, _ in found])
        for shard in shards:
            self._client.request(shard.server, Opcode.PULL, (shard.keys, None, None))
        self._receive(shards, [tensors for _, tensors in found])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull`, in one message to each server and back."""
        keys, totals = self._summed(key, value)
        found = known_values(key, value if out is None else out, "out", self.placement.entries)
        self._receive(self._push(Opcode.PUSHPULL, keys, totals), [tensors for _, tensors in found])
        self._has_updater = True

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Send this optimizer to all servers, to update what is stored, with states of its own from now on.

        One worker may call it, or all: the first to call it for the nth time sets the nth optimizer. Others who push right
        after that need a `barrier` in between.

        Raises:
            TypeError: not an `Optimizer`, or one that cannot be sent: its attributes must be plain data, and its class must
                stand at the top level of a module that the servers have imported.
            ValueError: it needs arrays whole that have been cut already (call it before `init`), or all gradients together,
                and there are several servers.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}; see optimizer.create(name)")
        if isinstance(optimizer, MultiOptimizer):
            raise TypeError(
                f"optimizer={optimizer!r}: servers update with one optimizer; use a synchronous store, such as 'dist_sync'"
            )
        check_fits(optimizer, self.placement.cut, self.num_servers)
        self._set(_bare_copy(optimizer))
        self._optimizer = optimizer
        self._synced = [SyncedSettings(optimizer) for _ in range(self.num_servers)]

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Let `updater(key, pushed, stored)` change what is stored, in place, on the servers.

        Raises:
            TypeError: not callable, or no function that is registered with `register_updater`.
            ValueError: an array has been cut already: call it before `init`.
        """
        if not callable(updater):
            raise TypeError(f"updater must be a function (key, pushed, stored), got {type(updater).__name__}")
        check_fits(updater, self.placement.cut, self.num_servers)
        self._set(updater)
        self._optimizer = None

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what this worker pushes from now on. What it pulls goes as it is.

        What goes to one server in one message is encoded together, and what that leaves out is kept back, by key, for the
        next push of it.

        Args:
            compression_params: as for `create_compressor`, but not "powersgd" nor "auto". A user-defined type must be
                registered before the store is made, for the servers to know it.

        Raises:
            TypeError, ValueError: they do not fit; nothing has been changed.

        Source: MXNet 1.9.1, `KVStoreDist`, for "2bit".
        """
        self._compression = PushCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Gather the states from all servers and write them to one file. One worker is enough; any may call it.

        Each server's states are those between two updates. For states of one moment, let all workers call `barrier` before
        and after it. Arrays that are cut over servers are whole in the file, so that any number of servers can read it.

        Raises:
            RuntimeError: no optimizer updates what is stored.
        """
        checkpoint.write(fname, self._states())

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote. Call it on one worker, or on all: the servers take the first.

        The settings and the schedule of this worker's optimizer become the saved ones, too.

        Raises:
            RuntimeError: this worker has not called `set_optimizer`.
            ValueError, FileNotFoundError: there is no such file, or it does not fit; nothing has been changed.
        """
        if self._optimizer is None:
            raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
        self._load_states(checkpoint.read(fname))

    def staleness(self) -> dict[int, Staleness]:
        """How old each worker's gradients were when they were applied; see `Staleness`.

        A key counts once for each server that has a part of it.
        """
        for server in range(self.num_servers):
            self._client.request(server, Opcode.STALENESS)
        found = [Counter[int]() for _ in range(self.num_workers)]
        for message in self._client.finish():
            for total, delays in zip(found, message.value(), strict=True):
                total.update(delays)
        return {worker: _staleness(delays) for worker, delays in enumerate(found)}

    def barrier(self) -> None:
        """Wait for all workers.

        Raises:
            RuntimeError: one of them is gone, or has closed its store.
        """
        self._client.barrier("barrier", None)

    def close(self) -> None:
        """Tell the servers that this worker is finished: they end when all are. Done at the interpreter's exit otherwise.

        Raises:
            RuntimeError: a server had an error with a push that was on its way, or is gone.
        """
        if self not in _open:
            return
        try:
            self._client.close()
        finally:
            _open.remove(self)
            atexit.unregister(self.close)

    def __repr__(self) -> str:
        return f"ServerStore({self.type!r}, worker {self.rank} of {self.num_workers}, {len(self.placement.entries)} keys)"

    def _states(self) -> dict[str, Any]:
        for server in range(self.num_servers):
            self._client.request(server, Opcode.SAVE)
        parts = []
        for message in self._client.finish():
            parts.append(with_tensors(message.value(), [tensor.clone() for tensor in message.tensors()]))
            self._client.release(message)
        return join_states(parts, self.placement.entries)

    def _load_states(self, saved: Mapping[str, Any]) -> None:
        assert self._optimizer is not None
        entries = self.placement.entries
        params = [torch.empty(entry.shape, dtype=entry.dtype) for entry in entries.values()]
        # One like the servers' takes them first, so that no server has to refuse them.
        twin = Updater(copy.deepcopy(_bare_copy(self._optimizer)))
        checkpoint.restore(twin, [str(key) for key in entries], params, saved, list(entries))
        self._calls["load"] += 1
        for server in range(self.num_servers):
            value, tensors = without_tensors(states_of_server(saved, entries, server))
            self._client.request(server, Opcode.LOAD, value, tensors, self._calls["load"])
        self._client.finish()
        optimizer = self._optimizer
        loaded = [name for name in saved["settings"] if name not in ("state_dtype", "rescale_grad")]
        optimizer.set_together({name: getattr(twin.optimizer, name) for name in (*loaded, "lr_scheduler")}, True)
        optimizer.num_update = saved["num_update"]
        for synced in self._synced:
            synced.record_loaded(optimizer, loaded)

    def _send_values(self, entries: Mapping[Key, Entry], values: Sequence[torch.Tensor]) -> None:
        for shard in Placement(self.num_servers, entries).shards(list(entries)):
            cut = [key for key, (_, part) in zip(shard.keys, shard.parts, strict=True) if part is not None]
            self._client.request(shard.server, Opcode.INIT, (shard.keys, cut), shard.of(values))
        self._client.finish()

    def _summed(self, key: Any, value: Any) -> tuple[list[Key], list[torch.Tensor]]:
        """Each key with the sum of its tensors, in the order of their list."""
        found = known_values(key, value, "value", self.placement.entries)
        keys = [each for each, _ in found]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = []
        for each, tensors in found:
            total, *others = [dense(each, tensor.detach(), _TAKE_DENSE) for tensor in tensors]
            for other in others:
                total = total + other.to(total.device)
            totals.append(total)
        return keys, totals

    def _push(self, opcode: Opcode, keys: Sequence[Key], totals: Sequence[torch.Tensor]) -> list[Shard]:
        """Send gradients to the servers, compressed if that is wanted; what each server gets."""
        if self._compression is not None:
            self._compression.begin(keys, totals)
        shards = self.placement.shards(keys)
        for shard in shards:
            tensors, compression = shard.of(totals), None
            if self._compression is not None and any(tensor.numel() for tensor in tensors):
                compression, tensors = self._compression.encode(shard, tensors)
            changes = self._synced[shard.server].changes(self._optimizer, keys) if self._optimizer is not None else {}
            self._client.request(shard.server, opcode, (shard.keys, changes or None, compression), tensors)
            if changes:
                self._synced[shard.server].record(changes)
        return shards

    def _receive(self, shards: Sequence[Shard], outs: Sequence[Sequence[torch.Tensor]]) -> None:
        wholes: dict[int, torch.Tensor] = {}  # of arrays that come in parts, for those that cannot be written to in parts
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        messages = self._client.finish([shard.server for shard in shards])
        for shard, message in zip(shards, messages, strict=True):
            for (i, part), value in zip(shard.parts, message.tensors(), strict=True):
                for out in outs[i]:
                    if part is None:
                        into.append(out)
                    elif out.is_contiguous():
                        into.append(out.view(-1)[part])
                    else:
                        whole = wholes.setdefault(id(out), torch.empty(out.shape, dtype=value.dtype))
                        into.append(whole.view(-1)[part])
                    values.append(value)
        copy_all(into, values)
        for tensors in outs:
            for out in tensors:
                if id(out) in wholes:
                    out.copy_(wholes[id(out)])
        for message in messages:
            self._client.release(message)

    def _set(self, updater: Any) -> None:
        self._calls["set"] += 1
        for server in range(self.num_servers):
            self._client.request(server, Opcode.UPDATER, updater, number=self._calls["set"])
        self._client.finish()
        self._has_updater = True

    def _follow(self, num_update: int) -> None:
        """Keep the optimizer's count of updates that of the servers."""
        if self._optimizer is not None:
            self._optimizer.num_update = max(self._optimizer.num_update, num_update)
            if self._optimizer.lr_scheduler is not None:  # it may want to know where training is, as that on the server does
                self._optimizer.lr_scheduler(self._optimizer.num_update)


class ServerSync(KVStoreSync):
    """Replicas in one process of several that meet in a `ServerStore`."""

    store: ServerStore

    def state_dict(self) -> dict[str, Any]:
        return renamed(self.store._states(), self._by_key)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.store._load_states(renamed(state, {name: key for key, name in self._by_key.items()}))

    def residuals(self) -> Residuals:
        store = self.store
        kept = {} if store._compression is None else store._compression.residuals
        return {self._by_key[str(key)]: {str(store.rank): each.to("cpu", copy=True)} for key, each in kept.items()}

    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """This worker's own; of sources that are no workers here, its share."""
        store = self.store
        if store._compression is not None:
            by_key: dict[Key, Any] = {i: saved.get(name, {}) for i, name in enumerate(self._replicas[0].names)}
            store._compression.load_residuals(by_key, store.rank, store.num_workers)


ServerStore.sync_class = ServerSync


def _staleness(delays: Counter[int]) -> Staleness:
    count = sum(delays.values())
    mean = sum(delay * times for delay, times in delays.items()) / count if count else 0.0
    return Staleness(mean, max(delays, default=0), dict(sorted(delays.items())))


def _bare_copy(optimizer: Optimizer) -> Optimizer:
    """A copy without parameters, counts, and multipliers, which are sent separately."""
    bare = copy.copy(optimizer)
    bare.param_dict, bare.lr_mult, bare.wd_mult = {}, {}, {}
    bare.step_counts = StepCounts(bare.begin_num_update)
    return bare


def _comparable(lr_scheduler: Any) -> Any:
    """What tells whether a schedule has changed."""
    if isinstance(lr_scheduler, LRScheduler):
        try:
            return type(lr_scheduler), lr_scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return lr_scheduler
    return lr_scheduler
