"""`ServerStore`: a worker's side of a parameter server, a store whose values are on the servers."""

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
from ...trainer.kvstore.sync import KVStoreSync
from ...trainer.lr_scheduler import LRScheduler
from ...trainer.optimizer import MultiOptimizer, Optimizer, Updater
from ...trainer.optimizer.counts import StepCounts
from ...trainer.validation import instance
from .client import ServerClient
from .compression import PushCompression, compressor_of
from .core import check_fits, takes_parts
from .job import Roles
from .loop import ServerLoop
from .sharding import Entry, Placement, Shard, join_states, states_of_server, with_tensors, without_tensors
from .transport import Opcode, copy_all

_TAKE_DENSE = "servers take dense tensors; use to_dense()"
_OUTSTANDING = 2  # most pushes that a server has not answered when `push` returns
_open: list[ServerStore] = []  # open stores of this process


class Staleness(NamedTuple):
    """Ages of a worker's gradients: the number of updates of a key between the worker's pull and its push.

    Attributes:
        mean: the mean age over all pushes of all keys; 0 without pushes.
        max: the highest age.
        histogram: the number of gradients of each age.
    """

    mean: float
    max: int
    histogram: dict[int, int]


class SyncedSettings:
    """The settings of a worker's optimizer that a server has.

    Args:
        optimizer: the optimizer that has been sent to the server.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._settings = {name: value for name, value in optimizer.settings().items() if name != "rescale_grad"}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)
        self._multipliers: dict[Key, tuple[float, float]] = {}

    def changes(self, optimizer: Optimizer, keys: Sequence[Key]) -> dict[str, Any]:
        """Return the settings that the server lacks, for `ServerCore.change`, with the multipliers of these keys."""
        changes: dict[str, Any] = {}
        settings, missing = optimizer.settings(), object()
        if settings != self._settings:
            changes["settings"] = {k: v for k, v in settings.items() if self._settings.get(k, missing) != v}
        if _comparable(optimizer.lr_scheduler) != self._lr_scheduler:
            changes["lr_scheduler"] = optimizer.lr_scheduler
        by_name, params = bool(optimizer.lr_mult or optimizer.wd_mult), optimizer.param_dict
        multipliers = {
            key: optimizer.multipliers(key) if by_name or getattr(params.get(key), "__dict__", None) else (1.0, 1.0)
            for key in keys
        }
        if new := {key: pair for key, pair in multipliers.items() if pair != self._multipliers.get(key, (1.0, 1.0))}:
            changes["multipliers"] = new
        return changes

    def record(self, changes: dict[str, Any]) -> None:
        """Note that these changes have been sent to the server."""
        self._settings |= changes.get("settings", {})
        if "lr_scheduler" in changes:
            self._lr_scheduler = _comparable(changes["lr_scheduler"])
        self._multipliers |= changes.get("multipliers", {})

    def record_loaded(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """Note that the server has loaded the schedule and these settings, which `optimizer` has too, from saved states."""
        self._settings |= {name: getattr(optimizer, name) for name in names}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)


class ServerStore(KVStore):
    """A worker's store of values on parameter servers; `kvstore.create("dist_async")` returns it.

    Servers apply each push when it arrives. `push` returns when its values have been copied, with up to two pushes not yet
    answered. If one fails on a server, the next call that waits for that server raises the error: a `pull`, or a `push` with
    too many unanswered ones. `pull` returns values that include all pushes of this worker. Only one thread at a time may use
    a store.

    Changes of the worker's optimizer, to its settings, schedule and multipliers, are sent with the next push. They then hold
    for all workers, except for `rescale_grad`, which holds for the pushes of this worker.

    Attributes:
        rank, num_workers: the number of this worker, from 0, and the number of workers, without the servers.
        num_servers: the number of servers.
        placement: the servers and ranges of elements of each key.

    Source: MXNet 1.9.1, `KVStoreDist` and `KVStoreDistServer`.
    """

    takes_lists = several_processes = asynchronous = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """Return a new store in a worker. In a server, serve until all workers have closed theirs, then end the process.

        All processes of torch.distributed's default process group must call it. If there is no group, it is made from
        `torchrun`'s environment.

        Args:
            name: "dist_async" stores values on the servers' CPUs, "dist_device_async" on their GPUs if they have any.
            timeout: seconds without a message after which a process counts as lost, > 0. Default: None, 30 minutes. A
                process that ends is noticed at once.

        Raises:
            ValueError: there are fewer processes than servers plus one, or TRISTEP_NUM_SERVERS is not an integer >= 1.
            RuntimeError: the environment does not describe several processes, or a store is open already.

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
        """Raise TypeError or ValueError for invalid arguments; "powersgd" does not work with servers."""
        compressor_of(compression_params)

    def __init__(self, roles: Roles, type: str) -> None:
        self.type = type
        self.rank, self.num_workers, self.num_servers = roles.rank, roles.workers, roles.servers
        self._client = ServerClient(roles, self._follow)
        self.placement = Placement(roles.servers)
        self._optimizer: Optimizer | None = None
        self._synced: list[SyncedSettings] = []  # one per server, once there is an optimizer
        self._calls = Counter[str]()  # calls that all workers may make, and that servers handle once
        self._has_updater = False
        self._compression: PushCompression | None = None
        _open.append(self)
        atexit.register(self.close)

    def init(self, key: Any, value: Any) -> None:
        """Store the values of rank 0. All workers must call it, with values of equal shapes, and wait for each other.

        An array of 1,000,000 elements (MXNET_KVSTORE_BIGARRAY_BOUND) or more is sharded over all servers, unless an
        optimizer that needs it whole has been set before.

        Raises:
            TypeError: a key has another type than earlier keys, or a value is not a dense tensor.
            ValueError: a key is stored already, or the shape or dtype of a value differs from rank 0's.
        """
        new = {
            each: dense(each, tensor, _TAKE_DENSE) for each, tensor in new_values(key, value, self.placement.entries).items()
        }
        keys, values = list(new), list(new.values())
        if any(value.is_cuda for value in values):
            self._client.pin_memory()
        entries: dict[Key, Entry] | None = None
        if self.rank == 0:
            entries = self.placement.place(keys, values, not self._has_updater or takes_parts(self._optimizer))
        failure: tuple[str, str] | None = None
        if entries is not None:
            try:
                self._send_values(entries, values)
            except (ValueError, TypeError) as error:  # sent to all workers, which would wait otherwise
                failure = "TypeError" if isinstance(error, TypeError) else "ValueError", str(error)
        answer, failure = self._client.barrier("init", (entries, failure))
        if failure is not None:
            raise (TypeError if failure[0] == "TypeError" else ValueError)(failure[1])
        entries = {each: Entry(torch.Size(shape), dtype, parts) for each, (shape, dtype, parts) in answer.items()}
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
        """Send gradients to the servers, which update the stored values. `priority` has no effect.

        Raises:
            TypeError, ValueError: keys or values are invalid; nothing has been sent.
            RuntimeError: no worker has called `set_optimizer`, or this or an earlier push failed on a server.
        """
        keys, totals = self._summed(key, value)
        shards = self._push(Opcode.PUSH, keys, totals)
        for shard in shards:
            self._client.drain(shard.server, _OUTSTANDING if self._has_updater else 0)
        self._client.raise_failure()
        self._has_updater = self._has_updater or not self._client.busy

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values to `out`, after all pushes of this worker; other workers are not waited for.

        Raises:
            TypeError, ValueError: keys or tensors are invalid; nothing has been changed.
            RuntimeError: a request failed on a server.
        """
        outs = known_values(key, out, "out", self.placement.entries)
        shards = self.placement.shards([each for each, _ in outs])
        for shard in shards:
            self._client.request(shard.server, Opcode.PULL, (shard.keys, None, None))
        self._receive(shards, [tensors for _, tensors in outs])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push `value`, then pull into `out`, with one request to each server; None pulls into the pushed tensors."""
        keys, totals = self._summed(key, value)
        outs = known_values(key, value if out is None else out, "out", self.placement.entries)
        self._receive(self._push(Opcode.PUSHPULL, keys, totals), [tensors for _, tensors in outs])
        self._has_updater = True

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Send an optimizer to all servers, which update stored values by it from now on, with new states.

        One worker may call it, or all. Calls are matched by number: whoever makes its nth call first sets the nth optimizer,
        and the others' nth calls do nothing. Other workers need a `barrier` between that and their next push.

        Raises:
            TypeError: `optimizer` is not an `Optimizer`, or cannot be sent: its attributes must be plain data, and its class
                must be at the top level of a module that the servers have imported.
            ValueError: it needs whole arrays, and some are sharded already (call it before `init`), or it needs all
                gradients together, and there are several servers.
        """
        instance("optimizer", optimizer, Optimizer, "an Optimizer", "; see optimizer.create(name)")
        if isinstance(optimizer, MultiOptimizer):
            raise TypeError(
                f"optimizer={optimizer!r}: servers update with one optimizer; use a synchronous store, such as 'dist_sync'"
            )
        check_fits(optimizer, self.placement.cut, self.num_servers)
        self._set(_bare_copy(optimizer))
        self._optimizer = optimizer
        self._synced = [SyncedSettings(optimizer) for _ in range(self.num_servers)]

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Update stored values on the servers by `updater(key, pushed, stored)`, which changes `stored` in place.

        Raises:
            TypeError: `updater` is not callable, or is not registered with `register_updater`.
            ValueError: an array is sharded already: call it before `init`.
        """
        if not callable(updater):
            raise TypeError(f"updater must be a function (key, pushed, stored), got {type(updater).__name__}")
        check_fits(updater, self.placement.cut, self.num_servers)
        self._set(updater)
        self._optimizer = None

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress this worker's pushes from now on; pulled values are not compressed.

        All values of a message are encoded together. The encoding error of each key is added to its next push.

        Args:
            compression_params: the arguments of `create_compressor`, except "powersgd". A user-defined type must
                be registered before the store is made, so that the servers know it.

        Raises:
            TypeError, ValueError: `compression_params` are invalid; nothing has been changed.

        Source: MXNet 1.9.1, `KVStoreDist`, for "2bit".
        """
        self._compression = PushCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Gather the states of all servers, and write them to one file. Any worker may call it; one is enough.

        Servers save between two of their updates, not at the same time. For states of the same moment, let all workers call
        `barrier` before and after it. The file has whole arrays, so any number of servers can load it.

        Raises:
            RuntimeError: no optimizer updates the stored values.
        """
        checkpoint.write(fname, self._states())

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_optimizer_states`. One worker may call it, or all: the servers load the first request.

        It also sets the settings and the schedule of this worker's optimizer to the saved ones.

        Raises:
            RuntimeError: this worker has not called `set_optimizer`.
            FileNotFoundError: there is no such file.
            ValueError: the file does not fit; nothing has been changed.
        """
        if self._optimizer is None:
            raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
        self._load_states(checkpoint.read(fname))

    def staleness(self) -> dict[int, Staleness]:
        """Return the ages of the applied gradients of each worker, by the worker's number; see `Staleness`.

        A sharded key counts once per server.
        """
        for server in range(self.num_servers):
            self._client.request(server, Opcode.STALENESS)
        delays_of = [Counter[int]() for _ in range(self.num_workers)]
        for message in self._client.finish():
            for total, delays in zip(delays_of, message.value(), strict=True):
                total.update(delays)
        return {worker: _staleness(delays) for worker, delays in enumerate(delays_of)}

    def barrier(self) -> None:
        """Wait for all workers.

        Raises:
            RuntimeError: a worker is lost, or has closed its store.
        """
        self._client.barrier("barrier", None)

    def close(self) -> None:
        """Tell the servers that this worker has finished; they end when all have. Also called at the interpreter's exit.

        Raises:
            RuntimeError: an unanswered push failed on a server, or a server is lost.
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
        # A copy of the servers' optimizer loads the states first, so that no server raises an error.
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
        """Return the keys, and the sum of each key's tensors in the order of their list."""
        pushed = known_values(key, value, "value", self.placement.entries)
        keys = [each for each, _ in pushed]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = []
        for each, tensors in pushed:
            total, *replicas = [dense(each, tensor.detach(), _TAKE_DENSE) for tensor in tensors]
            for replica in replicas:
                total = total + replica.to(total.device)
            totals.append(total)
        return keys, totals

    def _push(self, opcode: Opcode, keys: Sequence[Key], totals: Sequence[torch.Tensor]) -> list[Shard]:
        """Send gradients to the servers, compressed if compression is set, and return the shard of each server."""
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
        wholes: dict[int, torch.Tensor] = {}  # buffers of sharded arrays whose `out` is not contiguous
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
        """Set the optimizer's count of updates to the servers', if that is higher."""
        if self._optimizer is not None:
            self._optimizer.num_update = max(self._optimizer.num_update, num_update)
            if self._optimizer.lr_scheduler is not None:  # a schedule may have state, as on the server
                self._optimizer.lr_scheduler(self._optimizer.num_update)


class ServerSync(KVStoreSync):
    """Synchronization of the replicas in one of several processes through a `ServerStore`."""

    store: ServerStore

    def state_dict(self) -> dict[str, Any]:
        return renamed(self.store._states(), self._by_key)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.store._load_states(renamed(state, {name: key for key, name in self._by_key.items()}))

    def sum_state(self) -> dict[str, Any]:
        store = self.store
        by_key = {} if store._compression is None else store._compression.residuals
        residuals = {self._by_key[str(key)]: {str(store.rank): each.to("cpu", copy=True)} for key, each in by_key.items()}
        return {"residuals": residuals} if residuals else {}

    def load_sum_state(self, saved: Mapping[str, Any]) -> None:
        """Load this worker's residuals, and its share of residuals from sources that are not workers here."""
        store, residuals = self.store, saved.get("residuals", {})
        if store._compression is not None:
            by_key: dict[Key, Any] = {i: residuals.get(name, {}) for i, name in enumerate(self._replicas[0].names)}
            store._compression.load_residuals(by_key, store.rank, store.num_workers)


ServerStore.sync_class = ServerSync


def _staleness(delays: Counter[int]) -> Staleness:
    count = sum(delays.values())
    mean = sum(delay * times for delay, times in delays.items()) / count if count else 0.0
    return Staleness(mean, max(delays, default=0), dict(sorted(delays.items())))


def _bare_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy without parameters and counts, and without multipliers, which are sent separately."""
    bare = copy.copy(optimizer)
    bare.param_dict, bare.lr_mult, bare.wd_mult = {}, {}, {}
    bare.step_counts = StepCounts(bare.begin_num_update)
    return bare


def _comparable(lr_scheduler: Any) -> Any:
    """Return a value that changes when the schedule changes."""
    if isinstance(lr_scheduler, LRScheduler):
        try:
            return type(lr_scheduler), lr_scheduler.to_config()
        except TypeError:  # it contains a function that is not registered
            return lr_scheduler
    return lr_scheduler
