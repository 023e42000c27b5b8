"""For torture.py: processes that are killed and interrupted, and what to compare them by."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

__all__ = ["Child", "Silent", "Wrong", "plain"]

SECONDS = 120  # until a process counts as one that hangs


class Wrong(Exception):
    """An outcome that must not be."""


class Silent(Exception):
    """Other numbers, and no error."""


class Child:
    """A forked process that runs a function, and says at its end what that returned.

    Args:
        function: gets the number of a pipe's end, to write bytes to that `read` gives, and the `args`.
    """

    unread = b""  # what was read, and is not to count as that

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._said, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._said)
            code = 1
            try:
                signal.alarm(SECONDS)
                answer = json.dumps(["ok", function(there, *args)])
                code = 0
            except BaseException:
                answer = json.dumps(["error", traceback.format_exc()])
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late to mean anything
            os.write(there, b"\n" + answer.encode())
            os._exit(code)
        os.close(there)

    def read(self, count: int = 1) -> bytes:
        """The next bytes; none once it has ended."""
        return os.read(self._said, count)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> tuple[bytes, Any]:
        """Wait for it: all that was not read yet, and what the function returned; None if it was killed.

        Raises:
            Wrong: the function raised an error, or took too long.
        """
        rest = self.unread + b"".join(iter(lambda: os.read(self._said, 65536), b""))
        os.close(self._said)
        _, status = os.waitpid(self.pid, 0)
        before, _, answer = rest.partition(b"\n")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return before, None
        if not answer:
            raise Wrong(f"a process ended with status {status}")
        kind, value = json.loads(answer)
        if kind == "error":
            raise Wrong(value)
        return before, value


def plain(value: Any) -> Any:
    """Something to compare, with all numbers to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__.startswith("tristep."):
        return plain({name: item for name, item in vars(value).items() if name != "version"})
    return repr(value)
