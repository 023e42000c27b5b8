"""BackgroundWriter: a thread that writes, one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Calls a function in another thread. The interpreter waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in the background; what went before has been waited for."""

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="tristep checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end of the last call, and raise what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
