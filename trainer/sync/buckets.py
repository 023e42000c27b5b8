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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...kernels.layouts import is_dense
from ...kernels.states import PACK_FROM
from ..arguments import whole
from ..kvstore import collectives
from ..kvstore.collective import broadcast, check_alike, global_rank, process_group

__all__ = ["ALIGNMENT", "BLOCK", "Bucket", "GradientBuckets", "Pool"]

ALIGNMENT = 8  # elements between the starts of two gradients: 16 bytes of the narrowest type
BLOCK = 128  # elements of which a rank's part is a multiple, and at which large parameters start: packed states have blocks
COPIED_AT_ONCE = 2**16  # bytes; the next gradient takes the memory of one that has been copied. Others are copied together


class Member(NamedTuple):
    """A parameter's place in a bucket.

    Attributes:
        param: the parameter's number.
        start: its first element in the bucket.
        size: its elements.
        view: its gradient, in the parameter's own order of elements and with a version counter of its own.
        room: the same memory, flat, with the bucket's version counter.
    """

    param: int
    start: int
    size: int
    view: torch.Tensor
    room: torch.Tensor


class Bucket:
    """One flat buffer and what is in it.

    Attributes:
        flat: the buffer.
        bounds: where each rank's part begins, and the end.
        weight_dtype: the type of the parameters; None if there are none.
        members: its parameters.
        own: in buckets that are scattered this rank's part of the sum.
    """

    def __init__(self, flat: torch.Tensor, bounds: Sequence[int], weight_dtype: torch.dtype | None) -> None:
        self.flat, self.bounds, self.weight_dtype = flat, list(bounds), weight_dtype
        self.members: list[Member] = []
        self.own: torch.Tensor | None = None
        self.handle: Any = None
        self.waiting = 0  # members whose gradient has not come yet
        self.asleep = False  # nothing in it requires a gradient, so that it is left out
        self.started = False
        self.versions: list[int] = []  # of the members' views when it was started
        self.gaps: list[torch.Tensor] = []  # what lies between the members, where a reducer may leave something
        self.reducer: Any = None

    @property
    def even(self) -> bool:
        """Whether all ranks' parts are of one size."""
        return len({end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)}) == 1

    @property
    def parts(self) -> list[int]:
        """The sizes of the ranks' parts."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


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


class GradientBuckets:
    """The gradients of a model in buckets, summed over all ranks.

    The first `finish` makes the buckets, in the order in which rank 0's gradients came, so only from the second backward on
    sums are taken while it runs. All ranks must have the same parameters, each with the same `requires_grad` on all of them,
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
        notes: four user-defined integers below 2^12 that are summed along with the gradients; 0 unless set.
        note_sums: their sums over all ranks in the last `finish`, float32 or float64 [4].
        events: of the present round, or else the last one, in order: ("came", index of a parameter whose gradient a hook
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
        self.notes = [0, 0, 0, 0]
        self.note_sums = torch.zeros(4, device=self.params[0].device)
        self.events: list[tuple[str, int]] = []
        self._limits = whole("bucket_bytes", bucket_bytes, low=1), whole("first_bucket_bytes", first_bucket_bytes, low=1)
        self._reducer = reducer
        self._is_gloo = dist.get_backend(self.group) == "gloo"
        self._bucket_of: list[Bucket] = []  # by parameter
        self._members: list[Member] = []
        self._counts: torch.Tensor = torch.zeros(0)
        self._counting: Bucket | None = None  # the bucket in which counts travel, the last one
        self._came = [False] * len(self.params)
        self._order: list[int] = []  # in which gradients came, until there are buckets
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
        broadcast([*self.params, *(buffers or {}).values()], self.group)

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
        collectives.refuse_lost(self.group)
        given = zip(self._came, fresh, self.params, strict=True)
        counted = [came or (bool(new) and param.requires_grad) for came, new, param in given]
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
        counts, self.note_sums = self._counts.clone().split([len(self.params), len(self.notes)])
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
        awake = torch.tensor([param.requires_grad for param in self.params], dtype=torch.int64)
        plan = torch.cat([order, awake]).to(self.params[0].device)
        collectives.broadcast(plan, global_rank(self.group, 0), self.group)
        listed = plan.tolist()
        self._make(listed[: len(self.params)], listed[len(self.params) :])
        self._order = []

    def close(self) -> None:
        """Let go of the parameters: from now on gradients come as they did before."""
        _remove(self._hooks)

    def native(self, bucket: Bucket) -> bool:
        """Whether the backend's own reduce-scatter and all-gather are to be used: parts are equal, and it is not gloo."""
        return bucket.flat.is_cuda and not self._is_gloo and bucket.even

    def _add_hooks(self) -> None:
        own = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:
                self._hooks[i] = param.register_post_accumulate_grad_hook(partial(_on_gradient, own, i))

    def _make(self, order: Sequence[int], awake: Sequence[int]) -> None:
        gathered = _in_buckets(self.params, order, awake, *self._limits)
        wide = [k for k, (kind, _) in enumerate(gathered) if kind[3] and kind[1] in (torch.float32, torch.float64)]
        carries = bool(wide) and not self.scatter and self._reducer is None
        if carries:
            gathered.append(gathered.pop(wide[-1]))
        counts = len(self.params) + len(self.notes)
        for k, ((device, dtype, weight_dtype, _), members) in enumerate(gathered):
            own_counts = counts if carries and k == len(gathered) - 1 else 0
            self.buckets.append(self._bucket(device, dtype, weight_dtype, members, own_counts))
        if not carries:  # there is no bucket whose sums are exact and go to all ranks
            self.buckets.append(self._bucket(self.params[0].device, torch.float32, None, [], counts))
        self._counting = self.buckets[-1]
        end = max((member.start + member.size for member in self._counting.members), default=0)
        self._counts = self._counting.flat[end : end + counts]
        found = {member.param: (bucket, member) for bucket in self.buckets for member in bucket.members}
        self._bucket_of = [found[i][0] for i in range(len(self.params))]
        self._members = [found[i][1] for i in range(len(self.params))]
        for bucket in self.buckets:
            if self._reducer is not None and bucket is not self._counting:
                bucket.reducer, bucket.gaps = self._reducer(bucket), _gaps(bucket)
            if self.scatter and bucket is not self._counting:
                part = bucket.flat[bucket.bounds[self.rank] : bucket.bounds[self.rank + 1]]
                bucket.own = torch.zeros_like(part) if bucket.reducer is None else part

    def _bucket(
        self, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None, members: list[int], counts: int
    ) -> Bucket:
        parts = (
            [members] if self.owners is None else [[i for i in members if self.owners[i] == r] for r in range(self.ranks)]
        )
        starts, bounds, end = {}, [0], 0
        for part in parts:
            for i in part:
                step = BLOCK if self.params[i].numel() >= PACK_FROM else ALIGNMENT
                starts[i] = end = -(-end // step) * step
                end += self.params[i].numel()
            end = -(-end // BLOCK) * BLOCK
            bounds.append(end)
        if self.owners is None or counts:
            last = max((starts[i] + self.params[i].numel() for i in members), default=0) + counts
            length = -(-last // (self.ranks * BLOCK)) * BLOCK
            bounds = [rank * length for rank in range(self.ranks + 1)]
        flat = torch.zeros(bounds[-1], dtype=dtype, device=device)
        bucket = Bucket(flat, bounds, weight_dtype)
        for i in (i for part in parts for i in part):
            param, start = self.params[i], starts[i]
            size = param.numel()
            view = flat.data[start : start + size]  # what `data` gives has a version counter of its own, a view has not
            view = view.as_strided(param.shape, param.stride(), start) if is_dense(param) else view.view(param.shape)
            bucket.members.append(Member(i, start, size, view, flat[start : start + size]))
        return bucket

    def _arrived(self, i: int) -> None:
        with self._lock:  # backward has a thread for each device
            self._note(i)

    def _note(self, i: int) -> None:
        collectives.refuse_lost(self.group)
        if self.ranks == 1:
            if not self._accumulating and not self.buckets and not self._came[i]:
                self._order.append(i)
            self._came[i] = True
            return
        if self._came[i]:
            raise RuntimeError(
                f"a second gradient for {self.names[i]!r} before a step: its sum over all ranks may have been started after "
                "the first backward. To add up gradients of several backward passes, let all but the last run inside "
                "accumulate(); to go on without a step, call discard() on all ranks"
            )
        if self._accumulating:
            return
        if not self.buckets:
            self._came[i] = True
            self._order.append(i)
            return
        if not self._open:
            self._begin_round()
        self._came[i] = True
        self.events.append(("came", i))
        bucket = self._bucket_of[i]
        member = self._members[i]
        if member.room.nbytes >= COPIED_AT_ONCE:
            with torch.no_grad():
                self._take([member])
        bucket.waiting -= 1
        if bucket.waiting == 0:
            ready = self._next
            while ready < len(self.buckets) and self.buckets[ready].waiting == 0:
                ready += 1
            if ready > self._next:
                with torch.no_grad():
                    self._start(ready, self._came)

    def _begin_round(self) -> None:
        self._open, self._next = True, 0
        self.events = []
        for bucket in self.buckets:
            wanted = [member.param for member in bucket.members if self.params[member.param].requires_grad]
            # What has come before there were buckets is known.
            bucket.waiting = sum(not self._came[i] for i in wanted)
            bucket.started = False
            bucket.asleep = not wanted and bucket is not self._counting

    def _start(self, end: int, counted: Sequence[bool]) -> None:
        """Start the buckets up to this one, not including it."""
        while self._next < end:
            bucket = self.buckets[self._next]
            if not bucket.asleep:
                self._fill(bucket, counted)
                if bucket is self._counting:
                    counts, notes = self._counts.split([len(self.params), len(self.notes)])
                    if all(counted):
                        counts.fill_(1.0)
                    else:
                        counts.copy_(torch.tensor(counted, dtype=torch.float32), non_blocking=True)
                    notes.copy_(torch.tensor(self.notes, dtype=torch.float32), non_blocking=True)
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
        self._take([member for member in bucket.members if counted[member.param]])
        for member in bucket.members:
            if not counted[member.param]:
                member.room.zero_()
        bucket.versions = [member.view._version for member in bucket.members]

    def _take(self, members: Sequence[Member]) -> None:
        """Replica gradients to their places, and make them views of these."""
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for index, _, _, view, _ in members:
            gradient: Any = self.params[index].grad
            if gradient is not view:
                self._check(index, view, gradient)
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        for index, _, _, view, _ in members:
            self.params[index].grad = view

    def _check(self, index: int, view: torch.Tensor, gradient: Any) -> None:
        name = self.names[index]
        if gradient is None:
            raise ValueError(f"{name!r} has no gradient any more: let it be until the step is over")
        if gradient.layout != torch.strided:
            raise TypeError(
                f"the gradient of {name!r} is sparse ({gradient.layout}), which cannot be summed up in a bucket: use "
                "sparse=False in the layer, or gradient.to_dense()"
            )
        if gradient.dtype != view.dtype or gradient.device != view.device:
            raise TypeError(
                f"the gradient of {name!r} is {gradient.dtype} on {gradient.device}, its bucket is {view.dtype} on "
                f"{view.device}: move or convert the model, and set grad_dtype, before the first step"
            )
        if gradient.requires_grad:
            raise ValueError(
                f"the gradient of {name!r} has a graph (create_graph=True), which would be lost in a bucket: use "
                "torch.autograd.grad() for gradients of gradients"
            )

    def _check_unchanged(self) -> None:
        """An error for gradients that have been changed while they may have been on their way already."""
        for bucket in self.buckets if self._open else ():
            if not bucket.started:
                continue
            for member, version in zip(bucket.members, bucket.versions, strict=True):
                gradient = self.params[member.param].grad
                if self._came[member.param] and (gradient is not member.view or gradient._version != version):
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
            return collectives.all_reduce(bucket.flat, group=self.group, async_op=True)
        if self.native(bucket):
            return collectives.reduce_scatter(bucket.own, bucket.flat, self.group, async_op=True)
        return _Exchange(bucket, self.rank, self.group, self.pool)

    def _end_round(self) -> None:
        self._open, self._came = False, [False] * len(self.params)
        self._add_hooks()


class _Exchange:
    """A sum that is scattered: every rank gets its part of all ranks' buckets and adds these up, in the ranks' order.

    It is for parts of different sizes, and for gloo, whose own way sends as much as an all-reduce.
    """

    def __init__(self, bucket: Bucket, rank: int, group: Any, pool: Pool) -> None:
        own = bucket.own
        assert own is not None
        self._own, self._parts, self._pool = own, bucket.parts, pool
        self._got = pool.take(own.numel() * len(self._parts), own)
        sizes = [own.numel()] * len(self._parts), self._parts
        self._work = collectives.all_to_all(self._got, bucket.flat, group, async_op=True, sizes=sizes)

    def wait(self) -> None:
        self._work.wait()
        parts = self._got.view(len(self._parts), self._own.numel())
        if len(self._parts) == 1:
            self._own.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=self._own)
        for part in parts[2:]:
            self._own.add_(part)
        self._pool.give(self._got)


def _in_buckets(
    params: Sequence[torch.Tensor], order: Sequence[int], awake: Sequence[int], limit: int, first_limit: int
) -> list[tuple[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]]]:
    """The parameters of each bucket, and of what kind they are, in the order in which buckets will be full.

    Parameters that require no gradient come first, in buckets of their own: these need not be waited for.
    """
    buckets: list[tuple[int, Any, list[int]]] = []  # with the place of the last member
    filling: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    begun: set[Any] = set()
    for place, i in enumerate(sorted(order, key=lambda i: bool(awake[i]))):
        dtype = getattr(params[i], "grad_dtype", None) or params[i].dtype
        kind = params[i].device, dtype, params[i].dtype, bool(awake[i])
        filling.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + params[i].numel() * dtype.itemsize
        if filled[kind] >= (limit if kind in begun else min(limit, first_limit)):
            buckets.append((place, kind, filling.pop(kind)))
            filled[kind] = 0
            begun.add(kind)
    places = {i: place for place, i in enumerate(sorted(order, key=lambda i: bool(awake[i])))}
    buckets += [(places[members[-1]], kind, members) for kind, members in filling.items()]
    return [(kind, members) for _, kind, members in sorted(buckets, key=lambda bucket: bucket[0])]


def _gaps(bucket: Bucket) -> list[torch.Tensor]:
    """The stretches of a bucket that belong to no member."""
    gaps, end = [], 0
    for member in sorted(bucket.members, key=lambda member: member.start):
        gaps.append(bucket.flat[end : member.start])
        end = member.start + member.size
    gaps.append(bucket.flat[end:])
    return [gap for gap in gaps if gap.numel()]


def _on_gradient(buckets: Any, i: int, _: torch.Tensor) -> None:
    if (alive := buckets()) is not None:
        alive._arrived(i)


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
