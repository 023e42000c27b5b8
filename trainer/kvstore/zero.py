"""Sharded updates: the state of an optimizer is divided among the ranks (ZeRO, stage 1).

Gradients are summed up so that each rank gets its own part of each bucket. It updates the pieces of parameters in that part,
whose state only it has, by one launch of the same kernels as without sharding; then all ranks gather what the others
updated.

Where a rule looks at single elements, parameters are cut anywhere, and every rank has 1/N of the state. Where it needs whole
tensors (norms of a tensor, products of matrices, noise by the number of an element) each parameter belongs to one rank, and
ranks are balanced by what the rule says that updates cost. Sums over all tensors, as for clip_norm, are added up across the
ranks on the device.

Source: Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...kernels import Rule, storage
from ...kernels.layouts import compute_dtype, is_dense, widest
from ...kernels.metrics import MetricsBuffer
from .. import dist_utils
from ..dist_utils import process_group
from ..optimizer import MultiOptimizer, Optimizer, RuleOptimizer, Updater
from ..optimizer.plan import HyperRows, MultiPlan, Plan
from .allreduce import AllReduceSync
from .buckets import Bucket, BucketCollectives, GradientBuckets
from .partition import Piece, can_cut, check_parts, costs_of, memory_of, owners_of, pieces_of, shaped_like, weight_of
from .shard_states import ShardStates


class ZeroSync(AllReduceSync):
    """Every rank updates its share of the weights (dist_sync with update_on_kvstore=True): ZeRO, stage 1."""

    updates = True
    reports_metrics = False  # pieces of parameters have no rows in what is measured

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._control: torch.Tensor | None = None
        self._shards: ShardedUpdate | None = None

    def _make(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        params: Any = self._replica.params
        self._shards = ShardedUpdate(self._optimizer, params, self._names, self.group, engine=self._engine, reducer=reducer)
        if self._control is not None:
            self._shards.use_control(self._control)
        return self._shards.buckets

    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        self._whole.update(chosen)
        self.end_step()

    def use_control(self, control: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        if not (isinstance(optimizer, RuleOptimizer) and isinstance(optimizer.rule, Rule)):
            raise RuntimeError(
                f"a loss scaler with {type(optimizer).__name__} and update_on_kvstore=True: that a gradient overflowed is "
                "known to the rank that has it only; use update_on_kvstore=False"
            )
        if self._compression_params is not None:
            raise RuntimeError(
                "a loss scaler with compression_params: what an overflow leaves in the residuals never goes away; leave one "
                "of them out"
            )
        self._control = control
        if self._shards is not None:
            self._shards.use_control(control)

    def total(self) -> torch.Tensor | None:
        return self._whole.total()

    def state_dict(self) -> dict[str, Any] | None:
        return self._whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._whole.load_state_dict(state)

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        return self._whole.masters(new)

    def apply(self, rule: Any, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        self._whole.apply(rule, hyper, indices)

    @property
    def _whole(self) -> ShardedUpdate:
        assert self._shards is not None
        return self._shards


class ShardedUpdate:
    """An optimizer whose state is cut among the ranks. All methods are to be called on all ranks.

        update = ShardedUpdate(optimizer, params, names)
        update.buckets.broadcast_weights()
        for x, y in batches:
            loss(net(x), y).backward()
            update.buckets.finish(fresh)
            update.update(update.buckets.used)

    Args:
        optimizer: the optimizer, the same on all ranks.
        params: the parameters, initialized; where they are cut, without gaps in memory.
        names: what messages and saved states call them.
        group: the process group; default that of all ranks.
        engine: as for `tristep.kernels.choose_engine`.
        **settings: `bucket_bytes`, `first_bucket_bytes` and `reducer` of `GradientBuckets`.

    Attributes:
        buckets: the gradients. After their `finish` those of the parameters are still this rank's own.
        updater: has the states of this rank's pieces, by the parameter's index.
        pieces: what this rank has; empty before the first `update`.

    Raises:
        TypeError, ValueError: an argument that does not fit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[torch.nn.Parameter],
        names: Sequence[str] | None = None,
        group: Any = None,
        *,
        engine: str | None = None,
        **settings: Any,
    ) -> None:
        check_parts(optimizer)
        self.updater = Updater(optimizer, engine)
        self.cuts = can_cut(optimizer)
        group = process_group(group)
        owners = None if self.cuts else owners_of(costs_of(optimizer, params), dist.get_world_size(group))
        self.buckets = GradientBuckets(params, names, group, scatter=True, owners=owners, **settings)
        for name, param in zip(self.buckets.names, self.buckets.params, strict=True):
            if self.cuts and not is_dense(param):
                raise ValueError(
                    f"params: {name!r} has gaps in memory (shape {tuple(param.shape)}, strides {param.stride()}), so it "
                    "cannot be cut among ranks: use .contiguous(), or update_on_kvstore=False"
                )
        self.pieces: list[Piece] = []
        self._plan: Plan | None = None
        self._rows: HyperRows | None = None
        self._gradients: list[torch.Tensor] | None = None  # of the pieces, once there are buckets
        self._weights = WeightGathers(self.buckets, self.cuts)
        self._total: torch.Tensor | None = None  # what the first reduction over all tensors has found in the last update

    @torch.no_grad()
    def update(self, used: Sequence[bool]) -> None:
        """Update the parameters that are used, the same ones on all ranks, and give all ranks the new weights.

        Raises:
            RuntimeError: there are no buckets yet.
            TypeError, ValueError: as of a step; nothing has been changed.
        """
        own = self._follow()
        self._total = None
        optimizer: Any = self.updater.optimizer
        gradients = [gradient if used[piece.param] else None for gradient, piece in zip(own, self.pieces, strict=True)]
        if isinstance(optimizer, RuleOptimizer):
            self._step_by_rule(optimizer, used, gradients)
        elif isinstance(optimizer, MultiOptimizer):
            self._step_together(optimizer, used, gradients)
        elif any(used):
            mine = {piece.param for piece in self.pieces}
            if others := [i for i, active in enumerate(used) if active and i not in mine]:
                optimizer._update_count(others)
            if self.pieces:
                self._planned().step(gradients)
        self._weights.gather(used)

    def total(self) -> torch.Tensor | None:
        """As `Updater.total`, of the last update; the same on all ranks."""
        rule: Any = getattr(self.updater.optimizer, "composed_rule", None)
        if self._total is None or not getattr(rule, "skips_nonfinite", False):
            return None
        narrow = any(compute_dtype(param.dtype) == torch.float32 for param in self.buckets.params)
        return self._total.float() if narrow else self._total  # infinite where the update takes it to be so

    def use_control(self, control: torch.Tensor) -> None:
        """Let updates follow a loss scaler's control from now on, as `Updater.control`."""
        self.updater.control, self._plan, self._rows = control, None, None

    @torch.no_grad()
    def apply(self, rule: Rule, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        """Apply another rule to the parameters `indices`, as `Updater.apply`, such as the one that shows averaged weights.

        Raises:
            RuntimeError: there are no buckets yet.
        """
        self._follow()
        pieces = [piece for piece in self.pieces if piece.param in indices]
        weights = [weight_of(piece, self.buckets.params[piece.param], self.cuts) for piece in pieces]
        self.updater.apply(rule, hyper, [piece.param for piece in pieces], weights)
        self._weights.gather([True] * len(self.buckets.params))

    def state_dict(self, everywhere: bool = True) -> dict[str, Any]:
        """The whole state, in the form of a trainer's whose state is not cut, with tensors on the CPU.

        Args:
            everywhere: let all ranks have the tensors, else rank 0 alone.
        """
        return self._states().state_dict(everywhere)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what a `state_dict` gave, that of a `Trainer` or of any number of ranks.

        Raises:
            ValueError, TypeError: it does not fit; nothing has been changed.
        """
        self.buckets.make()
        self._find_pieces()
        self._states().load_state_dict(state_dict)
        self._plan = self._rows = None

    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[int, torch.Tensor]:
        """The masters of whole parameters, by index, on the CPU; or `new` ones, of which this rank takes its pieces."""
        if new is None:
            return self._states().masters()
        self.buckets.make()
        self._find_pieces()
        self._states().load_masters(new)
        self._plan = self._rows = None
        return new

    def _states(self) -> ShardStates:
        return ShardStates(self.updater, self.buckets, self.pieces, self.cuts)

    def _follow(self) -> list[torch.Tensor]:
        """See where the weights are now. Gives the gradients of this rank's pieces."""
        if not self.buckets.buckets:
            raise RuntimeError("there are no summed up gradients: call buckets.finish() first")
        gradients = self._find_pieces()
        if self._weights.follow():
            self._plan = self._rows = None
        return gradients

    def _find_pieces(self) -> list[torch.Tensor]:
        """Find this rank's pieces, once there are buckets. Gives their gradients."""
        if self._gradients is not None:
            return self._gradients
        rank, self._gradients = self.buckets.collectives.rank, []
        self.pieces = pieces_of(self.buckets.buckets, rank)
        for piece in self.pieces:
            bucket = self.buckets.buckets[piece.bucket]
            own, low = bucket.own, bucket.bounds[rank]
            assert own is not None
            flat = own[piece.at - low : piece.at - low + piece.stop - piece.start]
            self._gradients.append(flat if self.cuts else shaped_like(flat, self.buckets.params[piece.param]))
        return self._gradients

    def _planned(self) -> Plan:
        if self._plan is None:
            indices = [piece.param for piece in self.pieces]
            weights = [weight_of(piece, self.buckets.params[piece.param], self.cuts) for piece in self.pieces]
            names = [self.buckets.names[i] for i in indices]
            # Random numbers of pieces of a parameter must not be the same.
            offsets = np.array([piece.param + (piece.start // storage.BLOCK << 32) for piece in self.pieces], dtype=np.int64)
            self._plan = self.updater.make_plan(
                indices, weights, names, rng_offsets=offsets, all_reduce_global=self._all_reduce_global
            )
        return self._plan

    def _step_together(
        self, optimizer: MultiOptimizer, used: Sequence[bool], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """A step of several optimizers, which count all parameters; this rank updates its own."""
        if not any(used):
            return
        chosen, counts, slots = np.array(used, dtype=bool), optimizer.step_counts, optimizer.slots(range(len(used)))
        number = counts.largest_after(slots[chosen])
        optimizer.rate_at(number)  # where that fails, it does so on all ranks, before anything else
        if self.pieces:
            plan: Any = self._planned()  # a MultiPlan
            plan.prepare(gradients)
            plan.run(number=number)
        else:  # the other ranks wait for this one's share
            device = self.buckets.params[0].device
            MultiPlan(optimizer, [], self.updater.control, device, self._all_reduce_global).run(number=number)
        mine = np.isin(np.arange(len(used)), [piece.param for piece in self.pieces])
        counts.advance(slots[chosen & ~mine], number)

    def _step_by_rule(
        self, optimizer: RuleOptimizer, used: Sequence[bool], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """A step in which the optimizer is asked about all parameters, and counts them; this rank updates its own."""
        if not any(used):
            return
        rows = self._rows = self._rows or HyperRows(optimizer, range(len(used)))
        rows.use(list(used))
        try:
            rule, formed = rows.form_all()
            if any(gradient is not None for gradient in gradients):
                plan: Any = self._planned()  # a StepPlan
                plan.step_with(gradients, rule, [formed[piece.param] for piece in self.pieces])
            else:
                self._reduce_nothing(rule)
        except BaseException:
            rows.undo()
            raise
        rows.count()

    def _reduce_nothing(self, rule: Any) -> None:
        """Take part in the sums over all tensors, for which the other ranks wait."""
        for reduction in rule.reductions:
            if reduction.scope == "global":
                device = self.buckets.params[0].device
                zeros = torch.zeros(reduction.n_values, dtype=widest(device), device=device)
                self._all_reduce_global(zeros, reduction.op)

    def _all_reduce_global(self, totals: torch.Tensor, by: str) -> None:
        dist_utils.all_reduce(
            totals, dist.ReduceOp.SUM if by == "sum" else dist.ReduceOp.MAX, self.buckets.collectives.group
        )
        if self._total is None:
            self._total = totals[0]


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
