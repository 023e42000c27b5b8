"""Runners, which update the points of a simulation: all at once, or one after the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...kernels import Update
from ...trainer.loops.ensemble import Ensemble, JointRows, kind_of
from ...trainer.optimizer import Optimizer
from .candidates import PlainUpdate, TorchFactory

__all__ = ["ElementwiseRunner", "EnsembleRunner", "Runner", "SequentialRunner"]


class ElementwiseRunner:
    """Points of elementwise optimizers: a training's points are one weight, and hyper-parameters are computed only once.

    Optimizers have taken no step; their counts and schedules move to the last step. `size` is the number of points.
    """

    def __init__(self, optimizers: Sequence[Any], starts: np.ndarray, steps: int, engine: str | None) -> None:
        self.size, self._n_starts, self._taken = len(optimizers) * len(starts), len(starts), 0
        self._points, slopes = (_aligned(len(optimizers), len(starts)) for _ in range(2))
        self._weights, self._gradients = self._points.unbind(), slopes.unbind()  # updates do not keep gradients alive
        self._now, (self._dx, self._dy) = _by_coordinate(self._points), _by_coordinate(slopes)
        kinds: dict[Any, list[int]] = {}
        for i, optimizer in enumerate(optimizers):
            optimizer.slots(range(1))
            kinds.setdefault(kind_of(optimizer, 1), []).append(i)
        self._kinds = [_Kind([optimizers[i] for i in members], members, len(starts)) for members in kinds.values()]
        for kind in self._kinds:
            kind.prepare(self._weights, self._gradients, steps, engine)
        self.restart(starts)

    def restart(self, starts: np.ndarray) -> bool:
        """Start again at these points; return False if their number differs."""
        if len(starts) != self._n_starts:
            return False
        self._points.copy_(torch.from_numpy(starts.T.copy()))
        self._taken = 0
        for kind in self._kinds:
            kind.start(self._weights)
        return True

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        """Write the coordinates of the points into these arrays [size]."""
        x.reshape(-1, self._n_starts)[:], y.reshape(-1, self._n_starts)[:] = self._now

    def step(self, dx: np.ndarray, dy: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """Update the points by their gradients, and write the new ones into x and y; each array [size]."""
        self._dx[:], self._dy[:] = dx.reshape(-1, self._n_starts), dy.reshape(-1, self._n_starts)
        t = self._taken
        self._taken += 1
        for kind in self._kinds:
            for hyper, rows, run in kind.steps[t % len(kind.steps)]:
                hyper[:] = rows
                run()
        x.reshape(-1, self._n_starts)[:], y.reshape(-1, self._n_starts)[:] = self._now

    def states(self, training: int) -> list[np.ndarray]:
        kind = next(kind for kind in self._kinds if training in kind.members)
        at = kind.members.index(training)
        return [state[at, :, 0].numpy().copy() for state in kind.states.values()]


class _Kind:
    """The trainings of an `ElementwiseRunner` whose optimizers are of one `kind_of`.

    Attributes:
        members: the indices of the trainings.
        states: their states by name, [n, 2, n_starts].
        steps: for each step, or once for all, its launches: hyper-parameters to write, their values, and what runs it.
    """

    def __init__(self, optimizers: list[Any], members: list[int], n_starts: int) -> None:
        self._optimizers, self.members = optimizers, members
        self.states = {name: _aligned(len(members), n_starts) for name in optimizers[0].composed_rule.slots}
        self.steps: list[list[tuple[np.ndarray, np.ndarray, Callable[[], None]]]] = []

    def prepare(self, weights: Sequence[Any], gradients: Sequence[Any], steps: int, engine: str | None) -> None:
        """Compute all hyper-parameters, and make an `Update` for each rule."""
        rows = JointRows(self._optimizers, 1)
        repeats: dict[Any, list[tuple[np.ndarray, np.ndarray, Callable[[], None]]]] = {}
        own_weights, own_gradients = ([each[i] for i in self.members] for each in (weights, gradients))
        for _ in range(steps):
            rule = rows.rule()
            if rule not in repeats:
                columns = [self.states[name].unbind() for name in rule.state]
                states = list(zip(*columns, strict=True)) or [()] * len(self.members)
                update = Update(rule, own_weights, states, engine=engine)
                update.bind(own_gradients)
                repeats[rule] = update.repeats()
            ((_, table),) = rows.form(rule)
            self.steps.append([(hyper, table[at].astype(np.float32), run) for hyper, at, run in repeats[rule]])
            if len(self.steps) == 1 and rows.is_steady(rule):
                break
            rows.count()

    def start(self, weights: Sequence[Any]) -> None:
        for state in self.states.values():
            state.zero_()
        first = self._optimizers[0]
        if not first.starts_from_zeros:
            for i, optimizer, *own in zip(self.members, self._optimizers, *self.states.values(), strict=True):
                optimizer.start_state(weights[i], dict(zip(self.states, own, strict=True)))


def _aligned(n: int, n_starts: int) -> torch.Tensor:
    """Return zeros [n, 2, n_starts] of which each item begins at a multiple of 16 bytes, so that all go into one launch."""
    room = -(-2 * n_starts // 4) * 4
    return torch.zeros(n, room)[:, : 2 * n_starts].unflatten(1, (2, n_starts))


def _by_coordinate(points: torch.Tensor) -> np.ndarray:
    """Return a view [2, n, n_starts] of points [n, 2, n_starts]."""
    return points.numpy().swapaxes(0, 1)


class EnsembleRunner:
    """Points of other optimizers of tristep: each point is the weight of a model of an `Ensemble`."""

    def __init__(self, optimizers: Sequence[Optimizer], starts: np.ndarray, engine: str | None) -> None:
        self.size, self._n_starts = len(optimizers) * len(starts), len(starts)
        optimizers = [copy.deepcopy(each) for each in optimizers for _ in range(len(starts))]
        weights, gradients = (_aligned(self.size, 1)[:, :, 0] for _ in range(2))
        self._points, self._slopes = weights.numpy(), gradients.numpy()
        self._points[:] = np.tile(starts, (self.size // len(starts), 1))
        self._many = Ensemble(optimizers, [weights], engine)
        self._gradients: Any = [gradients]  # until the first step

    def restart(self, starts: np.ndarray) -> bool:
        return False  # optimizers keep the counts of the last walk

    def read(self, x: np.ndarray, y: np.ndarray) -> None:
        x[:], y[:] = self._points.T

    def step(self, dx: np.ndarray, dy: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        self._slopes[:, 0], self._slopes[:, 1] = dx, dy
        self._many.step(self._gradients)
        self._gradients = None
        self.read(x, y)

    def states(self, training: int) -> list[np.ndarray]:
        states = self._many.updaters[training * self._n_starts].states[0]
        return [state.detach().float().numpy().copy() for state in states]


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

    def step(self, dx: np.ndarray, dy: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        gradients = torch.from_numpy(np.stack([dx, dy], axis=-1))
        for point, gradient, step in zip(self._points, gradients, self._steps, strict=True):
            point.grad = gradient
            step()
        self.read(x, y)


Runner = ElementwiseRunner | EnsembleRunner | SequentialRunner


@torch.no_grad()
def _move(plain: PlainUpdate, point: torch.Tensor, state: dict[str, Any]) -> None:
    new = plain.update(point.clone(), point.grad, state, plain.rate)
    if not isinstance(new, torch.Tensor) or new.shape != (2,):
        what = f"shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
        raise ValueError(f"the callable gave {what}: it must return the new point, a tensor of shape (2,)")
    point.copy_(new)
