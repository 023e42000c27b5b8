"""OwnNumbers: a loop's place in torch's random numbers, kept while others draw from the same generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...trainer.utils.random_state import set_torch_state, torch_state

__all__ = ["OwnNumbers"]


class OwnNumbers:
    """Torch's random numbers, on the CPU and on GPUs in use, as a loop draws them: a turn goes on where the last one ended.

    What others have drawn between two turns changes nothing, and they go on where they were. Until somebody draws, there is
    one sequence, as for a plain loop. The loop is at rest when a turn begins and ends.
    """

    def __init__(self) -> None:
        self._left: Mapping[str, Any] | None = None  # where the last turn ended
        self._is_here = False  # whether a turn has begun and not ended

    def begin(self) -> Mapping[str, Any] | None:
        """Begin a turn, and return the others' place, for `end`; None if it is the loop's own."""
        here, self._is_here = torch_state(), True
        if self._left is None or _same(here, self._left):
            return None
        set_torch_state(self._left)
        return here

    def end(self, others: Mapping[str, Any] | None = None) -> None:
        """End a turn if one has begun. Without `others` these go on from the loop's place."""
        if self._is_here:
            self._left, self._is_here = torch_state(), False
            if others is not None:
                set_torch_state(others)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context that is a turn, or a part of the one that has begun."""
        if self._is_here:
            yield
            return
        others = self.begin()
        try:
            yield
        finally:
            self.end(others)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    gpus = zip(one["gpus"] or (), other["gpus"] or (), strict=False)  # none before they are in use
    return torch.equal(one["torch"], other["torch"]) and all(torch.equal(*pair) for pair in gpus)
