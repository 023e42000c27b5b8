"""Updates of which every rank does its share: the state of an optimizer is cut among the ranks (ZeRO, stage 1).

Gradients are summed up so that each rank gets its own part of each bucket. It updates the pieces of parameters that lie
there, whose state only it has, by one launch of the same kernels as ever; then all ranks gather what the others updated.

Where a rule looks at single elements, parameters are cut anywhere, and every rank has 1/N of the state. Where it needs whole
tensors (norms of a tensor, products of matrices, noise by the number of an element) each parameter belongs to one rank.
Sums over all tensors, as for clip_norm, are added up across the ranks on the device.

Source: Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...kernels import Rule, storage
from ...kernels.layouts import compute_dtype, is_dense, widest
from ...kernels.states import allocate_states
from .. import checkpoint
from ..kvstore import collectives
from ..kvstore.collective import global_rank, process_group
from ..optimizer import Optimizer, RuleOptimizer, Updater
from ..optimizer.plan import StepPlan
from .buckets import Bucket, GradientBuckets, Member

__all__ = ["ShardedUpdate", "can_cut", "memory_of", "owners_of"]


def can_cut(optimizer: Optimizer) -> bool:
    """Whether an optimizer's parameters can be cut anywhere: its rule looks at single elements, wherever they are."""
    if not isinstance(optimizer, RuleOptimizer) or not isinstance(optimizer.composed_rule, Rule):
        return False
    rule = optimizer.composed_rule
    return not any(stage.scope == "tensor" or "index" in stage.extras for stage in rule.reductions) and (
        "index" not in rule.extras
    )


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank each parameter belongs to: the largest first, each to the rank that has the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, owners[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[i], owners[i]))
    return owners


class Piece(NamedTuple):
    """What a rank has of a parameter.

    Attributes:
        param: the parameter's number.
        bucket: the number of its bucket.
        start: its first element in the parameter, in the order in which these lie in memory.
        stop: the element after its last one.
        at: its first element in the bucket.
    """

    param: int
    bucket: int
    start: int
    stop: int
    at: int


