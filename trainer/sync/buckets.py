"""Gradients in flat buckets, whose sums over all ranks are started from autograd's hooks while backward still runs.

A bucket is one piece of memory, in which each of its parameters has a place for its gradient. When all of them have come,
they are copied there, become views of it, and one collective adds up the bucket. Collectives must come in the same order on
all ranks, so a bucket waits for those before it; what has not been started when backward is over, because some parameters
were not used, is started by `finish`, with zeros for these.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import dist_utils
from ..dist_utils import broadcast_coalesced, check_alike, global_rank, process_group
from ..validation import integer
from .bucket import Bucket, Member, Pool, ScatteredSum, check_gradient, gaps_of, group_params, make_bucket

__all__ = ["GradientBuckets"]

COPIED_AT_ONCE = 2**16  # bytes; the next gradient takes the memory of one that has been copied. Others are copied together


class GradientBuckets:
    """The gradients of a model in buckets, summed over all ranks.

    The first `finish` makes the buckets, in the order in which rank 0's gradients arrived, so sums are taken while backward
    runs from the second one on. All ranks must have the same parameters, each with the same `requires_grad` on all of them,
    which may change between rounds. What is frozen when the buckets are made has buckets of its own, which come first.

        buckets = GradientBuckets(net.parameters())
        buckets.broadcast_weights()
        for x, y in batches:
            loss(net(x), y).backward()
            buckets.finish([True] * n)
            optimizer.step()

    Args:
        params: the parameters, all initialized. A gradient is of the type of `grad_dtype` where the parameter has that.
        names: what messages call them; default "0", "1" and so on.
        group: the process group; default that of all ranks.
        bucket_bytes: a bucket is closed when it has as many.
        first_bucket_bytes: as many for the first one, which is on its way sooner.
        scatter: give each rank only its own part of each bucket's sum, in the bucket's `own`; gradients stay as they are.
        owners: with `scatter`, for each parameter the rank whose part it is in as a whole; by default buckets are cut into
            equal parts anywhere.
        reducer: called with each bucket, gives what has `start(flat)`, which gives what has `advance()`, to be called
            until it says True; these replace the all-reduce. By default there is none.

    Attributes:
        buckets: in the order in which they are started; empty before the first `finish`.
        used: for each parameter whether some rank had a gradient for it in the last `finish`.
        flag_slots: four user-defined integers below 2^12 that are summed along with the gradients; 0 unless set.
        flag_sums: their sums over all ranks in the last `finish`, float32 or float64 [4].
        events: of the present round, or else the last one, in order: ("arrived", index of a parameter whose gradient a hook
            announced) and ("started", number of a bucket). There are none before there are buckets.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str] | None = None,
        group: Any = None,
        *,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        scatter: bool = False,
        owners: Sequence[int] | None = None,
        reducer: Callable[[Bucket], Any] | None = None,
    ) -> None:
        self.params = list(params)
        self.names = [str(i) for i in range(len(self.params))] if names is None else list(names)
        if not self.params:
            raise ValueError("params is empty: there are no gradients to sum up")
        if len(self.names) != len(self.params):
            raise ValueError(f"{len(self.names)} names for {len(self.params)} params: there must be as many")
        for name, param in zip(self.names, self.params, strict=True):
            if isinstance(param, torch.nn.UninitializedParameter):
                raise ValueError(f"params: {name!r} is not initialized yet: run the model once before")
        if owners is not None and not scatter:
            raise ValueError("owners given without scatter=True: parameters are owned where sums are scattered")
        self.group = process_group(group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.scatter, self.owners = scatter, None if owners is None else list(owners)
        self.pool = Pool()
        self.buckets: list[Bucket] = []
        self.used = [False] * len(self.params)
        self.flag_slots = [0, 0, 0, 0]
        self.flag_sums = torch.zeros(4, device=self.params[0].device)
        self.events: list[tuple[str, int]] = []
        self._limits = integer("bucket_bytes", bucket_bytes, low=1), integer("first_bucket_bytes", first_bucket_bytes, low=1)
        self._reducer = reducer
        self._is_gloo = dist.get_backend(self.group) == "gloo"
        self._bucket_of: list[Bucket] = []  # by parameter
        self._members: list[Member] = []
        self._counts: torch.Tensor = torch.zeros(0)
        self._counting: Bucket | None = None  # the bucket in which counts travel, the last one
        self._arrived = [False] * len(self.params)
        self._order: list[int] = []  # in which gradients arrived, until there are buckets
        self._open = False  # whether some bucket may be on its way
        self._next = 0  # the bucket to be started next
        self._accumulating = 0
        self._lock = threading.Lock()
        self._hooks: dict[int, Any] = {}
        self._add_hooks()
        weakref.finalize(self, _remove, self._hooks)

    def broadcast_weights(self, buffers: Mapping[str, torch.Tensor] | None = None) -> None:
        """Give all ranks rank 0's parameters, and these buffers. To be called on all ranks.

        Raises:
            ValueError: ranks have other names, shapes or types; on all ranks, and nothing has been changed.
        """
        named: dict[str, torch.Tensor] = dict(zip(self.names, self.params, strict=True))
        check_alike("parameter", named, self.group)
        check_alike("buffer", buffers or {}, self.group)
        broadcast_coalesced([*self.params, *(buffers or {}).values()], self.group)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context in which backward passes add up gradients on this rank, and nothing is sent."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @torch.no_grad()
    def finish(self, fresh: Sequence[bool]) -> torch.Tensor:
        """End a round: start what has not been started, and wait for all of it. To be called on all ranks.

        Afterwards each parameter that some rank had a gradient for has the sum as its gradient, unless it is scattered.

        Args:
            fresh: for each parameter whether its gradient counts, where no hook has announced it: it may have been written
                by hand, or come while gradients were accumulated.

        Returns:
            On how many ranks each parameter had a gradient, float32 or float64 [n_params] on the parameters' device. To
            look at it means to wait for the device; `used` says what matters without that where it can.

        Raises:
            RuntimeError: a gradient has been changed or replaced after its bucket was started.
            TypeError, ValueError: a gradient that does not fit, or no gradient where `fresh` says so.
        """
        dist_utils.refuse_lost(self.group)
        given = zip(self._arrived, fresh, self.params, strict=True)
        counted = [arrived or (bool(new) and param.requires_grad) for arrived, new, param in given]
        if self.ranks == 1 and not self.scatter:
            self.used = counted
            self._end_round()
            return torch.tensor(counted, dtype=torch.float32, device=self.params[0].device)
        self._check_unchanged()
        self.make()
        if not self._open:
            self._begin_round()
        self._start(len(self.buckets), counted)
        self._wait()
        counts, self.flag_sums = self._counts.clone().split([len(self.params), len(self.flag_slots)])
        self.used = counted
        if not all(new or not param.requires_grad for new, param in zip(counted, self.params, strict=True)):
            self.used = (counts > 0).tolist()
        if not self.scatter:
            for bucket in self.buckets:
                for member in bucket.members if bucket.started else ():
                    if self.used[member.param]:
                        self.params[member.param].grad = member.view
        self._end_round()
        return counts

    def discard(self) -> None:
        """Forget the gradients of a backward pass that no step will follow. To be called on all ranks.

        What has been started cannot be called back, so this takes as long as `finish`; gradients have no meaning afterwards.
        """
        if self.buckets and self.ranks > 1:
            if not self._open:
                self._begin_round()
            with torch.no_grad():
                self._start(len(self.buckets), [False] * len(self.params))
            self._wait()
        self._order = []
        self._end_round()

    @torch.no_grad()
    def make(self) -> None:
        """Make the buckets now, if there are none. To be called on all ranks; the first `finish` does."""
        if self.buckets:
            return
        known = set(self._order)
        rest = [i for i in reversed(range(len(self.params))) if i not in known]
        order = torch.tensor([*self._order, *rest], dtype=torch.int64)
        trained = torch.tensor([param.requires_grad for param in self.params], dtype=torch.int64)
        plan = torch.cat([order, trained]).to(self.params[0].device)
        dist_utils.broadcast(plan, global_rank(self.group, 0), self.group)
        listed = plan.tolist()
        self._make(listed[: len(self.params)], listed[len(self.params) :])
        self._order = []

    def close(self) -> None:
        """Remove the hooks from the parameters: from now on gradients come as they did before."""
        _remove(self._hooks)

    def native(self, bucket: Bucket) -> bool:
        """Whether the backend's own reduce-scatter and all-gather are to be used: parts are equal, and it is not gloo."""
        return bucket.flat.is_cuda and not self._is_gloo and bucket.even

    def _add_hooks(self) -> None:
        own = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:
                self._hooks[i] = param.register_post_accumulate_grad_hook(partial(_on_gradient, own, i))

    def _make(self, order: Sequence[int], trained: Sequence[int]) -> None:
        gathered = group_params(self.params, order, trained, *self._limits)
        wide = [k for k, (kind, _) in enumerate(gathered) if kind[3] and kind[1] in (torch.float32, torch.float64)]
        carries = bool(wide) and not self.scatter and self._reducer is None
        if carries:
            gathered.append(gathered.pop(wide[-1]))
        counts = len(self.params) + len(self.flag_slots)
        for k, ((device, dtype, weight_dtype, _), members) in enumerate(gathered):
            kind = device, dtype, weight_dtype
            own_counts = counts if carries and k == len(gathered) - 1 else 0
            self.buckets.append(make_bucket(self.params, members, kind, self.ranks, self.owners, own_counts))
        if not carries:  # there is no bucket whose sums are exact and go to all ranks
            own_kind = self.params[0].device, torch.float32, None
            self.buckets.append(make_bucket(self.params, [], own_kind, self.ranks, self.owners, counts))
        self._counting = self.buckets[-1]
        end = max((member.start + member.size for member in self._counting.members), default=0)
        self._counts = self._counting.flat[end : end + counts]
        found = {member.param: (bucket, member) for bucket in self.buckets for member in bucket.members}
        self._bucket_of = [found[i][0] for i in range(len(self.params))]
        self._members = [found[i][1] for i in range(len(self.params))]
        for bucket in self.buckets:
            if self._reducer is not None and bucket is not self._counting:
                bucket.reducer, bucket.gaps = self._reducer(bucket), gaps_of(bucket)
            if self.scatter and bucket is not self._counting:
                part = bucket.flat[bucket.bounds[self.rank] : bucket.bounds[self.rank + 1]]
                bucket.own = torch.zeros_like(part) if bucket.reducer is None else part

    def on_gradient(self, i: int) -> None:
        """The hooks call it when the gradient of parameter `i` has been accumulated."""
        with self._lock:  # backward has a thread for each device
            self._record(i)

    def _record(self, i: int) -> None:
        dist_utils.refuse_lost(self.group)
        if self.ranks == 1:
            if not self._accumulating and not self.buckets and not self._arrived[i]:
                self._order.append(i)
            self._arrived[i] = True
            return
        if self._arrived[i]:
            raise RuntimeError(
                f"a second gradient for {self.names[i]!r} before a step: its sum over all ranks may have been started after "
                "the first backward. To add up gradients of several backward passes, let all but the last run inside "
                "accumulate(); to go on without a step, call discard() on all ranks"
            )
        if self._accumulating:
            return
        if not self.buckets:
            self._arrived[i] = True
            self._order.append(i)
            return
        if not self._open:
            self._begin_round()
        self._arrived[i] = True
        self.events.append(("arrived", i))
        bucket = self._bucket_of[i]
        member = self._members[i]
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
                    self._start(ready, self._arrived)

    def _begin_round(self) -> None:
        self._open, self._next = True, 0
        self.events = []
        for bucket in self.buckets:
            wanted = [member.param for member in bucket.members if self.params[member.param].requires_grad]
            # What has come before there were buckets is known.
            bucket.waiting = sum(not self._arrived[i] for i in wanted)
            bucket.started = False
            bucket.idle = not wanted and bucket is not self._counting

    def _start(self, end: int, counted: Sequence[bool]) -> None:
        """Start the buckets up to this one, not including it."""
        while self._next < end:
            bucket = self.buckets[self._next]
            if not bucket.idle:
                self._fill(bucket, counted)
                if bucket is self._counting:
                    counts, flags = self._counts.split([len(self.params), len(self.flag_slots)])
                    if all(counted):
                        counts.fill_(1.0)
                    else:
                        counts.copy_(torch.tensor(counted, dtype=torch.float32), non_blocking=True)
                    flags.copy_(torch.tensor(self.flag_slots, dtype=torch.float32), non_blocking=True)
                bucket.handle = self._reduce(bucket)
                bucket.started = True
                self.events.append(("started", self._next))
            self._next += 1

    def _wait(self) -> None:
        started = [bucket for bucket in self.buckets if bucket.started]
        running = [bucket for bucket in started if bucket.reducer is not None]
        while running:  # the second messages of all are on their way together
            running = [bucket for bucket in running if not bucket.handle.advance()]
        for bucket in started:
            if bucket.reducer is None:
                bucket.handle.wait()
            bucket.handle = None

    def _fill(self, bucket: Bucket, counted: Sequence[bool]) -> None:
        """Put the gradients into the bucket, zeros where there is none."""
        if bucket.gaps:
            torch._foreach_zero_(bucket.gaps)
        self._copy_in([member for member in bucket.members if counted[member.param]])
        for member in bucket.members:
            if not counted[member.param]:
                member.room.zero_()
        bucket.versions = [member.view._version for member in bucket.members]

    def _copy_in(self, members: Sequence[Member]) -> None:
        """Copy gradients to their places, and make them views of these."""
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for index, _, _, view, _ in members:
            gradient: Any = self.params[index].grad
            if gradient is not view:
                check_gradient(self.names[index], view, gradient)
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        for index, _, _, view, _ in members:
            self.params[index].grad = view

    def _check_unchanged(self) -> None:
        """An error for gradients that have been changed while they may have been on their way already."""
        for bucket in self.buckets if self._open else ():
            if not bucket.started:
                continue
            for member, version in zip(bucket.members, bucket.versions, strict=True):
                gradient = self.params[member.param].grad
                if self._arrived[member.param] and (gradient is not member.view or gradient._version != version):
                    what = "was replaced" if gradient is not member.view else "was written to"
                    raise RuntimeError(
                        f"the gradient of {self.names[member.param]!r} {what} after backward, when its sum over all ranks "
                        "had been started: change gradients between allreduce_grads() and update(batch_size), or call "
                        "discard() on all ranks to go on without a step"
                    )

    def _reduce(self, bucket: Bucket) -> Any:
        if bucket.reducer is not None:
            return bucket.reducer.start(bucket.flat)
        if bucket.own is None:
            return dist_utils.all_reduce(bucket.flat, group=self.group, async_op=True)
        if self.native(bucket):
            return dist_utils.reduce_scatter(bucket.own, bucket.flat, self.group, async_op=True)
        return ScatteredSum(bucket, self.rank, self.group, self.pool)

    def _end_round(self) -> None:
        self._open, self._arrived = False, [False] * len(self.params)
        self._add_hooks()


def _on_gradient(buckets: Any, i: int, _: torch.Tensor) -> None:
    if (alive := buckets()) is not None:
        alive.on_gradient(i)


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
