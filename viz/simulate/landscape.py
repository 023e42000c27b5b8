"""The loss of a real network over a plane in the space of its weights, with the trajectories of several trainings on it.

The plane is that of the two directions along which the trainings moved most, or one through a point along two random
directions as long as the filters of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["LossPlane", "WeightPath", "loss_plane"]

MOST = 256  # sets of weights that a path keeps
AT_ONCE = 64  # points of the plane that are computed together
ROOM = 0.25  # of the paths' extent, left around them


class WeightPath:
    """The weights of a model on its way, at most 256 sets of them: when these are full, every second one is let go.

    Args:
        model: the model.
        name: what pictures call its way.
        every: take the first call of `step` and then each k-th, >= 1. It doubles each time when there is no more room.

    Attributes:
        points: float32 [n, n_weights], all parameters of the model one after the other.
        steps: int64 [n], the number of the call that each was taken at.

    Example:
        >>> import torch
        >>> from tristep.viz import WeightPath
        >>> path = WeightPath(torch.nn.Linear(3, 1), "sgd")
        >>> path.step()
        >>> path.points.shape
        (1, 4)
    """

    def __init__(self, model: nn.Module, name: str = "run", every: int = 1) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"every={every!r}: must be an integer >= 1")
        self.model, self.name = model, str(name)
        self._every, self._calls = every, 0
        self._points: list[np.ndarray] = []
        self._steps: list[int] = []

    def step(self) -> None:
        """Take the weights as they are now, if it is their turn. Call it before training and after each step."""
        if self._calls % self._every == 0:
            if len(self._points) == MOST:
                del self._points[1::2], self._steps[1::2]
                self._every *= 2
            if self._calls % self._every == 0:
                self._points.append(_flat(self.model.parameters()).cpu().numpy())
                self._steps.append(self._calls)
        self._calls += 1

    @property
    def points(self) -> np.ndarray:
        return np.stack(self._points) if self._points else np.zeros((0, 0), dtype=np.float32)

    @property
    def steps(self) -> np.ndarray:
        return np.array(self._steps, dtype=np.int64)


@dataclass(frozen=True)
class LossPlane:
    """What `loss_plane` found.

    Attributes:
        x, y: float64 [n], places along the two directions, in the weights' own unit of length, from the origin.
        values: float64 [n, n], the loss at each; rows along y.
        paths: by name, float64 [n_points, 2], where each way passes on the plane.
        steps: by name, int64 [n_points].
        losses: by name, float64 [n_points], on the way itself, not on the plane.
        off: by name, float64 [n_points], how far from the plane the way is there.
        origin: float32 [n_weights], the weights at (0, 0).
        directions: float32 [2, n_weights].
        explained: the share of the ways' variance that each direction has; NaN for random directions.
    """

    x: np.ndarray
    y: np.ndarray
    values: np.ndarray
    paths: dict[str, np.ndarray]
    steps: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]
    off: dict[str, np.ndarray]
    origin: np.ndarray
    directions: np.ndarray
    explained: tuple[float, float]


def loss_plane(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: tuple[Any, Any],
    paths: WeightPath | Sequence[WeightPath] = (),
    *,
    directions: str = "pca",
    n: int = 41,
    reach: float | None = None,
    seed: int = 0,
) -> LossPlane:
    """The loss on a grid of n by n sets of weights.

    Args:
        model: the network; its own weights, buffers and mode stay as they are. It is asked in evaluation mode.
        loss: from outputs and labels to losses, whose mean is taken.
        data: one batch (inputs, labels), which all points see.
        paths: ways to be shown on the plane, each of a network of the same parameters; needed for "pca".
        directions: "pca", the two directions along which all points of the ways vary most about their mean; or "filter", two
            random ones from the model's weights, each filter as long as the model's, biases and normalisation left alone.
        n: points along each side, >= 2.
        reach: how far from the origin to each side, > 0. None is as far as the ways go and a quarter more, or 1 without any.
        seed: of random directions.

    Raises:
        TypeError, ValueError: an argument that does not fit.

    Example:
        >>> import torch
        >>> from tristep.viz import loss_plane
        >>> net, data = torch.nn.Linear(3, 1), (torch.ones(4, 3), torch.zeros(4, 1))
        >>> plane = loss_plane(net, torch.nn.MSELoss(), data, directions="filter", n=5)
        >>> plane.values.shape
        (5, 5)

    Source: Li et al. (2018), "Visualizing the Loss Landscape of Neural Nets", sections 4 and 7.
    """
    ways = [paths] if isinstance(paths, WeightPath) else list(paths)
    own = _flat(model.parameters()).cpu().double().numpy()
    if directions not in ("pca", "filter"):
        raise ValueError(f"directions={directions!r}: must be 'pca' or 'filter'")
    if not (isinstance(n, int) and n >= 2):
        raise ValueError(f"n={n!r}: must be an integer >= 2")
    if reach is not None and not reach > 0:
        raise ValueError(f"reach={reach!r}: must be > 0, or None")
    names = [way.name for way in ways]
    if len(set(names)) < len(names):
        raise ValueError(f"paths are called {', '.join(map(repr, names))}: each must have a name of its own")
    points = {way.name: way.points.astype(np.float64) for way in ways}
    for name, array in points.items():
        if array.shape[1:] != own.shape or not len(array):
            raise ValueError(f"path {name!r} has points {array.shape}: the model has {own.size} weights, and one is needed")
    if directions == "pca":
        if sum(map(len, points.values())) < 3:
            raise ValueError("directions='pca' needs paths of three points or more: give them, or directions='filter'")
        origin, axes, explained = _principal(np.concatenate(list(points.values())))
    else:
        origin, axes, explained = own, _random_filters(model, seed), (float("nan"), float("nan"))
    # Random directions are not at right angles to the last bit, so places are found by least squares.
    onto = np.linalg.pinv(axes)
    placed = {name: (array - origin) @ onto for name, array in points.items()}
    off = {name: np.linalg.norm(array - origin - placed[name] @ axes, axis=1) for name, array in points.items()}
    x, y = (_side(k, placed, n, reach) for k in (0, 1))
    device = next(model.parameters()).device
    start, along = (torch.as_tensor(array, device=device) for array in (origin, axes))
    grid = torch.as_tensor(np.stack([np.tile(x, n), np.repeat(y, n)], axis=1), device=device)
    values = _losses(model, loss, data, (start + part @ along for part in grid.split(AT_ONCE))).reshape(n, n)
    losses = {name: _losses(model, loss, data, torch.as_tensor(array).split(AT_ONCE)) for name, array in points.items()}
    steps = {way.name: way.steps for way in ways}
    return LossPlane(x, y, values, placed, steps, losses, off, origin.astype(np.float32), axes.astype(np.float32), explained)


@torch.no_grad()
def _losses(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: tuple[Any, Any],
    parts: Iterable[torch.Tensor],
) -> np.ndarray:
    """The mean loss at sets of weights [n], of which each part [n_at_once, n_weights] is computed together."""
    parameters = dict(model.named_parameters())
    place = next(iter(parameters.values()))
    inputs, labels = data
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    inputs = tuple(each.to(place.device) if isinstance(each, torch.Tensor) else each for each in inputs)
    labels = labels.to(place.device) if isinstance(labels, torch.Tensor) else labels

    def mean_loss(point: torch.Tensor) -> torch.Tensor:
        pieces = point.split([parameter.numel() for parameter in parameters.values()])
        weights = {name: each.reshape(own.shape) for (name, own), each in zip(parameters.items(), pieces, strict=True)}
        return loss(torch.func.functional_call(model, weights, inputs), labels).double().mean()

    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return np.concatenate([torch.func.vmap(mean_loss)(part.to(place)).cpu().numpy() for part in parts])
    finally:
        for module in training:
            module.training = True


def _flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [parameter.detach().reshape(-1).float() for parameter in parameters]
    if not parts:
        raise ValueError("model has no parameters")
    return torch.cat(parts)


def _principal(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Mean [n_weights], directions of length 1 [2, n_weights], and their shares of the variance."""
    mean = points.mean(axis=0)
    centred = points - mean
    # There are far fewer points than weights, so the small matrix of their products is taken apart.
    squares, vectors = np.linalg.eigh(centred @ centred.T)
    squares, vectors = squares[::-1][:2], vectors[:, ::-1][:, :2]
    axes = vectors.T @ centred
    lengths = np.linalg.norm(axes, axis=1, keepdims=True)
    if not lengths[0] > 0:
        raise ValueError("the paths do not move at all: there is no direction to be found")
    total = float((centred**2).sum())
    if lengths[1] <= 1e-12 * lengths[0]:  # all on one line: any direction across it will do
        other = np.zeros_like(axes[0])
        other[np.argmin(np.abs(axes[0]))] = 1.0
        other -= (other @ axes[0]) / lengths[0, 0] ** 2 * axes[0]
        axes[1], lengths[1], squares[1] = other, np.linalg.norm(other), 0.0
    axes = axes / lengths
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])[:, None]  # so that it is the same at every run
    return mean, axes, (float(squares[0] / total), float(squares[1] / total))


def _random_filters(model: nn.Module, seed: int) -> np.ndarray:
    """Two random directions [2, n_weights], each filter (row of a matrix) as long as the model's own."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[torch.Tensor]] = [[], []]
    for parameter in model.parameters():
        weight = parameter.detach().cpu().double()
        for row in rows:
            if weight.ndim < 2:
                row.append(torch.zeros(weight.numel(), dtype=torch.float64))
                continue
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).flatten(1)
            lengths = weight.flatten(1).norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True)
            row.append((drawn * lengths).flatten())
    return np.stack([torch.cat(row).numpy() for row in rows])


def _side(k: int, placed: Mapping[str, np.ndarray], n: int, reach: float | None) -> np.ndarray:
    """The places of the grid along direction k."""
    if reach is not None or not placed:
        return np.linspace(-(reach or 1.0), reach or 1.0, n)
    # As far on both sides and both ways, so that a unit is as long along x as along y.
    together = np.concatenate(list(placed.values()))
    low, high = together.min(axis=0), together.max(axis=0)
    half = (high - low).max() / 2 * (1 + ROOM) or 1.0
    middle = (low[k] + high[k]) / 2
    return np.linspace(middle - half, middle + half, n)