class ShardedUpdate:
    """An optimizer whose state is cut among the ranks. All methods are to be called on all ranks.

        update = ShardedUpdate(optimizer, params, names)
        update.buckets.broadcast_weights()
        for x, y in batches:
            loss(net(x), y).backward()
            update.reduce(fresh)
            update.update(update.buckets.used)

    Args:
        optimizer: the optimizer, the same on all ranks.
        params: the parameters, initialized; where they are cut, without gaps in memory.
        names: what messages and saved states call them.
        group: the process group; default that of all ranks.
        engine: as for `tristep.kernels.choose_engine`.
        **settings: `bucket_bytes`, `first_bucket_bytes` and `reducer` of `GradientBuckets`.

    Attributes:
        buckets: the gradients. After `reduce` those of the parameters are still this rank's own.
        updater: has the states of this rank's pieces, by the parameter's index.
        pieces: what this rank has; empty before the first `reduce`.

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
        self.updater = Updater(optimizer, engine)
        self.params = list(params)
        self.cuts = can_cut(optimizer)
        self._device = self.params[0].device
        group = process_group(group)
        ranks = dist.get_world_size(group)
        owners = None if self.cuts else owners_of([param.numel() for param in self.params], ranks)
        self.buckets = GradientBuckets(self.params, names, group, scatter=True, owners=owners, **settings)
        self.names = self.buckets.names
        for name, param in zip(self.names, self.params, strict=True):
            if self.cuts and not is_dense(param):
                raise ValueError(
                    f"params: {name!r} has gaps in memory (shape {tuple(param.shape)}, strides {param.stride()}), so it "
                    "cannot be cut among ranks: use .contiguous(), or update_on_kvstore=False"
                )
        self.rank, self.ranks = self.buckets.rank, self.buckets.ranks
        self.pieces: list[Piece] = []
        self._places: list[tuple[int, int]] = []  # of each parameter: the number of its bucket, its first element there
        self._plan: StepPlan | None = None
        self._gradients: list[torch.Tensor] = []
        self._weight_addresses: list[int] = []
        self._strides = [param.stride() for param in self.params]
        self._gathers: list[_Gather] = []
        self._total: torch.Tensor | None = None  # what the first reduction over all tensors has found in the last update

    def reduce(self, fresh: Sequence[bool]) -> torch.Tensor:
        """Sum up the gradients, each rank its part; as `GradientBuckets.finish`. Its `used` can be handed to `update`."""
        counts = self.buckets.finish(fresh)
        self._make()
        return counts

    @torch.no_grad()
    def update(self, used: Sequence[bool]) -> None:
        """Update the parameters that are used, the same ones on all ranks, and give all ranks the new weights.

        Raises:
            RuntimeError: before `reduce`.
            TypeError, ValueError: as of a step; nothing has been changed.
        """
        self._refuse_early()
        self._follow_weights()
        self._total = None
        optimizer: Any = self.updater.optimizer
        gradients = [
            gradient if used[piece.param] else None for gradient, piece in zip(self._gradients, self.pieces, strict=True)
        ]
        if isinstance(optimizer, RuleOptimizer):
            self._step_by_rule(optimizer, used, gradients)
        elif any(used):
            mine = {piece.param for piece in self.pieces}
            if others := [i for i, active in enumerate(used) if active and i not in mine]:
                optimizer._update_count(others)
            if self.pieces:
                self._planned().step(gradients)
        self._gather(used)

    def total(self) -> torch.Tensor | None:
        """As `Updater.total`, of the last update; the same on all ranks."""
        rule: Any = getattr(self.updater.optimizer, "composed_rule", None)
        if self._total is None or not getattr(rule, "skips_nonfinite", False):
            return None
        narrow = any(compute_dtype(param.dtype) == torch.float32 for param in self.params)
        return self._total.float() if narrow else self._total  # infinite where the update takes it to be so

    def use_control(self, control: torch.Tensor) -> None:
        """Let updates follow a loss scaler's control from now on, as `Updater.control`."""
        self.updater.control, self._plan = control, None

    @torch.no_grad()
    def apply(self, rule: Rule, hyper: Mapping[str, float]) -> None:
        """Apply another rule to the parameters, as `Updater.apply`, such as the one that shows averaged weights.

        Raises:
            RuntimeError: before `reduce`.
        """
        self._refuse_early()
        self._follow_weights()
        pieces = self.pieces
        self.updater.apply(rule, hyper, [piece.param for piece in pieces], [self._weight(piece) for piece in pieces])
        self._gather([True] * len(self.params))

    def state_dict(self, everywhere: bool = True) -> dict[str, Any]:
        """The whole state, in the form of a trainer's whose state is not cut, with tensors on the CPU.

        Args:
            everywhere: let all ranks have the tensors, else rank 0 alone.
        """
        optimizer = self.updater.optimizer
        with self._scratch() as whole:
            keep = everywhere or self.rank == 0
            if self._has_states():
                if self.cuts:
                    self._collect_cut(whole, keep)
                else:
                    return self._collect_owned(whole, keep)
            optimizer.slots(range(len(self.params)))
            return checkpoint.collect(whole, self.names, self.params)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what a `state_dict` gave, that of a `Trainer` or of any number of ranks.

        Raises:
            ValueError, TypeError: it does not fit; nothing has been changed.
        """
        self.buckets.make()
        self._make()
        mine = {piece.param: piece for piece in self.pieces}
        with self._scratch() as whole:
            stand_ins = [
                param if not self.cuts and i in mine else torch.empty_like(param, device="cpu")
                for i, param in enumerate(self.params)
            ]
            checkpoint.restore(whole, self.names, stand_ins, state_dict)
            self.updater.states, self.updater.masters = {}, {}
            for i, piece in mine.items():
                if i not in whole.states:
                    continue
                if self.cuts:
                    self._cut(whole, piece)
                else:
                    self.updater.states[i] = whole.states[i]
                    if i in whole.masters:
                        self.updater.masters[i] = whole.masters[i]
        self._plan = None

    @contextmanager
    def _scratch(self) -> Iterator[Updater]:
        """An updater for whole states; the optimizer does not keep it."""
        optimizer: Any = self.updater.optimizer
        try:
            yield Updater(optimizer, self.updater.engine)
        finally:
            if isinstance(optimizer, RuleOptimizer):
                optimizer._updater = weakref.ref(self.updater)

    def _make(self) -> None:
        """Find this rank's pieces, when there are buckets."""
        if self._places:
            return
        self._places = [(-1, -1)] * len(self.params)
        for k, bucket in enumerate(self.buckets.buckets):
            low, high = bucket.bounds[self.rank], bucket.bounds[self.rank + 1]
            for member in bucket.members:
                self._places[member.param] = k, member.start
                start, stop = max(low - member.start, 0), min(high - member.start, member.size)
                # One without elements has none to be cut: it is where it begins.
                if start < stop or (member.size == 0 and self._first_owner(bucket, member) == self.rank):
                    self.pieces.append(Piece(member.param, k, start, stop, member.start + start))
        self.pieces.sort()
        for piece in self.pieces:
            bucket = self.buckets.buckets[piece.bucket]
            own, low = bucket.own, bucket.bounds[self.rank]
            assert own is not None
            flat = own[piece.at - low : piece.at - low + piece.stop - piece.start]
            self._gradients.append(flat if self.cuts else _like(flat, self.params[piece.param]))
        self._gathers = [_Gather(bucket, self.params, self.buckets) for bucket in self.buckets.buckets if bucket.members]

    def _refuse_early(self) -> None:
        if not self._places:
            raise RuntimeError("there are no summed up gradients: call reduce() first")

    def _first_owner(self, bucket: Bucket, member: Member) -> int:
        """The lowest rank that has a piece of a parameter."""
        return next((rank for rank in range(self.ranks) if bucket.bounds[rank + 1] > member.start), self.ranks - 1)

    def _weight(self, piece: Piece) -> torch.Tensor:
        param = self.params[piece.param]
        return memory_of(param)[piece.start : piece.stop] if self.cuts else param

    def _planned(self) -> StepPlan:
        if self._plan is None:
            indices = [piece.param for piece in self.pieces]
            weights = [self._weight(piece) for piece in self.pieces]
            names = [self.names[i] for i in indices]
            # Random numbers of pieces of a parameter must not be the same.
            offsets = np.array([piece.param + (piece.start // storage.BLOCK << 32) for piece in self.pieces], dtype=np.int64)
            self._plan = StepPlan(
                self.updater, indices, weights, names, rng_offsets=offsets, all_reduce_global=self._all_reduce_global
            )
        return self._plan

    def _follow_weights(self) -> None:
        if self.cuts and [param.stride() for param in self.params] != self._strides:
            raise ValueError(
                "a parameter has got other strides since the first step, as by .t() or another memory format: each process "
                "has the states of pieces of its memory, which cannot follow; change layouts before the first step"
            )
        addresses = [param.data_ptr() for param in self.params]
        if addresses != self._weight_addresses:
            self._weight_addresses, self._plan = addresses, None
            for gather in self._gathers:
                gather.follow()

    def _step_by_rule(
        self, optimizer: RuleOptimizer, used: Sequence[bool], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """A step in which the optimizer counts all parameters, and this rank updates its own."""
        if not any(used):
            return
        slots = optimizer.slots(range(len(self.params)))
        chosen = np.array(used, dtype=bool)
        own = chosen & np.isin(np.arange(len(used)), [piece.param for piece in self.pieces])
        counts, before, carried = optimizer.step_counts, optimizer.num_update, optimizer.host_state()
        number = max(before, int(counts.values[slots[chosen]].max()) + 1)
        asked = before if optimizer.reads_rate_first else number
        try:
            if own.any() and (optimizer.uniform_hyper or not optimizer.host_state_names):
                optimizer.num_update = asked  # which the plan takes for the rate
                self._planned().step(gradients)
            else:
                self._step_with_all_rows(optimizer, used, gradients, slots, optimizer.rate_at(asked), bool(own.any()))
                if optimizer.counts_as_step:
                    counts.advance(slots[own], number)
        except BaseException:
            optimizer.num_update = before
            optimizer.load_host_state(carried)
            raise
        counts.largest = before
        if optimizer.counts_as_step:
            counts.advance(slots[chosen & ~own], number)

    def _step_with_all_rows(
        self,
        optimizer: RuleOptimizer,
        used: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
        slots: np.ndarray,
        lr: float,
        any_own: bool,
    ) -> None:
        """A step for which the optimizer is asked about all parameters in their order, since an answer depends on others."""
        rule = optimizer.rule_for(slots)
        optimizer.begin_step(lr)
        rows: dict[int, list[float]] = {}
        if not optimizer.uniform_hyper:
            for i, active in enumerate(used):
                if active:
                    lr_mult, wd_mult = optimizer.multipliers(i)
                    t = int(optimizer.step_counts.values[slots[i]]) + 1
                    rows[i] = optimizer.row(t, lr * lr_mult, optimizer.wd * wd_mult, i, rule)
        if any_own:
            width = 1 + len(rule.hyper) + (optimizer.rounding is not None)
            self._planned().step_with(gradients, [rows.get(piece.param, [0.0] * width) for piece in self.pieces])
            return
        for reduction in rule.reductions:  # the other ranks wait for this one's share
            if reduction.scope == "global":
                device = self._device
                self._all_reduce_global(
                    torch.zeros(reduction.n_values, dtype=widest(device.type), device=device), reduction.op
                )

    def _all_reduce_global(self, totals: torch.Tensor, by: str) -> None:
        collectives.all_reduce(totals, dist.ReduceOp.SUM if by == "sum" else dist.ReduceOp.MAX, self.buckets.group)
        if self._total is None:
            self._total = totals[0]

    def _gather(self, used: Sequence[bool]) -> None:
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

    def _has_states(self) -> bool:
        found = torch.tensor([float(bool(self.updater.states))], device=self._device)
        collectives.all_reduce(found, dist.ReduceOp.MAX, self.buckets.group)
        return bool(found.item())

    def _state(self, optimizer: RuleOptimizer, piece: Piece) -> tuple[torch.Tensor, ...]:
        state = self.updater.states[piece.param]
        if len(state) != len(optimizer.composed_rule.slots):  # another rule since the last step; the next one does the same
            return optimizer.create_state(piece.param, self._weight(piece).detach())
        return state

    @torch.no_grad()
    def _collect_cut(self, whole: Updater, keep: bool) -> None:
        """Put whole states and masters into `whole`, bucket by bucket and slot by slot."""
        optimizer: Any = self.updater.optimizer
        rule = optimizer.composed_rule
        states = {piece.param: self._state(optimizer, piece) for piece in self.pieces}
        room: list[Any] = [None] * len(self.params)
        if keep:
            room = [torch.empty_like(param, device="cpu") for param in self.params]
            whole.states = dict(enumerate(optimizer.states_for(room)))
        for k, slot in enumerate(rule.state):
            found = {i: state[k] for i, state in states.items()}
            for i, values in self._whole_tensors(found, slot in rule.nonnegative):
                if keep:
                    storage.copy(whole.states[i][k], values, values.shape, slot in rule.nonnegative)
        self._collect_numbers(optimizer, states, whole)
        present = torch.tensor([float(i in self.updater.masters) for i in range(len(self.params))], device=self._device)
        collectives.all_reduce(present, dist.ReduceOp.MAX, self.buckets.group)
        if present.any():
            for i, values in self._whole_tensors(self.updater.masters, False):
                if keep and present[i]:
                    ((master,),) = allocate_states([room[i]], 1, optimizer.master_dtype(self.params[i]))
                    whole.masters[i] = master.copy_(values)

    def _whole_tensors(self, found: Mapping[Any, torch.Tensor], unsigned: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Each parameter's whole tensor, on the CPU in its arithmetic's type, of all ranks' pieces of it."""
        pieces: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.bucket, []).append(piece)
        for k, bucket in enumerate(self.buckets.buckets):
            if not bucket.members:
                continue
            assert bucket.weight_dtype is not None
            dtype = compute_dtype(bucket.weight_dtype)  # which has all values of narrower types
            flat = torch.zeros(bucket.bounds[-1], dtype=dtype, device=bucket.flat.device)
            for piece in pieces.get(k, ()):
                if piece.param in found:
                    tensor, size = found[piece.param], piece.stop - piece.start
                    if tensor.dtype == torch.uint8:
                        tensor = storage.unpacked(tensor, torch.Size([size]), unsigned)
                    flat[piece.at : piece.at + size] = tensor
            self._all_gather(bucket, flat)
            flat = flat.cpu()
            for member in bucket.members:
                like = torch.empty_like(self.params[member.param], device="cpu", dtype=dtype)
                yield member.param, like.copy_(_like(flat[member.start : member.start + member.size], like))

    def _all_gather(self, bucket: Bucket, flat: torch.Tensor) -> None:
        gathering = _Gathering(self.buckets, bucket, flat)
        gathering.wait()

    def _collect_numbers(
        self, optimizer: RuleOptimizer, states: Mapping[int, tuple[torch.Tensor, ...]], whole: Updater
    ) -> None:
        """The numbers that a rule keeps of each parameter, which all its pieces have; the first one's are taken."""
        rule = optimizer.composed_rule
        if not rule.kept:
            return
        first, device = len(rule.state), self._device
        numbers = torch.zeros(len(self.params), len(rule.kept), dtype=widest(device.type), device=device)
        for piece in self.pieces:
            if piece.start == 0:
                numbers[piece.param] = torch.stack(states[piece.param][first:]).to(numbers)
        collectives.all_reduce(numbers, group=self.buckets.group)
        for i, state in whole.states.items():
            for tensor, value in zip(state[first:], numbers[int(i)].cpu(), strict=True):
                tensor.copy_(value)

    def _collect_owned(self, whole: Updater, keep: bool) -> dict[str, Any]:
        """The state of parameters that belong to ranks as a whole, tensor by tensor."""
        mine = [piece.param for piece in self.pieces]
        group, device = self.buckets.group, self._device
        whole.states = {i: self.updater.states[i] for i in mine if i in self.updater.states}
        whole.masters = {i: master for i, master in self.updater.masters.items() if i in mine}
        self.updater.optimizer.slots(range(len(self.params)))
        collected = checkpoint.collect(whole, self.names, self.params)
        own = collected["state"]
        listed = [
            (
                name,
                [(slot, tuple(tensor.shape), tensor.dtype) for slot, tensor in slots.items()],
                collected["layout"].get(name),
            )
            for name, slots in own.items()
        ]
        lists = collectives.all_gather_objects(listed, group)
        state: dict[str, dict[str, torch.Tensor]] = {}
        layout: dict[str, Any] = {}
        for rank, entries in enumerate(lists):
            for name, slots, nesting in entries:
                state[name] = {}
                if nesting is not None:
                    layout[name] = nesting
                for slot, shape, dtype in slots:
                    there = rank == self.rank
                    tensor = own[name][slot].contiguous() if there else torch.empty(shape, dtype=dtype, device=device)
                    sent = tensor.to(device).view(torch.uint8) if dtype == torch.int16 else tensor.to(device)
                    collectives.broadcast(sent, global_rank(group, rank), group)
                    if keep:
                        state[name][slot] = (own[name][slot] if there else tensor).cpu()
        collected["state"] = {name: state[name] for name in self.names if name in state} if keep else {}
        collected["layout"] = {name: layout[name] for name in self.names if name in layout} if keep else {}
        return collected

    def _cut(self, whole: Updater, piece: Piece) -> None:
        """Take this rank's piece of a whole state and master."""
        optimizer: Any = self.updater.optimizer
        rule, weight, param = optimizer.composed_rule, self._weight(piece).detach(), self.params[piece.param]
        size = torch.Size([piece.stop - piece.start])
        (state,) = optimizer.states_for([weight])
        for k, (slot, tensor) in enumerate(zip(rule.slots, whole.states[piece.param], strict=True)):
            unsigned = slot in rule.nonnegative
            if k >= len(rule.state):
                state[k].copy_(tensor)
                continue
            if tensor.dtype == torch.uint8:
                tensor = storage.unpacked(tensor, param.shape, unsigned)
            part = _in_order_of(tensor, param)[piece.start : piece.stop]
            storage.copy(state[k], part.to(weight.device), size, unsigned)
        self.updater.states[piece.param] = state
        if piece.param in whole.masters:
            master = whole.masters[piece.param]
            ((own,),) = allocate_states([weight], 1, master.dtype)
            self.updater.masters[piece.param] = own.copy_(_in_order_of(master, param)[piece.start : piece.stop])


class _Gather:
    """The updated pieces of a bucket on their way to all ranks."""

    def __init__(self, bucket: Bucket, params: Sequence[torch.nn.Parameter], buckets: GradientBuckets) -> None:
        self.bucket, self._params, self._buckets = bucket, params, buckets
        self._sizes: list[int] = []  # of the stretches of the bucket: pieces, and gaps between them
        self._own: list[
            tuple[int, torch.Tensor]
        ] = []  # the weights of this rank's part, each with the number of its stretch
        self._others: list[tuple[int, torch.Tensor]] = []
        self._stage: Any = None
        self._running: Any = None

    def follow(self) -> None:
        """Look where the weights are."""
        bounds, rank = self.bucket.bounds, self._buckets.rank
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
                weight = memory_of(param)[start:stop] if self._buckets.owners is None else param
                into.append((len(self._sizes) - 1, weight))
        self._sizes.append(bounds[-1] - end)

    def start(self) -> None:
        buckets, bucket = self._buckets, self.bucket
        stage = self._stage = buckets.pool.take(bucket.bounds[-1], self._params[bucket.members[0].param])
        parts, weights = self._pairs(self._own)
        if parts:
            torch._foreach_copy_(parts, weights)
        self._running = _Gathering(buckets, bucket, stage)

    def finish(self) -> None:
        self._running.wait()
        parts, weights = self._pairs(self._others)
        if parts:
            torch._foreach_copy_(weights, parts)
        self._buckets.pool.give(self._stage)
        self._stage = self._running = None

    def _pairs(self, placed: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Stretches of the staging buffer, and the weights that belong there."""
        stretches = self._stage.split_with_sizes(self._sizes)
        if self._buckets.owners is None:
            return [stretches[k] for k, _ in placed], [weight for _, weight in placed]
        return [_like(stretches[k], weight) for k, weight in placed], [weight for _, weight in placed]


class _Gathering:
    """An all-gather within one flat tensor, of which each rank has its part."""

    def __init__(self, buckets: GradientBuckets, bucket: Bucket, flat: torch.Tensor) -> None:
        self._pool, self._sent = buckets.pool, None
        own = flat[bucket.bounds[buckets.rank] : bucket.bounds[buckets.rank + 1]]
        if buckets.native(bucket):
            self._work = collectives.all_gather(flat, own, buckets.group, async_op=True)
            return
        sent = self._sent = buckets.pool.take(own.numel() * buckets.ranks, own)
        sent.view(buckets.ranks, own.numel()).copy_(own.expand(buckets.ranks, own.numel()))
        sizes = bucket.parts, [own.numel()] * buckets.ranks
        self._work = collectives.all_to_all(flat, sent, buckets.group, async_op=True, sizes=sizes)

    def wait(self) -> None:
        self._work.wait()
        if self._sent is not None:
            self._pool.give(self._sent)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory: a view of one dimension."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _like(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A stretch of memory as a tensor of this one's shape, and, if it is dense, order of elements."""
    if is_dense(param):
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset())
    return flat.view(param.shape)


def _in_order_of(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor of one's shape in the order in which those of a dense parameter lie in memory."""
    ordered = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return memory_of(ordered.copy_(tensor))
