"""dist_async: workers that push gradients and pull weights without waiting for each other, and servers that update.

Of the processes that `torchrun` starts, the last TRISTEP_NUM_SERVERS (default 1) are servers. Each keeps some of the keys,
and a part of each large array. A worker sends each server one message for all keys that it pushes or pulls at once.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels import compress
from .. import checkpoint
from ..arguments import choice
from ..lr_scheduler import LRScheduler
from ..optimizer import Optimizer, Updater
from ..optimizer.counts import StepCounts
from .base import Key, KVStore, pairs, same_shapes
from .compressors import Compressor, create_compressor
from .messages import Channel, Kind, Layout, Message, Sent, Tag
from .server_core import check_fits, takes_parts
from .service import Roles, Service, copy_all, packed, unpacked, whole_number_of

__all__ = ["NAMES", "ServerStore", "Staleness", "compressor_of", "connect", "serve"]

NAMES = ("dist_async", "dist_device_async")
_TIMEOUT = 1800.0  # seconds; torch's own default for gloo
_OUTSTANDING = 2  # pushes that a server need not have taken yet when `push` returns
_BIG = 1_000_000  # elements from which an array is cut
_ERRORS = {klass.__name__: klass for klass in (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError)}
_open: list[ServerStore] = []  # in this process


def connect(name: str = "dist_async", timeout: float = _TIMEOUT) -> ServerStore:
    """The store of this name, in a worker. A server serves until all workers have closed theirs, and then ends the process.

    All processes must call it. The processes are those of torch.distributed's default process group, which is made from
    `torchrun`'s environment if there is none.

    Args:
        name: "dist_async" keeps values on the servers' CPUs, "dist_device_async" on their GPUs where they have any.
        timeout: seconds after which a process that has not been heard of counts as lost, > 0. One that ends is noticed at
            once.

    Raises:
        ValueError: fewer processes than servers and one worker, or TRISTEP_NUM_SERVERS is no integer >= 1.
        RuntimeError: the environment says nothing of other processes.

    Source: MXNet 1.9.1, `mx.kv.create`, and `kvstore_server.py`, which ends a server's process in the same way.
    """
    name = choice("name", name, NAMES, ignore_case=True)
    if _open:
        raise RuntimeError(f"{_open[0]!r} is open: servers serve one store at a time; use it again, or close() it first")
    roles = Roles.of_this_job(timeout)
    if roles.rank >= roles.workers:
        Service(roles, name).run()
        sys.exit(0)
    return ServerStore(roles, name)


def serve(name: str = "dist_async", timeout: float = _TIMEOUT) -> None:
    """Be a server until all workers have closed their stores. To be called where they call `connect`; as that otherwise.

    Raises:
        ValueError, RuntimeError: as `connect`; or this process is no server.
        TimeoutError: a worker has not been heard of for too long.
    """
    name, roles = choice("name", name, NAMES, ignore_case=True), Roles.of_this_job(timeout)
    if roles.rank < roles.workers:
        roles.leave()
        raise RuntimeError(
            f"rank {roles.rank} is a worker: of {roles.workers + roles.servers} processes the last {roles.servers} "
            "(TRISTEP_NUM_SERVERS) serve; call connect() here"
        )
    Service(roles, name).run()


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


class ServerStore(KVStore):
    """A worker's side of the servers. Made by `connect`.

    Each push is applied by the servers as soon as it comes. `push` returns when its values have been copied, and a few may
    be on their way then; an error that a server has with one is raised by the next call that waits for the server: a pull,
    or a push when too many are on their way. `pull` gives values with all of this worker's own pushes in them. One thread at
    a time may use a store.

    The optimizer stays the worker's to change: what has changed of its settings, schedule and multipliers goes along with
    the next push, and counts for all workers from then on, but for `rescale_grad`, which counts for this worker's pushes.

    Attributes:
        rank, num_workers: among the workers alone.
        num_servers: how many servers there are.

    Source: MXNet 1.9.1, `KVStoreDist` and `KVStoreDistServer`.
    """

    takes_lists = True

    def __init__(self, roles: Roles, type: str) -> None:
        self.type = type
        self.rank, self.num_workers, self.num_servers = roles.rank, roles.workers, roles.servers
        self._roles = roles
        self._channel = Channel(roles.group)
        self._pending: list[deque[tuple[Any, Sent]]] = [deque() for _ in range(roles.servers)]
        self._failures: list[Exception] = []
        self._entries: dict[Key, _Entry] = {}
        self._routes: dict[Any, list[_Leg]] = {}
        self._optimizer: Optimizer | None = None
        self._calls = Counter[str]()  # of what all workers may call, for the servers to do once
        self._has_updater = False
        self._compression: tuple[dict[str, Any], Compressor] | None = None
        self._kept: dict[tuple[Key, int], torch.Tensor] = {}  # what compression has kept back, by key and server; flat
        self._told = [_Told({}, None) for _ in range(roles.servers)]
        self._lost = ""
        self._closed = False
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
        found = pairs(key, value, "value")
        keys = [each for each, _ in found]
        for each, tensors in found:
            if len(tensors) != 1:
                raise ValueError(f"value of key {each!r} is a list of {len(tensors)}: init takes one tensor for each key")
            if each in self._entries or keys.count(each) > 1:
                raise ValueError(f"key {each!r} has been initialized already: init takes each key once")
        if len({type(each) for each in (*keys, *self._entries)}) > 1:
            raise TypeError("keys must be all int or all str in one store, these are of both kinds")
        values = [_dense(each, tensors[0].detach()) for each, tensors in found]
        if any(value.is_cuda for value in values):
            self._channel.pool.pinned = True
        entries = self._place(keys, values) if self.rank == 0 else None
        failure: tuple[str, str] | None = None
        if entries is not None:
            try:
                self._send_values(entries, dict(zip(keys, values, strict=True)))
            except (ValueError, TypeError) as error:  # for all workers, who would wait otherwise
                failure = "TypeError" if isinstance(error, TypeError) else "ValueError", str(error)
        found, failure = self._barrier("init", (entries, failure))
        if failure is not None:
            raise _ERRORS[failure[0]](failure[1])
        entries = {each: _Entry(torch.Size(shape), dtype, parts) for each, (shape, dtype, parts) in found.items()}
        for each, tensor in zip(keys, values, strict=True):
            if each not in entries or entries[each].shape != tensor.shape or entries[each].dtype != tensor.dtype:
                theirs = f"{tuple(entries[each].shape)}, {entries[each].dtype}" if each in entries else "not there"
                raise ValueError(
                    f"value of key {each!r} is {tuple(tensor.shape)}, {tensor.dtype}; on rank 0 it is {theirs}: all workers "
                    "must have the same model"
                )
        self._entries.update(entries)

    @torch.no_grad()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Send gradients, for the servers to update what is stored. `priority` has no meaning here.

        Raises:
            TypeError, ValueError: keys or values that do not fit; nothing has been sent.
            RuntimeError: no worker has called `set_optimizer`, or a server had an error with this push or one before.
        """
        keys, totals = self._summed(key, value)
        push = self._push_route(keys, totals)
        self._send(Kind.PUSH, keys, push, totals, [])
        for leg in push:
            self._drain(leg.server, _OUTSTANDING if self._has_updater else 0)
        self._raise()
        self._has_updater = self._has_updater or not any(self._pending)

    @torch.no_grad()
    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As `KVStore.pull`. It waits for the servers, and for this worker's own pushes, but for no other worker.

        Raises:
            TypeError, ValueError: keys or tensors that do not fit; nothing has been changed.
            RuntimeError: a server had an error.
        """
        found = self._known(key, out, "out")
        legs = self._route([each for each, _ in found], [self._entries[each].dtype for each, _ in found])
        self._send(Kind.PULL, [], [], [], legs)
        self._receive(legs, [tensors for _, tensors in found])

    @torch.no_grad()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull`, in one message to each server and back."""
        keys, totals = self._summed(key, value)
        found = self._known(key, value if out is None else out, "out")
        push = self._push_route(keys, totals)
        legs = self._route(keys, [self._entries[each].dtype for each in keys])
        self._send(Kind.PUSHPULL, keys, push, totals, legs)
        self._receive(legs, [tensors for _, tensors in found])
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
        check_fits(optimizer, self._cut(), self.num_servers)
        self._set("optimizer", _bare(optimizer))
        self._optimizer = optimizer
        settings = {name: value for name, value in optimizer.settings().items() if name != "rescale_grad"}
        self._told = [_Told(dict(settings), _comparable(optimizer.lr_scheduler)) for _ in self._told]

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], None]) -> None:
        """Let `updater(key, pushed, stored)` change what is stored, in place, on the servers.

        Raises:
            TypeError: not callable, or no function at the top level of a module that the servers have imported.
            ValueError: an array has been cut already: call it before `init`.
        """
        if not callable(updater):
            raise TypeError(f"updater must be a function (key, pushed, stored), got {type(updater).__name__}")
        check_fits(updater, self._cut(), self.num_servers)
        self._set("updater", updater)
        self._optimizer = None

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what this worker pushes from now on. What it pulls goes as it is.

        What goes to one server in one message is encoded together, and what that leaves out is kept back, by key, for the
        next push of it.

        Args:
            compression_params: as for `create_compressor`, but not "powersgd" nor "auto". A type of one's own must be
                registered before the store is made, for the servers to know it.

        Raises:
            TypeError, ValueError: they do not fit; nothing has been changed.

        Source: MXNet 1.9.1, `KVStoreDist`, for "2bit".
        """
        compressor = compressor_of(compression_params)
        self._compression, self._kept, self._routes = (dict(compression_params), compressor), {}, {}

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Gather the states from all servers and write them to one file. One worker is enough; any may call it.

        Each server's states are those between two updates. For states of one moment, let all workers call `barrier` before
        and after it. Arrays that are cut over servers are whole in the file, so that any number of servers can read it.

        Raises:
            RuntimeError: no optimizer updates what is stored.
        """
        checkpoint.write(fname, self._gathered())

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read what `save_optimizer_states` wrote. Call it on one worker, or on all: the servers take the first.

        The settings and the schedule of this worker's optimizer become the saved ones, too.

        Raises:
            RuntimeError: this worker has not called `set_optimizer`.
            ValueError, FileNotFoundError: there is no such file, or it does not fit; nothing has been changed.
        """
        if self._optimizer is None:
            raise RuntimeError("no optimizer updates what is stored, so there are no states: call set_optimizer() first")
        saved, keys = checkpoint.read(fname), list(self._entries)
        params = [torch.empty(entry.shape, dtype=entry.dtype) for entry in self._entries.values()]
        # One like the servers' takes them first, so that no server has to refuse them.
        twin = Updater(copy.deepcopy(_bare(self._optimizer)))
        checkpoint.restore(twin, [str(key) for key in keys], params, saved, keys)
        self._calls["load"] += 1
        for server in range(self.num_servers):
            value, tensors = packed(self._part_of(saved, server))
            layout = Layout([tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors])
            self._request(server, Kind.LOAD, [self._calls["load"]], value, layout, tensors)
        self._finish_all()
        optimizer = self._optimizer
        loaded = [name for name in saved["settings"] if name not in ("state_dtype", "rescale_grad")]
        for attribute in loaded:
            setattr(optimizer, attribute, getattr(twin.optimizer, attribute))
        optimizer.lr_scheduler, optimizer.num_update = twin.optimizer.lr_scheduler, saved["num_update"]
        for told in self._told:
            told.settings |= {name: getattr(optimizer, name) for name in loaded}
            told.lr_scheduler = _comparable(optimizer.lr_scheduler)

    def staleness(self) -> dict[int, Staleness]:
        """How old each worker's gradients were when they were applied; see `Staleness`.

        A key counts once for each server that has a part of it.
        """
        for server in range(self.num_servers):
            self._request(server, Kind.STALENESS)
        found = [Counter[int]() for _ in range(self.num_workers)]
        for message in self._finish_all():
            for total, delays in zip(found, message.value(), strict=True):
                total.update(delays)
        return {worker: _staleness(delays) for worker, delays in enumerate(found)}

    def barrier(self) -> None:
        """Wait for all workers.

        Raises:
            RuntimeError: one of them is gone, or has closed its store.
        """
        self._barrier("barrier", None)

    def close(self) -> None:
        """Tell the servers that this worker is finished: they end when all are. Done at the interpreter's exit otherwise.

        Raises:
            RuntimeError: a server had an error with a push that was on its way, or is gone.
        """
        if self._closed:
            return
        try:
            if not self._lost:  # of which an error has told already
                for server in range(self.num_servers):
                    self._request(server, Kind.BYE)
                self._finish_all()
        finally:
            self._closed = True
            _open.remove(self)
            atexit.unregister(self.close)
            self._channel.close()
            self._roles.leave()

    def __repr__(self) -> str:
        return f"ServerStore({self.type!r}, worker {self.rank} of {self.num_workers}, {len(self._entries)} keys)"

    # Compression

    def _residuals(self) -> dict[tuple[Any, Any], torch.Tensor]:
        """As `KVStore._residuals`, but copies."""
        found = {}
        for key, entry in self._entries.items():
            parts = [self._kept.get((key, server)) for server, _, _ in entry.parts]
            if any(part is not None for part in parts):
                sizes = [stop - start for _, start, stop in entry.parts]
                flats = [torch.zeros(n) if part is None else part.cpu() for part, n in zip(parts, sizes, strict=True)]
                found[key, self.rank] = torch.cat(flats).view(entry.shape)
        return found

    def _load_residuals(self, saved: Mapping[Key, Mapping[str, torch.Tensor]]) -> bool:
        """This worker's own; of sources that are no workers here, its share."""
        if self._compression is None or not self._compression[1].error_feedback:
            return True
        workers = set(map(str, range(self.num_workers)))
        for key, sources in saved.items():
            entry = self._entries[key]
            own = torch.zeros(entry.shape.numel())
            for source, residual in sources.items():
                if source == str(self.rank):
                    own += residual.cpu().reshape(-1)
                elif source not in workers:
                    own += residual.cpu().reshape(-1) / self.num_workers
            for server, start, stop in entry.parts:
                part = own[start:stop]
                kept = self._kept.setdefault((key, server), part)
                if kept is not part:
                    kept.copy_(part)
        return True

    def _push_route(self, keys: Sequence[Key], totals: Sequence[torch.Tensor]) -> list[_Leg]:
        """As `_route`, for gradients, and with compression, if there is any."""
        dtypes = [total.dtype for total in totals]
        if self._compression is None or not keys:
            return self._route(keys, dtypes)
        for key, dtype in zip(keys, dtypes, strict=True):
            if dtype not in compress.VALUES:
                kinds = ", ".join(map(str, compress.VALUES))
                raise TypeError(f"the gradient of key {key!r} is {dtype}: compression takes {kinds}; convert the model")
        legs = self._route(keys, dtypes, totals[0].device)
        for leg in legs:
            for key, residual in zip(leg.keys, leg.residuals, strict=False):  # there may be none
                kept = self._kept.get((key, leg.server))
                if kept is not residual:  # another route, which has the key, too, was the last to push it
                    residual.zero_() if kept is None else residual.copy_(kept)
                    self._kept[key, leg.server] = residual
        return legs

    # Placing keys

    def _place(self, keys: Sequence[Key], values: Sequence[torch.Tensor]) -> dict[Key, _Entry]:
        """Where each key is to be. MXNet's places, but that an array stays whole where the optimizer needs it so."""
        bound = whole_number_of("MXNET_KVSTORE_BIGARRAY_BOUND", _BIG)
        may_cut = self.num_servers > 1 and (not self._has_updater or takes_parts(self._optimizer))
        entries = {}
        for place, (key, value) in enumerate(zip(keys, values, strict=True), len(self._entries)):
            size = value.numel()
            if may_cut and size >= bound:
                ends = [int(size * i / self.num_servers + 0.5) for i in range(self.num_servers + 1)]
                parts = [(server, ends[server], ends[server + 1]) for server in range(self.num_servers)]
                parts = [part for part in parts if part[1] < part[2]]
            else:
                number = key if isinstance(key, int) else place
                parts = [(number * 9973 % self.num_servers, 0, size)]
            entries[key] = _Entry(value.shape, value.dtype, tuple(parts))
        return entries

    def _cut(self) -> list[Key]:
        return [key for key, entry in self._entries.items() if len(entry.parts) > 1]

    def _send_values(self, entries: Mapping[Key, _Entry], values: Mapping[Key, torch.Tensor]) -> None:
        tensors = list(values.values())
        for server in range(self.num_servers):
            leg = self._leg(server, entries, list(values), [value.dtype for value in tensors])
            if leg.keys:
                cut = [key for key, (_, part) in zip(leg.keys, leg.places, strict=True) if part is not None]
                value = leg.keys, leg.shapes, leg.dtypes, cut
                self._request(server, Kind.INIT, [], value, leg.layout, leg.of(tensors))
        self._finish_all()

    def _leg(self, server: int, entries: Mapping[Key, _Entry], keys: Sequence[Key], dtypes: Sequence[torch.dtype]) -> _Leg:
        leg = _Leg(server, [], [], [], [])
        for i, (key, dtype) in enumerate(zip(keys, dtypes, strict=True)):
            entry = entries[key]
            for where, start, stop in entry.parts:
                if where == server:
                    whole = len(entry.parts) == 1
                    leg.keys.append(key)
                    leg.shapes.append(entry.shape if whole else torch.Size([stop - start]))
                    leg.dtypes.append(dtype)
                    leg.places.append((i, None if whole else slice(start, stop)))
        leg.layout = Layout(leg.shapes, leg.dtypes)
        return leg

    def _route(self, keys: Sequence[Key], dtypes: Sequence[torch.dtype], device: torch.device | None = None) -> list[_Leg]:
        """What of these keys each server has; those that have none are left out. `device`: compress it there."""
        what = tuple(keys), tuple(dtypes), device
        if what not in self._routes:
            legs = [self._leg(server, self._entries, keys, dtypes) for server in range(self.num_servers)]
            self._routes[what] = [leg for leg in legs if leg.keys]
            for leg in self._routes[what]:
                leg.number = len(self._routes)
                if device is not None and self._compression is not None:
                    leg.compress(*self._compression, device)
        return self._routes[what]

    def _known(self, key: Any, value: Any, what: str) -> list[tuple[Key, list[torch.Tensor]]]:
        found = pairs(key, value, what)
        for each, tensors in found:
            if each not in self._entries:
                known = ", ".join(map(repr, list(self._entries)[:8])) or "none"
                raise ValueError(f"key {each!r} has not been initialized (there are {known}): call init() first")
            for tensor in tensors:
                same_shapes(each, [tensor], self._entries[each], what)  # type: ignore[arg-type]  # its shape is all it reads
        return found

    def _summed(self, key: Any, value: Any) -> tuple[list[Key], list[torch.Tensor]]:
        """Each key with the sum of its tensors, in the order of their list."""
        found = self._known(key, value, "value")
        keys = [each for each, _ in found]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice in one push: push one after the other")
        totals = []
        for each, tensors in found:
            total, *others = [_dense(each, tensor.detach()) for tensor in tensors]
            for other in others:
                total = total + other.to(total.device)
            totals.append(total)
        return keys, totals

    # Messages

    def _send(
        self, kind: Kind, keys: Sequence[Key], push: list[_Leg], totals: Sequence[torch.Tensor], pull: list[_Leg]
    ) -> None:
        now = None if self._optimizer is None or not push else _Now(self._optimizer, keys)
        sending, getting = ({leg.server: leg for leg in legs} for legs in (push, pull))
        for server in sending.keys() | getting.keys():
            legs = [legs.get(server) for legs in (sending, getting)]
            changes = None if now is None else self._told[server].changes(now)
            new = {leg.number: leg.described() for leg in legs if leg is not None and not leg.told}
            leg = sending.get(server)
            numbers = [0 if leg is None else leg.number for leg in legs] + [0 if leg is None else leg.count]
            value = (new, changes) if new or changes else None
            if leg is None:
                self._request(server, kind, numbers, value)
            else:
                self._request(server, kind, numbers, value, leg.layout, leg.of(totals))
            for leg in legs:
                if leg is not None:
                    leg.told = True
            if changes:
                self._told[server].take(changes)

    def _receive(self, legs: list[_Leg], outs: Sequence[Sequence[torch.Tensor]]) -> None:
        wholes: dict[int, torch.Tensor] = {}  # of arrays that come in parts, for those that cannot be written to in parts
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        messages = self._finish_all([leg.server for leg in legs])
        for leg, message in zip(legs, messages, strict=True):
            for (i, part), value in zip(leg.places, message.tensors(leg.layout), strict=True):
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
            self._channel.pool.give(message.buffer)

    def _set(self, what: str, updater: Any) -> None:
        self._calls["set"] += 1
        for server in range(self.num_servers):
            self._request(server, Kind.OPTIMIZER, [self._calls["set"]], (what, updater))
        self._finish_all()
        self._has_updater = True

    def _barrier(self, what: str, value: Any) -> Any:
        """Wait for all workers; what rank 0 has brought."""
        for server in range(1, self.num_servers):
            self._drain(server, 0)
        self._request(0, Kind.BARRIER, [], (what, value))
        (message,) = self._finish_all([0])
        return message.value()

    def _gathered(self) -> dict[str, Any]:
        for server in range(self.num_servers):
            self._request(server, Kind.SAVE)
        parts = [unpacked(message) for message in self._finish_all()]
        counts: dict[str, int] = {}
        state: dict[str, dict[str, torch.Tensor]] = {}
        layout: dict[str, Any] = {}
        for part in parts:
            counts |= part["counts"]
            layout |= part["layout"]
        for key, entry in self._entries.items():
            found = [parts[server]["state"][str(key)] for server, _, _ in entry.parts]
            if len(found) == 1:
                state[str(key)] = found[0]
            else:
                state[str(key)] = {slot: torch.cat([each[slot] for each in found]).view(entry.shape) for slot in found[0]}
        return parts[0] | {
            "num_update": max(part["num_update"] for part in parts),
            "counts": counts,
            "parameters": {str(key): list(entry.shape) for key, entry in self._entries.items()},
            "layout": layout,
            "state": state,
        }

    def _part_of(self, saved: Mapping[str, Any], server: int) -> dict[str, Any]:
        """What of saved states a server is to have."""
        parts = {
            str(key): slice(start, stop) if len(entry.parts) > 1 else None
            for key, entry in self._entries.items()
            for where, start, stop in entry.parts
            if where == server
        }
        shapes = {
            name: saved["parameters"][name] if part is None else [part.stop - part.start] for name, part in parts.items()
        }
        state = {
            name: {slot: t if (part := parts[name]) is None else t.reshape(-1)[part] for slot, t in slots.items()}
            for name, slots in saved["state"].items()
            if name in parts
        }
        mine = {what: {name: v for name, v in saved[what].items() if name in parts} for what in ("counts", "layout")}
        return dict(saved) | mine | {"parameters": shapes, "state": state}

    def _request(
        self,
        server: int,
        kind: Kind,
        numbers: Sequence[int] = (),
        value: Any = None,
        layout: Layout | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Begin to ask a server for something. Its answer begins to be received, too, so that it can never be held up."""
        if self._closed or self._lost:
            raise RuntimeError(self._lost or "this store has been closed: make another one with connect()")
        try:
            encoded, buffer, room = self._channel.body(value, layout)
        except TypeError as error:
            raise TypeError(
                f"the servers cannot be sent {value!r} ({error}): attributes must be plain data, and classes and functions "
                "known by name at the top level of a module that is imported before the store is made"
            ) from error
        copy_all(room, tensors)
        peer = self.num_workers + server
        try:
            expected = self._channel.expect(peer, Tag.REPLY)
            sent = self._channel.send(peer, Tag.REQUEST, [int(kind), *numbers], encoded, buffer)
        except RuntimeError as error:
            raise self._without(server, error) from error
        self._pending[server].append((expected, sent))

    def _finish(self, server: int) -> Message:
        """The answer to the oldest request; an error in it is kept for `_raise`."""
        expected, sent = self._pending[server].popleft()
        try:
            message = self._channel.receive(self.num_workers + server, Tag.REPLY, expected)
            sent.wait()
        except RuntimeError as error:
            raise self._without(server, error) from error
        self._channel.pool.give(sent.buffer)
        failed, num_update = message.numbers[:2]
        if failed:
            name, text = message.value()
            known = _ERRORS.get(name)
            self._failures.append((known or RuntimeError)(f"server {server}: {text if known else f'{name}: {text}'}"))
        elif self._optimizer is not None:
            self._optimizer.num_update = max(self._optimizer.num_update, num_update)
            if self._optimizer.lr_scheduler is not None:  # it may want to know where training is, as that on the server does
                self._optimizer.lr_scheduler(self._optimizer.num_update)
        return message

    def _without(self, server: int, error: Exception) -> RuntimeError:
        """The error that this and every further call raises after a server has been lost."""
        self._lost = f"server {server} (rank {self.num_workers + server}) is gone: {error}"
        return RuntimeError(self._lost)

    def _drain(self, server: int, keep: int) -> None:
        while len(self._pending[server]) > keep:
            self._channel.pool.give(self._finish(server).buffer)

    def _finish_all(self, servers: Collection[int] | None = None) -> list[Message]:
        """The answers to the newest requests to these servers, by default all; raises the first error of any request."""
        messages = []
        for server in range(self.num_servers) if servers is None else servers:
            self._drain(server, 1)
            messages += [self._finish(server)] if self._pending[server] else []
        self._raise()
        return messages

    def _raise(self) -> None:
        if self._failures:
            failure, self._failures = self._failures[0], []
            raise failure


class _Entry(NamedTuple):
    """A key: its value's shape and type, and which servers have which elements of it."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[int, int, int], ...]  # server, first element, end


class _Leg:
    """What of some keys goes to one server, or comes from it."""

    def __init__(
        self,
        server: int,
        keys: list[Key],
        shapes: list[torch.Size],
        dtypes: list[torch.dtype],
        places: list[tuple[int, slice | None]],  # in the list of all keys, and of its elements; None for all of them
    ) -> None:
        self.server, self.keys, self.shapes, self.dtypes, self.places = server, keys, shapes, dtypes, places
        self.layout = Layout(shapes, dtypes)  # of what is sent
        self.number = 0  # by which the server knows it once it has been told
        self.told = False
        self.count = 0  # of compressed messages
        self.residuals: list[torch.Tensor] = []  # what compression keeps back of each key; flat
        self._kept: torch.Tensor | None = None  # the same memory in one
        self._compression: tuple[dict[str, Any], Compressor, torch.device] | None = None
        self._message: tuple[torch.Size, torch.dtype] | None = None

    def compress(self, params: dict[str, Any], compressor: Compressor, device: torch.device) -> None:
        """Send one message of this compressor from now on."""
        sizes = [shape.numel() for shape in self.shapes]
        if not sum(sizes):
            return
        message = compressor._encode(torch.zeros(sum(sizes), device=device), 0)
        self._compression, self._message = (params, compressor, device), (message.shape, message.dtype)
        self.layout = Layout([message.shape], [message.dtype])
        if compressor.error_feedback:
            self._kept = torch.zeros(sum(sizes), device=device)
            self.residuals = list(self._kept.split(sizes))

    def described(self) -> tuple[Any, ...]:
        """What the server is to be told of it."""
        packed = None if self._compression is None or self._message is None else (self._compression[0], *self._message)
        return self.keys, self.shapes, self.dtypes, packed

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of these that go to this server, or the message that says them."""
        parts = [tensors[i] if part is None else tensors[i].reshape(-1)[part] for i, part in self.places]
        if self._compression is None:
            return parts
        _, compressor, device = self._compression
        values = torch.cat([part.detach().reshape(-1).to(device, torch.float32) for part in parts])
        message = compressor._message(values, self._kept, self.count)
        if (message.shape, message.dtype) != self._message:
            raise ValueError(
                f"{compressor!r}: encode gave {message.dtype} {tuple(message.shape)}, and of as many zeros "
                f"{self._message}: the size of a message must follow from that of the values"
            )
        self.count += 1
        return [message]


class _Now:
    """What a worker's optimizer says at present: settings, schedule, and the multipliers of some keys."""

    def __init__(self, optimizer: Optimizer, keys: Sequence[Key]) -> None:
        self.settings = optimizer.settings()
        self.lr_scheduler = optimizer.lr_scheduler
        self.comparable = _comparable(optimizer.lr_scheduler)
        by_name = bool(optimizer.lr_mult or optimizer.wd_mult)
        own = optimizer.param_dict
        self.multipliers = {
            key: optimizer.multipliers(key) if by_name or getattr(own.get(key), "__dict__", None) else (1.0, 1.0)
            for key in keys
        }


class _Told:
    """What a server has been told of this worker's optimizer."""

    def __init__(self, settings: dict[str, Any], lr_scheduler: Any) -> None:
        self.settings = settings
        self.lr_scheduler = lr_scheduler
        self.multipliers: dict[Key, tuple[float, float]] = {}

    def changes(self, now: _Now) -> dict[str, Any]:
        """What the server does not know yet, for `ServerCore.change`."""
        changes: dict[str, Any] = {}
        if now.settings != self.settings:
            missing = object()
            changes["settings"] = {k: v for k, v in now.settings.items() if self.settings.get(k, missing) != v}
        if now.comparable != self.lr_scheduler:
            changes["lr_scheduler"] = now.lr_scheduler
        if new := {key: pair for key, pair in now.multipliers.items() if pair != self.multipliers.get(key, (1.0, 1.0))}:
            changes["multipliers"] = new
        return changes

    def take(self, changes: Mapping[str, Any]) -> None:
        """It knows them now."""
        self.settings |= changes.get("settings", {})
        if "lr_scheduler" in changes:
            self.lr_scheduler = _comparable(changes["lr_scheduler"])
        self.multipliers |= changes.get("multipliers", {})


def compressor_of(compression_params: Any) -> Compressor:
    """The compressor of what a worker pushes to servers.

    Raises:
        TypeError, ValueError: `compression_params` do not fit, or are of a type that takes an all-reduce.
    """
    kind = compression_params.get("type") if isinstance(compression_params, Mapping) else None
    compressor = create_compressor(compression_params) if kind != "auto" else None
    if compressor is None or compressor.type == "powersgd":
        raise ValueError(
            f"compression_params={dict(compression_params)!r} for a parameter server: 'powersgd' and 'auto' are for "
            "processes that add up their gradients; use another type, such as 'int8', or kvstore='dist_sync'"
        )
    return compressor


def _dense(key: Key, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(f"value of key {key!r} is sparse ({tensor.layout}): servers take dense tensors; use to_dense()")
    return tensor


def _comparable(lr_scheduler: Any) -> Any:
    """What tells whether a schedule has changed."""
    if isinstance(lr_scheduler, LRScheduler):
        try:
            return type(lr_scheduler), lr_scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return lr_scheduler
    return lr_scheduler


def _bare(optimizer: Optimizer) -> Optimizer:
    """A copy without parameters, multipliers, which are sent apart, and counts."""
    bare = copy.copy(optimizer)
    bare.param_dict, bare.lr_mult, bare.wd_mult = {}, {}, {}
    bare.step_counts = StepCounts(bare.begin_num_update)
    return bare


def _staleness(delays: Counter[int]) -> Staleness:
    count = sum(delays.values())
    mean = sum(delay * times for delay, times in delays.items()) / count if count else 0.0
    return Staleness(mean, max(delays, default=0), dict(sorted(delays.items())))
