"""What is recorded of steps that are captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .launch import GRADIENT

# The recording that is going on; what another thread does meanwhile is not recorded.
current_recording: ContextVar[Recording | None] = ContextVar("current_recording", default=None)
# Whether rules must be those that are right at every step, as in a graph and before it is recorded.
for_all_steps: ContextVar[bool] = ContextVar("for_all_steps", default=False)


class Recording:
    """What is launched while a CUDA graph is recorded. What changes from step to step is not copied into the graph then.

    Attributes:
        updates: each `Update` that has been run, with what it is to work on again.
        owners: for each step that was taken a function that tells whether it can be taken in the same way again, and one
            that does all of it that the host does.
    """

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.owners: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """A context that is recorded here."""
        before = current_recording.set(self)
        try:
            yield
        finally:
            current_recording.reset(before)


class RecordedUpdate:
    """An update in a CUDA graph: the launches whose kernels are in it, and the addresses of their gradients."""

    def __init__(self, update: Any) -> None:
        self.update, self._groups = update, update.groups
        self._gradients = [group.addresses[GRADIENT].copy() for group in self._groups]
        # Kept alive, since the graph reads and writes there.
        self._alive = [reference() for reference in update.references], [group.sources for group in self._groups]

    def holds(self) -> bool:
        """Whether the graph's kernels still work on the weights and states of the update."""
        return self.update.groups is self._groups and self.update.is_in_place()

    def upload(self) -> None:
        """Copy what the kernels read to the device; `hyper` has been copied already."""
        for group, addresses in zip(self._groups, self._gradients, strict=True):
            group.addresses[GRADIENT] = addresses
            group.upload()
        self.update.forget_gradients()  # so that a step without the graph looks for gradients again
