"""Metrics of the eager backend, computed from the tensors that a step has at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import storage
from ..launch import Launch
from ..metrics import MetricsBuffer

ALONE = 16384  # elements; torch shares longer sums out among threads, and their number would show in the result


class Found:
    """What one step finds of the tensors of a launch."""

    def __init__(self, into: MetricsBuffer, launch: Launch) -> None:
        ring, metric = into.ring(launch.device), into.metric
        self._slot, self._metric, self._scale_and_skip = ring[into.slot], metric, launch.grad_scale_and_skip
        self._totals = torch.zeros(len(launch.weights), len(metric.names), dtype=ring.dtype, device=ring.device)
        self._largest = torch.tensor([by == "max" for by in metric.by], device=ring.device)

    def take(self, i: int, seen: tuple[Any, ...], stored: list[torch.Tensor], values: list[Any]) -> None:
        """Compute the metric on a stretch of a tensor.

        Args:
            i: the tensor's number.
            seen: the weight, the gradient and the new weight as the rule has them.
            stored, values: the weight, what is stored alongside if there is anything, and what is to be stored there.
        """
        w, computed = seen[0], list(self._metric(*seen))
        if self._metric.counts_unchanged:
            pairs = zip(stored, values, strict=True)
            new = [value.to(old) if isinstance(value, torch.Tensor) else old.new_tensor(value) for old, value in pairs]
            computed.append(storage.unchanged(stored, new))
        each = [torch.as_tensor(value, dtype=w.dtype, device=w.device).expand(w.shape) for value in computed]
        found = [value.amax() if by == "max" else sum_of(value) for value, by in zip(each, self._metric.by, strict=True)]
        total, more = self._totals[i], torch.stack(found).to(self._totals.dtype)
        total[:] = torch.where(self._largest, torch.maximum(total, more), total + more)

    def put(self, rows: np.ndarray) -> None:
        """Put all totals into these rows of the ring: 0 of a skipped step."""
        if self._scale_and_skip is not None:
            self._totals = torch.where(self._scale_and_skip[1] != 0, 0.0, self._totals)
        self._slot[torch.from_numpy(rows).to(self._slot.device)] = self._totals


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """The sum of a vector, which does not depend on the number of threads."""
    if value.device.type != "cpu" or len(value) <= ALONE:
        return torch.sum(value)
    return torch.stack([torch.sum(piece) for piece in value.split(ALONE)]).sum()
