"""A server of a parameter server: who is one, and how it answers workers. What it does for them is in server_core.py."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import real
from .base import Key
from .compressors import create_compressor
from .messages import Buffer, Channel, Kind, Layout, Lost, Message, Sent, Tag
from .server_core import ServerCore

__all__ = ["Roles", "Service", "copy_all", "packed", "unpacked", "whole_number_of"]


@dataclass
class Roles:
    """Who this process is, and the process group of all workers and servers, which is made for one store."""

    rank: int
    workers: int
    servers: int
    group: Any
    made: Any  # the default process group, if that was made here, too
    timeout: float

    @classmethod
    def of_this_job(cls, timeout: float) -> Roles:
        timeout = real("timeout", timeout, above=0)
        servers = whole_number_of("TRISTEP_NUM_SERVERS", 1)
        known = dist.is_available() and dist.is_initialized()
        if not known and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise RuntimeError(
                "a parameter server needs several processes, and the environment names none: start the program with "
                f"torchrun --nproc_per_node {servers + 1} (or more), or call torch.distributed.init_process_group() first"
            )
        count = dist.get_world_size() if known else int(os.environ["WORLD_SIZE"])
        if count <= servers:
            raise ValueError(
                f"{count} processes are too few for TRISTEP_NUM_SERVERS={servers} servers and a worker: start at least "
                f"{servers + 1}, as with torchrun --nproc_per_node {servers + 1}"
            )
        limit = timedelta(seconds=timeout)
        if not known:
            dist.init_process_group("gloo", timeout=limit)
        group = dist.new_group(backend="gloo", timeout=limit)
        return cls(dist.get_rank(), count - servers, servers, group, None if known else dist.group.WORLD, timeout)

    def leave(self) -> None:
        """Let the process groups go that were made here.

        Whoever keeps one keeps its threads alive, which may end a program that is about to end anyway with an error.
        """
        group, made = self.group, self.made
        self.group = self.made = None
        if not dist.is_initialized():  # the program has destroyed them all
            return
        with contextlib.suppress(ValueError):  # it has done so, and made new ones
            dist.destroy_process_group(group)
        if made is not None and dist.group.WORLD is made:
            dist.destroy_process_group()


class Service:
    """A server: a thread for each worker receives its requests, and this one answers them in the order of their arrival."""

    def __init__(self, roles: Roles, name: str) -> None:
        self._roles = roles
        self._channel = Channel(roles.group)
        device = torch.device("cpu")
        if "device" in name and torch.accelerator.is_available():
            index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
            device = torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
        self._core = ServerCore(roles.workers, device, roles.servers)
        self._inbox: queue.SimpleQueue[tuple[int, Message | Lost]] = queue.SimpleQueue()
        self._there = set(range(roles.workers))
        self._gone: dict[int, str] = {}  # why, by worker
        self._outgoing: list[tuple[Sent, bool] | None] = [None] * roles.workers
        self._errors: list[Sent] = []  # answers that a worker may look at later
        self._routes: list[dict[int, _Route]] = [{} for _ in range(roles.workers)]
        self._calls = Counter[str]()
        self._waiting: dict[int, tuple[str, Any]] = {}  # workers at a barrier: which, and what they bring

    def run(self) -> None:
        """Serve until all workers are gone.

        Raises:
            TimeoutError: a worker has not been heard of for too long.
        """
        for worker in range(self._roles.workers):
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        try:
            while self._there:
                worker, message = self._inbox.get()
                if isinstance(message, Lost):
                    self._lose(worker, message)
                else:
                    self._answer(worker, message)
            for worker in range(self._roles.workers):
                self._release(worker)
        finally:
            self._errors = []
            self._channel.close()
            self._roles.leave()
        if lost := {worker: why for worker, why in self._gone.items() if why}:
            warnings.warn(f"workers ended without closing their store: {lost}", RuntimeWarning, stacklevel=3)

    def _read(self, worker: int) -> None:
        try:
            while True:
                message = self._channel.receive(worker, Tag.REQUEST)
                last = message.numbers[0] == Kind.BYE
                self._inbox.put((worker, message))
                if last:
                    return
        except Lost as error:
            self._inbox.put((worker, error))

    def _lose(self, worker: int, error: Lost) -> None:
        if "Timed out" in str(error):  # gloo has closed all connections
            raise TimeoutError(
                f"worker {worker} has not been heard of for {self._roles.timeout:g} s: it hangs, or is slower than the "
                "timeout of connect() and serve() allows"
            ) from error
        self._leave(worker, str(error))

    def _leave(self, worker: int, why: str) -> None:
        self._there.discard(worker)
        self._gone[worker] = why
        self._waiting.pop(worker, None)
        for other in list(self._waiting):
            del self._waiting[other]
            self._reply(other, self._absent())

    def _absent(self) -> Exception:
        said = [f"worker {w} {f'is gone: {why}' if why else 'has closed its store'}" for w, why in self._gone.items()]
        return RuntimeError(f"nobody can wait for all workers any more: {'; '.join(said)}")

    def _answer(self, worker: int, message: Message) -> None:
        self._release(worker)
        kind = Kind(message.numbers[0])
        try:
            value = message.value()
            if kind in (Kind.PUSH, Kind.PULL, Kind.PUSHPULL):
                self._push_and_pull(worker, message, value)
            elif kind == Kind.BARRIER:
                self._arrive(worker, *value)
            elif kind == Kind.SAVE:
                self._reply(worker, *packed(self._core.states()))
            else:
                self._reply(worker, self._do(kind, message, value))
        except Exception as error:  # which is the worker's to deal with
            self._reply(worker, error)
        self._channel.pool.give(message.buffer)
        if kind == Kind.BYE:
            self._leave(worker, "")

    def _do(self, kind: Kind, message: Message, value: Any) -> Any:
        core = self._core
        if kind == Kind.INIT:
            keys, shapes, dtypes, cut = value
            core.init(dict(zip(keys, message.tensors(Layout(shapes, dtypes)), strict=True)), cut)
        elif kind == Kind.OPTIMIZER:
            what, updater = value
            if self._first("set", message.numbers[1]):
                (core.set_optimizer if what == "optimizer" else core.set_updater)(updater)
        elif kind == Kind.LOAD:
            if self._first("load", message.numbers[1]):
                core.load_states(unpacked(message))
        elif kind == Kind.STALENESS:
            return core.delays()
        return None

    def _first(self, what: str, number: int) -> bool:
        """Whether nobody has asked for this before: all workers may, each for what is the nth for it."""
        new = number > self._calls[what]
        self._calls[what] = max(number, self._calls[what])
        return new

    def _push_and_pull(self, worker: int, message: Message, value: Any) -> None:
        routes = self._routes[worker]
        new, changes = value or ({}, None)
        for number, described in new.items():
            routes[number] = _Route(*described)
        if changes:
            self._core.change(worker, changes)
        _, pushed, pulled, count, *_ = message.numbers
        if pushed:
            route = routes[pushed]
            self._core.push(worker, route.keys, route.gradients(message, count, self._core.device))
        if not pulled:
            self._reply(worker, None)
            return
        route = routes[pulled]
        _, buffer, room = self._channel.body(None, route.layout)
        self._core.pull(worker, route.keys, room)
        self._send(worker, 0, b"", buffer, keep=self._core.keeps_pulled)

    def _arrive(self, worker: int, what: str, value: Any) -> None:
        if self._gone:
            raise self._absent()
        if self._waiting and (others := next(iter(self._waiting.values()))[0]) != what:
            raise RuntimeError(f"worker {worker} has called {what}(), where others wait in {others}()")
        self._waiting[worker] = what, value
        if len(self._waiting) == self._roles.workers:
            brought = self._waiting[0][1]
            for other in list(self._waiting):
                del self._waiting[other]
                self._reply(other, brought)

    def _reply(self, worker: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        failed = isinstance(value, Exception) and not tensors
        if failed:
            value = type(value).__name__, str(value)
        layout = Layout([tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors])
        encoded, buffer, room = self._channel.body(value, layout)
        copy_all(room, tensors)
        self._send(worker, int(failed), encoded, buffer)

    def _send(self, worker: int, failed: int, encoded: bytes, buffer: Buffer | None, keep: bool = False) -> None:
        sent = self._channel.send(worker, Tag.REPLY, [failed, self._core.num_update], encoded, buffer)
        if failed:  # the worker may go on pushing before it receives what is wrong
            self._errors.append(sent)
        else:
            self._outgoing[worker] = sent, keep

    def _release(self, worker: int) -> None:
        """Have the last answer's buffer back. The worker has it: it asks again, and began to receive when it asked."""
        outgoing, self._outgoing[worker] = self._outgoing[worker], None
        if outgoing is not None:
            sent, keep = outgoing
            with contextlib.suppress(RuntimeError):  # the worker is gone, as its thread says
                sent.wait()
            if not keep:
                self._channel.pool.give(sent.buffer)


