"""Sharded optimizer states and updates (ZeRO, stage 1).

Gradients are reduce-scattered, so each rank gets the sum of its own part of each bucket. It updates the pieces of parameters
in that part, whose state it alone has, by one launch of the same kernels as without sharding. Then an all-gather gives all
ranks the updated weights. Files of states are the same as without sharding.

If the rule is elementwise, parameters are cut at any element, and every rank has 1/N of the state. If it needs whole tensors
(norms of a tensor, products of matrices, random numbers by element index), each parameter belongs to one rank, and the ranks
are balanced by the cost of updates that the rule estimates. Sums over all tensors, as for clip_norm, are all-reduced on the
device.

Source: Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...kernels import Rule, compress, storage
from ...kernels.guards import copy_all
from ...kernels.layouts import compute_dtype, is_dense, widest
from ...kernels.metrics import MetricsBuffer
from ...kernels.states import master_like
from .. import serialization
from ..compression import create_compressor
from ..optimizer import RuleOptimizer, Updater
from ..optimizer.plan import Division, Plan
from ..optimizer.states import MASTER, State, current_state
from ..utils import distributed
from .allreduce import AllReduceSync
from .buckets import BLOCK, Bucket, GradientBuckets
from .compressed import use_saved_plan
from .partition import (
    can_cut,
    costs_of,
    in_memory_order,
    memory_of,
    owners_of,
    shaped_like,
)

_MASTERS = (None, torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8)  # dtypes that masters may have
# Weights, each after the index of its stretch of a bucket, with a tensor that has the stretch's layout on all ranks.
_Placed = list[tuple[int, torch.Tensor, torch.Tensor]]


class Piece(NamedTuple):
    """The range of a parameter's elements that belongs to one rank: from `start` to `stop`, counted in memory order.

    Attributes:
        bucket: the index of the bucket that holds the parameter's gradient.
        at: the range's first element in the bucket.
    """

    param: int
    bucket: int
    start: int
    stop: int
    at: int


class ZeroSync(AllReduceSync):
    """The synchronization of `dist_sync` with `update_on_kvstore=True`: each rank updates its share of the weights (ZeRO 1).

    Its `updater` holds the states of this rank's pieces, by parameter index.
    """

    updates = True
    reports_metrics = False  # metrics have rows for whole parameters only
    updater: Updater

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._control: torch.Tensor | None = None
        self._cuts = False  # whether parameters are cut at any element; otherwise each belongs to one rank
        self._pieces: list[Piece] = []  # of this rank, once there are buckets
        self._gradients: list[torch.Tensor] | None = None  # of the pieces, once there are buckets
        self._plan: Plan | None = None
        self._strides: list[tuple[int, ...]] = []
        self._places_in_memory: list[tuple[int, tuple[int, ...]]] = []  # address and strides of each weight
        self._views: dict[int, torch.Tensor] = {}  # of each parameter a tensor with the layout that it has in its bucket
        # For each bucket: the sizes of its stretches (pieces and the gaps between them), the weights in this rank's part,
        # and the weights in the other ranks' parts.
        self._routes: list[tuple[Bucket, list[int], _Placed, _Placed]] = []
        self._total: torch.Tensor | None = None  # the result of the last update's first reduction over all tensors

    def _make_buckets(self, reducer: Callable[[Bucket], Any] | None) -> GradientBuckets:
        optimizer, params = self._optimizer, self._replica.params
        self._cuts = can_cut(optimizer)
        for name, param in zip(self._names, params, strict=True):
            if self._cuts and not is_dense(param):
                raise ValueError(
                    f"params: {name!r} has gaps in memory (shape {tuple(param.shape)}, strides {param.stride()}), so it "
                    "cannot be divided among ranks: use .contiguous(), or update_on_kvstore=False"
                )
        self.updater = Updater(optimizer, self._engine)
        self.updater.control = self._control
        self._strides = [param.stride() for param in params]
        owners = None if self._cuts else owners_of(costs_of(optimizer, params), self.num_replicas)
        compression: Any = self._compression_params
        # With parts of whole tiles all messages are encoded in one launch.
        in_tiles = reducer is not None and create_compressor(compression).exchange == "all_to_all"
        options: dict[str, Any] = {"owners": owners, "reducer": reducer, "step": compress.TILE if in_tiles else BLOCK}
        return GradientBuckets(params, self._names, self.group, scatter=True, **options)  # type: ignore[arg-type]

    @torch.no_grad()
    def update(self, chosen: Sequence[bool], fresh: Sequence[Sequence[bool]], into: MetricsBuffer | None) -> None:
        shards = self._follow()
        self._total = None
        pairs = zip(shards, self._pieces, strict=True)
        plan = self._planned() if any(chosen) else None
        if plan is not None:
            plan.prepare([gradient if chosen[piece.param] else None for gradient, piece in pairs], list(chosen))
            plan.run()
        self._gather(chosen)
        self._end_step(plan)

    @property
    def _step_plan(self) -> Plan | None:
        return self._plan

    def use_control(self, control: torch.Tensor) -> None:
        optimizer: Any = self._optimizer
        if not (isinstance(optimizer, RuleOptimizer) and isinstance(optimizer.rule, Rule)):
            raise RuntimeError(
                f"a loss scaler with {type(optimizer).__name__} and update_on_kvstore=True: only the rank that holds a "
                "gradient could see that it overflowed; use update_on_kvstore=False"
            )
        self._refuse_compressed()
        self._control = control
        if self._buckets is not None:
            self.updater.control, self._plan = control, None

    def total(self) -> torch.Tensor | None:
        rule: Any = getattr(self._optimizer, "composed_rule", None)
        limits = getattr(rule, "limits", ())
        if self._total is None or not (limits and limits[0].skips):
            return None
        narrow = any(compute_dtype(param.dtype) == torch.float32 for param in self._live.params)
        return self._total.float() if narrow else self._total  # infinite where the update takes it to be so

    @torch.no_grad()
    def apply(self, rule: Rule, hyper: Mapping[str, float], indices: Collection[int]) -> None:
        self._follow()
        pieces = [piece for piece in self._pieces if piece.param in indices]
        weights = [self._weight(piece) for piece in pieces]
        self.updater.apply(rule, hyper, [piece.param for piece in pieces], weights)
        self._gather([True] * len(self._names))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of whole parameters, as without sharding, with tensors on the CPU."""
        whole = self._for_whole_states()
        has_states = torch.tensor([float(bool(self.updater.state))], device=self._device)
        distributed.all_reduce(has_states, dist.ReduceOp.MAX, self.group)
        if has_states.item():
            if not self._cuts:
                return self._collect_owned(whole)
            self._collect_cut(whole)
        self._optimizer.slots(range(len(self._names)))
        return serialization.collect(whole, self._names, self._live.params)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, saved with or without sharding and on any number of ranks."""
        use_saved_plan(self._live, state)
        self._find_pieces()
        mine, whole = {piece.param: piece for piece in self._pieces}, self._for_whole_states()
        stand_ins = [
            param if not self._cuts and i in mine else torch.empty_like(param, device="cpu")
            for i, param in enumerate(self._live.params)
        ]
        serialization.restore(whole, self._names, stand_ins, state, checks=self.all_or_none())
        present = {i: piece for i, piece in mine.items() if i in whole.state}
        if self._cuts:
            self.updater.state = {i: self._piece_of(whole.state[i], piece) for i, piece in present.items()}
            self._load_masters(whole.masters)
        else:
            self.updater.state = {i: whole.state[i] for i in present}
        self._plan = None

    @torch.no_grad()
    def masters(self, new: Mapping[int, torch.Tensor] | None = None) -> Mapping[Any, torch.Tensor]:
        """Return whole masters, on the CPU; with `new`, load this rank's pieces of it instead."""
        if new is not None:
            self._find_pieces()
            self._load_masters(new)
            self._plan = None
            return new
        params, pieces = self._live.params, dict(self.updater.masters)
        kinds = torch.tensor(
            [_MASTERS.index(pieces[i].dtype if i in pieces else None) for i in range(len(params))], device=self._device
        )
        distributed.all_reduce(kinds, dist.ReduceOp.MAX, self.group)
        if not kinds.any():
            return {}
        if not self._cuts:
            pieces = {i: in_memory_order(master, self._views[int(i)]) for i, master in pieces.items()}
        whole: dict[Any, torch.Tensor] = {}
        for i, values in self._whole_tensors(pieces, None):
            if (dtype := _MASTERS[int(kinds[i])]) is not None:
                whole[i] = master_like(values, dtype).copy_(values)
        return whole

    @property
    def _device(self) -> torch.device:
        return self._live.params[0].device

    def _weight(self, piece: Piece) -> torch.Tensor:
        param = self._live.params[piece.param]
        return memory_of(param)[piece.start : piece.stop] if self._cuts else param

    def _follow(self) -> list[torch.Tensor]:
        """Find where the weights lie in memory now, and return the gradients of this rank's pieces.

        Raise ValueError if parameters are cut and the strides of one have changed.
        """
        gradients, params, cuts, rank = self._find_pieces(), self._live.params, self._cuts, self._live.rank
        strides = [param.stride() for param in params]
        if cuts and strides != self._strides:
            raise ValueError(
                "the strides of a parameter have changed since the first step, as by .t() or another memory format, but "
                "each process has states for ranges of its old memory order: change layouts before the first step"
            )
        places = list(zip([param.data_ptr() for param in params], strides, strict=True))
        if places == self._places_in_memory:
            return gradients
        self._places_in_memory, self._routes, self._plan = places, [], None
        for bucket in self._live.buckets:
            low, high, last, end = *bucket.bounds[rank : rank + 2], bucket.bounds[-1], 0
            sizes: list[int] = []
            local: _Placed = []
            remote: _Placed = []
            for member in bucket.members:
                param = params[member.param].detach()
                for first, past, into in ((0, low, remote), (low, high, local), (high, last, remote)):
                    start, stop = max(first - member.start, 0), min(past - member.start, member.size)
                    if start < stop:
                        sizes += [member.start + start - end, stop - start]
                        end = member.start + stop
                        into.append((len(sizes) - 1, memory_of(param)[start:stop] if cuts else param, member.view))
            if bucket.members:
                self._routes.append((bucket, [*sizes, last - end], local, remote))
        return gradients

    def _find_pieces(self) -> list[torch.Tensor]:
        """Make the buckets, find this rank's pieces in them, and return the gradients of these pieces."""
        if self._gradients is None:
            self._live.make()
            rank, self._gradients = self._live.rank, []
            self._pieces = _pieces_of(self._live.buckets, rank)
            self._views = {member.param: member.view for bucket in self._live.buckets for member in bucket.members}
            for piece in self._pieces:
                bucket = self._live.buckets[piece.bucket]
                shard, low = bucket.shard, bucket.bounds[rank]
                assert shard is not None
                flat = shard[piece.at - low : piece.at - low + piece.stop - piece.start]
                self._gradients.append(flat if self._cuts else shaped_like(flat, self._views[piece.param]))
        return self._gradients

    def _gather(self, used: Sequence[bool]) -> None:
        """All-gather the weights of the buckets with used parameters; one bucket is copied while the next is gathered."""
        buckets, landing = self._live, None
        for bucket, sizes, local, remote in self._routes:
            if not any(used[member.param] for member in bucket.members):
                continue
            stage = buckets.pool.take(bucket.bounds[-1], buckets.params[bucket.members[0].param])
            stretches = stage.split_with_sizes(sizes)
            if local:
                torch._foreach_copy_(self._places(stretches, local), [weight for _, weight, _ in local])
            work = buckets.gather(bucket, stage)
            if landing is not None:
                self._land(*landing)
            landing = work, stage, stretches, remote
        if landing is not None:
            self._land(*landing)

    def _land(self, work: Any, stage: torch.Tensor, stretches: Sequence[torch.Tensor], remote: _Placed) -> None:
        work.wait()
        if remote:
            copy_all([weight for _, weight, _ in remote], self._places(stretches, remote))
        self._live.pool.give(stage)

    def _places(self, stretches: Sequence[torch.Tensor], placed: _Placed) -> list[torch.Tensor]:
        """Return the stretches of a bucket's memory that hold these weights, as views of the weights' shapes."""
        return [stretches[k] if self._cuts else shaped_like(stretches[k], view) for k, _, view in placed]

    def _planned(self) -> Plan:
        if self._plan is None:
            indices = [piece.param for piece in self._pieces]
            weights = [self._weight(piece) for piece in self._pieces]
            names = [self._names[i] for i in indices]
            # Pieces of one parameter must draw different random numbers.
            offsets = np.array(
                [piece.param + (piece.start // storage.BLOCK << 32) for piece in self._pieces], dtype=np.int64
            )
            params = self._live.params
            narrow = any(compute_dtype(param.dtype) == torch.float32 for param in params)
            like = torch.empty(0, dtype=torch.float32 if narrow else torch.float64, device=self._device)
            division = Division(range(len(params)), self._all_reduce_global, like)
            self._plan = self.updater.make_plan(indices, weights, names, rng_offsets=offsets, division=division)
        return self._plan

    def _all_reduce_global(self, totals: torch.Tensor, by: str) -> None:
        distributed.all_reduce(totals, dist.ReduceOp.SUM if by == "sum" else dist.ReduceOp.MAX, self.group)
        if self._total is None:
            self._total = totals[0]

    def _for_whole_states(self) -> Updater:
        """Return a temporary updater for whole states; the optimizer goes on with this rank's updater."""
        whole = Updater(self._optimizer, self.updater.engine)
        self.updater.register_with(self._optimizer)
        return whole

    def _load_masters(self, masters: Mapping[Any, torch.Tensor]) -> None:
        """Load this rank's pieces of whole masters, which are given by parameter index."""
        weights, pieces = {}, {}
        for piece in self._pieces if masters else ():
            i, param = piece.param, self._live.params[piece.param]
            weights[i] = self._weight(piece)
            if i in masters:
                pieces[i] = in_memory_order(masters[i], param)[piece.start : piece.stop] if self._cuts else masters[i]
        self.updater.put_masters(pieces, weights)

    @torch.no_grad()
    def _collect_cut(self, whole: Updater) -> None:
        """Gather the states and masters of whole parameters into `whole`, slot by slot and bucket by bucket."""
        optimizer: Any = self._optimizer
        rule, states = optimizer.composed_rule, {}
        for piece in self._pieces:
            weight, i = self._weight(piece).detach(), piece.param
            states[i] = current_state(optimizer, i, weight, self.updater.state_of(i))
        empty = optimizer.states_for([torch.empty_like(param, device="cpu") for param in self._live.params])
        whole.state = {i: dict(zip(rule.slots, state, strict=True)) for i, state in enumerate(empty)}
        for slot in rule.state:
            unsigned = slot in rule.nonnegative
            for i, values in self._whole_tensors({i: state[slot] for i, state in states.items()}, unsigned):
                storage.copy(whole.state[i][slot], values, values.shape, unsigned)
        self._collect_numbers(optimizer, states, whole)
        for i, master in self.masters().items():
            whole.state[i][MASTER] = master

    def _whole_tensors(self, local: Mapping[Any, torch.Tensor], unsigned: bool | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter's index and whole tensor, gathered from all ranks' pieces, on the CPU in its compute dtype.

        `local` has this rank's pieces by parameter; `unsigned` says whether the states are never negative, None for masters.
        """
        pieces: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            pieces.setdefault(piece.bucket, []).append(piece)
        for k, bucket in enumerate(self._live.buckets):
            if not bucket.members:
                continue
            assert bucket.weight_dtype is not None
            dtype = compute_dtype(bucket.weight_dtype)  # it represents all values of narrower dtypes
            flat = torch.zeros(bucket.bounds[-1], dtype=dtype, device=bucket.flat.device)
            for piece in pieces.get(k, ()):
                if piece.param in local:
                    tensor, size = local[piece.param], piece.stop - piece.start
                    if unsigned is not None and storage.is_packed(tensor):
                        tensor = storage.unpacked(tensor, torch.Size([size]), unsigned)
                    flat[piece.at : piece.at + size] = tensor
            self._live.gather(bucket, flat).wait()
            flat = flat.cpu()
            for member in bucket.members:
                like = torch.empty_like(self._live.params[member.param], device="cpu", dtype=dtype)
                yield member.param, like.copy_(shaped_like(flat[member.start : member.start + member.size], member.view))

    def _collect_numbers(self, optimizer: RuleOptimizer, states: Mapping[int, State], whole: Updater) -> None:
        """Gather the scalar states of each parameter into `whole`: all its pieces have equal ones, so the first piece's."""
        rule = optimizer.composed_rule
        if not rule.kept:
            return
        device = self._device
        numbers = torch.zeros(len(self._live.params), len(rule.kept), dtype=widest(device), device=device)
        for piece in self._pieces:
            if piece.start == 0:
                numbers[piece.param] = torch.stack([states[piece.param][slot] for slot in rule.kept]).to(numbers)
        distributed.all_reduce(numbers, group=self.group)
        for i, state in whole.state.items():
            for slot, value in zip(rule.kept, numbers[int(i)].cpu(), strict=True):
                state[slot].copy_(value)

    def _collect_owned(self, whole: Updater) -> dict[str, Any]:
        """Return the state of all parameters when each belongs to one rank, which broadcasts it tensor by tensor."""
        whole.state = {p.param: self.updater.state[p.param] for p in self._pieces if p.param in self.updater.state}
        self._optimizer.slots(range(len(self._names)))
        collected = serialization.collect(whole, self._names, self._live.params)
        local = collected["state"]
        state: dict[str, dict[str, torch.Tensor]] = {}
        layout: dict[str, Any] = {}
        listed = {name: {slot: (tuple(t.shape), t.dtype) for slot, t in slots.items()} for name, slots in local.items()}
        for rank, (kinds, nesting) in enumerate(distributed.all_gather_objects((listed, collected["layout"]), self.group)):
            layout |= nesting
            for name, slots in kinds.items():
                state[name] = {}
                for slot, (shape, dtype) in slots.items():
                    is_local = rank == self._live.rank
                    tensor = local[name][slot] if is_local else torch.empty(shape, dtype=dtype, device=self._device)
                    sent = tensor.contiguous().to(self._device)
                    distributed.broadcast(sent.view(torch.uint8) if dtype == torch.int16 else sent, rank, self.group)
                    state[name][slot] = tensor.cpu()
        collected["state"] = {name: state[name] for name in self._names if name in state}
        collected["layout"] = {name: layout[name] for name in self._names if name in layout}
        return collected

    def _piece_of(self, whole: State, piece: Piece) -> State:
        """Return this rank's piece of a whole parameter's states, without the master."""
        optimizer: Any = self._optimizer
        rule, param = optimizer.composed_rule, self._live.params[piece.param]
        weight, size = self._weight(piece).detach(), torch.Size([piece.stop - piece.start])
        state: State = dict(zip(rule.slots, *optimizer.states_for([weight]), strict=True))
        for slot, new in state.items():
            if slot in rule.kept:
                new.copy_(whole[slot])
                continue
            tensor, unsigned = whole[slot], slot in rule.nonnegative
            if storage.is_packed(tensor):
                tensor = storage.unpacked(tensor, param.shape, unsigned)
            part = in_memory_order(tensor, param)[piece.start : piece.stop]
            storage.copy(new, part.to(weight.device), size, unsigned)
        return state


def _pieces_of(buckets: Sequence[Bucket], rank: int) -> list[Piece]:
    pieces = []
    for k, bucket in enumerate(buckets):
        low, high = bucket.bounds[rank], bucket.bounds[rank + 1]
        for member in bucket.members:
            start, stop = max(low - member.start, 0), min(high - member.start, member.size)
            # An empty parameter belongs to the rank at whose part it begins.
            if start < stop or (member.size == 0 and _owner_of(bucket, member.start) == rank):
                pieces.append(Piece(member.param, k, start, stop, member.start + start))
    return sorted(pieces)


def _owner_of(bucket: Bucket, element: int) -> int:
    ends = bucket.bounds[1:]
    return next((rank for rank, end in enumerate(ends) if end > element), len(ends) - 1)
