"""Sums and all-gathers of flat buckets, of which each rank has a part, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import dist_utils
from .bucket import Bucket

__all__ = ["BucketCollectives"]


class BucketCollectives:
    """The collectives of a process group on buckets.

    Args:
        group: the process group; None: that of all ranks.

    Attributes:
        group, rank, ranks: the group, this process's number in it, and how many there are.
        pool: of buffers.
    """

    def __init__(self, group: Any) -> None:
        self.group = dist_utils.process_group(group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.pool = Pool()
        self._is_gloo = dist.get_backend(self.group) == "gloo"

    def sum(self, bucket: Bucket) -> Any:
        """Start the sum over all ranks, of which each has its part or the whole; gives what can be waited for."""
        if bucket.reducer is not None:
            return bucket.reducer.start(bucket.flat)
        if bucket.own is None:
            return dist_utils.all_reduce(bucket.flat, group=self.group, async_op=True)
        if self.native(bucket):
            return dist_utils.reduce_scatter(bucket.own, bucket.flat, self.group, async_op=True)
        # For parts of different sizes, and for gloo, whose own way sends as much as an all-reduce, every rank gets its part
        # of all ranks' buckets and adds these up, in the ranks' order.
        own, parts, pool = bucket.own, bucket.parts, self.pool
        got = pool.take(own.numel() * len(parts), own)
        sizes = [own.numel()] * len(parts), parts

        def add_up() -> None:
            first, *others = got.view(len(parts), own.numel())
            if others:
                torch.add(first, others[0], out=own)
            else:
                own.copy_(first)
            for part in others[1:]:
                own.add_(part)
            pool.give(got)

        return _Pending(dist_utils.all_to_all(got, bucket.flat, self.group, async_op=True, sizes=sizes), add_up)

    def gather(self, bucket: Bucket, flat: torch.Tensor) -> Any:
        """Start to give all ranks each other's parts of `flat`, cut as this bucket is; gives what can be waited for."""
        own = flat[bucket.bounds[self.rank] : bucket.bounds[self.rank + 1]]
        if self.native(bucket):
            return dist_utils.all_gather(flat, own, self.group, async_op=True)
        sent = self.pool.take(own.numel() * self.ranks, own)
        sent.view(self.ranks, own.numel()).copy_(own.expand(self.ranks, own.numel()))
        sizes = bucket.parts, [own.numel()] * self.ranks
        work = dist_utils.all_to_all(flat, sent, self.group, async_op=True, sizes=sizes)
        return _Pending(work, lambda: self.pool.give(sent))

    def native(self, bucket: Bucket) -> bool:
        """Whether the backend's own reduce-scatter and all-gather are to be used: parts are equal, and it is not gloo."""
        return bucket.flat.is_cuda and not self._is_gloo and len(set(bucket.parts)) == 1


class Pool:
    """Buffers that are used again and again, as messages in flight are never many."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer of so many elements, of undefined contents, of this type and on this device."""
        free = self._free.get((like.device, like.dtype), [])
        fitting = [k for k, buffer in enumerate(free) if buffer.numel() >= size]
        if fitting:
            return free.pop(min(fitting, key=lambda k: free[k].numel()))[:size]
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, when all that uses it is queued."""
        root = buffer if buffer._base is None else buffer._base
        self._free.setdefault((root.device, root.dtype), []).append(root)


class _Pending:
    """A collective that is under way, with something to do after it."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        self._then()
