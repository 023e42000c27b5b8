"""Gradients in flat buckets, which autograd hooks all-reduce while backward still runs.

A bucket is a flat buffer with a range for the gradient of each of its parameters. When all these gradients have been
computed, they are copied into the buffer and become views of it, and one collective sums the bucket over the ranks. All
ranks must start collectives in the same order, so a bucket waits until the earlier ones have been started. `finish` starts
the buckets that backward left, with zeros for the gradients of unused parameters.

A compressed sum takes several collectives. Its next one is started right after the first one of the next bucket, whether
backward or `finish` starts that, so the order depends on the buckets alone.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...kernels import streams
from ...kernels.guards import copy_all
from ...kernels.states import PACK_FROM
from ..step.params import is_lazy
from ..utils import distributed
from ..utils.distributed import broadcast_coalesced, check_alike
from ..validation import integer
from .partition import shaped_like

ALIGNMENT = 8  # the start of each gradient is a multiple of so many elements: 16 bytes of the narrowest dtype
FLAGS = 12  # numbers that are summed along with the gradients, to compare 32 bits
# Rounds in which all ranks learn that one has frozen parameters alone; so long it takes part in the sums of their bucket.
NOTICED_AFTER = 2
BLOCK = 128  # the same for large parameters and ranks' parts: the size of a block of packed states


class Member(NamedTuple):
    """The range of a bucket that holds the gradient of one parameter, from the bucket's element `start` on.

    Attributes:
        view: the gradient, with the shape and strides of the parameter and a version counter of its own.
        room: the same memory as a flat tensor, which shares the bucket's version counter.
    """

    param: int
    start: int
    size: int
    view: torch.Tensor
    room: torch.Tensor


class Bucket:
    """A flat buffer of gradients that are summed by one collective.

    Attributes:
        bounds: the first element of each rank's part, then the buffer's length.
        weight_dtype: the dtype of the parameters; None if there are no parameters.
        extra: elements after the members that are summed with them; None if there are no such elements.
        shard: this rank's part of the sum if the bucket is reduce-scattered; otherwise None. A view of `flat` if a reducer
            sums the whole bucket, else memory of its own.
    """

    def __init__(self, flat: torch.Tensor, bounds: Sequence[int], weight_dtype: torch.dtype | None) -> None:
        self.flat, self.bounds, self.weight_dtype = flat, list(bounds), weight_dtype
        self.members: list[Member] = []
        self.extra: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.handle: Any = None
        self.waiting = 0  # members whose gradient has not been computed yet
        self.streams: list[Any] = []  # on which gradients of this round have been computed
        self.frozen_rounds = 0  # for how many rounds no member has required a gradient
        self.idle = False  # whether that is known to hold on all ranks, so that the bucket is not summed
        self.woken = False  # whether it was idle before this round: it is summed last, if it is on all ranks
        self.started = False
        self.versions: list[int] = []  # of the members' views when the sum was started
        self.gaps: list[torch.Tensor] = []  # stretches between the members, to which a reducer may write
        self.reducer: Any = None

    @property
    def reducer_scatters(self) -> bool:
        """Whether the reducer sums this rank's part only, and leaves `flat` as it is."""
        return bool(getattr(self.reducer, "scatters", False))

    @property
    def parts(self) -> list[int]:
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def is_even(self) -> bool:
        return len(set(self.parts)) == 1


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
    step: int = BLOCK,
) -> list[Bucket]:
    """Return buckets for the gradients of these parameters, in the order in which backward will fill them.

    Parameters that require no gradient are in buckets of their own, which come first, as nothing has to be waited for.

    Args:
        order: the parameters' indices in the order in which backward computes their gradients.
        limits: bytes at which a bucket is full; the second number is for the first bucket of each device and dtype.
        owners: for each parameter the rank whose part holds all of it; None to divide buckets into equal parts.
        extra: the number of extra elements, float32 or float64, after the last bucket's members.
        exact: whether float32 and float64 sums are exact and go to all ranks. Otherwise the extra elements get a bucket of
            their own.
        step: equal parts of ranks are multiples of so many elements, except in the bucket of the extra elements.
    """
    groups = _groups(params, order, trained, *limits)
    wide = [k for k, (kind, _) in enumerate(groups) if kind[3] and kind[1] in (torch.float32, torch.float64)]
    carrier = groups.pop(wide[-1]) if wide and exact else ((params[0].device, torch.float32, None, False), [])
    buckets = [_bucket(params, members, kind[:3], ranks, owners, step) for kind, members in groups]
    return [*buckets, _bucket(params, carrier[1], carrier[0][:3], ranks, owners, BLOCK, extra)]


