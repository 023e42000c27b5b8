"""BucketQueue: gradients come into their buckets, whose sums are started in one order, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...kernels import streams
from ..compression import wait_all
from .bucket import Bucket, Member, check_gradient
from .collectives import BucketCollectives

__all__ = ["BucketQueue"]

COPIED_AT_ONCE = 2**16  # bytes; the next gradient takes the memory of one that has been copied. Others are copied together


class BucketQueue:
    """One round of sums after the other: from the first gradient that comes until all ranks have all sums.

    It is part of `GradientBuckets`, whose arguments are the same.

    Attributes:
        buckets: in the order in which they are started; empty before `use`.
        arrived: for each parameter whether its gradient has come in this round.
        is_open: whether some bucket may be on its way.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str], collectives: BucketCollectives) -> None:
        self._params, self._names, self._collectives = params, names, collectives
        self.buckets: list[Bucket] = []
        self.arrived = [False] * len(params)
        self.is_open = False
        self._members: list[tuple[Bucket, Member]] = []  # by parameter
        self._flags: Sequence[int] = ()
        self._next = 0  # the bucket to be started next

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Use these buckets from now on, of which the last one has room for a count for each parameter, and for flags."""
        self.buckets = list(buckets)
        found = {member.param: (bucket, member) for bucket in buckets for member in bucket.members}
        self._members = [found[i] for i in range(len(self._params))]

    def begin(self, flags: Sequence[int]) -> None:
        """Begin a round. What has come before there were buckets is known."""
        self.is_open, self._next, self._flags = True, 0, flags
        for bucket in self.buckets:
            wanted = [member.param for member in bucket.members if self._params[member.param].requires_grad]
            bucket.waiting = sum(not self.arrived[i] for i in wanted)
            bucket.started = False
            bucket.idle = not wanted and bucket.extra is None

    def add(self, i: int) -> None:
        """The gradient of parameter `i` has come: start what is complete with it."""
        self.arrived[i] = True
        bucket, member = self._members[i]
        if member.room.nbytes >= COPIED_AT_ONCE:
            with torch.no_grad():
                self._copy_in([member])
        bucket.waiting -= 1
        if bucket.waiting == 0:
            ready = self._next
            while ready < len(self.buckets) and self.buckets[ready].waiting == 0:
                ready += 1
            if ready > self._next:
                with torch.no_grad():
                    self._start(ready, self.arrived)

    @torch.no_grad()
    def finish(self, counted: Sequence[bool], flags: Sequence[int]) -> torch.Tensor:
        """End the round: start what has not been started, and wait for all of it.

        Args:
            counted: for each parameter whether its gradient counts; else there are zeros.
            flags: as for `begin`, if there is no round yet.

        Returns:
            The sums over all ranks of `counted` and of the flags.
        """
        if not self.is_open:
            self.begin(flags)
        self._start(len(self.buckets), counted)
        started = [bucket for bucket in self.buckets if bucket.started]
        wait_all([bucket.handle for bucket in started if bucket.reducer is not None])
        for bucket in started:
            if bucket.reducer is None:
                bucket.handle.wait()
            bucket.handle = None
        extra: Any = self.buckets[-1].extra
        return extra.clone()

    def reset(self) -> None:
        """Wait for the gradients of a new round."""
        self.is_open, self.arrived = False, [False] * len(self._params)

    def check_unchanged(self) -> None:
        """An error for gradients that have been changed while they may have been on their way already."""
        for bucket in self.buckets if self.is_open else ():
            if not bucket.started:
                continue
            for member, version in zip(bucket.members, bucket.versions, strict=True):
                gradient = self._params[member.param].grad
                if self.arrived[member.param] and (gradient is not member.view or gradient._version != version):
                    what = "was replaced" if gradient is not member.view else "was written to"
                    raise RuntimeError(
                        f"the gradient of {self._names[member.param]!r} {what} after backward, when its sum over all ranks "
                        "had been started: change gradients between allreduce_grads() and update(batch_size), or call "
                        "discard() on all ranks to go on without a step"
                    )

    def _start(self, end: int, counted: Sequence[bool]) -> None:
        """Start the buckets up to this one, not including it, with zeros where there is no gradient."""
        while self._next < end:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket.idle:
                continue
            if bucket.gaps:
                torch._foreach_zero_(bucket.gaps)
            self._copy_in([member for member in bucket.members if counted[member.param]])
            for member in bucket.members:
                if not counted[member.param]:
                    member.room.zero_()
            bucket.versions = [member.view._version for member in bucket.members]
            if bucket.extra is not None:
                bucket.extra.fill_(1.0)
                given = self._flags if all(counted) else [*counted, *self._flags]
                flags = streams.staged(torch.tensor(given, dtype=torch.float32), bucket.extra.device)
                bucket.extra[-len(given) :].copy_(flags, non_blocking=True)
            bucket.handle = self._collectives.sum(bucket)
            bucket.started = True

    def _copy_in(self, members: Sequence[Member]) -> None:
        """Copy gradients to their places, and make them views of these."""
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for index, _, _, view, _ in members:
            gradient: Any = self._params[index].grad
            if gradient is not view:
                check_gradient(self._names[index], view, gradient)
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
            increment_version(views)  # on GPUs torch does not count what lists of tensors are given
        for index, _, _, view, _ in members:
            self._params[index].grad = view
