"""Ctrl-C waits until a step has ended: one that is left in its middle would leave weights updated, and not counted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from threading import get_ident, main_thread
from typing import Any, TypeVar

__all__ = ["interrupts_wait", "uninterrupted"]

_F = TypeVar("_F", bound=Callable[..., Any])
# The functions that those of `signal` wrap, which take ten times as long to make enums of handlers: 20 us for a step.
_signal: Any = import_module("_signal") if find_spec("_signal") else signal
_SIGINT = int(signal.SIGINT)
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


def _begin() -> Callable[..., Any] | None:
    """Let interrupts wait; gives the handler from before, None where there is nothing to be done."""
    if get_ident() != main_thread().ident:
        return None
    before: Any = _signal.getsignal(_SIGINT)
    if before is _note or not callable(before):
        return None
    _waiting["handler"], _waiting["came"] = before, None
    _signal.signal(_SIGINT, _note)
    handler: Callable[..., Any] = before
    return handler


def _end(before: Callable[..., Any]) -> None:
    if _signal.getsignal(_SIGINT) is _note:  # nobody has set another one meanwhile
        _signal.signal(_SIGINT, before)
    if (came := _waiting["came"]) is not None:
        _waiting["came"] = None
        before(*came)


def _note(*came: Any) -> None:
    if _waiting["came"] is None:
        _waiting["came"] = came
    else:
        _waiting["came"] = None
        _waiting["handler"](*came)
