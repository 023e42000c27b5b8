"""All-gathers of the weights that each rank has updated its pieces of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .bucket import Bucket
from .collectives import BucketCollectives
from .partition import memory_of, shaped_like

__all__ = ["WeightGather"]


class WeightGather:
    """The updated pieces of a bucket on their way to all ranks."""

    def __init__(
        self, bucket: Bucket, params: Sequence[torch.nn.Parameter], collectives: BucketCollectives, cuts: bool
    ) -> None:
        self.bucket, self._params, self._collectives, self._cuts = bucket, params, collectives, cuts
        self._sizes: list[int] = []  # of the stretches of the bucket: pieces, and gaps between them
        # The weights of this rank's part, each with the number of its stretch, and those of other ranks'.
        self._own: list[tuple[int, torch.Tensor]] = []
        self._others: list[tuple[int, torch.Tensor]] = []
        self._stage: Any = None
        self._running: Any = None

    def follow(self) -> None:
        """Look where the weights are."""
        bounds, rank = self.bucket.bounds, self._collectives.rank
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
                weight = memory_of(param)[start:stop] if self._cuts else param
                into.append((len(self._sizes) - 1, weight))
        self._sizes.append(bounds[-1] - end)

    def start(self) -> None:
        bucket = self.bucket
        stage = self._stage = self._collectives.pool.take(bucket.bounds[-1], self._params[bucket.members[0].param])
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
