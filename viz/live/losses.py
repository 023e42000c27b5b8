"""LossWatch: looks at the losses of a run as they are recorded."""

from __future__ import annotations

import math

import numpy as np

from ..record import Run
from ..views.series import is_loss

__all__ = ["LossWatch"]


class LossWatch:
    """Looks at the losses of a run as they are recorded: all scalars whose names end in "loss".

    `is_fine` says whether the last value of each loss is no higher than its first, or there is no value yet.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.is_fine = run, True
        self._seen: dict[str, int] = {}  # by name: how many values have been looked at
        self._first: dict[str, float] = {}

    def find_nonfinite(self) -> tuple[str, int, float] | None:
        """Return (name, step, value) of the first value since the last call that is infinite or NaN; or None."""
        bad: tuple[str, int, float] | None = None
        for name, series in self.run.scalars.items():
            if not is_loss(name) or len(series) == self._seen.get(name):
                continue
            steps, values = series.since(self._seen.get(name, 0))
            self._seen[name] = len(series)
            self._first.setdefault(name, float(values[0]))
            for k in np.flatnonzero(~np.isfinite(values))[:1]:
                if bad is None or steps[k] < bad[1]:
                    bad = name, int(steps[k]), float(values[k])
        lasts = {name: float(self.run.scalars[name].recent()[1][-1]) for name in self._first}
        self.is_fine = all(not math.isnan(last) and last <= self._first[name] for name, last in lasts.items())
        return bad
