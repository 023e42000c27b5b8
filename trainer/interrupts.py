"""Ctrl-C waits until a step has ended: a step interrupted midway would leave weights updated but not counted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident, main_thread
from typing import Any, TypeVar

__all__ = ["interrupts_wait", "uninterrupted"]

_F = TypeVar("_F", bound=Callable[..., Any])
_waiting: dict[str, Any] = {"handler": None, "came": None}  # whose interrupts wait, and with what it is to be called


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
    """A context at whose end an interrupt acts that came inside. A second one acts at once, should the end never come.

    It does something in the main thread only, where Python handles signals: other threads get no KeyboardInterrupt. One
    inside another is part of that. Handlers of others, such as a notebook's, get the interrupt as if it came at the end.
    """
    before = _begin()
    try:
        yield
    finally:
        if before is not None:
            _end(before)


# An interrupt may come between any two lines of these while the handler from before is in force, and end them there. So
# nothing but that handler says whether interrupts wait, and what is left in `_waiting` by then has no meaning.


def _begin() -> Callable[..., Any] | None:
    """Let interrupts wait; gives the handler from before, None where there is nothing to be done."""
    if get_ident() != main_thread().ident:
        return None
    before = signal.getsignal(signal.SIGINT)
    if before is _note or not callable(before):
        return None
    _waiting["handler"], _waiting["came"] = before, None
    signal.signal(signal.SIGINT, _note)
    return before


def _end(before: Callable[..., Any]) -> None:
    present = signal.signal(signal.SIGINT, before)
    if present is not _note:  # somebody has set another one meanwhile
        signal.signal(signal.SIGINT, present)
    came, _waiting["came"] = _waiting["came"], None
    if came is not None:
        before(*came)


def _note(*came: Any) -> None:
    if _waiting["came"] is None:
        _waiting["came"] = came
    else:
        _waiting["came"] = None
        _waiting["handler"](*came)
