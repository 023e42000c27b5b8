"""DisplacedWeights: weights that are replaced temporarily, and restored later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .interrupts import uninterrupted
from .replica import Replica

__all__ = ["DisplacedWeights"]


class DisplacedWeights:
    """What the weights of replicas were before they were moved, and whether they have been written to since.

    Args:
        replicas: whose weights are about to be moved; they are copied.
        before: the weights to restore, of each replica, where they have been moved already.

    Attributes:
        before: the weights to restore.
    """

    def __init__(self, replicas: Sequence[Replica], before: list[list[torch.Tensor]] | None = None) -> None:
        self._replicas = replicas
        if before is None:
            before = [[weight.clone() for weight in replica.weights()] for replica in replicas]
        self.before = before
        self._marks = self._present_marks()

    def mark(self) -> None:
        """The weights are now where they are to stay until `restore`."""
        self._marks = self._present_marks()

    def written(self) -> list[str]:
        """Names, in quotes, of the parameters that have been written to, or given other memory, since `mark`."""
        changed = [now != then for now, then in zip(self._present_marks(), self._marks, strict=True)]
        names = self._replicas[0].names
        return [repr(name) for i, name in enumerate(names) if any(changed[i :: len(names)])]

    @uninterrupted
    @torch.no_grad()
    def restore(self) -> None:
        """Give the weights their values from before."""
        for replica, weights in zip(self._replicas, self.before, strict=True):
            for parameter, weight in zip(replica.params, weights, strict=True):
                parameter.copy_(weight)

    def _present_marks(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for replica in self._replicas for parameter in replica.params]
