"""The loss of a network over a plane in the space of its weights, with the paths of training runs on it.

The plane goes along the two directions in which the runs moved most, or along two random directions scaled like the filters
of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...trainer.validation import instance

__all__ = ["LossPlane", "WeightPath", "loss_plane"]

MOST = 256  # sets of weights that a path can hold
AT_ONCE = 64  # points of the plane that are computed together
ROOM = 0.25  # margin around the paths, as a share of their extent


class WeightPath:
    """The path of a model's weights during training, for `loss_plane`: at most 256 sets of weights.

    At 256 sets, every second one is dropped and `every` doubles.

    Args:
        model: the model.
        name: the name of the path in pictures.
        every: record the weights at the first call of `step` and at each `every`-th call after it, >= 1.

    Attributes:
        points: float32 [n, n_weights], all parameters of the model one after the other, flattened.
        steps: int64 [n], the number of the call of `step` that recorded each point, from 0.

    Example:
        >>> import torch
        >>> from tristep.viz import WeightPath
        >>> path = WeightPath(torch.nn.Linear(3, 1), "sgd")
        >>> path.step()
        >>> path.points.shape
        (1, 4)
    """

    def __init__(self, model: nn.Module, name: str = "run", every: int = 1) -> None:
        instance("model", model, nn.Module, "a torch.nn.Module")
        if not (isinstance(every, int) and every >= 1):
            raise ValueError(f"every={every!r}: must be an integer >= 1")
        self.model, self.name = model, str(name)
        self._every, self._calls = every, 0
        self._points: list[np.ndarray] = []
        self._steps: list[int] = []

    def step(self) -> None:
        """Record the present weights at every `every`-th call. Call it before training and after each step."""
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
    """The loss on a plane of weights, as returned by `loss_plane`.

    Attributes:
        x, y: float64 [n], the coordinates of the grid along the two directions: multiples of each direction's length, from
            the origin. "pca" directions have length 1.
        values: float64 [n, n], the loss at each grid point; rows along y.
        paths: float64 [n_points, 2] by name, each path projected onto the plane.
        steps: int64 [n_points] by name, the step of each point of the path.
        losses: float64 [n_points] by name, the losses at the points of the path itself, not of its projection.
        off: float64 [n_points] by name, the distance of each point of the path from the plane.
        origin: float32 [n_weights], the weights at (0, 0).
        directions: float32 [2, n_weights], the weights added per unit of x and of y.
        explained: the share of the paths' variance along each direction; NaN for random directions.
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
    """Compute the loss of a network on an n by n grid over a plane in the space of its weights.

    Args:
        model: the network. It is evaluated in evaluation mode; its weights, buffers and mode do not change.
        loss: a function of outputs and labels that returns losses, whose mean is taken.
        data: one batch (inputs, labels), used at all points.
        paths: the paths to project onto the plane, each of a network with the same parameters; required by "pca".
        directions: "pca", the two principal directions of all points of the paths, through their mean; or "filter", two
            random directions through the model's weights, with each filter scaled to the norm of the model's filter, and
            zero for biases and normalization.
        n: the number of grid points along each side, >= 2.
        reach: the distance from the origin to each side, > 0. None covers the paths with a margin of a quarter, or uses 1
            without paths.
        seed: the seed of random directions.

    Returns:
        The losses on the grid, and the paths on the plane.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

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
    flat = _flat(model.parameters()).cpu().double().numpy()
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
        if array.shape[1:] != flat.shape or not len(array):
            raise ValueError(f"path {name!r} has points {array.shape}: the model has {flat.size} weights, and one is needed")
    if directions == "pca":
        if sum(map(len, points.values())) < 3:
            raise ValueError("directions='pca' needs paths of three points or more: give them, or directions='filter'")
        origin, axes, explained = _principal(np.concatenate(list(points.values())))
    else:
        origin, axes, explained = flat, _random_filters(model, seed), (float("nan"), float("nan"))
    # Random directions are not exactly orthogonal, so points are projected by least squares.
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
    """Return the mean loss at each set of weights, [n]; each part [n_at_once, n_weights] is computed in one batch."""
    parameters = dict(model.named_parameters())
    place = next(iter(parameters.values()))
    inputs, labels = data
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    inputs = tuple(each.to(place.device) if isinstance(each, torch.Tensor) else each for each in inputs)
    labels = labels.to(place.device) if isinstance(labels, torch.Tensor) else labels

    def mean_loss(point: torch.Tensor) -> torch.Tensor:
        pieces = point.split([parameter.numel() for parameter in parameters.values()])
        weights = {name: each.reshape(like.shape) for (name, like), each in zip(parameters.items(), pieces, strict=True)}
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
    """Return the mean [n_weights], two principal directions of length 1 [2, n_weights], and their shares of the variance."""
    mean = points.mean(axis=0)
    centred = points - mean
    # There are far fewer points than weights, so we decompose the small Gram matrix of the points.
    squares, vectors = np.linalg.eigh(centred @ centred.T)
    squares, vectors = squares[::-1][:2], vectors[:, ::-1][:, :2]
    axes = vectors.T @ centred
    lengths = np.linalg.norm(axes, axis=1, keepdims=True)
    if not lengths[0] > 0:
        raise ValueError("the paths do not move at all: there is no direction to be found")
    total = float((centred**2).sum())
    if lengths[1] <= 1e-12 * lengths[0]:  # all points lie on a line: use any orthogonal direction
        other = np.zeros_like(axes[0])
        other[np.argmin(np.abs(axes[0]))] = 1.0
        other -= (other @ axes[0]) / lengths[0, 0] ** 2 * axes[0]
        axes[1], lengths[1], squares[1] = other, np.linalg.norm(other), 0.0
    axes = axes / lengths
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(axis=1)])[:, None]  # fix the sign, which is arbitrary
    return mean, axes, (float(squares[0] / total), float(squares[1] / total))


def _random_filters(model: nn.Module, seed: int) -> np.ndarray:
    """Return two random directions [2, n_weights]; each filter (row of a matrix) has the norm of the model's filter."""
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
    if reach is not None or not placed:
        return np.linspace(-(reach or 1.0), reach or 1.0, n)
    # x and y cover the same length, so that they have the same scale.
    together = np.concatenate(list(placed.values()))
    low, high = together.min(axis=0), together.max(axis=0)
    half = (high - low).max() / 2 * (1 + ROOM) or 1.0
    middle = (low[k] + high[k]) / 2
    return np.linspace(middle - half, middle + half, n)
