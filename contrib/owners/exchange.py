"""Exchanges between shards of tensors, on all ranks of a group, and whole tensors, on owners, by one all-to-all each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...trainer.utils import distributed

_ALIGNMENT = 16  # bytes between the starts of two tensors in a message, so that each can be viewed in its type


class CutTensor(NamedTuple):
    """A tensor that is sharded over the ranks of a group, and whole on one of them, its owner.

    Attributes:
        own: this rank's shard.
        whole: the whole tensor on the owner; None elsewhere.
        shape: the shape of the whole tensor.
        dim: the dimension along which it is sharded as by `torch.chunk`; None if every rank has the whole tensor.
        owner: the owner's rank in the group.
    """

    own: torch.Tensor
    whole: torch.Tensor | None
    shape: torch.Size
    dim: int | None
    owner: int


def shard_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank's shard, and the end of the shard, if `size` rows are sharded as by `torch.chunk`."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


class Exchange:
    """One all-to-all that sends the shards of tensors to their owners, or back from them.

    Every rank calls it with the same tensors in the same order. The host does not wait for the device.

    Args:
        group: a process group.
        rank: the rank of this process in the group.
        tensors: the tensors to exchange, of any dtypes, all on one device.
        to_owners: whether to send shards to owners, rather than back.
    """

    def __init__(self, group: Any, rank: int, tensors: Sequence[CutTensor], to_owners: bool) -> None:
        ranks = torch.distributed.get_world_size(group)
        shards, shards_of = [], []  # this rank's shards of all tensors, by owner
        for owner in range(ranks):
            shards += [each.own for each in tensors if each.owner == owner]
            shards_of.append(sum(_room(each.own) for each in tensors if each.owner == owner))
        pieces, pieces_of = [], []  # all shards of tensors that this rank owns, by rank
        mine = [each for each in tensors if each.owner == rank]
        for other in range(ranks):
            pieces += (those := [_piece(each, ranks, other) for each in mine])
            pieces_of.append(sum(map(_room, those)))
        self._from, self._to = (shards, pieces) if to_owners else (pieces, shards)
        self._sent_sizes, self._got_sizes = (shards_of, pieces_of) if to_owners else (pieces_of, shards_of)
        self._group, self._device = group, tensors[0].own.device
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._work: Any = None

    def start(self) -> None:
        """Pack the tensors into one message per rank, and start to send them."""
        sent, got = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=self._device) for sizes in (self._sent_sizes, self._got_sizes)
        )
        _copy(_views(sent, self._from), self._from)
        sizes = self._got_sizes, self._sent_sizes
        self._work = distributed.all_to_all(got, sent, self._group, async_op=True, sizes=sizes)
        self._buffers = sent, got

    def finish(self) -> None:
        """Wait for the received messages, and copy them to their tensors."""
        assert self._buffers is not None
        self._work.wait()
        _copy(self._to, _views(self._buffers[1], self._to))
        self._work = self._buffers = None


def _piece(tensor: CutTensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a view of a rank's shard of a tensor that this rank owns."""
    assert tensor.whole is not None
    if tensor.dim is None:
        return tensor.whole
    start, stop = shard_bounds(tensor.shape[tensor.dim], ranks, rank)
    return tensor.whole.narrow(tensor.dim, start, stop - start)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a message's bytes as consecutive tensors like these."""
    views, start = [], 0
    for tensor in like:
        size = math.prod(tensor.shape) * tensor.element_size()
        views.append(buffer[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    return views


def _copy(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    pairs = [(place, value) for place, value in zip(to, values, strict=True) if place.numel()]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])
