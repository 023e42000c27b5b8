"""StepSource: where training steps come from, a generator, an iterator or a callable."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

__all__ = ["StepSource", "is_stateful", "weakly"]


class StepSource:
    """Training steps, one for each `take`.

    Args:
        steps: a generator function or an iterator, or a callable that takes a step, until it returns False.
    """

    def __init__(self, steps: Callable[[], Any] | Iterable[Any]) -> None:
        self._steps, self._iterator = steps, _iterator(steps)

    def take(self) -> Any:
        """Take one step.

        Raises:
            StopIteration: there are no more.
        """
        if self._iterator is not None:
            return next(self._iterator)
        value = self._steps()  # type: ignore[operator]
        if value is False:
            raise StopIteration
        return value

    @property
    def _is_closed(self) -> bool:
        return isinstance(self._iterator, Generator) and inspect.getgeneratorstate(self._iterator) == inspect.GEN_CLOSED

    @property
    def can_renew(self) -> bool:
        """Whether there are steps to come, once it is renewed."""
        return not self._is_closed or inspect.isgeneratorfunction(self._steps)

    def renew(self) -> bool:
        """As `can_renew`; a generator that an exception has ended is created again by its function."""
        if self._is_closed and self.can_renew:
            self._iterator = _iterator(self._steps)
        return self.can_renew

    def close(self) -> None:
        """Close a generator, which may have something to clean up."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()

    def is_redefined(self, newer: StepSource) -> bool:
        """Whether a newer source's steps are a function that has taken this one's name, as in a cell that is run again."""
        mine, its = self._steps, newer._steps
        if not (isinstance(mine, types.FunctionType) and isinstance(its, types.FunctionType)) or mine is its:
            return False
        name, namespace = mine.__qualname__, mine.__globals__
        return its.__globals__ is namespace and its.__qualname__ == name and namespace.get(name) is its

    def forget(self) -> None:
        """Have no steps any more, nor what they refer to."""
        self._steps = self._iterator = iter(())


def is_stateful(thing: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def weakly(thing: Any) -> Callable[[], Any]:
    """A function that gives this thing, or None once nothing else refers to it."""
    try:
        return weakref.ref(thing)
    except TypeError:  # None, and objects of some classes
        return lambda: thing


def _iterator(steps: Any) -> Iterator[Any] | None:
    if inspect.isgeneratorfunction(steps):
        return steps()
    return iter(steps) if isinstance(steps, Iterable) else None
