"""Sharing: each of the ranks that take the same step computes some of its costly parts, and sends them to the others.

With an all-reduce every rank has all gradients, weights and states, and would orthogonalize all of Muon's matrices. Instead
each stack of matrices is orthogonalized by one rank, which broadcasts the result, in 16 bits; then all ranks update all
weights. What is computed together, and so every bit, is as in one process.

Source: Jordan et al. (2024), "Muon", whose authors' code divides the matrices among ranks; here they are divided by cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...kernels.layouts import dense_strides
from ...kernels.sharing import replaced_by
from .. import dist_utils
from .partition import owners_of

STAGE_BYTES = 2**25  # bytes of results in a stage, about; a stage is sent while the next one is computed
_ALIGNMENT = 16  # bytes between the starts of two results in a message, so that each can be viewed in its type


class _Kind(NamedTuple):
    """What a result is; sums over it depend on its order in memory."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def room(self) -> int:
        """The bytes that it takes in a message."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class _Part:
    """The costly part of the step of a stack: its results, and the number of its operations."""

    def __init__(self) -> None:
        self.kinds: list[_Kind] = []
        self.cost, self.device = 0.0, torch.device("cpu")

    @property
    def size(self) -> int:
        """The bytes that the results take in a message."""
        return sum(kind.room for kind in self.kinds)

    def learn(self, compute: Any, tensors: Sequence[torch.Tensor], cost: Callable[[], float]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = compute(tensors)
        self.kinds += [_Kind(result.dtype, result.shape, dense_strides(result)) for result in results]
        self.cost, self.device = self.cost + cost(), results[0].device
        return results

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the results as views of a message's bytes."""
        views, start = [], 0
        for kind in self.kinds:
            values = message[start : start + kind.room].view(kind.dtype)
            views.append(values.as_strided(kind.shape, kind.strides))
            start += kind.room
        return views


class _Stage(NamedTuple):
    """Results that are on the way, by the number of their stack."""

    works: list[Any]
    results: dict[int, list[torch.Tensor]]

    def finish(self, step: Callable[[int, bool], None]) -> None:
        """Wait for the results, and update with them."""
        for work in self.works:
            work.wait()
        for k, results in self.results.items():
            with replaced_by(partial(_taken, iter(results))):
                step(k, True)


class Sharing:
    """A `Share` of the ranks of a process group, which all call it with the same keys in the same order.

    All ranks compute the first step of a stack, and learn what its results are and what they cost. From then on it has an
    owner, chosen by the costs of all stacks of a call.

    Attributes:
        is_on: whether ranks take the same step; otherwise each computes its own.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._parts: dict[Hashable, _Part] = {}
        self.is_on = True

    def __call__(self, keys: Sequence[Hashable], step: Callable[[int, bool], None]) -> None:
        if not self.is_on:
            for k in range(len(keys)):
                step(k, True)
            return
        parts = {k: part for k, key in enumerate(keys) if (part := self._parts.get(key)) is not None and part.kinds}
        owners = dict(zip(parts, owners_of([part.cost for part in parts.values()], self._ranks), strict=True))
        for k, key in enumerate(keys):
            if key not in self._parts:
                part = _Part()
                with replaced_by(part.learn):
                    step(k, True)
                self._parts[key] = part
            elif k not in parts:
                step(k, True)
        sent: _Stage | None = None
        for stage in _stages(parts):
            computed = self._start({k: parts[k] for k in stage}, owners, step)
            if sent is not None:
                sent.finish(step)
            sent = computed
        if sent is not None:
            sent.finish(step)

    def _start(self, parts: dict[int, _Part], owners: dict[int, int], step: Callable[[int, bool], None]) -> _Stage:
        """Compute this rank's results of a stage, and start to send every owner's to the other ranks."""
        messages: dict[Any, torch.Tensor] = {}
        stage = _Stage([], {})
        for owner, device in dict.fromkeys((owners[k], part.device) for k, part in parts.items()):
            owned = {k: part for k, part in parts.items() if (owners[k], part.device) == (owner, device)}
            sizes = [part.size for part in owned.values()]
            message = messages[owner, device] = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            for (k, part), piece in zip(owned.items(), message.split(sizes), strict=True):
                stage.results[k] = part.views(piece)
                if owner == self._rank:
                    with replaced_by(partial(_filled, iter(stage.results[k]))):
                        step(k, False)
        for (owner, _), message in messages.items():
            stage.works.append(dist_utils.broadcast(message, owner, self._group, async_op=True))
        return stage


def _filled(places: Iterator[torch.Tensor], compute: Any, tensors: Sequence[torch.Tensor], cost: Any) -> list[torch.Tensor]:
    results: list[torch.Tensor] = compute(tensors)
    for result in results:
        next(places).copy_(result)
    return results


def _taken(results: Iterator[torch.Tensor], compute: Any, tensors: Sequence[torch.Tensor], cost: Any) -> list[torch.Tensor]:
    return [next(results) for _ in tensors]


def _stages(parts: dict[int, _Part]) -> list[list[int]]:
    """Divide stacks into lists whose results have about `STAGE_BYTES` together."""
    stages: list[list[int]] = []
    size = STAGE_BYTES
    for k, part in parts.items():
        if size >= STAGE_BYTES:
            stages.append([])
            size = 0
        stages[-1].append(k)
        size += part.size
    return stages
