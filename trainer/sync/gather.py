"""All-gathers within a flat buffer, and of the weights that each rank has updated its pieces of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dist_utils
from .bucket import Bucket
from .buckets import GradientBuckets
from .partition import memory_of, shaped_like

__all__ = ["FlatAllGather", "WeightGather"]


class FlatAllGather:
    """An all-gather within one flat tensor, of which each rank has its part."""

    def __init__(self, buckets: GradientBuckets, bucket: Bucket, flat: torch.Tensor) -> None:
        self._pool, self._sent = buckets.pool, None
        own = flat[bucket.bounds[buckets.rank] : bucket.bounds[buckets.rank + 1]]
        if buckets.native(bucket):
            self._work = dist_utils.all_gather(flat, own, buckets.group, async_op=True)
            return
        sent = self._sent = buckets.pool.take(own.numel() * buckets.ranks, own)
        sent.view(buckets.ranks, own.numel()).copy_(own.expand(buckets.ranks, own.numel()))
        sizes = bucket.parts, [own.numel()] * buckets.ranks
        self._work = dist_utils.all_to_all(flat, sent, buckets.group, async_op=True, sizes=sizes)

    def wait(self) -> None:
        self._work.wait()
        if self._sent is not None:
            self._pool.give(self._sent)


class WeightGather:
    """The updated pieces of a bucket on their way to all ranks."""

    def __init__(self, bucket: Bucket, params: Sequence[torch.nn.Parameter], buckets: GradientBuckets) -> None:
        self.bucket, self._params, self._buckets = bucket, params, buckets
        self._sizes: list[int] = []  # of the stretches of the bucket: pieces, and gaps between them
        self._own: list[
            tuple[int, torch.Tensor]
        ] = []  # the weights of this rank's part, each with the number of its stretch
        self._others: list[tuple[int, torch.Tensor]] = []
        self._stage: Any = None
        self._running: Any = None

    def follow(self) -> None:
        """Look where the weights are."""
        bounds, rank = self.bucket.bounds, self._buckets.rank
        low, high, end = bounds[rank], bounds[rank + 1], 0
        self._sizes, self._own, self._others = [], [], []
        for member in sorted(self.bucket.members, key=lambda member: member.start):
            param = self._params[member.param].detach()
            for first, last, into in ((0, low, self._others), (low, high, self._own), (high, bounds[-1], self._others)):
                start, stop = max(first - member.start, 0), min(last - member.start, member.size)
                if start >= stop:
                    continue
                self._sizes += [member.start + start - end, stop - start]
                end = member.start + stop
                weight = memory_of(param)[start:stop] if self._buckets.owners is None else param
                into.append((len(self._sizes) - 1, weight))
        self._sizes.append(bounds[-1] - end)

    def start(self) -> None:
        buckets, bucket = self._buckets, self.bucket
        stage = self._stage = buckets.pool.take(bucket.bounds[-1], self._params[bucket.members[0].param])
        parts, weights = self._pairs(self._own)
        if parts:
            torch._foreach_copy_(parts, weights)
        self._running = FlatAllGather(buckets, bucket, stage)

    def finish(self) -> None:
        self._running.wait()
        parts, weights = self._pairs(self._others)
        if parts:
            torch._foreach_copy_(weights, parts)
        self._buckets.pool.give(self._stage)
        self._stage = self._running = None

    def _pairs(self, placed: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Stretches of the staging buffer, and the weights that belong there."""
        stretches = self._stage.split_with_sizes(self._sizes)
        if self._buckets.owners is None:
            return [stretches[k] for k, _ in placed], [weight for _, weight in placed]
        return [shaped_like(stretches[k], weight) for k, weight in placed], [weight for _, weight in placed]
