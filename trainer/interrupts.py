"""Signals during training: Ctrl-C waits for the end of a step, and a signal to end waits for a checkpoint.

A handler that raises in the middle of a step would leave weights updated but not counted. Handlers are set in the main
thread, and restored.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident, main_thread
from typing import Any, TypeVar

try:
    # Up to Python 3.12 the functions of `signal` try to convert each handler to an enum: a quarter of the time of a small
    # network's step, which sets handlers twice.
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as set_handler
except ImportError:  # neither CPython nor PyPy
    from signal import getsignal
    from signal import signal as set_handler

_F = TypeVar("_F", bound=Callable[..., Any])
_Handlers = dict[int, Callable[..., Any]]
# Ctrl-C, and signals for which programs set handlers that raise: time limits, and requests to end a job.
_NUMBERS = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1") if hasattr(signal, name)]
_waiting: list[_Handlers] = [{}]  # the handlers of the signals that wait
_came: list[tuple[int, Any]] = []  # the signals that wait


def gets_signals() -> bool:
    """Return whether this is the main thread, in which Python calls signal handlers."""
    return get_ident() == main_thread().ident


def give_back(before: Mapping[int, Any], handler: Any) -> None:
    """Restore the handlers `before`, by number of signal, unless a program has replaced `handler` meanwhile."""
    for number, earlier in before.items():
        present = set_handler(number, earlier if callable(earlier) else int(earlier or signal.SIG_DFL))
        if present != handler and present is not None:
            set_handler(number, present)


@contextmanager
def handled(handler: Callable[[int, Any], Any], number: int = signal.SIGINT) -> Iterator[None]:
    """Handle a signal by `handler` inside this context; it does nothing outside of the main thread."""
    if not gets_signals():
        yield
        return
    before = {number: signal.signal(number, handler)}
    try:
        yield
    finally:
        give_back(before, handler)


def uninterrupted(function: _F) -> _F:
    """Decorate a function so that signals wait until a call has ended, see `interrupts_wait`."""

    @wraps(function)
    def whole(*args: Any, **kwargs: Any) -> Any:
        before = _begin()
        try:
            return function(*args, **kwargs)
        finally:
            if before is not None:
                _end(before)

    return whole  # type: ignore[return-value]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let signals wait until the end of this context: SIGINT, SIGTERM, SIGALRM and SIGUSR1.

    The handlers of the program, such as a notebook's, are called at the end. A second SIGINT acts at once, in case the end
    never comes. Signals without a Python handler are not delayed. Nested contexts act as the outermost one. Outside of the
    main thread, which alone gets signals, it does nothing.
    """
    before = _begin()
    try:
        yield
    finally:
        if before is not None:
            _end(before)


# While handlers are replaced, a signal may come between any two lines and raise. So only the handlers in force say whether
# signals wait, not `_waiting` and `_came`, which may be stale; and after any exception all handlers are restored.


def _begin() -> _Handlers | None:
    """Let signals wait; return the handlers from before, or None if signals wait already or there are none to delay."""
    if get_ident() != main_thread().ident:  # as `gets_signals`, in every step
        return None
    before = {number: handler for number in _NUMBERS if callable(handler := getsignal(number))}
    if not before or _note in before.values():
        return None
    _came.clear()
    _waiting[0] = before
    try:
        for number in before:
            set_handler(number, _note)
    except BaseException:
        _end(before)
        raise
    return before


def _end(before: _Handlers) -> None:
    try:
        give_back(before, _note)
    except BaseException:
        give_back(before, _note)
        raise
    finally:
        if _came:
            came = _came[:]
            _came.clear()
            _deliver(came, before)


def _deliver(came: list[tuple[int, Any]], before: _Handlers) -> None:
    """Call the handlers of all signals that came, even if some raise."""
    if came:
        try:
            before[came[0][0]](*came[0])
        finally:
            _deliver(came[1:], before)


def _note(number: int, frame: Any) -> None:
    if number not in [waiting for waiting, _ in _came]:
        _came.append((number, frame))
    elif number == signal.SIGINT:
        _came[:] = [(waiting, its_frame) for waiting, its_frame in _came if waiting != number]
        _waiting[0][number](number, frame)


def checked_signals(names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of signals by their names; raise if the system has none of a name, or none can have a handler."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"signals={names!r}: must be a list of names, such as ('SIGTERM', 'SIGUSR1')")
    for name in names:
        if not (name[:3] == "SIG" and isinstance(getattr(signal, name, None), signal.Signals)):
            raise ValueError(f"signals has {name!r}: must be names of signals of this system, such as 'SIGTERM'")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals has {name!r}, for which no program can have a handler")
    return tuple(int(getattr(signal, name)) for name in names)


class StopSignals:
    """Notes the signals that ask a training to end, from `install` to `restore`, instead of ending it at once.

    `deliver` and `restore` then let the noted signal act, in the main thread. Several signals count as one. Forked processes
    get the handlers from before.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.arrived = 0  # the number of the signal that has come, 0 if none has
        self.numbers = tuple(numbers)
        self.entered = 0  # `install` calls without a `restore`; only the outermost pair has an effect
        self._delivers, self._is_over = False, False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Begin to note signals. Warns outside of the main thread, where no handler can be set."""
        self.entered += 1
        if self.entered > 1:
            return
        self.arrived, self._delivers, self._is_over = 0, False, False
        if not self.numbers:
            return
        if not gets_signals():
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
        """Restore the handlers from before, and let a noted signal act.

        In another thread the handlers stay installed, and forward signals to the handlers from before.
        """
        self.entered = max(0, self.entered - 1)
        if self.entered:
            return
        if gets_signals():
            self.give_back()
        else:
            self._is_over = True
        arrived, self.arrived = self.arrived, 0
        if arrived:
            signal.raise_signal(arrived)

    def give_back(self) -> None:
        give_back(self._before, self._note)
        self._before = {}
        _installed.discard(self)

    def deliver(self, number: int) -> None:
        """Let a signal act as it would have before `install`, which may end the process."""
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
        if not self._is_over:  # the process goes on: note the next signal
            signal.signal(number, self._note)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


# A forked process saves no checkpoint, so signals must end it as before, even if they come while it starts.


def _before_fork() -> None:
    numbers = {number for signals in _installed for number in signals.numbers}
    _of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork(in_child: bool) -> None:
    for signals in list(_installed) if in_child else ():
        signals.arrived = 0
        signals.give_back()
    signal.pthread_sigmask(signal.SIG_SETMASK, _of_thread.mask)


_of_thread = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True)
    )
