"""NoSync: replicas without a store, each updated with its own gradients; one replica, as a rule."""

from __future__ import annotations

from .base import GradientSync

__all__ = ["NoSync"]


class NoSync(GradientSync):
    """Each replica is updated with its own gradients."""

    reduces = False

    def __init__(self, replicas: int) -> None:
        self.num_replicas = replicas

    def start(self) -> None:
        pass
