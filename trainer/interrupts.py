"""Handlers of signals: set in the main thread, and given back.

Signals wait until a step has ended: one that raises midway would leave weights updated but not counted. Those that ask a
training to end are noted, and acted on once a checkpoint has been written.
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
    # Up to Python 3.12 the functions of `signal` try to convert each handler to an enum. In a step of a small network, which
    # sets handlers twice, that took a quarter of the time.
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as set_handler
except ImportError:  # of another Python than CPython and PyPy
    from signal import getsignal
    from signal import signal as set_handler

_F = TypeVar("_F", bound=Callable[..., Any])
_Handlers = dict[int, Callable[..., Any]]
# Ctrl-C, and those for which programs have handlers that raise: time limits, and what asks a job to end.
_NUMBERS = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1") if hasattr(signal, name)]
_waiting: list[_Handlers] = [{}]  # whose signals wait
_came: list[tuple[int, Any]] = []


def gets_signals() -> bool:
    """Whether this thread is the one that signals come to."""
    return get_ident() == main_thread().ident


def give_back(before: Mapping[int, Any], handler: Any) -> None:
    """Set the handlers from before, unless somebody has set another one than `handler` meanwhile."""
    for number, earlier in before.items():
        present = set_handler(number, earlier if callable(earlier) else int(earlier or signal.SIG_DFL))
        if present != handler and present is not None:
            set_handler(number, present)


@contextmanager
def handled(handler: Callable[[int, Any], Any], number: int = signal.SIGINT) -> Iterator[None]:
    """A context in which this handles a signal; in a thread that gets none nothing changes."""
    if not gets_signals():
        yield
        return
    before = {number: signal.signal(number, handler)}
    try:
        yield
    finally:
        give_back(before, handler)


def uninterrupted(function: _F) -> _F:
    """A decorator: as `interrupts_wait` around each call."""

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
    """A context at whose end the handlers of signals act that came inside: SIGINT, SIGTERM, SIGALRM and SIGUSR1.

    A second SIGINT acts at once, should the end never come. It does something in the main thread only, where Python handles
    signals: other threads get none. One inside another is part of that. Handlers of others, such as a notebook's, get the
    signal as if it came at the end; signals without a handler in Python act as ever.
    """
    before = _begin()
    try:
        yield
    finally:
        if before is not None:
            _end(before)


# A signal may come between any two lines of these while a handler from before is in force, and end them there. So nothing
# but the handlers says whether signals wait, and what is left in `_waiting` and `_came` by then has no meaning; and whatever
# ends them, all handlers are those from before.


def _begin() -> _Handlers | None:
    """Let signals wait; gives the handlers from before, None where there is nothing to be done."""
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
    """Call the handlers, all of them, whatever they raise."""
    if came:
        try:
            before[came[0][0]](*came[0])
        finally:
            _deliver(came[1:], before)


def _note(number: int, frame: Any) -> None:
    if number not in [each for each, _ in _came]:
        _came.append((number, frame))
    elif number == signal.SIGINT:
        _came[:] = [each for each in _came if each[0] != number]
        _waiting[0][number](number, frame)


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
        """End: the handlers are those from before, and get what has come. In another thread they act as those now."""
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
        """The handlers are those from before."""
        give_back(self._before, self._note)
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
