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
from collections.abc import Callable, Iterator, Mapping
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
_INTERRUPT, _END = int(signal.SIGINT), int(signal.SIGTERM)
_NONE: _Handlers = {}
_waiting = [_NONE]  # the handlers of the signals that wait
_came: list[tuple[int, Any]] = []  # the signals that wait


def gets_signals() -> bool:
    """Return whether this is the main thread, in which Python calls signal handlers."""
    return get_ident() == main_thread().ident


@contextmanager
def handled(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Handle SIGINT by `handler` inside this context; it does nothing outside of the main thread."""
    if not gets_signals():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        restore_handlers({signal.SIGINT: before})


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Set the handlers `before`, by number of signal, as `getsignal` returned them; None, not of Python, is the default."""
    for number, handler in before.items():
        set_handler(number, handler if callable(handler) else int(handler or signal.SIG_DFL))


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
    """Let SIGINT and SIGTERM wait until the end of this context.

    The handlers of the program, such as a notebook's, are called at the end. A second SIGINT acts at once, in case the end
    never comes. A signal without a Python handler is not delayed. A context inside another one is part of it. Outside of the
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
    interrupt, end = getsignal(_INTERRUPT), getsignal(_END)
    if interrupt is _note or end is _note:
        return None
    before = {_INTERRUPT: interrupt} if callable(interrupt) else {}
    if callable(end):
        before[_END] = end
    if not before:
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
        restore_handlers(before)
    except BaseException:
        restore_handlers(before)
        raise
    else:
        _waiting[0] = _NONE  # a handler may hold a loop, with its model
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


class StopSignal:
    """Notes SIGTERM, which asks a training to end, from `install` to `restore`, instead of ending the process at once.

    `deliver` and `restore` then let it act, in the main thread. Several count as one. Forked processes get the handler from
    before.
    """

    def __init__(self) -> None:
        self.arrived = False

    def install(self) -> None:
        """Begin to note SIGTERM. Warns outside of the main thread, where no handler can be set."""
        global _before_notes, _acts
        self.arrived = False
        if not gets_signals():
            warnings.warn(
                "SIGTERM can be noted in the main thread only, so that it will not save a checkpoint: enter the "
                "CheckpointManager there, or give sigterm=False",
                stacklevel=4,
            )
            return
        if getsignal(signal.SIGTERM) is not _note_stop:
            _before_notes, _acts = signal.signal(signal.SIGTERM, _note_stop), False
        _installed.add(self)

    def restore(self) -> None:
        """Restore the handler from before, and let a noted signal act.

        In another thread the handler stays installed, and forwards signals to the one from before.
        """
        if self in _installed:
            _installed.discard(self)
            if not _installed and gets_signals():
                restore_handlers({signal.SIGTERM: _before_notes})
        if self.arrived:
            self.arrived = False
            signal.raise_signal(signal.SIGTERM)

    def deliver(self) -> None:
        """Let SIGTERM act as it would have before `install`, which may end the process; the last that has noted it does."""
        global _acts
        self.arrived = False
        if not any(each.arrived for each in _installed):
            _acts = True
            signal.raise_signal(signal.SIGTERM)


_installed: weakref.WeakSet[StopSignal] = weakref.WeakSet()
_before_notes: Any = signal.SIG_DFL  # the handler from before the first of them
_acts = False  # whether the next signal acts instead of being noted


def _note_stop(number: int, frame: Any) -> None:
    global _acts
    if _installed and not _acts:
        for each in _installed:
            each.arrived = True
        return
    _acts = False
    restore_handlers({number: _before_notes})
    signal.raise_signal(number)
    if _installed:  # the process goes on: note the next signal
        signal.signal(number, _note_stop)


# A forked process saves no checkpoint, so SIGTERM must end it as before, even if it comes while it starts.


def _before_fork() -> None:
    _of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _installed else ())


def _after_fork(in_child: bool) -> None:
    if in_child and _installed:
        for each in _installed:
            each.arrived = False
        _installed.clear()
        restore_handlers({signal.SIGTERM: _before_notes})
    signal.pthread_sigmask(signal.SIG_SETMASK, _of_thread.mask)


_of_thread = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True)
    )
