"""Signals that ask a training to end: noted when they come, acted on once a checkpoint has been written."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["StopSignals", "checked_signals"]


def checked_signals(given: Sequence[str]) -> tuple[int, ...]:
    """The numbers of signals by their names.

    Raises:
        TypeError, ValueError: there is none of that name here, or no handler can be set.
    """
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"signals={given!r}: must be a list of names, such as ('SIGTERM', 'SIGUSR1')")
    for name in given:
        if not (name[:3] == "SIG" and isinstance(getattr(signal, name, None), signal.Signals)):
            raise ValueError(f"signals has {name!r}: must be names of signals of this system, such as 'SIGTERM'")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals has {name!r}, for which no program can have a handler")
    return tuple(int(getattr(signal, name)) for name in given)


class StopSignals:
    """Notes signals from `install` to `restore`.

    After `deliver` or `restore` the signal acts as it would have before, in the main thread. One that comes again meanwhile
    is the same. Processes that are forked meanwhile have the handlers from before.

    Args:
        numbers: of the signals.

    Attributes:
        numbers: as above.
        arrived: the number of the signal that has come, 0 if none has.
        entered: how many calls of `install` there have been without one of `restore`; only the first of them matters.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.arrived = 0
        self.numbers = tuple(numbers)
        self.entered = 0
        self._delivers, self._is_over = False, False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Begin. Warns outside of the main thread, where no handler can be set."""
        self.entered += 1
        if self.entered > 1:
            return
        self.arrived, self._delivers, self._is_over = 0, False, False
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "signals can be noted in the main thread only, so that none will save a checkpoint: enter the "
                "CheckpointManager there, or give signals=()",
                stacklevel=4,
            )
            return
        for number in self.numbers:
            self._before[number] = signal.signal(number, self._note)
        _installed.add(self)

    def restore(self) -> None:
        """End: the handlers are those from before, and get what has come. In another thread they act as those now."""
        self.entered = max(0, self.entered - 1)
        if self.entered:
            return
        if threading.current_thread() is threading.main_thread():
            self.give_back()
        else:
            self._is_over = True
        arrived, self.arrived = self.arrived, 0
        if arrived:
            signal.raise_signal(arrived)

    def give_back(self) -> None:
        """The handlers are those from before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
        _installed.discard(self)

    def deliver(self, number: int) -> None:
        """Let a signal act as it would have before `install`. What it does may be to end the process."""
        self.arrived, self._delivers = 0, True
        signal.raise_signal(number)

    def _note(self, number: int, frame: Any) -> None:
        if not (self._delivers or self._is_over):
            self.arrived = number
            return
        self._delivers = False
        before = self._before.get(number)
        signal.signal(number, signal.SIG_DFL if before is None else before)
        signal.raise_signal(number)
        if not self._is_over:  # it has not ended the process: the next one is noted
            signal.signal(number, self._note)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


# A forked process saves no checkpoint: who asks it to end is to be heard, also while it begins.


def _before_fork() -> None:
    numbers = {number for each in _installed for number in each.numbers}
    _of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork(in_child: bool) -> None:
    for each in list(_installed) if in_child else ():
        each.arrived = 0
        each.give_back()
    signal.pthread_sigmask(signal.SIG_SETMASK, _of_thread.mask)


_of_thread = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True)
    )
