"""`StepCounts`, the number of updates of each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Index = int | str


class StepCounts:
    """Update counts of parameters in one array; a parameter's position in it is called its slot.

    Source: MXNet 1.9.1, `Optimizer._update_count`.
    """

    def __init__(self, largest: int = 0) -> None:
        self.values = np.zeros(0, dtype=np.int64)  # the count in each slot; may be replaced by a row of a larger array
        self.largest = largest  # of any parameter so far, MXNet's `num_update`
        self._slots: dict[Index, int] = {}

    def slots(self, indices: Sequence[Index], begin: int = 0) -> np.ndarray:
        """Return the slots of parameters as an int64 array, adding a slot with the count `begin` for each new parameter."""
        new = [index for index in indices if index not in self._slots]
        if new:
            for index in new:
                self._slots[index] = len(self._slots)
            self.values = np.concatenate([self.values, np.full(len(new), begin, dtype=np.int64)])
        return np.array([self._slots[index] for index in indices], dtype=np.int64)

    def largest_after(self, slots: np.ndarray) -> int:
        """Return what `largest` would be after an update of the parameters in these slots."""
        return max(self.largest, int(self.values[slots].max(initial=-1)) + 1)

    def advance(self, slots: np.ndarray | slice, largest: int) -> None:
        """Add 1 to the counts in these slots, each of which occurs once; `largest` is the largest of the new counts."""
        self.values[slots] += 1
        self.largest = max(self.largest, largest)

    def as_dict(self) -> dict[Index, int]:
        return {index: int(self.values[slot]) for index, slot in self._slots.items()}

    def copy(self) -> StepCounts:
        other = StepCounts(self.largest)
        other.values, other._slots = self.values.copy(), dict(self._slots)
        return other

    def restore(self, saved: StepCounts) -> None:
        """Set all counts back to `saved`, an earlier `copy`."""
        self.values, self._slots, self.largest = saved.values.copy(), dict(saved._slots), saved.largest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepCounts):
            return NotImplemented
        return (self.largest, self._slots) == (other.largest, other._slots) and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]  # counts change
