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
from typing import Any

import torch

from ...kernels import streams
from .. import dist_utils
from ..dist_utils import broadcast_coalesced, check_alike, global_rank
from ..params import is_lazy
from ..validation import integer
from .bucket import Bucket, gaps_of, make_buckets
from .bucket_queue import BucketQueue
from .collectives import BucketCollectives

__all__ = ["GradientBuckets"]


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
        collectives: of the process group.
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
        self.collectives = BucketCollectives(group)
        self.used = [False] * len(self.params)
        self.flag_slots = [0, 0, 0, 0]
        self.flag_sums = torch.zeros(4, device=self.params[0].device)
        self._queue = BucketQueue(self.params, self.names, self.collectives)
        self._scatter, self._owners = scatter, owners
        self._limits = integer("bucket_bytes", bucket_bytes, low=1), integer("first_bucket_bytes", first_bucket_bytes, low=1)
        self._reducer = reducer
        self._order: list[int] = []  # in which gradients arrived, until there are buckets
        self._accumulating = 0
        self._lock = threading.Lock()
        self._hooks: dict[int, Any] = {}
        self._add_hooks()
        weakref.finalize(self, _remove, self._hooks)

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they are started; empty before the first `finish`."""
        return self._queue.buckets

    def broadcast_weights(self) -> None:
        """Give all ranks rank 0's parameters. To be called on all ranks.

        Raises:
            ValueError: ranks have other names, shapes or types; on all ranks, and nothing has been changed.
        """
        check_alike("parameter", dict(zip(self.names, self.params, strict=True)), self.collectives.group)
        broadcast_coalesced(self.params, self.collectives.group)

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
        dist_utils.refuse_lost(self.collectives.group)
        queue, n = self._queue, len(self.params)
        given = zip(queue.arrived, fresh, self.params, strict=True)
        counted = [arrived or (bool(new) and param.requires_grad) for arrived, new, param in given]
        if self.collectives.ranks == 1 and not self._scatter:
            self.used = counted
            self._end_round()
            device = self.params[0].device
            return streams.staged(torch.tensor(counted, dtype=torch.float32), device).to(device, non_blocking=True)
        queue.check_unchanged()
        self.make()
        counts, self.flag_sums = queue.finish(counted, self.flag_slots).split([n, len(self.flag_slots)])
        self.used = counted
        if not all(new or not param.requires_grad for new, param in zip(counted, self.params, strict=True)):
            self.used = (counts > 0).tolist()
        if not self._scatter:
            for bucket in queue.buckets:
                for member in bucket.members if bucket.started else ():
                    if self.used[member.param]:
                        self.params[member.param].grad = member.view
        self._end_round()
        return counts

    def discard(self) -> None:
        """Forget the gradients of a backward pass that no step will follow. To be called on all ranks.

        What has been started cannot be called back, so this takes as long as `finish`; gradients have no meaning afterwards.
        """
        if self.buckets and self.collectives.ranks > 1:
            self._queue.finish([False] * len(self.params), self.flag_slots)
        self._order = []
        self._end_round()

    @torch.no_grad()
    def make(self) -> None:
        """Make the buckets now, if there are none. To be called on all ranks; the first `finish` does."""
        if self.buckets:
            return
        group, rank, n = self.collectives.group, self.collectives.rank, len(self.params)
        known = set(self._order)
        rest = [i for i in reversed(range(n)) if i not in known]
        trained = [int(param.requires_grad) for param in self.params]
        plan = torch.tensor([*self._order, *rest, *trained], dtype=torch.int64, device=self.params[0].device)
        dist_utils.broadcast(plan, global_rank(group, 0), group)
        listed, ranks, extra = plan.tolist(), self.collectives.ranks, n + len(self.flag_slots)
        exact = not self._scatter and self._reducer is None
        params = self.params, listed[:n], listed[n:]
        made = make_buckets(*params, self._limits, ranks, self._owners, extra=extra, exact=exact)
        for bucket in made:
            if self._reducer is not None and bucket.extra is None:
                bucket.reducer, bucket.gaps = self._reducer(bucket), [gap for gap in gaps_of(bucket) if gap.numel()]
            if self._scatter and bucket.extra is None:
                part = bucket.flat[bucket.bounds[rank] : bucket.bounds[rank + 1]]
                bucket.own = torch.zeros_like(part) if bucket.reducer is None else part
        self._queue.use(made)
        self._order = []

    def on_gradient(self, i: int) -> None:
        """The hooks call it when the gradient of parameter `i` has been accumulated."""
        with self._lock:  # backward has a thread for each device
            dist_utils.refuse_lost(self.collectives.group)
            queue, alone = self._queue, self.collectives.ranks == 1  # then nothing is ever on its way
            if queue.arrived[i] and not alone:
                raise RuntimeError(
                    f"a second gradient for {self.names[i]!r} before a step: its sum over all ranks may have been started "
                    "after the first backward. To add up gradients of several backward passes, let all but the last run "
                    "inside accumulate(); to go on without a step, call discard() on all ranks"
                )
            if self._accumulating and not alone:
                return
            if self.buckets and not alone:
                if not queue.is_open:
                    queue.begin(self.flag_slots)
                queue.add(i)
                return
            if not (self.buckets or self._accumulating or queue.arrived[i]):
                self._order.append(i)
            queue.arrived[i] = True

    def _add_hooks(self) -> None:
        own = weakref.ref(self)
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:
                self._hooks[i] = param.register_post_accumulate_grad_hook(partial(_on_gradient, own, i))

    def _end_round(self) -> None:
        self._queue.reset()
        self._add_hooks()


def _on_gradient(buckets: Any, i: int, _: torch.Tensor) -> None:
    if (alive := buckets()) is not None:
        alive.on_gradient(i)


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
