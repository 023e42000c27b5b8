"""Runners, which update the points of a simulation: all at once, or one after the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...trainer.ensemble import Ensemble
from ...trainer.optimizer import Optimizer
from .candidates import PlainUpdate, TorchFactory

__all__ = ["BatchedRunner", "Runner", "SequentialRunner"]


class BatchedRunner:
    """Points updated all at once by an `Ensemble`, as the weights of its trainings.

    Args:
        optimizers: the optimizer of each training.
        starts: float32 [n_starts, 2].
        together: whether a training has all starts in one weight; False makes a training for each start.
        engine: the engine of the updates, as for `tristep.kernels.choose_engine`.

    Attributes:
        size: the number of points.
    """

    def __init__(self, optimizers: Sequence[Optimizer], starts: np.ndarray, together: bool, engine: str | None) -> None:
        if not together:
            optimizers = [copy.deepcopy(each) for each in optimizers for _ in range(len(starts))]
        self._together, self._n_starts = together, len(starts)
        n, count = len(optimizers), len(starts)
        self.size = n * count if together else n
        # Rows that begin at multiples of 16 bytes, so that all go into one launch.
        width = count + count % 2 if together else 2
        weights, gradients = np.zeros((2, n, 2, width), np.float32)
        if together:
            self._points, self._slopes = weights[:, :, :count], gradients[:, :, :count]
        else:
            weights, gradients = weights[:, 0], gradients[:, 0]
            self._points, self._slopes = weights[:, :, None], gradients[:, :, None]
        self._set(starts)
        self._many = Ensemble(optimizers, [torch.from_numpy(weights)], engine, stacked=True)
        self._gradients = [torch.from_numpy(gradients)]
        self._steps: Iterator[None] | None = None  # the steps after the first

    def restart(self, starts: np.ndarray) -> bool:
        """Start again at these points; return False if their number differs or the ensemble cannot restart."""
        if len(starts) != self._n_starts:
            return False
        self._set(starts)
        return self._many.restart()

    def _set(self, starts: np.ndarray) -> None:
        if self._together:
            self._points[:] = starts.T
        else:
            self._points[:, :, 0] = np.tile(starts, (len(self._points) // len(starts), 1))

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        """Write the coordinates of the points into these arrays [size]."""
        n = len(self._points)
        x.reshape(n, -1)[:], y.reshape(n, -1)[:] = self._points[:, 0], self._points[:, 1]

    def step(self, dx: np.ndarray, dy: np.ndarray) -> None:
        """Update the points by their gradients, each array [size]."""
        n = len(self._points)
        self._slopes[:, 0], self._slopes[:, 1] = dx.reshape(n, -1), dy.reshape(n, -1)
        if self._steps is None:
            self._many.step(self._gradients)
            self._steps = self._many.steps()
        else:
            next(self._steps)

    def states(self, training: int) -> list[np.ndarray]:
        """Return copies of a training's states at its first start."""
        states = [state.detach().float().numpy() for state in self._many.updaters[training].states[0]]
        return [(state[:, 0] if self._together and state.ndim > 1 else state).copy() for state in states]


class SequentialRunner:
    """Points updated one after the other, by torch's optimizers or plain callables."""

    def __init__(self, made: Sequence[Any], starts: np.ndarray) -> None:
        self.size = len(made) * len(starts)
        self._points = [torch.from_numpy(start.copy()) for _ in made for start in starts]
        self._steps: list[Callable[[], object]] = []
        for i, point in enumerate(self._points):
            training = made[i // len(starts)]
            if isinstance(training, TorchFactory):
                point.requires_grad_()
                self._steps.append(training.make([point]).step)
            else:
                self._steps.append(functools.partial(_move, training, point, {}))

    def restart(self, starts: np.ndarray) -> bool:
        return False  # states of torch's optimizers and callables cannot be reset

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        x[:], y[:] = torch.stack(self._points).detach().numpy().T

    def step(self, dx: np.ndarray, dy: np.ndarray) -> None:
        gradients = torch.from_numpy(np.stack([dx, dy], axis=-1))
        for point, gradient, step in zip(self._points, gradients, self._steps, strict=True):
            point.grad = gradient
            step()


Runner = BatchedRunner | SequentialRunner


@torch.no_grad()
def _move(plain: PlainUpdate, point: torch.Tensor, state: dict[str, Any]) -> None:
    new = plain.update(point.clone(), point.grad, state, plain.rate)
    if not isinstance(new, torch.Tensor) or new.shape != (2,):
        what = f"shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
        raise ValueError(f"the callable gave {what}: it must return the new point, a tensor of shape (2,)")
    point.copy_(new)
