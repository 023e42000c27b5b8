"""The eager engine: the rule on torch tensors, on any device, in any floating-point type. The yardstick of the others."""

from __future__ import annotations

from typing import Any

import torch

from .table import TensorTable

__all__ = ["EagerUpdate"]

TILE = 65536  # elements; on a CPU, a rule's temporaries of this size stay in its caches
JOIN_UP_TO = 4096  # elements; smaller tensors with equal hyper-parameters are computed as one


class EagerUpdate:
    """Runs one table with torch operations: large CPU tensors in tiles, small tensors joined."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self._weights = [_flat(weight.detach()) for weight in table.weights]
        self._masters = None if table.masters is None else [_flat(master) for master in table.masters]
        self._states = [tuple(_flat(state) for state in row) for row in table.states]

    @torch.no_grad()
    def __call__(self) -> None:
        table = self.table
        joined: dict[tuple[float, ...], list[int]] = {}
        gradients = [None if gradient is None else gradient() for gradient in table.gradients]
        for i, gradient in enumerate(gradients):
            if gradient is None or not table.sizes[i]:
                continue
            hyper = tuple(table.hyper[i].tolist())
            if table.sizes[i] <= JOIN_UP_TO:
                joined.setdefault(hyper, []).append(i)
            else:
                step = TILE if table.device.type == "cpu" else int(table.sizes[i])
                gradient = _flat(gradient)
                for start in range(0, int(table.sizes[i]), step):
                    part = slice(start, start + step)
                    w, g, states = self._weight(i)[part], gradient[part], tuple(s[part] for s in self._states[i])
                    self._store(i, part, *self._compute(w, g, states, hyper))
        for hyper, members in joined.items():
            w = torch.cat([self._weight(i) for i in members])
            g = torch.cat([_flat(gradients[i]) for i in members])
            states = tuple(torch.cat([self._states[i][k] for i in members]) for k in range(len(table.rule.state)))
            w, states = self._compute(w, g, states, hyper)
            start = 0
            for i in members:
                part = slice(start, start + int(table.sizes[i]))
                self._store(i, slice(None), w[part], tuple(state[part] for state in states))
                start = part.stop

    def _weight(self, i: int) -> torch.Tensor:
        return self._weights[i] if self._masters is None else self._masters[i]

    def _compute(self, w: Any, g: Any, states: Any, hyper: tuple[float, ...]) -> Any:
        dtype = self.table.dtype
        return self.table.rule(w.to(dtype), g.to(dtype) * hyper[0], states, hyper[1:])

    def _store(self, i: int, part: slice, w: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        if self._masters is not None:
            self._masters[i][part] = w
        self._weights[i][part] = w.to(self._weights[i].dtype)
        for old, new in zip(self._states[i], states, strict=True):
            old[part] = new


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    """A dense tensor's elements in memory order."""
    assert tensor is not None
    return tensor.as_strided((tensor.numel(),), (1,))