def _groups(
    params: Sequence[torch.Tensor], order: Sequence[int], trained: Sequence[int], limit: int, first_limit: int
) -> list[tuple[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]]]:
    """Return the parameters of each bucket, after their kind: device, gradient dtype, parameter dtype, whether trained."""
    groups: list[tuple[int, Any, list[int]]] = []  # the first number is the last member's place in `order`
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
    step: int,
    extra: int = 0,
) -> Bucket:
    """Return a bucket for these parameters' gradients; `kind` is device, gradient dtype and parameter dtype."""
    device, dtype, weight_dtype = kind
    parts = [members] if owners is None else [[i for i in members if owners[i] == r] for r in range(ranks)]
    starts, bounds, end = {}, [0], 0
    for part in parts:
        for i in part:
            alignment = BLOCK if params[i].numel() >= PACK_FROM else ALIGNMENT
            starts[i] = end = -(-end // alignment) * alignment
            end += params[i].numel()
        end = -(-end // BLOCK) * BLOCK
        bounds.append(end)
    last = max((starts[i] + params[i].numel() for i in members), default=0)
    if owners is None or extra:
        length = -(-(last + extra) // (ranks * step)) * step
        bounds = [rank * length for rank in range(ranks + 1)]
    flat = torch.zeros(bounds[-1], dtype=dtype, device=device)
    bucket = Bucket(flat, bounds, weight_dtype)
    bucket.extra = flat[last : last + extra] if extra else None
    for i in (i for part in parts for i in part):
        param, start = params[i], starts[i]
        size = param.numel()
        view = shaped_like(flat.data[start : start + size], param)  # through `data`: a version counter of its own
        bucket.members.append(Member(i, start, size, view, flat[start : start + size]))
    return bucket


def gaps_of(bucket: Bucket) -> list[torch.Tensor]:
    """Return the stretches of a bucket before, between and after its members; some may be empty."""
    gaps, end = [], 0
    for member in bucket.members:
        gaps.append(bucket.flat[end : member.start])
        end = member.start + member.size
    return [*gaps, bucket.flat[end:]]


def check_gradient(name: str, view: torch.Tensor, gradient: Any) -> None:
    """Raise TypeError or ValueError if a gradient cannot be copied to `view`, its range of a bucket."""
    if gradient is None:
        raise ValueError(f"the gradient of {name!r} was set to None after backward: leave gradients alone until the step")
    if gradient.layout != torch.strided:
        raise TypeError(
            f"the gradient of {name!r} is sparse ({gradient.layout}), but buckets are dense: use sparse=False in the "
            "layer, or gradient.to_dense()"
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
    """Reusable buffers for messages, of which only few are in flight at once."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized flat buffer of `size` elements with the dtype and device of `like`."""
        free = self._free.get((like.device, like.dtype), [])
        fitting = [k for k, buffer in enumerate(free) if buffer.numel() >= size]
        if fitting:
            return free.pop(min(fitting, key=lambda k: free[k].numel()))[:size]
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool; all operations on it must have been queued."""
        root = buffer if buffer._base is None else buffer._base
        self._free.setdefault((root.device, root.dtype), []).append(root)


# Bytes from which a gradient is copied at once, so that the next gradient can take its memory. Others are copied together.
COPIED_AT_ONCE = 2**16


class GradientBuckets:
    """The gradients of a model, summed over all ranks in flat buckets while backward runs.

    The first `finish` makes the buckets, in the order in which rank 0's backward computed the gradients, so communication
    overlaps with backward from the second round on. A round is one or more backward passes and a `finish`. All ranks must
    have the same parameters with the same `requires_grad`, which may change between rounds. Parameters that are frozen when
    the buckets are made have buckets of their own, which come first.

        buckets = GradientBuckets(net.parameters())
        buckets.broadcast_weights()
        for x, y in batches:
            loss(net(x), y).backward()
            buckets.finish([True] * n)
            optimizer.step()

    Args:
        params: the parameters, all initialized. A gradient has the dtype `grad_dtype` of its parameter if that is set.
        bucket_bytes: bytes of gradients at which a bucket is full, >= 1.
        first_bucket_bytes: the same for the first bucket, whose sum can start sooner if it is small.
        scatter: whether each rank gets only its own part of each bucket's sum, in `Bucket.shard`; `parameter.grad` is then
            left as it is. By default every rank gets all sums, in `parameter.grad`.
        owners: with `scatter`, for each parameter the rank whose part holds all of it; None to cut buckets into equal
            parts, also inside parameters.
        reducer: a function that is called with each bucket and returns an object, such as `CompressedAllReduce`, that
            replaces the all-reduce: its `start(flat)` starts the sum and returns a handle, whose `advance()` is called until
            it returns True. If it has `scatters`, `start(flat, shard)` writes this rank's part only. None for a plain sum.
        step: with `scatter`, equal parts of ranks are multiples of so many elements.

    Attributes:
        buckets: the buckets in the order in which they are started; empty before the first `finish`.
        plan: what the buckets are made from: the parameters' indices in the order in which backward computes their
            gradients, then for each parameter 1 if it requires a gradient, else 0. Empty before; if it is set then, the
            buckets are made from it.
        used: for each parameter whether any rank had a gradient for it in the last `finish`.
        trained: for each parameter whether it required a gradient when the last round began.
        checksum: a user-defined integer below 2^32 to compare among ranks, along with the gradients; 0 unless set.
        flag_sums: sums over all ranks in the last `finish`, float32 or float64 [FLAGS]: of each piece x of a number that
            stands for `checksum` and `trained`, and of x**2. Ranks are equal if n * sum(x**2) == sum(x)**2 for all pieces.
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
        step: int = BLOCK,
    ) -> None:
        self.params = list(params)
        self.names = [str(i) for i in range(len(self.params))] if names is None else list(names)
        if not self.params:
            raise ValueError("params is empty: give at least one parameter")
        if len(self.names) != len(self.params):
            raise ValueError(f"names has {len(self.names)} entries for {len(self.params)} params: give one name for each")
        for name, param in zip(self.names, self.params, strict=True):
            if is_lazy(param):
                raise ValueError(f"params: {name!r} is not initialized yet: run the model once before")
        if owners is not None and not scatter:
            raise ValueError("owners needs scatter=True, since an all-reduce gives every rank all sums: leave owners out")
        self.group, self.pool = distributed.process_group(group), Pool()
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._is_gloo = dist.get_backend(self.group) == "gloo"
        self.used = [False] * len(self.params)
        self.trained: list[bool] = []
        self._trained_sum = 0  # a checksum of `trained`
        self.checksum = 0
        self.flag_sums = torch.zeros(FLAGS, device=self.params[0].device)
        self.buckets: list[Bucket] = []
        self.plan: list[int] = []
        self._members: list[tuple[Bucket, Member]] = []  # by parameter
        self._arrived = [False] * len(self.params)  # for each parameter whether its gradient was computed in this round
        self._is_open = False  # whether a round has begun, so that sums may be running
        self._flags: Sequence[int] = ()  # of this rank, for `flag_sums`
        self._next = 0  # the bucket to be started next
        self._running: list[Bucket] = []  # whose compressed sums are not complete, in the order in which they were started
        self._side_streams: dict[torch.device, Any] = {}  # of each device, on which compressed sums are computed
        self._scatter, self._owners = scatter, owners
        self._limits = integer("bucket_bytes", bucket_bytes, low=1), integer("first_bucket_bytes", first_bucket_bytes, low=1)
        self._reducer, self._step = reducer, step
        self._order: list[int] = []  # parameters in the order in which their gradients arrived, until buckets are made
        self._accumulating = 0
        self._lock = threading.Lock()
        self._hooks: dict[int, Any] = {}
        self._add_hooks()
        weakref.finalize(self, _remove, self._hooks)

    def broadcast_weights(self) -> None:
        """Replace the parameters by rank 0's, in place. All ranks call it.

        If names, shapes, dtypes or memory layouts differ between ranks, all ranks raise ValueError, and nothing has been
        changed: buckets hold gradients in the parameters' memory order.
        """
        check_alike("parameter", dict(zip(self.names, self.params, strict=True)), self.group, layouts=True)
        broadcast_coalesced(self.params, self.group)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context manager inside which backward passes only accumulate gradients, without communication."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    @torch.no_grad()
    def finish(self, fresh: Sequence[bool]) -> torch.Tensor:
        """End a round: start the sums that backward left, and wait for all sums. To be called on all ranks.

        Afterwards `parameter.grad` is the sum over all ranks for each parameter that had a gradient on any rank; with
        `scatter`, this rank's part of each sum is in `Bucket.shard`.

        Args:
            fresh: for each parameter whether its gradient counts although no hook has seen it in this round, as when it was
                written by hand or computed inside `accumulate()`.

        Returns:
            The number of ranks on which each parameter had a gradient, float32 or float64 [n_params] on the parameters'
            device. Reading it waits for the device; `used` often tells enough without waiting.
        """
        distributed.refuse_lost(self.group)
        states = zip(self._arrived, fresh, self.params, strict=True)
        counted = [arrived or (bool(new) and param.requires_grad) for arrived, new, param in states]
        if self.ranks == 1 and not self._scatter:
            self.used = counted
            self._end_round()
            device = self.params[0].device
            return streams.staged(torch.tensor(counted, dtype=torch.float32), device).to(device, non_blocking=True)
        self._check_unchanged()
        self.make()
        counts, self.flag_sums = self._sums(counted).split([len(self.params), FLAGS])
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

    @torch.no_grad()
    def put_sums_back(self, indices: Collection[int]) -> bool:
        """Replace gradients by this rank's part of their last sums, and zeros elsewhere, so that they sum to the same again.

        Do nothing and return False if sums have replaced the gradients on all ranks already.
        """
        summed = [bucket for bucket in self.buckets if bucket.members]
        if any(bucket.shard is None or _is_view(bucket.shard, bucket.flat) for bucket in summed):
            return False
        for bucket in summed:
            low, high = bucket.bounds[self.rank : self.rank + 2]
            for member in bucket.members:
                if member.param in indices:
                    member.room.zero_()
                    start, stop = max(member.start, low), min(member.start + member.size, high)
                    if start < stop:
                        bucket.flat[start:stop] = bucket.shard[start - low : stop - low]  # type: ignore[index]
        return True

    def discard(self) -> None:
        """End a round without using its gradients, after a backward pass that no step follows. To be called on all ranks.

        Sums that have been started cannot be cancelled, so this takes as long as `finish`, and leaves gradients undefined.
        """
        if self.buckets and self.ranks > 1:
            with torch.no_grad():
                self._sums([False] * len(self.params))
        self._order = []
        self._end_round()

    @torch.no_grad()
    def make(self) -> None:
        """Make the buckets unless they exist. To be called on all ranks; the first `finish` calls it."""
        if self.buckets:
            return
        group, rank, n = self.group, self.rank, len(self.params)
        arrived = set(self._order)
        unused = [i for i in reversed(range(n)) if i not in arrived]
        trained = [int(param.requires_grad) for param in self.params]
        # The layouts that the buckets are given for good; they may have changed since the weights were sent.
        check_alike("parameter", dict(zip(self.names, self.params, strict=True)), group, layouts=True)
        plan = torch.tensor(self.plan or [*self._order, *unused, *trained], device=self.params[0].device)
        distributed.broadcast(plan, 0, group)
        self.plan = plan.tolist()
        ranks, extra = self.ranks, n + FLAGS
        exact = not self._scatter and self._reducer is None
        params = self.params, self.plan[:n], self.plan[n:]
        made = make_buckets(*params, self._limits, ranks, self._owners, extra=extra, exact=exact, step=self._step)
        for bucket in made:
            if not any(self.plan[n + member.param] for member in bucket.members):
                bucket.frozen_rounds = NOTICED_AFTER
            if self._reducer is not None and bucket.extra is None:
                bucket.reducer, bucket.gaps = self._reducer(bucket), [gap for gap in gaps_of(bucket) if gap.numel()]
            if self._scatter and bucket.extra is None:
                part = bucket.flat[bucket.bounds[rank] : bucket.bounds[rank + 1]]
                in_place = bucket.reducer is not None and not bucket.reducer_scatters
                bucket.shard = part if in_place else torch.zeros_like(part)
        self.buckets, self._order = made, []
        by_param = {member.param: (bucket, member) for bucket in made for member in bucket.members}
        self._members = [by_param[i] for i in range(n)]

    def on_gradient(self, i: int) -> None:
        """Start the sums that are complete with the gradient of parameter `i`; the autograd hooks call it."""
        with self._lock:  # backward has a thread for each device
            distributed.refuse_lost(self.group)
            alone = self.ranks == 1  # then there are no sums
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
        self._is_open, self._next, self._running = True, 0, []
        trained = [param.requires_grad for param in self.params]
        if trained != self.trained:
            self.trained, self._trained_sum = trained, zlib.crc32(bytes(trained))
        self._flags = _flags_of(zlib.crc32(b"%d" % self._trained_sum, self.checksum))
        for bucket in self.buckets:
            wanted = [member.param for member in bucket.members if trained[member.param]]
            bucket.waiting = sum(not self._arrived[i] for i in wanted)
            bucket.started, bucket.streams = False, []
            bucket.woken = bucket.idle and bool(wanted)
            bucket.frozen_rounds = 0 if wanted else bucket.frozen_rounds + 1
            bucket.idle = bucket.frozen_rounds > NOTICED_AFTER and bucket.extra is None

    def _add(self, i: int) -> None:
        """Mark the gradient of parameter `i` as computed, and start the buckets that are complete now."""
        self._arrived[i] = True
        bucket, member = self._members[i]
        stream = streams.current(bucket.flat.device)
        if stream is not None and stream not in bucket.streams:
            bucket.streams.append(stream)
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
        """Start the remaining sums and wait for all. Return the sums of `counted` and of the flags over all ranks.

        Gradients that are not counted are summed as zeros.
        """
        if not self._is_open:
            self._begin()
        self._start(len(self.buckets), counted)
        self._wait()
        extra: Any = self.buckets[-1].extra
        woken = [bucket for bucket in self.buckets if bucket.woken]
        if woken and flags_agree(extra[-FLAGS:].tolist(), self.ranks):  # all ranks sum them; waits for a GPU
            for bucket in woken:
                self._start_bucket(bucket, counted)
            self._wait()
        return extra.clone()

    def _wait(self) -> None:
        """Wait for the sums that have been started."""
        while self._running:
            self._advance()
        for device, stream in self._side_streams.items():
            if stream is not None:
                streams.current(device).wait_stream(stream)
        for bucket in self.buckets:
            if bucket.handle is not None and bucket.reducer is None:
                bucket.handle.wait()
            bucket.handle = None

    def _check_unchanged(self) -> None:
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
        """Start the sums of the buckets before the bucket `end`, with zeros for gradients that are not counted."""
        while self._next < end:
            bucket = self.buckets[self._next]
            self._next += 1
            if not (bucket.idle or bucket.woken):
                self._start_bucket(bucket, counted)

    def _start_bucket(self, bucket: Bucket, counted: Sequence[bool]) -> None:
        here = streams.current(bucket.flat.device)
        others = [stream for stream in bucket.streams if stream != here]
        for stream in others:  # autograd runs a hook on its gradient's stream, and orders no two of them
            here.wait_stream(stream)
        if bucket.gaps:
            torch._foreach_zero_(bucket.gaps)
        self._copy_in([member for member in bucket.members if counted[member.param]], here if others else None)
        for member in bucket.members:
            if not counted[member.param]:
                member.room.zero_()
        bucket.versions = [member.view._version for member in bucket.members]
        if bucket.extra is not None:
            bucket.extra.fill_(1.0)
            numbers = self._flags if all(counted) else [*counted, *self._flags]
            staged = streams.staged(torch.tensor(numbers, dtype=torch.float32), bucket.extra.device)
            bucket.extra[-len(numbers) :].copy_(staged, non_blocking=True)
        if bucket.reducer is None:
            bucket.handle = self.start_sum(bucket)
        else:
            self._start_compressed(bucket)
        bucket.started = True

    def _start_compressed(self, bucket: Bucket) -> None:
        """Start the compressed sum of a bucket, and the next collectives of those that are running.

        They wait for the running ones: on a GPU a stream of their own, on a CPU the host.
        """
        device = bucket.flat.device
        if device not in self._side_streams:
            self._side_streams[device] = streams.new_stream(device)
        if (side := self._side_streams[device]) is not None:
            side.wait_stream(streams.current(device))
        with streams.on_stream(side):
            bucket.handle = self.start_sum(bucket)
        self._advance()
        self._running.append(bucket)

    def _advance(self) -> None:
        """Wait for the running collective of each compressed sum, and start the next one."""
        running = []
        for bucket in self._running:
            with streams.on_stream(self._side_streams[bucket.flat.device]):
                if not bucket.handle.advance():
                    running.append(bucket)
        self._running = running

    def _copy_in(self, members: Sequence[Member], stream: Any = None) -> None:
        """Make gradients views of the bucket; `stream` is the present one if other streams may have made some of them."""
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
        for gradient in gradients if stream is not None else ():  # else its own stream could take its memory before the copy
            gradient.record_stream(stream)
        for index, _, _, view, _ in members:
            self.params[index].grad = view

    def start_sum(self, bucket: Bucket) -> Any:
        """Start the reduction of a bucket over all ranks, and return a handle to wait for.

        The sum is written to `bucket.shard` if the bucket is reduce-scattered, else to `bucket.flat`.
        """
        if bucket.reducer is not None:
            return bucket.reducer.start(*([bucket.flat, bucket.shard] if bucket.reducer_scatters else [bucket.flat]))
        if bucket.shard is None:
            return distributed.all_reduce(bucket.flat, group=self.group, async_op=True)
        shard, parts, pool = bucket.shard, bucket.parts, self.pool
        if self.native(bucket):
            if bucket.is_even:
                return distributed.reduce_scatter(shard, bucket.flat, self.group, async_op=True)
            # One owner may have most of a bucket, and would receive that from each of the others.
            sums = pool.take(bucket.flat.numel(), shard)
            pieces = sums.copy_(bucket.flat).split(parts)
            started = [
                distributed.reduce(piece, rank, self.group, async_op=True) for rank, piece in enumerate(pieces) if len(piece)
            ]

            def keep() -> None:
                shard.copy_(pieces[self.rank])
                pool.give(sums)

            return _several(started, keep)
        # gloo's reduce-scatter sends as much as an all-reduce. So every rank receives its part of all ranks' buckets and
        # adds these up, in the ranks' order.
        received = pool.take(shard.numel() * len(parts), shard)
        sizes = [shard.numel()] * len(parts), parts

        def add_up() -> None:
            first, *later = received.view(len(parts), shard.numel())
            if later:
                torch.add(first, later[0], out=shard)
            else:
                shard.copy_(first)
            for part in later[1:]:
                shard.add_(part)
            pool.give(received)

        work = distributed.all_to_all(received, bucket.flat, self.group, async_op=True, sizes=sizes)
        work.then = add_up
        return work

    def gather(self, bucket: Bucket, flat: torch.Tensor) -> Any:
        """Start an all-gather of `flat`, in which each rank has filled its part, and return a handle to wait for."""
        shard = flat[bucket.bounds[self.rank] : bucket.bounds[self.rank + 1]]
        if self.native(bucket):
            if bucket.is_even:
                return distributed.all_gather(flat, shard, self.group, async_op=True)
            pieces = enumerate(flat.split(bucket.parts))
            return _several(
                [distributed.broadcast(piece, rank, self.group, async_op=True) for rank, piece in pieces if len(piece)]
            )
        sent = self.pool.take(shard.numel() * self.ranks, shard)
        sent.view(self.ranks, shard.numel()).copy_(shard.expand(self.ranks, shard.numel()))
        sizes = bucket.parts, [shard.numel()] * self.ranks
        work = distributed.all_to_all(flat, sent, self.group, async_op=True, sizes=sizes)
        work.then = lambda: self.pool.give(sent)
        return work

    def native(self, bucket: Bucket) -> bool:
        """Return whether the backend's own sums are used: on a GPU without gloo."""
        return bucket.flat.is_cuda and not self._is_gloo

    def _add_hooks(self) -> None:
        this = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:
                self._hooks[i] = param.register_post_accumulate_grad_hook(partial(_on_gradient, this, i))

    def _end_round(self) -> None:
        self._is_open, self._arrived = False, [False] * len(self.params)
        self._add_hooks()


def _flags_of(checksum: int) -> list[int]:
    """Return a number of 32 bits in pieces with their squares, small enough that sums over 2^12 ranks are exact."""
    return [number for shift in range(0, 32, 6) for number in (checksum >> shift & 63, (checksum >> shift & 63) ** 2)]


def flags_agree(sums: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks had equal flags, as far as their sums are exact: n * sum(x**2) == sum(x)**2."""
    return ranks > 2**12 or all(ranks * square == total * total for total, square in zip(sums[::2], sums[1::2], strict=True))


def _on_gradient(buckets: Any, i: int, _: torch.Tensor) -> None:
    if (live := buckets()) is not None:
        live.on_gradient(i)


def _several(works: Sequence[Any], then: Callable[[], None] | None = None) -> distributed.Works:
    together = distributed.Works(works)
    together.then = then
    return together


def _is_view(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
