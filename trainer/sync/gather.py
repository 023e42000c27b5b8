"""All-gathers of the weights that each rank has updated its pieces of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .bucket import Bucket
from .buckets import GradientBuckets
from .collectives import BucketCollectives
from .partition import memory_of, shaped_like

__all__ = ["WeightGathers"]


class WeightGathers:
    """The weights of all parameters, of which each rank has updated its pieces.

    Args:
        buckets: which pieces each rank has.
        cuts: whether parameters are cut anywhere, or each belongs to one rank.
    """

    def __init__(self, buckets: GradientBuckets, cuts: bool) -> None:
        self._buckets, self._cuts = buckets, cuts
        self._strides = [param.stride() for param in buckets.params]
        self._addresses: list[int] = []
        self._gathers: list[_WeightGather] = []

    def follow(self) -> bool:
        """See where the weights are; whether some are elsewhere now. To be called when there are buckets.

        Raises:
            ValueError: elements of a parameter that is cut are in another order.
        """
        params = self._buckets.params
        if self._cuts and [param.stride() for param in params] != self._strides:
            raise ValueError(
                "a parameter has got other strides since the first step, as by .t() or another memory format: each process "
                "has the states of pieces of its memory, which cannot follow; change layouts before the first step"
            )
        addresses = [param.data_ptr() for param in params]
        if addresses == self._addresses:
            return False
        self._addresses, collectives = addresses, self._buckets.collectives
        self._gathers = [
            _WeightGather(bucket, params, collectives, self._cuts) for bucket in self._buckets.buckets if bucket.members
        ]
        return True

    def gather(self, used: Sequence[bool]) -> None:
        """Give all ranks all pieces of what was used. While a bucket is copied to the parameters, the next is on its way."""
        running = None
        for gather in self._gathers:
            if not any(used[member.param] for member in gather.bucket.members):
                continue
            gather.start()
            if running is not None:
                running.finish()
            running = gather
        if running is not None:
            running.finish()


class _WeightGather:
    """The updated pieces of a bucket on their way to all ranks."""

    def __init__(
        self, bucket: Bucket, params: Sequence[torch.nn.Parameter], collectives: BucketCollectives, cuts: bool
    ) -> None:
        self.bucket, self._collectives, self._cuts = bucket, collectives, cuts
        self._like = params[bucket.members[0].param]
        self._stage: Any = None
        self._running: Any = None
        self._sizes: list[int] = []  # of the stretches of the bucket: pieces, and gaps between them
        # The weights of this rank's part, each with the number of its stretch, and those of other ranks'.
        self._own: list[tuple[int, torch.Tensor]] = []
        self._others: list[tuple[int, torch.Tensor]] = []
        bounds, rank = bucket.bounds, collectives.rank
        low, high, end = bounds[rank], bounds[rank + 1], 0
        for member in bucket.members:
            param = params[member.param].detach()
            for first, last, into in ((0, low, self._others), (low, high, self._own), (high, bounds[-1], self._others)):
                start, stop = max(first - member.start, 0), min(last - member.start, member.size)
                if start >= stop:
                    continue
                self._sizes += [member.start + start - end, stop - start]
                end = member.start + stop
                weight = memory_of(param)[start:stop] if cuts else param
                into.append((len(self._sizes) - 1, weight))
        self._sizes.append(bounds[-1] - end)

    def start(self) -> None:
        bucket = self.bucket
        stage = self._stage = self._collectives.pool.take(bucket.bounds[-1], self._like)
        parts, weights = self._pairs(self._own)
        if parts:
            torch._foreach_copy_(parts, weights)
        self._running = self._collectives.gather(bucket, stage)

    def finish(self) -> None:
        self._running.wait()
        parts, weights = self._pairs(self._others)
        if parts:
            torch._foreach_copy_(weights, parts)
        self._collectives.pool.give(self._stage)
        self._stage = self._running = None

    def _pairs(self, placed: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Stretches of the staging buffer, and the weights that belong there."""
        stretches = self._stage.split_with_sizes(self._sizes)
        if self._cuts:
            return [stretches[k] for k, _ in placed], [weight for _, weight in placed]
        return [shaped_like(stretches[k], weight) for k, weight in placed], [weight for _, weight in placed]
