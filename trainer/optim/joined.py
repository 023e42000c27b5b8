"""Several optimizers that look like one of torch's."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch

__all__ = ["JoinedOptimizers"]


class JoinedOptimizers(torch.optim.Optimizer):
    """The base of optimizers that consist of others: their groups and states are those of all of them.

    Attributes:
        optimizers: the others, which must be there before this class's constructor is called.
    """

    optimizers: list[Any]
    _is_made = False

    def __init__(self) -> None:
        super().__init__([parameter for group in self.param_groups for parameter in group["params"]], {})
        self._is_made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order; changes of a group are the optimizer's."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        """The base class sets it; the groups are those of the optimizers."""

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all parameters; changes of a parameter's are the optimizer's."""
        return defaultdict(dict, chain.from_iterable(optimizer.state.items() for optimizer in self.optimizers))

    @state.setter
    def state(self, state: Any) -> None:
        """The base class sets it; the states are those of the optimizers."""

    def add_param_group(self, param_group: Any) -> None:
        """Refused after construction: patterns say what a parameter gets."""
        if self._is_made:
            raise RuntimeError(f"add_param_group() of {type(self).__name__}: make a new one, with other patterns")
