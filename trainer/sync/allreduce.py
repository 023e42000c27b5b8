"""Synchronization of several processes: gradients are summed in buckets while backward runs.

`AllReduceSync` gives every rank the sums, with which its trainer updates its replica; with `ZeroSync` every rank updates
its share of the weights, whose states only it has.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import dist_utils
from ..optimizer import Optimizer
from ..replica import Replica
from .agreement import RankAgreement
from .base import GradientSync, Residuals
from .bucket import Bucket
from .buckets import GradientBuckets
from .compressed import AUTO, check_compression, choose_compression, compressed_sum, load_residuals, residuals_of

__all__ = ["AllReduceSync", "CollectiveSync"]


class CollectiveSync(GradientSync):
    """Base of the synchronizations that sum gradients in buckets, while backward runs and in `count_fresh`.

    Args:
        group: the process group.
        replica: of the model, the only one in this process.
        names: of the parameters.
        optimizer: the optimizer, the same on all ranks.
        compression_params: for the sums; None compresses nothing.
        engine: as for `tristep.kernels.choose_engine`.
    """

    def __init__(
        self,
        group: Any,
        replica: Replica,
        names: Sequence[str],
        optimizer: Optimizer,
        compression_params: Mapping[str, Any] | None,
        engine: str | None,
    ) -> None:
        self.group, self._replica, self._names, self._engine = group, replica, list(names), engine
        self._optimizer = optimizer
        self._compression_params = compression_params
        check_compression(compression_params)
        self._buckets: GradientBuckets | None = None
        # Gradients that are sums already, of a step that was refused after that: the tensors, their versions, their counts.
        self._sums: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.num_replicas = dist.get_world_size(group)
        self.writes = dist.get_rank(group) == 0
        self._agreement = RankAgreement(group, self.num_replicas, self._names, replica.params, optimizer)

    def start(self) -> None:
        # First: where ranks differ some would refuse what others go on with, or wait for them in vain.
        settings = {"update_on_kvstore": self.updates, "compression_params": self._compression_params}
        self._agreement.check_start(settings)
        if self._compression_params is not None and self._compression_params["type"] == AUTO:
            self._compression_params = choose_compression(self._replica.params, self.group)
        reducer, params = None, self._compression_params
        if params is not None:
            for name, param in zip(self._names, self._replica.params, strict=True):
                if (getattr(param, "grad_dtype", None) or param.dtype) == torch.float64:
                    raise TypeError(
                        f"compression_params={params!r}: the gradient of {name!r} is torch.float64, which cannot be "
                        "compressed; convert the model, or leave it out"
                    )
            reducer = partial(compressed_sum, compression_params=params, group=self.group, engine=self._engine)
        self._buckets = self._make(reducer)
        self._buckets.broadcast_weights()

    @abc.abstractmethod
    def _make(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        """Make the buckets."""

    @property
    def _live(self) -> GradientBuckets:
        assert self._buckets is not None
        return self._buckets

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        summed = {
            i: count
            for i, (gradient, version, count) in self._sums.items()
            if self._replica.params[i].grad is gradient and gradient._version == version
        }
        # Of a sum rank 0 alone gives its own, so that it stays what it is.
        own = [new and (i not in summed or self.writes) for i, new in enumerate(fresh[0])]
        found = self._live.finish(own)
        known = [new or i in summed for i, new in enumerate(own)]
        counts = self._agreement.counts(known, found, self._live.flag_sums, ignore_stale_grad)
        counts = [summed.get(i, count) for i, count in enumerate(counts)]
        if self._compression_params is not None or not self.updates:
            self._sums = {
                i: (param.grad, param.grad._version, counts[i])
                for i, param in enumerate(self._replica.params)
                if counts[i] and param.grad is not None
            }
        return counts

    def end_step(self) -> None:
        self._sums = {}
        self._live.flag_slots = self._agreement.flags()

    def accumulate(self) -> AbstractContextManager[None]:
        return super().accumulate() if self._buckets is None else self._buckets.accumulate()

    def end_save(self) -> None:
        dist_utils.barrier(self.group)

    def residuals(self) -> Residuals:
        return {} if self._buckets is None else residuals_of(self._buckets)

    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if self._compression_params is not None:
            load_residuals(self._live, saved)


class AllReduceSync(CollectiveSync):
    """Every rank gets the sums of the gradients, and its trainer updates its replica with them (dist_sync)."""

    def _make(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        params: Any = self._replica.params
        return GradientBuckets(params, self._names, self.group, reducer=reducer)
