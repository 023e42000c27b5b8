"""Costly parts of updates, which several processes that take the same step need not all compute.

A rule of whole tensors computes such a part by `costly`, and `WholeLaunch` gives a `Share`, if it has one, the step of each
stack of tensors. A share takes a step twice: first only as far as the costly part, on the process that computes it for all,
and later on every process with its results. So every process has all weights and states, with the bits of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# A function of the arguments of `costly` that is called in its place.
Replacement = Callable[[Callable[..., Any], Sequence[torch.Tensor], Callable[[], float]], list[torch.Tensor]]
# A function of a key for each stack, equal in all processes, and of `step(k, keep)`, which updates stack k, or only computes
# the update if `keep` is false.
Share = Callable[[Sequence[Hashable], Callable[[int, bool], None]], None]

_replacement: ContextVar[Replacement | None] = ContextVar("_replacement", default=None)


def costly(
    compute: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    cost: Callable[[], float],
) -> list[torch.Tensor]:
    """Return `compute(tensors)`, which another process may have computed; `cost` returns the number of its operations."""
    replacement = _replacement.get()
    return compute(tensors) if replacement is None else replacement(compute, tensors, cost)


@contextmanager
def replaced_by(replacement: Replacement) -> Iterator[None]:
    """Call `replacement` in place of `costly` inside this context."""
    before = _replacement.set(replacement)
    try:
        yield
    finally:
        _replacement.reset(before)
