"""ServerLoop: receives the workers' requests and answers them. core.py has the computations."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ...trainer.compression import create_compressor
from ...trainer.kvstore.base import Key
from ...trainer.optimizer import Optimizer
from ...trainer.validation import choice
from .core import ServerCore
from .job import Roles
from .transport import Channel, Lost, Message, Opcode, Sent, Tag, copy_all, with_tensors, without_tensors


class ServerLoop:
    """The server: one thread per worker receives requests, and the main thread answers them in the order of arrival."""

    def __init__(self, roles: Roles, name: str) -> None:
        self._roles = roles
        self._channel = Channel(roles.group)
        device = torch.device("cpu")
        if "device" in name and torch.accelerator.is_available():
            index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
            device = torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
        self._core = ServerCore(roles.workers, device)
        self._inbox: queue.SimpleQueue[tuple[int, Message | Lost]] = queue.SimpleQueue()
        self._present = set(range(roles.workers))
        self._gone: dict[int, str] = {}  # workers that have left, with the reason; "" if they closed their store
        self._outgoing: list[tuple[Sent, bool] | None] = [None] * roles.workers
        self._errors: list[Sent] = []  # answers with errors, which a worker may receive later
        self._calls = Counter[str]()
        self._waiting: dict[int, tuple[str, Any]] = {}  # workers at a barrier: the barrier's name and the worker's value

    def run(self) -> None:
        """Serve until all workers have closed their stores or are lost.

        Raises:
            TimeoutError: a worker has sent nothing for longer than the timeout.
        """
        for worker in range(self._roles.workers):
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        try:
            while self._present:
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
                last = message.code == Opcode.SHUTDOWN
                self._inbox.put((worker, message))
                if last:
                    return
        except Lost as error:
            self._inbox.put((worker, error))

    def _lose(self, worker: int, error: Lost) -> None:
        if "Timed out" in str(error):  # gloo has closed all connections
            raise TimeoutError(
                f"worker {worker} has not been heard of for {self._roles.timeout:g} s: it hangs, or is slower than the "
                "timeout of kvstore.create() and serve() allows"
            ) from error
        self._leave(worker, str(error))

    def _leave(self, worker: int, why: str) -> None:
        self._present.discard(worker)
        self._gone[worker] = why
        self._waiting.pop(worker, None)
        for other in list(self._waiting):
            del self._waiting[other]
            self._reply(other, self._absent())

    def _absent(self) -> Exception:
        reasons = [f"worker {w} {f'is gone: {why}' if why else 'has closed its store'}" for w, why in self._gone.items()]
        return RuntimeError(f"nobody can wait for all workers any more: {'; '.join(reasons)}")

    def _answer(self, worker: int, message: Message) -> None:
        self._release(worker)
        opcode = None
        try:
            opcode = Opcode(message.code)
            value = message.value()
            if opcode in (Opcode.PUSH, Opcode.PULL, Opcode.PUSHPULL):
                self._push_and_pull(worker, opcode, message, *value)
            elif opcode == Opcode.BARRIER:
                self._arrive(worker, *value)
            elif opcode == Opcode.SAVE:
                self._reply(worker, *without_tensors(self._core.states()))
            else:
                self._reply(worker, self._do(opcode, message, value))
        except Exception as error:  # the worker raises it
            self._reply(worker, error)
        self._channel.pool.give(message.body)
        if opcode == Opcode.SHUTDOWN:
            self._leave(worker, "")

    def _do(self, opcode: Opcode, message: Message, value: Any) -> Any:
        core = self._core
        if opcode == Opcode.INIT:
            core.init(dict(zip(value, message.tensors(), strict=True)))
        elif opcode == Opcode.OPTIMIZER:
            if not isinstance(value, Optimizer):
                raise ValueError(f"{value!r} is no optimizer")
            if self._first("set", message.number):
                core.use(value)
        elif opcode == Opcode.LOAD:
            if self._first("load", message.number):
                core.load_states(with_tensors(value, message.tensors()))
        elif opcode == Opcode.STALENESS:
            return core.delays()
        return None

    def _first(self, what: str, number: int) -> bool:
        """Return whether this is the first call of `what` with this number: all workers may make each nth call."""
        new = number > self._calls[what]
        self._calls[what] = max(number, self._calls[what])
        return new

    def _push_and_pull(
        self, worker: int, opcode: Opcode, message: Message, keys: Sequence[Key], changes: Any, compression: Any
    ) -> None:
        if changes:
            self._core.change(worker, changes)
        if opcode != Opcode.PULL:
            grads = message.tensors()
            self._core.push(worker, keys, grads if compression is None else self._decoded(grads[0], *compression))
        if opcode == Opcode.PUSH:
            self._reply(worker, None)
            return
        reply, room = self._channel.pack(like=self._core.values_of(keys))
        self._core.pull(worker, keys, room)
        self._send(worker, reply, keep=self._core.keeps_pulled)

    def _decoded(
        self, message: torch.Tensor, params: Any, kinds: Sequence[tuple[Sequence[int], torch.dtype]]
    ) -> list[torch.Tensor]:
        """Return the gradients that a compressed message encodes."""
        sizes = [math.prod(shape) for shape, _ in kinds]
        flats = create_compressor(params).decode(message.to(self._core.device), sum(sizes)).split(sizes)
        return [flat.view(shape).to(dtype) for flat, (shape, dtype) in zip(flats, kinds, strict=True)]

    def _arrive(self, worker: int, what: str, value: Any) -> None:
        if self._gone:
            raise self._absent()
        if self._waiting and (called := next(iter(self._waiting.values()))[0]) != what:
            raise RuntimeError(f"worker {worker} has called {what}(), where others wait in {called}()")
        self._waiting[worker] = what, value
        if len(self._waiting) == self._roles.workers:
            brought = self._waiting[0][1]
            for other in list(self._waiting):
                del self._waiting[other]
                self._reply(other, brought)

    def _reply(self, worker: int, value: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        failed = isinstance(value, Exception)
        message, room = self._channel.pack((type(value).__name__, str(value)) if failed else value, tensors)
        copy_all(room, tensors)
        self._send(worker, message, failed)

    def _send(self, worker: int, message: Message, failed: bool = False, keep: bool = False) -> None:
        message = message._replace(code=int(failed), number=self._core.num_update)
        sent = self._channel.send(worker, Tag.REPLY, message)
        if failed:  # the worker may push more before it receives the error
            self._errors.append(sent)
        else:
            self._outgoing[worker] = sent, keep

    def _release(self, worker: int) -> None:
        """Return the last answer's memory to the pool. The worker has received that answer, as it sends a new request."""
        outgoing, self._outgoing[worker] = self._outgoing[worker], None
        if outgoing is not None:
            sent, keep = outgoing
            with contextlib.suppress(RuntimeError):  # the worker is lost; its thread reports that
                sent.wait()
            if not keep:
                self._channel.pool.give(sent.body)


def serve(name: str = "dist_async", timeout: float | None = None) -> None:
    """Run the parameter server in this process, the last one, until all workers have closed their stores.

    Call it in the server's process where workers call `kvstore.create(name)`; or call that in all processes, which also ends
    the server's process afterwards.

    Args:
        name: "dist_async" stores values on the CPU, "dist_device_async" on this process's GPU if it has one.
        timeout: seconds without a message after which a worker counts as lost, > 0. Default: None, 30 minutes.

    Raises:
        ValueError: there is one process, or the environment asks for several servers.
        RuntimeError: the environment does not describe several processes, or this process is a worker.
        TimeoutError: a worker has sent nothing for longer than the timeout.
    """
    name = choice("name", name, ("dist_async", "dist_device_async"), ignore_case=True)
    roles = Roles.of_this_job(timeout)
    if roles.rank != roles.server:
        roles.leave()
        raise RuntimeError(
            f"rank {roles.rank} is a worker: of {roles.workers + 1} processes the last one serves; call "
            f"kvstore.create({name!r}) here"
        )
    ServerLoop(roles, name).run()
