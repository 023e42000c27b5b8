"""Numbers of steps on their way into a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from .probes import copy_to_host
from .runs import Run, readable
from .series import Series

__all__ = ["ScalarBuffer", "checked_scalars"]


class ScalarBuffer:
    """Numbers, and values of followed weights, that are not in a run yet. Those on a device are copied without waiting."""

    def __init__(self) -> None:
        self._here: dict[str, tuple[list[int], list[float]]] = {}
        self._later: deque[tuple[int, str, torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def pending(self) -> bool:
        """Whether there are any."""
        return bool(self._here or self._later)

    @property
    def next_step(self) -> int | None:
        """The step of the first that a device has not copied yet; None if there is none."""
        return self._later[0][0] if self._later else None

    def add(self, step: int, values: Mapping[str, float | torch.Tensor]) -> None:
        """Add numbers, or tensors on a device, of one step; all as `checked_scalars` gives them, or [n] of weights."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._later.append((step, name, *copy_to_host(value)))
            else:
                steps, known = self._here.setdefault(name, ([], []))
                steps.append(step)
                known.append(value)

    def look(self, run: Run) -> None:
        """Take what has arrived into the run. Never waits."""
        self._take_numbers(run)
        while self._later and (self._later[0][3] is None or self._later[0][3].query()):
            self._take_first(run)

    def flush(self, run: Run) -> None:
        """Wait for all, and take it into the run."""
        self._take_numbers(run)
        while self._later:
            event = self._later[0][3]
            if event is not None:
                event.synchronize()
            self._take_first(run)

    def _take_numbers(self, run: Run) -> None:
        for name, (steps, values) in self._here.items():
            run.scalars.setdefault(name, Series()).extend(steps, values)
        run.version += bool(self._here)
        self._here = {}

    def _take_first(self, run: Run) -> None:
        step, name, value, _ = self._later.popleft()
        if value.ndim == 0:
            run.add_scalars(step, {name: float(value)})
        else:
            run.add_weights(step, {name: value.float().numpy()})


def checked_scalars(scalars: Mapping[str, Any]) -> dict[str, float | torch.Tensor]:
    """Single numbers as floats, and those on another device as tensors without dimensions.

    Raises:
        TypeError, ValueError: a value that is no single number.
    """
    found: dict[str, float | torch.Tensor] = {}
    for key, value in scalars.items():
        name = key if key.isascii() else readable(key)
        if type(value) is float:  # mostly
            found[name] = value
            continue
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} has shape {tuple(value.shape)}: must be a single number")
            value = value.detach()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            found[name] = value.reshape(())
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})") from None
    return found
