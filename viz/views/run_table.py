"""The table of runs, which chooses those that are drawn where a legend would be too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..scene import RunTable, Scene

__all__ = ["MOST_IN_LEGEND", "best_of", "with_table"]

MOST_IN_LEGEND = 8


def with_table(
    scene: Scene, names: Sequence[str], columns: Mapping[str, Sequence[Any]], scores: Sequence[float], lowest: bool = True
) -> Scene:
    """Return the scene with a table of its runs, if there are more than 8; the table first draws the best 8.

    The scene's layers have the number of their run. `columns` are by heading; `scores` decide which runs are best.
    """
    if len(names) <= MOST_IN_LEGEND:
        return scene
    return replace(scene, runs=RunTable(names, columns, best_of(scores, lowest)))


def best_of(scores: Sequence[float], lowest: bool = True, most: int = MOST_IN_LEGEND) -> list[int]:
    """Return the numbers of the best runs, the best first; a score that is not finite is the worst."""
    values = np.asarray(scores, dtype=np.float64) * (1 if lowest else -1)
    return np.argsort(np.where(np.isfinite(values), values, np.inf), kind="stable")[:most].tolist()