class _Route:
    """What is in a worker's messages of one number: tensors of some keys, or a compressed message of them."""

    def __init__(
        self,
        keys: list[Key],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        packed: tuple[Mapping[str, Any], Sequence[int], torch.dtype] | None,
    ) -> None:
        self.keys, self._shapes, self._dtypes = keys, [torch.Size(shape) for shape in shapes], dtypes
        self._compressor = None if packed is None else create_compressor(packed[0])
        self.layout = Layout(shapes, dtypes) if packed is None else Layout([packed[1]], [packed[2]])

    def gradients(self, message: Message, count: int, device: torch.device) -> list[torch.Tensor]:
        """The gradients in a message, the worker's one of this number if it is compressed."""
        tensors = message.tensors(self.layout)
        if self._compressor is None:
            return tensors
        sizes = [shape.numel() for shape in self._shapes]
        flats = self._compressor._decode(tensors[0].to(device), sum(sizes), count).split(sizes)
        return [flat.view(s).to(dtype) for flat, s, dtype in zip(flats, self._shapes, self._dtypes, strict=True)]


def whole_number_of(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r}: must be an integer >= 1")
    return int(text)


def copy_all(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each of `values` to one of `into`, and wait for it."""
    devices = {tensor.device for tensors in (into, values) for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        if into:
            torch._foreach_copy_(list(into), list(values))
        return
    for to, value in zip(into, values, strict=True):
        to.copy_(value, non_blocking=True)
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def packed(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Collected states as plain data that names the tensors' places, and the tensors."""
    names = [(name, slot) for name, slots in saved["state"].items() for slot in slots]
    tensors = [saved["state"][name][slot] for name, slot in names]
    kinds = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
    return dict(saved) | {"state": None, "packed": (list(saved["state"]), names, *kinds)}, tensors


def unpacked(message: Message) -> dict[str, Any]:
    saved = message.value()
    members, names, shapes, dtypes = saved.pop("packed")
    saved["state"] = {member: {} for member in members}
    for (name, slot), tensor in zip(names, message.tensors(Layout(shapes, dtypes)), strict=True):
        saved["state"][name][slot] = tensor
    return saved
