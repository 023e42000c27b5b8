"""Signals wait until a step has ended: one that raises midway would leave weights updated but not counted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident, main_thread
from typing import Any, TypeVar

__all__ = ["interrupts_wait", "uninterrupted"]

_F = TypeVar("_F", bound=Callable[..., Any])
_Handlers = dict[int, Callable[..., Any]]
# Ctrl-C, and those for which programs have handlers that raise: time limits, and what asks a job to end.
_NUMBERS = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1") if hasattr(signal, name)]
_waiting: list[_Handlers] = [{}]  # whose signals wait
_came: list[tuple[int, Any]] = []


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
    if get_ident() != main_thread().ident:
        return None
    before = {number: handler for number in _NUMBERS if callable(handler := signal.getsignal(number))}
    if not before or _note in before.values():
        return None
    _came.clear()
    _waiting[0] = before
    try:
        for number in before:
            signal.signal(number, _note)
    except BaseException:
        _end(before)
        raise
    return before


def _end(before: _Handlers) -> None:
    try:
        _give_back(before)
    except BaseException:
        _give_back(before)
        raise
    finally:
        if _came:
            came = _came[:]
            _came.clear()
            _deliver(came, before)


def _give_back(before: _Handlers) -> None:
    for number, handler in before.items():
        present = signal.signal(number, handler)
        if present is not _note:  # somebody has set another one meanwhile
            signal.signal(number, present)


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
