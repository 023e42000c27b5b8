"""HyperRows: the hyper-parameters of a step, computed once for all parameters that share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels import Update
from .base import Optimizer
from .counts import Index
from .rule_optimizer import RuleOptimizer

__all__ = ["HyperRows"]

_UNKNOWN = object()


class HyperRows:
    """The rows of hyper-parameters that a list of parameters has at each step.

    Args:
        optimizer: whose parameters they are.
        indices: of the parameters.

    Attributes:
        slots: where the optimizer's counts have those of the parameters.
        active: for each parameter whether the next step updates it.
    """

    def __init__(self, optimizer: Optimizer, indices: Sequence[Index]) -> None:
        self._indices = list(indices)
        self.slots = optimizer.slots(self._indices)
        self.active = [True] * len(self._indices)
        # A parameter's attributes; the dictionaries are live, so that looking whether they are empty is enough.
        self._own = [getattr(optimizer.param_dict.get(index), "__dict__", {}) for index in self._indices]
        # Active parameters that share hyper-parameters: rows, the count's slot, lr_mult, wd_mult, the first's
        # index. Rows are None where they are all.
        self._shared: list[tuple[Any, int, float, float, Index]] = []
        self._counted: Any = self.slots
        self._multipliers: Any = _UNKNOWN  # by which `_shared` was found

    def use(self, active: list[bool]) -> None:
        """Update these parameters from now on."""
        if active != self.active:
            self.active, self._multipliers = active, _UNKNOWN

    def forget(self) -> None:
        """Find again what is shared, with the counts that there are then."""
        self._multipliers = _UNKNOWN

    def times(self, optimizer: RuleOptimizer) -> list[int]:
        """How many updates, with the coming one, those have had that share a row; none if no parameter is active."""
        multipliers = self._read_multipliers(optimizer)
        if multipliers != self._multipliers:
            self._share(optimizer, multipliers)
        counts = optimizer.step_counts.values
        return [int(counts[slot]) + 1 for _, slot, _, _, _ in self._shared]

    def write(self, optimizer: RuleOptimizer, times: list[int], update: Update) -> None:
        """Give an update the hyper-parameters of the step with these numbers."""
        rows = optimizer.rows_of_step(times, self._shared, update.rule)  # type: ignore[arg-type]  # its own
        for (where, *_), row in zip(self._shared, rows, strict=True):
            if where is None:
                update.broadcast_hyper(row)
            else:
                update.hyper[where] = row

    def count(self, optimizer: RuleOptimizer, times: list[int]) -> None:
        """Count the step with these numbers."""
        optimizer.step_counts.advance(self._counted, max(times))

    def check_multipliers(self, optimizer: Optimizer, indices: Sequence[Index]) -> None:
        """Raise the error of `Optimizer.multipliers` for a parameter whose multipliers are not valid."""
        if any(self._own):
            for index in indices:
                optimizer.multipliers(index)

    def _read_multipliers(self, optimizer: RuleOptimizer) -> Any:
        """All that multipliers depend on, to be compared with the last step's; None as long as nobody has set any."""
        if not any(self._own) and not (optimizer.lr_mult or optimizer.wd_mult):
            return None
        own = [tuple(map(attributes.get, ("lr_mult", "wd_mult", "grad_req"))) for attributes in self._own]
        return own, dict(optimizer.lr_mult), dict(optimizer.wd_mult)

    def _share(self, optimizer: RuleOptimizer, multipliers: Any) -> None:
        """Find the active parameters with equal counts and multipliers, which share one row of hyper-parameters."""
        counts = optimizer.step_counts.values[self.slots].tolist()
        members: dict[Any, list[int]] = {}
        for i, index in enumerate(self._indices):
            if self.active[i]:
                pair = (1.0, 1.0) if multipliers is None else optimizer.multipliers(index)
                members.setdefault((counts[i], *pair) if optimizer.uniform_hyper else i, []).append(i)
        self._shared = []
        for rows in members.values():
            index = self._indices[rows[0]]
            lr_mult, wd_mult = (1.0, 1.0) if multipliers is None else optimizer.multipliers(index)
            where = None if len(rows) == len(self._indices) else np.array(rows)
            self._shared.append((where, int(self.slots[rows[0]]), lr_mult, wd_mult, index))
        counted = self.slots[np.array(self.active, dtype=bool)]
        in_a_row = counted.size > 0 and bool((np.diff(counted) == 1).all())
        self._counted = slice(int(counted[0]), int(counted[-1]) + 1) if in_a_row else counted
        self._multipliers = multipliers
