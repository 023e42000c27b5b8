"""StepCounts: how often each parameter has been updated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Index = int | str


class StepCounts:
    """Update counts of parameters, each in a slot of one array.

    Args:
        largest: what `largest` begins with.

    Attributes:
        values: int64 [n_slots], the counts. May be replaced, such as by a row of a larger array.
        largest: MXNet's `num_update`, the largest count of all so far.

    Source: MXNet 1.9.1, `Optimizer._update_count`.
    """

    def __init__(self, largest: int = 0) -> None:
        self.values = np.zeros(0, dtype=np.int64)
        self.largest = largest
        self._slots: dict[Index, int] = {}

    def slots(self, indices: Sequence[Index], begin: int = 0) -> np.ndarray:
        """int64 [n], the slots of these parameters; new parameters get one, with the count `begin`."""
        new = [index for index in indices if index not in self._slots]
        if new:
            for index in new:
                self._slots[index] = len(self._slots)
            self.values = np.concatenate([self.values, np.full(len(new), begin, dtype=np.int64)])
        return np.array([self._slots[index] for index in indices], dtype=np.int64)

    def largest_after(self, slots: np.ndarray) -> int:
        """`largest` after an update of the parameters in these slots."""
        return max(self.largest, int(self.values[slots].max(initial=-1)) + 1)

    def advance(self, slots: np.ndarray | slice, largest: int) -> None:
        """Count one update in these slots, where each slot occurs once, after which `largest` is their largest count."""
        self.values[slots] += 1
        self.largest = max(self.largest, largest)

    def as_dict(self) -> dict[Index, int]:
        """The counts by parameter."""
        return {index: int(self.values[slot]) for index, slot in self._slots.items()}

    def copy(self) -> StepCounts:
        """Counts of their own, equal to these."""
        other = StepCounts(self.largest)
        other.values, other._slots = self.values.copy(), dict(self._slots)
        return other

    def restore(self, saved: StepCounts) -> None:
        """Become equal to `saved`, a `copy` from before."""
        self.values, self._slots, self.largest = saved.values.copy(), dict(saved._slots), saved.largest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepCounts):
            return NotImplemented
        return (self.largest, self._slots) == (other.largest, other._slots) and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]  # counts change
