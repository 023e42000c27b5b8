"""StepSaving: the checkpoints of a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...trainer import CheckpointManager
from .steps import weakly

__all__ = ["StepSaving"]


class StepSaving:
    """Resumes a loop before its first step, and saves it after steps. It refers to what it saves weakly.

    Args:
        manager: what saves; None: nothing does.
        stateful: what else training depends on.
    """

    def __init__(self, manager: CheckpointManager | None, stateful: Sequence[Any]) -> None:
        self._living, self._is_open = weakly(manager), False
        self._own = [] if manager is None else [weakly(each) for each in stateful if each is not manager.net]
        self._before: list[Any] = []

    @property
    def _manager(self) -> CheckpointManager | None:
        manager: CheckpointManager | None = self._living()
        return manager

    def begin(self) -> int:
        """Resume, and save from now on; gives the number of the step to which that leads."""
        if self._manager is None:
            return 0
        self.go_on()
        try:
            return self._manager.resume().step
        except BaseException:
            self.end("failed")
            raise

    def go_on(self) -> None:
        """Save, and note signals, from now on."""
        if self._manager is None or self._is_open:
            return
        self._before = self._manager.stateful
        self._manager.stateful = [*self._before, *(each() for each in self._own)]
        self._manager.__enter__()
        self._is_open = True

    def after_step(self, value: Any) -> None:
        """A step has been taken, which gave this."""
        if self._manager is not None and self._is_open:
            self._manager.step(_metrics(value, self._manager.metric))

    def end(self, status: str) -> None:
        """The loop has ended: save where it stands, unless it failed, and wait for that."""
        manager = self._manager
        if manager is None or not self._is_open:
            return
        self._is_open = False
        try:
            if status != "failed" and manager.saved_step != manager.trainer.optimizer.num_update:
                manager.save()
        finally:
            manager.__exit__(None, None, None)
            manager.stateful, self._before = self._before, []


def _metrics(value: Any, needed: str | None) -> dict[str, Any] | None:
    """The numbers that a step gave, by name; None where the one that is needed is not among them."""
    found = dict(value) if isinstance(value, Mapping) else {"loss": value}
    found = {name: one for name, one in found.items() if _is_number(one)}
    return found if needed is None or needed in found else None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
