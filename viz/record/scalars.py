"""Hold scalars until they have arrived from their devices and can be added to a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .copies import Copies
from .runs import Run, readable
from .series import Series

__all__ = ["ScalarBuffer", "checked_scalars"]


class ScalarBuffer:
    """Scalars and followed weights that have not been added to a run yet. Copies from a device are asynchronous."""

    def __init__(self) -> None:
        self._on_host: dict[str, tuple[list[int], list[float]]] = {}
        self._copying = Copies()

    @property
    def pending(self) -> bool:
        return bool(self._on_host or self._copying)

    @property
    def next_step(self) -> int | None:
        """The earliest step with a value that is still being copied from a device; None if no copy is in flight."""
        return self._copying.first[0] if self._copying else None

    def add(self, step: int, values: Mapping[str, float | torch.Tensor]) -> None:
        """Add the values of one step by name: the result of `checked_scalars`, or the followed elements [n] of weights."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._copying.add((step, name), value)
            else:
                steps, numbers = self._on_host.setdefault(name, ([], []))
                steps.append(step)
                numbers.append(value)

    def poll(self, run: Run) -> None:
        """Move all values that are on the host into the run. Never waits for a device."""
        self._take_numbers(run)
        for (step, name), value in self._copying.arrived():
            if value.ndim == 0:
                run.add_scalars(step, {name: float(value)})
            else:
                run.add_weights(step, {name: value.float().numpy()})

    def flush(self, run: Run) -> None:
        """Wait for all copies, and move all values into the run."""
        self._copying.wait()
        self.poll(run)

    def _take_numbers(self, run: Run) -> None:
        for name, (steps, values) in self._on_host.items():
            run.scalars.setdefault(name, Series()).extend(steps, values)
        run.version += bool(self._on_host)
        self._on_host = {}


def checked_scalars(scalars: Mapping[str, Any]) -> dict[str, float | torch.Tensor]:
    """Return the values as floats, or as 0-d tensors if they are on an accelerator; raise if one is not a single number."""
    checked: dict[str, float | torch.Tensor] = {}
    for key, value in scalars.items():
        if not isinstance(key, str):
            raise TypeError(f"{key!r} is the name of a number to record: it must be a string")
        name = key if key.isascii() else readable(key)
        if type(value) is float:  # the usual case, made fast
            checked[name] = value
            continue
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} has shape {tuple(value.shape)}: must be a single number")
            value = value.detach()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            checked[name] = value.reshape(())
            continue
        try:
            checked[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})") from None
    return checked
