"""An optimizer's settings as a worker keeps them the same on the servers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ...lr_scheduler import LRScheduler
from ...optimizer import Optimizer
from ...optimizer.counts import StepCounts
from ..base import Key


class SyncedSettings:
    """A server's knowledge of a worker's optimizer.

    Args:
        optimizer: the one that the server has been sent.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._settings = {name: value for name, value in optimizer.settings().items() if name != "rescale_grad"}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)
        self._multipliers: dict[Key, tuple[float, float]] = {}

    def changes(self, optimizer: Optimizer, keys: Sequence[Key]) -> dict[str, Any]:
        """What the server does not know yet, for `ServerCore.change`, of these keys' multipliers."""
        changes: dict[str, Any] = {}
        settings, missing = optimizer.settings(), object()
        if settings != self._settings:
            changes["settings"] = {k: v for k, v in settings.items() if self._settings.get(k, missing) != v}
        if _comparable(optimizer.lr_scheduler) != self._lr_scheduler:
            changes["lr_scheduler"] = optimizer.lr_scheduler
        by_name, own = bool(optimizer.lr_mult or optimizer.wd_mult), optimizer.param_dict
        multipliers = {
            key: optimizer.multipliers(key) if by_name or getattr(own.get(key), "__dict__", None) else (1.0, 1.0)
            for key in keys
        }
        if new := {key: pair for key, pair in multipliers.items() if pair != self._multipliers.get(key, (1.0, 1.0))}:
            changes["multipliers"] = new
        return changes

    def record(self, changes: dict[str, Any]) -> None:
        """The server has been sent these."""
        self._settings |= changes.get("settings", {})
        if "lr_scheduler" in changes:
            self._lr_scheduler = _comparable(changes["lr_scheduler"])
        self._multipliers |= changes.get("multipliers", {})

    def record_loaded(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        """The server has loaded the schedule and these settings from saved states, as this optimizer has them now."""
        self._settings |= {name: getattr(optimizer, name) for name in names}
        self._lr_scheduler = _comparable(optimizer.lr_scheduler)


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """A copy without parameters, counts, and multipliers, which are sent separately."""
    bare = copy.copy(optimizer)
    bare.param_dict, bare.lr_mult, bare.wd_mult = {}, {}, {}
    bare.step_counts = StepCounts(bare.begin_num_update)
    return bare


def _comparable(lr_scheduler: Any) -> Any:
    """What tells whether a schedule has changed."""
    if isinstance(lr_scheduler, LRScheduler):
        try:
            return type(lr_scheduler), lr_scheduler.to_config()
        except TypeError:  # it has a function in it that is known by no name
            return lr_scheduler
    return lr_scheduler
