"""ServerClient: a worker's connection to the server. Answers come in the order of the requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .job import Roles
from .transport import Channel, Message, Opcode, Sent, Tag, copy_all

_ERRORS = {klass.__name__: klass for klass in (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError)}


class ServerClient:
    """Sends requests to the server, and receives its answers. Its errors are raised when a call waits for an answer.

    Args:
        roles: the roles of the processes.
        on_reply: called with the `num_update` of the server's optimizer after each answer without an error.

    Attributes:
        lost: why requests are impossible now; "" while they are possible.
    """

    def __init__(self, roles: Roles, on_reply: Callable[[int], None]) -> None:
        self._roles, self._on_reply = roles, on_reply
        self._channel = Channel(roles.group)
        self._pending: deque[tuple[Any, Sent]] = deque()
        self._failures: list[Exception] = []
        self.lost = ""

    def pin_memory(self) -> None:
        """Use pinned memory for messages from now on."""
        self._channel.pool.pinned = True

    def request(self, opcode: Opcode, value: Any = None, tensors: Sequence[torch.Tensor] = (), number: int = 0) -> None:
        """Start to send a request, and to receive its answer, so that the server never waits to send it.

        Raises:
            TypeError: the value cannot be sent.
            RuntimeError: the server is lost, or the store has been closed.
        """
        if self.lost:
            raise RuntimeError(self.lost)
        try:
            message, room = self._channel.pack(value, tensors)
        except TypeError as error:
            raise TypeError(
                f"the server cannot be sent {value!r} ({error}): attributes must be plain data, and classes and functions "
                "registered, at the top level of a module that is imported before the store is made"
            ) from error
        copy_all(room, tensors)
        try:
            expected = self._channel.expect(self._roles.server, Tag.REPLY)
            sent = self._channel.send(self._roles.server, Tag.REQUEST, message._replace(code=int(opcode), number=number))
        except RuntimeError as error:
            raise self._without_server(error) from error
        self._pending.append((expected, sent))

    def drain(self, keep: int = 0) -> None:
        """Wait until at most `keep` requests are unanswered."""
        while len(self._pending) > keep:
            self.release(self._receive())

    def finish(self) -> Message:
        """Return the answer to the newest request. Raise the first error of a request."""
        self.drain(1)
        message = self._receive()
        self.raise_failure()
        return message

    def release(self, message: Message) -> None:
        """Return the memory of an answer to the pool."""
        self._channel.pool.give(message.body)

    def raise_failure(self) -> None:
        """Raise the first error that the server has answered, if any, and forget all."""
        if self._failures:
            failure, self._failures = self._failures[0], []
            raise failure

    def barrier(self, what: str, value: Any) -> Any:
        """Wait for all workers, and return the value of rank 0. `what`: the name of the calling method."""
        self.request(Opcode.BARRIER, (what, value))
        return self.finish().value()

    def close(self) -> None:
        """Tell the server that this worker is finished, and release the process groups.

        Raises:
            RuntimeError: an unanswered push failed on the server, or the server is lost.
        """
        try:
            if not self.lost:  # otherwise an error has been raised already
                self.request(Opcode.SHUTDOWN)
                self.finish()
        finally:
            self.lost = self.lost or "this store has been closed: make another one with kvstore.create()"
            self._channel.close()
            self._roles.leave()

    def _receive(self) -> Message:
        """Wait for the answer to the oldest request, and return it; `raise_failure` raises an error in it."""
        expected, sent = self._pending.popleft()
        try:
            message = self._channel.receive(self._roles.server, Tag.REPLY, expected)
            sent.wait()
        except RuntimeError as error:
            raise self._without_server(error) from error
        self._channel.pool.give(sent.body)
        if message.code:
            name, text = message.value()
            klass = _ERRORS.get(name)
            self._failures.append((klass or RuntimeError)(f"server: {text if klass else f'{name}: {text}'}"))
        else:
            self._on_reply(message.number)
        return message

    def _without_server(self, error: Exception) -> RuntimeError:
        """Mark the server as lost, and return the error for this and all further calls."""
        self.lost = f"the server (rank {self._roles.server}) is gone: {error}"
        return RuntimeError(self.lost)
