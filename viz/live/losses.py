"""LossWatch: looks at the losses of a run as they are recorded."""

from __future__ import annotations

import numpy as np

from ..record import Run
from ..views.series import is_loss

__all__ = ["LossWatch"]


class LossWatch:
    """Looks at the losses of a run as they are recorded: all scalars whose names end in "loss"."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._seen: dict[str, int] = {}  # by name: how many values have been looked at

    def find_nonfinite(self) -> tuple[str, int, float] | None:
        """Return (name, step, value) of the first value since the last call that is infinite or NaN; or None."""
        bad: tuple[str, int, float] | None = None
        for name, series in self.run.scalars.items():
            if not is_loss(name) or len(series) == self._seen.get(name):
                continue
            steps, values = series.since(self._seen.get(name, 0))
            self._seen[name] = len(series)
            for k in np.flatnonzero(~np.isfinite(values))[:1]:
                if bad is None or steps[k] < bad[1]:
                    bad = name, int(steps[k]), float(values[k])
        return bad
