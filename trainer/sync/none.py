"""NoSync: replicas without a store, each updated with its own gradients; one replica, as a rule."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.metrics import MetricsBuffer
from .base import GradientSync

__all__ = ["NoSync"]


class NoSync(GradientSync):
    """Each replica is updated with its own gradients."""

    reduces = False

    def __init__(self, replicas: int) -> None:
        self.num_replicas = replicas

    def start(self) -> None:
        pass

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        return list(map(sum, zip(*fresh, strict=True)))

    def reduce(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]]) -> None:
        pass

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        raise NotImplementedError
