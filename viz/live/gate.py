"""StepGate: keeps steps, and what looks at or changes what steps change, from each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["StepGate"]


class StepGate:
    """Lets through one step, or any number of guests; steps wait for guests.

    As a context it keeps all threads from beginning or ending a step; those who wait look again afterwards.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._guests = 0
        self._stepping: int | None = None  # the thread of the current step

    @property
    def in_step(self) -> bool:
        """Whether this thread is in a step."""
        return self._stepping == threading.get_ident()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context between two steps, which wait meanwhile. In a step itself it changes nothing."""
        if self.in_step:
            yield
            return
        with self._changed:
            self._guests += 1
            try:
                self._changed.wait_for(lambda: self._stepping is None)
                yield
            finally:
                self._guests -= 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()

    def enter(self, may_step: Callable[[], bool]) -> bool:
        """Begin a step, once there is neither another one nor a guest; False if by then it must not."""
        with self._changed:
            self._changed.wait_for(lambda: self._guests == 0 and self._stepping is None)
            if not may_step():
                return False
            self._stepping = threading.get_ident()
            return True

    def leave(self) -> None:
        """End the step; to be called in the gate as a context."""
        self._stepping = None

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until this holds, at most for so many seconds; whether it does."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)
