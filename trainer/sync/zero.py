"""ZeroSync: every rank updates its share of the weights, whose states only it has (dist_sync, update_on_kvstore=True)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ...kernels import Rule
from ...kernels.metrics import MetricsBuffer
from ..optimizer import RuleOptimizer
from .allreduce import CollectiveSync
from .bucket import Bucket
from .buckets import GradientBuckets
from .sharded import ShardedUpdate

__all__ = ["ZeroSync"]


class ZeroSync(CollectiveSync):
    """Every rank updates its share of the weights (dist_sync with update_on_kvstore=True): ZeRO, stage 1."""

    updates = True
    reports_metrics = False  # pieces of parameters have no rows in what is measured

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._control: torch.Tensor | None = None
        self._shards: ShardedUpdate | None = None

    def _make(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        params: Any = self._replica.params
        self._shards = ShardedUpdate(self._optimizer, params, self._names, self.group, engine=self._engine, reducer=reducer)
        if self._control is not None:
            self._shards.use_control(self._control)
        return self._shards.buckets

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        self._whole.update(chosen)
        self.end_step()

    def use_control(self, control: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        if not (isinstance(optimizer, RuleOptimizer) and isinstance(optimizer.rule, Rule)):
            raise RuntimeError(
                f"a loss scaler with {type(optimizer).__name__} and update_on_kvstore=True: that a gradient overflowed is "
                "known to the rank that has it only; use update_on_kvstore=False"
            )
        if self._compression_params is not None:
            raise RuntimeError(
                "a loss scaler with compression_params: what an overflow leaves in the residuals never goes away; leave one "
                "of them out"
            )
        self._control = control
        if self._shards is not None:
            self._shards.use_control(control)

    def total(self) -> torch.Tensor | None:
        return self._whole.total()

    def state_dict(self) -> dict[str, Any] | None:
        return self._whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._whole.load_state_dict(state)

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        return self._whole.masters(new)

    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        self._whole.apply(rule, hyper, indices)

    @property
    def _whole(self) -> ShardedUpdate:
        assert self._shards is not None
        return self._shards
