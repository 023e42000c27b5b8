"""Record the updates that are captured in a CUDA graph, to replay them with new numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .launch import GRADIENT

# The recording of this thread, if one is going on.
current_recording: ContextVar[Recording | None] = ContextVar("current_recording", default=None)
# Whether an optimizer must use a rule that is correct at every step, because a graph will replay it.
for_all_steps: ContextVar[bool] = ContextVar("for_all_steps", default=False)


class Recording:
    """The updates and steps that ran while a CUDA graph was captured; the graph does not contain their uploads.

    Attributes:
        owners: for each step two functions: whether it can be repeated unchanged, and the host's part of repeating it.
    """

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.owners: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    @contextmanager
    def going_on(self) -> Iterator[None]:
        before = current_recording.set(self)
        try:
            yield
        finally:
            current_recording.reset(before)


class RecordedUpdate:
    """An `Update` that a CUDA graph has captured: its launches, and the addresses of their gradients."""

    def __init__(self, update: Any) -> None:
        self.update, self._groups = update, update.groups
        self._gradients = [group.addresses[GRADIENT].copy() for group in self._groups]
        self._forms = update.graph_forms()
        # The graph reads and writes these tensors, so keep them alive.
        self._kept = [reference() for reference in update.references], [group.sources for group in self._groups]

    def is_valid(self) -> bool:
        """Return whether weights and states have the addresses, and the numbers written last those, that the graph has."""
        update = self.update
        return update.groups is self._groups and update.is_in_place() and update.graph_forms() == self._forms

    def upload(self) -> None:
        for group, addresses in zip(self._groups, self._gradients, strict=True):
            group.addresses[GRADIENT] = addresses
            group.upload()
        self.update.forget_gradients()  # so that a step without the graph binds gradients again
