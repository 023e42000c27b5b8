"""The optimizers of a saved state, one or several, and their schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import lr_scheduler
from ..optimizer import MultiOptimizer, Optimizer
from ..optimizer.counts import Index
from ..optimizer.multi import part_of
from ..optimizer.patterns import pattern_text

CALLABLE = "callable"  # stands for a schedule that is a function, or has one in it, that only the program has
_KEYS = {"pattern", "optimizer", "settings", "lr_scheduler", "names"}


def collect_parts(optimizer: MultiOptimizer, names: Sequence[str], indices: Sequence[Index]) -> list[dict[str, Any]]:
    """Of each of several optimizers what is saved of one alone, and the names of its parameters."""
    return [
        {
            "pattern": pattern_text(pattern),
            "optimizer": type(part).__name__.lower(),
            "settings": part.settings(),
            "lr_scheduler": schedule_of(part),
            "names": [name for i, name in zip(indices, names, strict=True) if part_of(optimizer, i) is part],
        }
        for pattern, part in zip(optimizer.patterns, optimizer.optimizers, strict=True)
    ]


def check_parts(saved: Mapping[str, Any]) -> None:
    """Refuse what `collect_parts` has not given, whatever the model and the optimizers are."""
    parts = saved.get("optimizers", [])
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"saved state: optimizers must be a list, got {type(parts).__name__}")
    for k, part in enumerate(parts):
        if not isinstance(part, Mapping) or set(part) != _KEYS:
            raise ValueError(f"saved state: optimizers[{k}] must have {', '.join(sorted(_KEYS))}, and nothing else")
        if not isinstance(part["settings"], Mapping) or any(not isinstance(name, str) for name in part["settings"]):
            raise TypeError(f"saved state: settings of optimizers[{k}] must be a dict with names")
        if not isinstance(part["names"], (list, tuple)) or any(not isinstance(name, str) for name in part["names"]):
            raise TypeError(f"saved state: names of optimizers[{k}] must be a list of strings")


def shared_settings(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own settings; of several those that they have together."""
    if isinstance(optimizer, MultiOptimizer):
        return {"clip_norm": optimizer.clip_norm, "skip_nonfinite": optimizer.skip_nonfinite}
    return optimizer.settings()


def shares(optimizer: Optimizer, names: Sequence[str], saved: Mapping[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Each optimizer that there is, with what was saved of it and its parameters.

    Raises:
        ValueError: the state is of other optimizers, or of others for some parameters.
    """
    if not isinstance(optimizer, MultiOptimizer):
        return [(optimizer, dict(saved))]
    parts, found = saved.get("optimizers", []), []
    of = {name: part for part in parts for name in part["names"]}
    for i, name in enumerate(names):
        mine, theirs = type(part_of(optimizer, i)).__name__.lower(), of.get(name, {"optimizer": None})["optimizer"]
        if mine != theirs:
            raise ValueError(f"saved state: {name!r} is a parameter of optimizer {theirs!r}, in this trainer of {mine!r}")
    if len(parts) != len(optimizer.optimizers):
        raise ValueError(f"saved state is of {len(parts)} optimizers, this trainer has {len(optimizer.optimizers)}")
    for k, (part, own) in enumerate(zip(optimizer.optimizers, parts, strict=True)):
        here = [name for i, name in enumerate(names) if part_of(optimizer, i) is part]
        if other := sorted(set(here) ^ set(own["names"])):
            raise ValueError(f"saved state: {other[0]!r} belongs to optimizers[{k}] in the saved state or here, not in both")
        state = {name: slots for name, slots in saved["state"].items() if name in own["names"]}
        found.append((part, {**saved, **own, "state": state}))
    return found


def schedule_of(optimizer: Optimizer) -> dict[str, Any] | str | None:
    """A schedule as plain data; None where there is none."""
    scheduler = optimizer.lr_scheduler
    if isinstance(scheduler, lr_scheduler.LRScheduler):
        try:
            return scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return CALLABLE
    return None if scheduler is None else CALLABLE


def saved_schedule(optimizer: Optimizer, schedule: Any) -> Any:
    """The schedule that was saved, or the optimizer's own, if that is a function that could not be.

    Raises:
        ValueError: there is no such function, or the data are no schedule's.
    """
    if schedule is None:
        return None
    if schedule != CALLABLE:
        return lr_scheduler.from_config(schedule)
    mine = optimizer.lr_scheduler
    if schedule_of(optimizer) != CALLABLE:
        raise ValueError(
            f"saved state had a plain callable as its lr_scheduler, which cannot be saved; this trainer has {mine!r}: give "
            "it that callable before loading"
        )
    return mine
