"""Packed exchanges between the shards of tensors, which all ranks of a group have, and whole tensors, which owners have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...trainer import dist_utils

_ALIGNMENT = 16  # bytes between the starts of two tensors in a message, so that each can be viewed in its type


class CutTensor(NamedTuple):
    """A tensor that is cut among the ranks of a group, and belongs to one of them.

    Attributes:
        own: this rank's shard.
        whole: all of it, on the owner; None elsewhere.
        shape: that of the whole.
        dim: the dimension along which it is cut as `torch.chunk` does; None where every rank has all of it.
        owner: a rank of the group.
    """

    own: torch.Tensor
    whole: torch.Tensor | None
    shape: torch.Size
    dim: int | None
    owner: int


def shard_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first row of a rank's shard, and the one behind its last, of so many that are cut as `torch.chunk` does."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


class Exchange:
    """One all-to-all that brings all shards of some tensors to their owners, or the whole tensors' shards back.

    Every rank calls it with the same tensors in the same order. Nothing waits for the device.

    Args:
        group: a process group.
        rank: this process's number in it.
        tensors: what is exchanged; of any types, all on one device.
        to_owners: the direction.
    """

    def __init__(self, group: Any, rank: int, tensors: Sequence[CutTensor], to_owners: bool) -> None:
        ranks = torch.distributed.get_world_size(group)
        shards, shards_of = [], []  # what this rank has of all tensors, by owner
        for owner in range(ranks):
            shards += [each.own for each in tensors if each.owner == owner]
            shards_of.append(sum(_room(each.own) for each in tensors if each.owner == owner))
        pieces, pieces_of = [], []  # what all ranks have of this owner's tensors, by rank
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
        """Pack and send."""
        sent, got = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=self._device) for sizes in (self._sent_sizes, self._got_sizes)
        )
        _copy(_views(sent, self._from), self._from)
        sizes = self._got_sizes, self._sent_sizes
        self._work = dist_utils.all_to_all(got, sent, self._group, async_op=True, sizes=sizes)
        self._buffers = sent, got

    def finish(self) -> None:
        """Put what has been received where it belongs."""
        assert self._buffers is not None
        self._work.wait()
        _copy(self._to, _views(self._buffers[1], self._to))
        self._work = self._buffers = None


def _piece(tensor: CutTensor, ranks: int, rank: int) -> torch.Tensor:
    """What a rank has of a tensor that is here."""
    assert tensor.whole is not None
    if tensor.dim is None:
        return tensor.whole
    start, stop = shard_bounds(tensor.shape[tensor.dim], ranks, rank)
    return tensor.whole.narrow(tensor.dim, start, stop - start)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A message's bytes as tensors like these, one after the other."""
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
