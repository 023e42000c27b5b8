"""Gradients in flat buckets, whose sums over all ranks are started from autograd's hooks while backward still runs.

A bucket is one piece of memory, in which each of its parameters has a place for its gradient. When all of them have come,
they are copied there, become views of it, and one collective adds up the bucket. Collectives must come in the same order on
all ranks, so a bucket waits for those before it; what has not been started when backward is over, because some parameters
were not used, is started by `finish`, with zeros for these.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...kernels import streams
from ...kernels.guards import copy_all
from ...kernels.layouts import is_dense
from ...kernels.states import PACK_FROM
from .. import dist_utils
from ..compression import wait_all
from ..dist_utils import broadcast_coalesced, check_alike
from ..params import is_lazy
from ..validation import integer

ALIGNMENT = 8  # elements between the starts of two gradients: 16 bytes of the narrowest type
BLOCK = 128  # elements of which a rank's part is a multiple, and at which large parameters start: packed states have blocks


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
        members: its parameters, by their starts.
        extra: elements behind the members that are summed with them; None if there are none.
        own: in buckets that are scattered this rank's part of the sum.
    """

    def __init__(self, flat: torch.Tensor, bounds: Sequence[int], weight_dtype: torch.dtype | None) -> None:
        self.flat, self.bounds, self.weight_dtype = flat, list(bounds), weight_dtype
        self.members: list[Member] = []
        self.extra: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.handle: Any = None
        self.waiting = 0  # members whose gradient has not come yet
        self.idle = False  # nothing in it requires a gradient, so that it is left out
        self.started = False
        self.versions: list[int] = []  # of the members' views when it was started
        self.gaps: list[torch.Tensor] = []  # what lies between the members, where a reducer may leave something
        self.reducer: Any = None

    @property
    def parts(self) -> list[int]:
        """The sizes of the ranks' parts."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


def make_buckets(
    params: Sequence[torch.nn.Parameter],
    order: Sequence[int],
    trained: Sequence[int],
    limits: tuple[int, int],
    ranks: int,
    owners: Sequence[int] | None = None,
    *,
    extra: int = 0,
    exact: bool = True,
) -> list[Bucket]:
    """Buckets for the gradients of these parameters, in the order in which they will be full.

    Parameters that require no gradient come first, in buckets of their own: these need not be waited for.

    Args:
        params: all parameters.
        order: their indices in the order in which their gradients come.
        trained: for each whether it requires a gradient.
        limits: the bytes from which a bucket is full, and those for the first one of its kind.
        ranks: over how many a bucket is divided.
        owners: for each parameter the rank in whose part it is as a whole; None to divide buckets into equal parts.
        extra: elements of the last bucket behind its members, of float32 or float64.
        exact: whether sums of such types are exact and go to all ranks, so that the extra ones need no bucket of their own.
    """
    groups = _groups(params, order, trained, *limits)
    wide = [k for k, (kind, _) in enumerate(groups) if kind[3] and kind[1] in (torch.float32, torch.float64)]
    carrier = groups.pop(wide[-1]) if wide and exact else ((params[0].device, torch.float32, None, False), [])
    buckets = [_bucket(params, members, kind[:3], ranks, owners) for kind, members in groups]
    return [*buckets, _bucket(params, carrier[1], carrier[0][:3], ranks, owners, extra)]


def _groups(
    params: Sequence[torch.Tensor], order: Sequence[int], trained: Sequence[int], limit: int, first_limit: int
) -> list[tuple[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]]]:
    """The parameters of each bucket, and of what kind they are."""
    groups: list[tuple[int, Any, list[int]]] = []  # with the place of the last member
    filling: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    begun: set[Any] = set()
    places: dict[int, int] = {}
    for place, i in enumerate(sorted(order, key=lambda i: bool(trained[i]))):
        dtype = getattr(params[i], "grad_dtype", None) or params[i].dtype
        kind = params[i].device, dtype, params[i].dtype, bool(trained[i])
        places[i] = place
        filling.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + params[i].numel() * dtype.itemsize
        if filled[kind] >= (limit if kind in begun else min(limit, first_limit)):
            groups.append((place, kind, filling.pop(kind)))
            filled[kind] = 0
            begun.add(kind)
    groups += [(places[members[-1]], kind, members) for kind, members in filling.items()]
    return [(kind, members) for _, kind, members in sorted(groups, key=lambda group: group[0])]


def _bucket(
    params: Sequence[torch.nn.Parameter],
    members: Sequence[int],
    kind: tuple[torch.device, torch.dtype, torch.dtype | None],
    ranks: int,
    owners: Sequence[int] | None,
    extra: int = 0,
) -> Bucket:
    """A bucket for the gradients of these parameters; its kind is the device and type of the buffer, and their own type."""
    device, dtype, weight_dtype = kind
    parts = [members] if owners is None else [[i for i in members if owners[i] == r] for r in range(ranks)]
    starts, bounds, end = {}, [0], 0
    for part in parts:
        for i in part:
            step = BLOCK if params[i].numel() >= PACK_FROM else ALIGNMENT
            starts[i] = end = -(-end // step) * step
            end += params[i].numel()
        end = -(-end // BLOCK) * BLOCK
        bounds.append(end)
    last = max((starts[i] + params[i].numel() for i in members), default=0)
    if owners is None or extra:
        length = -(-(last + extra) // (ranks * BLOCK)) * BLOCK
        bounds = [rank * length for rank in range(ranks + 1)]
    flat = torch.zeros(bounds[-1], dtype=dtype, device=device)
    bucket = Bucket(flat, bounds, weight_dtype)
    bucket.extra = flat[last : last + extra] if extra else None
    for i in (i for part in parts for i in part):
        param, start = params[i], starts[i]
        size = param.numel()
        view = flat.data[start : start + size]  # what `data` gives has a version counter of its own, a view has not
        view = view.as_strided(param.shape, param.stride(), start) if is_dense(param) else view.view(param.shape)
        bucket.members.append(Member(i, start, size, view, flat[start : start + size]))
    return bucket


def gaps_of(bucket: Bucket) -> list[torch.Tensor]:
    """The stretches of a bucket before, between and behind its members; some may be empty."""
    gaps, end = [], 0
    for member in bucket.members:
        gaps.append(bucket.flat[end : member.start])
        end = member.start + member.size
    return [*gaps, bucket.flat[end:]]


def check_gradient(name: str, view: torch.Tensor, gradient: Any) -> None:
    """Refuse a gradient that cannot be copied to `view`, its range of a bucket.

    Raises:
        TypeError, ValueError: there is none, or it is sparse, of another type or device, or has a graph.
    """
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
        group, rank, ranks: the process group, this process's number in it, and how many there are.
        pool: of buffers.
        buckets: in the order in which they are started; empty before the first `finish`.
        used: for each parameter whether some rank had a gradient for it in the last `finish`.
        flag_slots: four user-defined integers below 2^12 that are summed along with the gradients; 0 unless set.
        flag_sums: their sums over all ranks in the last `finish`, float32 or float64 [4].

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
            if is_lazy(param):
                raise ValueError(f"params: {name!r} is not initialized yet: run the model once before")
        if owners is not None and not scatter:
            raise ValueError("owners given without scatter=True: parameters are owned where sums are scattered")
        self.group, self.pool = dist_utils.process_group(group), Pool()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._is_gloo = dist.get_backend(self.group) == "gloo"
        self.used = [False] * len(self.params)
        self.flag_slots = [0, 0, 0, 0]
        self.flag_sums = torch.zeros(4, device=self.params[0].device)
        self.buckets: list[Bucket] = []
        self._members: list[tuple[Bucket, Member]] = []  # by parameter
        self._arrived = [False] * len(self.params)  # for each whether its gradient has come in this round
        self._is_open = False  # whether some bucket may be on its way
        self._flags: Sequence[int] = ()  # of this round
        self._next = 0  # the bucket to be started next
        self._scatter, self._owners = scatter, owners
        self._limits = integer("bucket_bytes", bucket_bytes, low=1), integer("first_bucket_bytes", first_bucket_bytes, low=1)
        self._reducer = reducer
        self._order: list[int] = []  # in which gradients arrived, until there are buckets
        self._accumulating = 0
        self._lock = threading.Lock()
        self._hooks: dict[int, Any] = {}
        self._add_hooks()
        weakref.finalize(self, _remove, self._hooks)

    def broadcast_weights(self) -> None:
        """Give all ranks rank 0's parameters. To be called on all ranks.

        Raises:
            ValueError: ranks have other names, shapes or types; on all ranks, and nothing has been changed.
        """
        check_alike("parameter", dict(zip(self.names, self.params, strict=True)), self.group)
        broadcast_coalesced(self.params, self.group)

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
        if self.ranks == 1 and not self._scatter:
            self.used = counted
            self._end_round()
            device = self.params[0].device
            return streams.staged(torch.tensor(counted, dtype=torch.float32), device).to(device, non_blocking=True)
        self._check_unchanged()
        self.make()
        counts, self.flag_sums = self._sums(counted).split([len(self.params), len(self.flag_slots)])
        self.used = counted
        if not all(new or not param.requires_grad for new, param in zip(counted, self.params, strict=True)):
            self.used = (counts > 0).tolist()
        if not self._scatter:
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
            with torch.no_grad():
                self._sums([False] * len(self.params))
        self._order = []
        self._end_round()

    @torch.no_grad()
    def make(self) -> None:
        """Make the buckets now, if there are none. To be called on all ranks; the first `finish` does."""
        if self.buckets:
            return
        group, rank, n = self.group, self.rank, len(self.params)
        known = set(self._order)
        rest = [i for i in reversed(range(n)) if i not in known]
        trained = [int(param.requires_grad) for param in self.params]
        plan = torch.tensor([*self._order, *rest, *trained], dtype=torch.int64, device=self.params[0].device)
        dist_utils.broadcast(plan, 0, group)
        listed, ranks, extra = plan.tolist(), self.ranks, n + len(self.flag_slots)
        exact = not self._scatter and self._reducer is None
        params = self.params, listed[:n], listed[n:]
        made = make_buckets(*params, self._limits, ranks, self._owners, extra=extra, exact=exact)
        for bucket in made:
            if self._reducer is not None and bucket.extra is None:
                bucket.reducer, bucket.gaps = self._reducer(bucket), [gap for gap in gaps_of(bucket) if gap.numel()]
            if self._scatter and bucket.extra is None:
                part = bucket.flat[bucket.bounds[rank] : bucket.bounds[rank + 1]]
                bucket.own = torch.zeros_like(part) if bucket.reducer is None else part
        self.buckets, self._order = made, []
        found = {member.param: (bucket, member) for bucket in made for member in bucket.members}
        self._members = [found[i] for i in range(n)]

    def on_gradient(self, i: int) -> None:
        """The hooks call it when the gradient of parameter `i` has been accumulated."""
        with self._lock:  # backward has a thread for each device
            dist_utils.refuse_lost(self.group)
            alone = self.ranks == 1  # then nothing is ever on its way
            if self._arrived[i] and not alone:
                raise RuntimeError(
                    f"a second gradient for {self.names[i]!r} before a step: its sum over all ranks may have been started "
                    "after the first backward. To add up gradients of several backward passes, let all but the last run "
                    "inside accumulate()"
                )
            if self._accumulating and not alone:
                return
            if self.buckets and not alone:
                if not self._is_open:
                    self._begin()
                self._add(i)
                return
            if not (self.buckets or self._accumulating or self._arrived[i]):
                self._order.append(i)
            self._arrived[i] = True

    def _begin(self) -> None:
        """Begin a round: from the first gradient that comes until all ranks have all sums."""
        self._is_open, self._next, self._flags = True, 0, self.flag_slots
        for bucket in self.buckets:
            wanted = [member.param for member in bucket.members if self.params[member.param].requires_grad]
            bucket.waiting = sum(not self._arrived[i] for i in wanted)
            bucket.started = False
            bucket.idle = not wanted and bucket.extra is None

    def _add(self, i: int) -> None:
        """The gradient of parameter `i` has come: start what is complete with it."""
        self._arrived[i] = True
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
                    self._start(ready, self._arrived)

    def _sums(self, counted: Sequence[bool]) -> torch.Tensor:
        """Start what has not been started, with zeros for what does not count, and wait for all of it.

        Returns the sums over all ranks of `counted` and of the flags.
        """
        if not self._is_open:
            self._begin()
        self._start(len(self.buckets), counted)
        started = [bucket for bucket in self.buckets if bucket.started]
        wait_all([bucket.handle for bucket in started if bucket.reducer is not None])
        for bucket in started:
            if bucket.reducer is None:
                bucket.handle.wait()
            bucket.handle = None
        extra: Any = self.buckets[-1].extra
        return extra.clone()

    def _check_unchanged(self) -> None:
        """An error for gradients that have been changed while they may have been on their way already."""
        for bucket in self.buckets if self._is_open else ():
            if not bucket.started:
                continue
            for member, version in zip(bucket.members, bucket.versions, strict=True):
                gradient = self.params[member.param].grad
                if self._arrived[member.param] and (gradient is not member.view or gradient._version != version):
                    what = "was replaced" if gradient is not member.view else "was written to"
                    raise RuntimeError(
                        f"the gradient of {self.names[member.param]!r} {what} after backward, when its sum over all ranks "
                        "had been started: change gradients between allreduce_grads() and update(batch_size)"
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
            bucket.handle = self.start_sum(bucket)
            bucket.started = True

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
            copy_all(views, gradients)
        for index, _, _, view, _ in members:
            self.params[index].grad = view

    def start_sum(self, bucket: Bucket) -> Any:
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

        work = dist_utils.all_to_all(got, bucket.flat, self.group, async_op=True, sizes=sizes)
        work.then = add_up
        return work

    def gather(self, bucket: Bucket, flat: torch.Tensor) -> Any:
        """Start to give all ranks each other's parts of `flat`, cut as this bucket is; gives what can be waited for."""
        own = flat[bucket.bounds[self.rank] : bucket.bounds[self.rank + 1]]
        if self.native(bucket):
            return dist_utils.all_gather(flat, own, self.group, async_op=True)
        sent = self.pool.take(own.numel() * self.ranks, own)
        sent.view(self.ranks, own.numel()).copy_(own.expand(self.ranks, own.numel()))
        sizes = bucket.parts, [own.numel()] * self.ranks
        work = dist_utils.all_to_all(flat, sent, self.group, async_op=True, sizes=sizes)
        work.then = lambda: self.pool.give(sent)
        return work

    def native(self, bucket: Bucket) -> bool:
        """Whether the backend's own reduce-scatter and all-gather are to be used: parts are equal, and it is not gloo."""
        return bucket.flat.is_cuda and not self._is_gloo and len(set(bucket.parts)) == 1

    def _add_hooks(self) -> None:
        own = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:
                self._hooks[i] = param.register_post_accumulate_grad_hook(partial(_on_gradient, own, i))

    def _end_round(self) -> None:
        self._is_open, self._arrived = False, [False] * len(self.params)
        self._add_hooks()


def _on_gradient(buckets: Any, i: int, _: torch.Tensor) -> None:
    if (alive := buckets()) is not None:
        alive.on_gradient(i)


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
