"""How the tensors of a launch are stored, as their types say."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .low_precision import CodesOnly
from .master import MasterKind, kind_of
from .packed import is_packed


class Storage(NamedTuple):
    """What the tensors of a launch are stored as.

    Attributes:
        states: the type of each of the rule's states.
        master: what is stored alongside the weights.
        stochastic: whether packed states are rounded at random, and what is stored as bfloat16 or in 24 bits, but for a
            weight with something else alongside.
        codes_only: whether only packed states are.
    """

    states: tuple[torch.dtype, ...]
    master: MasterKind = MasterKind.NONE
    stochastic: bool = False
    codes_only: bool = False


def of_tensors(weight: torch.dtype, states: Any, master: torch.dtype | None, seed: int | CodesOnly | None) -> Storage:
    """The storage of tensors of these types."""
    kind = kind_of(weight, master)
    assert kind is not None
    states, codes_only = tuple(states), isinstance(seed, CodesOnly)
    some = torch.bfloat16 in states or (weight == torch.bfloat16 and kind in (MasterKind.NONE, MasterKind.SPLIT8))
    stochastic = seed is not None and (any(map(is_packed, states)) or (some and not codes_only))
    return Storage(states, kind, stochastic, stochastic and codes_only)
