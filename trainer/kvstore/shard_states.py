"""Saving and loading the states of an update that is sharded over ranks, in the form of one that is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import storage
from ...kernels.layouts import compute_dtype, widest
from ...kernels.states import master_like
from .. import checkpoint, dist_utils
from ..optimizer import RuleOptimizer, Updater
from ..optimizer.states import MASTER, State, current_state
from .buckets import GradientBuckets
from .partition import Piece, in_memory_order, shaped_like, weight_of

_MASTERS = (None, torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8)  # types that masters may have


class ShardStates:
    """The states of one rank's pieces of all parameters. All methods are to be called on all ranks.

    Args:
        updater: has the states of the pieces, by the parameter's index.
        buckets: the gradients of the parameters.
        pieces: what this rank has of them.
        cuts: whether parameters are cut anywhere, or each belongs to one rank.
    """

    def __init__(self, updater: Updater, buckets: GradientBuckets, pieces: Sequence[Piece], cuts: bool) -> None:
        self.updater, self.buckets, self.pieces, self.cuts = updater, buckets, pieces, cuts
        self.params, self.names = buckets.params, buckets.names
        self.collectives = buckets.collectives
        self.device = self.params[0].device

    def state_dict(self, everywhere: bool = True) -> dict[str, Any]:
        """The whole state, in the form of a trainer's whose state is not cut, with tensors on the CPU.

        Args:
            everywhere: let all ranks have the tensors, else rank 0 alone.
        """
        optimizer = self.updater.optimizer
        with self._scratch() as whole:
            keep = everywhere or self.collectives.rank == 0
            if self._has_states():
                if self.cuts:
                    self._collect_cut(whole, keep)
                else:
                    return self._collect_owned(whole, keep)
            optimizer.slots(range(len(self.params)))
            return checkpoint.collect(whole, self.names, self.params)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what a `state_dict` returned, that of a `Trainer` or of any number of ranks.

        Raises:
            ValueError, TypeError: it does not fit; nothing has been changed.
        """
        mine = {piece.param: piece for piece in self.pieces}
        with self._scratch() as whole:
            stand_ins = [
                param if not self.cuts and i in mine else torch.empty_like(param, device="cpu")
                for i, param in enumerate(self.params)
            ]
            checkpoint.restore(whole, self.names, stand_ins, state_dict)
            present = {i: piece for i, piece in mine.items() if i in whole.state}
            if self.cuts:
                self.updater.state = {i: self._piece_of(whole.state[i], piece) for i, piece in present.items()}
                self.load_masters(whole.masters)
            else:
                self.updater.state = {i: whole.state[i] for i in present}

    @torch.no_grad()
    def masters(self) -> dict[Any, torch.Tensor]:
        """Whole masters, by index, on the CPU."""
        own: Any = self.updater.masters
        kinds = [_MASTERS.index(own[i].dtype if i in own else None) for i in range(len(self.params))]
        found = torch.tensor(kinds, device=self.device)
        dist_utils.all_reduce(found, dist.ReduceOp.MAX, self.collectives.group)
        if not found.any():
            return {}
        if not self.cuts:
            own = {i: in_memory_order(master, torch.empty_like(self.params[i])) for i, master in own.items()}
        whole: dict[Any, torch.Tensor] = {}
        for i, values in self._whole_tensors(own, None):
            if (dtype := _MASTERS[int(found[i])]) is not None:
                whole[i] = master_like(values, dtype).copy_(values)
        return whole

    def load_masters(self, masters: Mapping[Any, torch.Tensor]) -> None:
        """Take this rank's pieces of these masters, by index."""
        weights, own = {}, {}
        for piece in self.pieces if masters else ():
            i, param = piece.param, self.params[piece.param]
            weights[i] = weight_of(piece, param, self.cuts)
            if i in masters:
                own[i] = in_memory_order(masters[i], param)[piece.start : piece.stop] if self.cuts else masters[i]
        self.updater.put_masters(own, weights)

    @contextmanager
    def _scratch(self) -> Iterator[Updater]:
        """An updater for whole states; the optimizer does not keep it."""
        optimizer: Any = self.updater.optimizer
        try:
            yield Updater(optimizer, self.updater.engine)
        finally:
            self.updater.be_that_of(optimizer)

    def _has_states(self) -> bool:
        found = torch.tensor([float(bool(self.updater.state))], device=self.device)
        dist_utils.all_reduce(found, dist.ReduceOp.MAX, self.collectives.group)
        return bool(found.item())

    @torch.no_grad()
    def _collect_cut(self, whole: Updater, keep: bool) -> None:
        """Put whole states and masters into `whole`, bucket by bucket and slot by slot."""
        optimizer: Any = self.updater.optimizer
        rule = optimizer.composed_rule
        states = {}
        for piece in self.pieces:
            weight = weight_of(piece, self.params[piece.param], self.cuts).detach()
            states[piece.param] = current_state(optimizer, piece.param, weight, self.updater.state_of(piece.param))
        room: list[Any] = [None] * len(self.params)
        if keep:
            room = [torch.empty_like(param, device="cpu") for param in self.params]
            made = optimizer.states_for(room)
            whole.state = {i: dict(zip(rule.slots, state, strict=True)) for i, state in enumerate(made)}
        for slot in rule.state:
            found = {i: state[slot] for i, state in states.items()}
            for i, values in self._whole_tensors(found, slot in rule.nonnegative):
                if keep:
                    storage.copy(whole.state[i][slot], values, values.shape, slot in rule.nonnegative)
        self._collect_numbers(optimizer, states, whole)
        masters = self.masters()
        for i, master in masters.items() if keep else ():
            whole.state[i][MASTER] = master

    def _whole_tensors(self, found: Mapping[Any, torch.Tensor], unsigned: bool | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Each parameter's whole tensor, on the CPU in its arithmetic's type, of all ranks' pieces of it.

        `unsigned` is whether states are never negative, or None of masters.
        """
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
                    if unsigned is not None and storage.is_packed(tensor):
                        tensor = storage.unpacked(tensor, torch.Size([size]), unsigned)
                    flat[piece.at : piece.at + size] = tensor
            self.collectives.gather(bucket, flat).wait()
            flat = flat.cpu()
            for member in bucket.members:
                like = torch.empty_like(self.params[member.param], device="cpu", dtype=dtype)
                yield member.param, like.copy_(shaped_like(flat[member.start : member.start + member.size], like))

    def _collect_numbers(self, optimizer: RuleOptimizer, states: Mapping[int, State], whole: Updater) -> None:
        """The numbers that a rule keeps of each parameter, which all its pieces have; the first one's are taken."""
        rule = optimizer.composed_rule
        if not rule.kept:
            return
        device = self.device
        numbers = torch.zeros(len(self.params), len(rule.kept), dtype=widest(device), device=device)
        for piece in self.pieces:
            if piece.start == 0:
                numbers[piece.param] = torch.stack([states[piece.param][slot] for slot in rule.kept]).to(numbers)
        dist_utils.all_reduce(numbers, group=self.collectives.group)
        for i, state in whole.state.items():
            for slot, value in zip(rule.kept, numbers[int(i)].cpu(), strict=True):
                state[slot].copy_(value)

    def _collect_owned(self, whole: Updater, keep: bool) -> dict[str, Any]:
        """The state of parameters that belong to ranks as a whole, tensor by tensor."""
        mine = [piece.param for piece in self.pieces]
        group, device = self.collectives.group, self.device
        whole.state = {i: self.updater.state[i] for i in mine if i in self.updater.state}
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
        lists = dist_utils.all_gather_objects(listed, group)
        state: dict[str, dict[str, torch.Tensor]] = {}
        layout: dict[str, Any] = {}
        for rank, entries in enumerate(lists):
            for name, slots, nesting in entries:
                state[name] = {}
                if nesting is not None:
                    layout[name] = nesting
                for slot, shape, dtype in slots:
                    there = rank == self.collectives.rank
                    tensor = own[name][slot].contiguous() if there else torch.empty(shape, dtype=dtype, device=device)
                    sent = tensor.to(device).view(torch.uint8) if dtype == torch.int16 else tensor.to(device)
                    dist_utils.broadcast(sent, rank, group)
                    if keep:
                        state[name][slot] = (own[name][slot] if there else tensor).cpu()
        collected["state"] = {name: state[name] for name in self.names if name in state} if keep else {}
        collected["layout"] = {name: layout[name] for name in self.names if name in layout} if keep else {}
        return collected

    def _piece_of(self, whole: State, piece: Piece) -> State:
        """This rank's piece of the whole states of a parameter, without its master."""
        optimizer: Any = self.updater.optimizer
        rule, param = optimizer.composed_rule, self.params[piece.param]
        weight, size = weight_of(piece, param, self.cuts).detach(), torch.Size([piece.stop - piece.start])
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
