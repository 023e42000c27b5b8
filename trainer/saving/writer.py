"""BackgroundWriter: a thread that writes, one thing at a time."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable


class BackgroundWriter:
    """Calls a function in another thread. The interpreter waits for it before it ends.

    What it raises is raised by the next `wait`. If none comes, as at the end of a script, it is printed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        weakref.finalize(self, self._outcome.abandon)  # also at the end of the interpreter, which has waited by then

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in the background; what went before has been waited for."""
        self._thread = threading.Thread(target=self._outcome.of, args=(write,), name="tristep checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the last call, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._outcome.take()
        if error is not None:
            raise error


class _Outcome:
    """What a call has raised, until somebody takes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_abandoned = False

    def of(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
            if self._is_abandoned:
                self.abandon()

    def take(self) -> BaseException | None:
        with self._lock:
            error, self._error = self._error, None
        return error

    def abandon(self) -> None:
        """Nobody will ask any more."""
        self._is_abandoned = True
        error = self.take()
        if error is not None:
            print("The last checkpoint of a CheckpointManager has not been written:", file=sys.stderr)
            traceback.print_exception(error)
