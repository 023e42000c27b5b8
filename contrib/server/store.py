"""`ServerStore`: a worker's side of a parameter server, a store whose values are on the server."""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ...trainer import serialization
from ...trainer.compression import create_compressor
from ...trainer.kvstore.base import Key, KVStore, dense, known_values, new_values, renamed
from ...trainer.kvstore.sync import KVStoreSync
from ...trainer.lr_scheduler import LRScheduler
from ...trainer.optimizer import MultiOptimizer, Optimizer, Updater
from ...trainer.optimizer.counts import StepCounts
from ...trainer.validation import instance
from .client import ServerClient
from .compression import PushCompression
from .job import Roles
from .loop import ServerLoop
from .transport import Opcode, copy_all, with_tensors, without_tensors

_TAKE_DENSE = "servers take dense tensors; use to_dense()"
_OUTSTANDING = 2  # most pushes that the server has not answered when `push` returns
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


class SyncedOptimizer:
    """A worker's optimizer, and which of its settings the server has.

    Args:
        optimizer: the optimizer that has been sent to the server.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._settings = {name: value for name, value in optimizer.settings().items() if name != "rescale_grad"}
        self._schedules = _comparable(optimizer)
        self._multipliers: dict[Key, tuple[float, float]] = {}

    def changes(self, keys: Sequence[Key]) -> dict[str, Any]:
        """Return the settings that the server lacks, for `ServerCore.change`, with the multipliers of these keys."""
        changes: dict[str, Any] = {}
        optimizer = self.optimizer
        settings, missing = optimizer.settings(), object()
        if settings != self._settings:
            changes["settings"] = {k: v for k, v in settings.items() if self._settings.get(k, missing) != v}
        if _comparable(optimizer) != self._schedules:
            changes |= {"lr_scheduler": optimizer.lr_scheduler, "schedules": dict(optimizer.schedules)}
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
            self._schedules = _comparable(self.optimizer)
        self._multipliers |= changes.get("multipliers", {})

    def record_loaded(self, names: Sequence[str]) -> None:
        """Note that the server has loaded the schedules and these settings, which the optimizer has, too, from a file."""
        self._settings |= {name: getattr(self.optimizer, name) for name in names}
        self._schedules = _comparable(self.optimizer)


class ServerStore(KVStore):
    """A worker's store of values on a parameter server; `kvstore.create("dist_async")` returns it.

    The server applies each push when it arrives. `push` returns when its values have been copied, with up to two pushes not
    yet answered. If one fails on the server, the next call that waits for it raises the error: a `pull`, or a `push` with
    too many unanswered ones. `pull` returns values that include all pushes of this worker. Only one thread at a time may use
    a store.

    Changes of the worker's optimizer, to its settings, schedule and multipliers, are sent with the next push. They then hold
    for all workers, except for `rescale_grad`, which holds for the pushes of this worker.

    Attributes:
        rank, num_workers: the number of this worker, from 0, and the number of workers, without the server.

    Source: MXNet 1.9.1, `KVStoreDist` and `KVStoreDistServer`.
    """

    takes_lists = several_processes = asynchronous = True

    @classmethod
    def open(cls, name: str, timeout: float | None = None) -> KVStore:
        """Return a new store in a worker. In the server, serve until all workers have closed theirs, then end the process.

        All processes of torch.distributed's default process group must call it; the last one is the server. If there is no
        group, it is made from `torchrun`'s environment.

        Args:
            name: "dist_async" stores values on the server's CPU, "dist_device_async" on its GPU if it has one.
            timeout: seconds without a message after which a process counts as lost, > 0. Default: None, 30 minutes. A
                process that ends is noticed at once.

        Raises:
            ValueError: there is one process, or the environment asks for several servers.
            RuntimeError: the environment does not describe several processes, or a store is open already.

        Source: MXNet 1.9.1, `mx.kv.create`, and `kvstore_server.py`, which ends a server's process in the same way.
        """
        if _open:
            raise RuntimeError(
                f"{_open[0]!r} is open: a server serves one store at a time; use it again, or close() it first"
            )
        roles = Roles.of_this_job(timeout)
        if roles.rank == roles.server:
            ServerLoop(roles, name).run()
            sys.exit(0)
        return cls(roles, name)

    @classmethod
    def check_compression(cls, compression_params: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for invalid arguments."""
        create_compressor(compression_params)

    def __init__(self, roles: Roles, type: str) -> None:
        self.type = type
        self.rank, self.num_workers = roles.rank, roles.workers
        self._client = ServerClient(roles, self._follow)
        self._entries: dict[Key, torch.Tensor] = {}  # meta tensors like the stored values
        self._synced: SyncedOptimizer | None = None
        self._calls = Counter[str]()  # calls that all workers may make, and that the server handles once
        self._has_optimizer = False  # whether a push cannot fail for the lack of one
        self._compression: PushCompression | None = None
        _open.append(self)
        atexit.register(self.close)

    def init(self, key: Any, value: Any) -> None:
        """Store the values of rank 0. All workers must call it, with values of equal shapes, and wait for each other.

        Raises:
            TypeError: a key has another type than earlier keys, or a value is not a dense tensor.
            ValueError: a key is stored already, or the shape or dtype of a value differs from rank 0's.
        """
        new = {each: dense(each, tensor, _TAKE_DENSE) for each, tensor in new_values(key, value, self._entries).items()}
        keys, values = list(new), list(new.values())
        if any(value.is_cuda for value in values):
            self._client.pin_memory()
        failure: tuple[str, str] | None = None
        if self.rank == 0:
            try:
                self._client.request(Opcode.INIT, keys, values)
                self._client.finish()
            except (ValueError, TypeError) as error:  # sent to all workers, which would wait otherwise
                failure = "TypeError" if isinstance(error, TypeError) else "ValueError", str(error)
        kinds = {each: (tensor.shape, tensor.dtype) for each, tensor in new.items()}
        kinds, failure = self._client.barrier("init", (kinds, failure))
        if failure is not None:
            raise (TypeError if failure[0] == "TypeError" else ValueError)(failure[1])
        entries = {each: torch.empty(shape, dtype=dtype, device="meta") for each, (shape, dtype) in kinds.items()}
        for each, tensor in new.items():
            if each not in entries or entries[each].shape != tensor.shape or entries[each].dtype != tensor.dtype:
                theirs = f"{tuple(entries[each].shape)}, {entries[each].dtype}" if each in entries else "not there"
                raise ValueError(
                    f"value of key {each!r} is {tuple(tensor.shape)}, {tensor.dtype}; on rank 0 it is {theirs}: all workers "
                    "must have the same model"
                )
        self._entries.update(entries)

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Send gradients to the server, which updates the stored values. `priority` has no effect.

        Raises:
            TypeError, ValueError: keys or values are invalid; nothing has been sent.
            RuntimeError: no worker has called `set_optimizer`, or this or an earlier push failed on the server.
        """
        self._push(Opcode.PUSH, *self._summed(key, value))
        self._client.drain(_OUTSTANDING if self._has_optimizer else 0)
        self._client.raise_failure()
        self._has_optimizer = True

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values to `out`, after all pushes of this worker; other workers are not waited for.

        Raises:
            TypeError, ValueError: keys or tensors are invalid; nothing has been changed.
            RuntimeError: a request failed on the server.
        """
        outs = known_values(key, out, "out", self._entries)
        self._client.request(Opcode.PULL, ([each for each, _ in outs], None, None))
        self._receive([tensors for _, tensors in outs])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push `value`, then pull into `out`, with one request; None pulls into the pushed tensors."""
        keys, totals = self._summed(key, value)
        outs = known_values(key, value if out is None else out, "out", self._entries)
        self._push(Opcode.PUSHPULL, keys, totals)
        self._receive([tensors for _, tensors in outs])
        self._has_optimizer = True

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Send an optimizer to the server, which updates stored values by it from now on, with new states.

        One worker may call it, or all. Calls are matched by number: whoever makes its nth call first sets the nth optimizer,
        and the others' nth calls do nothing. Other workers need a `barrier` between that and their next push.

        Raises:
            TypeError: `optimizer` is not an `Optimizer`, or cannot be sent: its attributes must be plain data, and its class
                must be at the top level of a module that the server has imported.
        """
        instance("optimizer", optimizer, Optimizer, "an Optimizer", "; see optimizer.create(name)")
        if isinstance(optimizer, MultiOptimizer):
            raise TypeError(
                f"optimizer={optimizer!r}: a server updates with one optimizer; use a synchronous store, such as 'dist_sync'"
            )
        self._calls["set"] += 1
        self._client.request(Opcode.OPTIMIZER, _bare_copy(optimizer), number=self._calls["set"])
        self._client.finish()
        self._synced, self._has_optimizer = SyncedOptimizer(optimizer), True

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress this worker's pushes from now on; pulled values are not compressed.

        All values of a message are encoded together. The encoding error of each key is added to its next push.

        Args:
            compression_params: the arguments of `create_compressor`. A user-defined type must be registered before the store
                is made, so that the server knows it.

        Raises:
            TypeError, ValueError: `compression_params` are invalid; nothing has been changed.

        Source: MXNet 1.9.1, `KVStoreDist`, for "2bit".
        """
        self._compression = PushCompression(compression_params)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Fetch the server's states, and write them to a file. Any worker may call it; one is enough.

        The server saves between two of its updates.

        Raises:
            RuntimeError: no optimizer updates the stored values.
        """
        serialization.write(fname, self._states())

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file of `save_optimizer_states`. One worker may call it, or all: the server loads the first request.

        It also sets the settings and the schedule of this worker's optimizer to the saved ones.

        Raises:
            RuntimeError: this worker has not called `set_optimizer`.
            FileNotFoundError: there is no such file.
            ValueError: the file does not fit; nothing has been changed.
        """
        if self._synced is None:
            raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
        self._load_states(serialization.read(fname))

    def staleness(self) -> dict[int, Staleness]:
        """Return the ages of the applied gradients of each worker, by the worker's number; see `Staleness`."""
        self._client.request(Opcode.STALENESS)
        delays_of = self._client.finish().value()
        return {worker: _staleness(Counter(delays)) for worker, delays in enumerate(delays_of)}

    def barrier(self) -> None:
        """Wait for all workers.

        Raises:
            RuntimeError: a worker is lost, or has closed its store.
        """
        self._client.barrier("barrier", None)

    def close(self) -> None:
        """Tell the server that this worker has finished; it ends when all have. Also called at the interpreter's exit.

        Raises:
            RuntimeError: an unanswered push failed on the server, or the server is lost.
        """
        if self not in _open:
            return
        try:
            self._client.close()
        finally:
            _open.remove(self)
            atexit.unregister(self.close)

    def __repr__(self) -> str:
        return f"ServerStore({self.type!r}, worker {self.rank} of {self.num_workers}, {len(self._entries)} keys)"

    def _states(self) -> dict[str, Any]:
        self._client.request(Opcode.SAVE)
        message = self._client.finish()
        states = with_tensors(message.value(), [tensor.clone() for tensor in message.tensors()])
        self._client.release(message)
        return states

    def _load_states(self, saved: Mapping[str, Any]) -> None:
        assert self._synced is not None
        entries, optimizer = self._entries, self._synced.optimizer
        params = [torch.empty(entry.shape, dtype=entry.dtype) for entry in entries.values()]
        # A copy of the server's optimizer loads the states first, so that the server raises no error.
        twin = Updater(copy.deepcopy(_bare_copy(optimizer)))
        serialization.restore(twin, [str(key) for key in entries], params, saved, list(entries))
        self._calls["load"] += 1
        self._client.request(Opcode.LOAD, *without_tensors(saved), self._calls["load"])
        self._client.finish()
        loaded = [name for name in saved["settings"] if name not in ("state_dtype", "rescale_grad")]
        optimizer.set_together(
            {name: getattr(twin.optimizer, name) for name in (*loaded, "lr_scheduler", "_schedules")}, True
        )
        optimizer.num_update = saved["num_update"]
        self._synced.record_loaded(loaded)

    def _summed(self, key: Any, value: Any) -> tuple[list[Key], list[torch.Tensor]]:
        """Return the keys, and the sum of each key's tensors in the order of their list."""
        pushed = known_values(key, value, "value", self._entries)
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

    def _push(self, opcode: Opcode, keys: Sequence[Key], gradients: Sequence[torch.Tensor]) -> None:
        """Send gradients to the server, compressed if compression is set."""
        compression, tensors = None, list(gradients)
        if self._compression is not None:
            compression, tensors = self._compression.encode(keys, gradients)
        changes = None if self._synced is None else self._synced.changes(keys)
        self._client.request(opcode, (list(keys), changes or None, compression), tensors)
        if self._synced is not None and changes:
            self._synced.record(changes)

    def _receive(self, outs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy each value of the answer to its tensors."""
        message = self._client.finish()
        pairs = [(out, value) for tensors, value in zip(outs, message.tensors(), strict=True) for out in tensors]
        copy_all([out for out, _ in pairs], [value for _, value in pairs])
        self._client.release(message)

    def _follow(self, num_update: int) -> None:
        """Set the optimizer's count of updates to the server's, if that is higher."""
        if self._synced is not None:
            optimizer = self._synced.optimizer
            optimizer.num_update = max(optimizer.num_update, num_update)
            if optimizer.lr_scheduler is not None:  # a schedule may have state, as on the server
                optimizer.lr_scheduler(optimizer.num_update)


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


def _comparable(optimizer: Optimizer) -> dict[str, Any]:
    """Return a value that changes when a schedule changes."""
    made: dict[str, Any] = {"lr": optimizer.lr_scheduler, **optimizer.schedules}
    for name, schedule in made.items():
        if isinstance(schedule, LRScheduler):
            with suppress(TypeError):  # it contains a function that is not registered
                made[name] = type(schedule), schedule.to_config()
    return made
