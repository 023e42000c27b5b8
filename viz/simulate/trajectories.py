"""Trajectories of optimizers on functions of two variables, with the library's own rules.

The results are plain arrays, which the views draw. The points are the weights of many small trainings, updated by the same
kernels as any other weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch

from ...trainer.validation import integer, refuse_arguments
from .candidates import Candidate, named_optimizers, settings_to_try
from .catalog import function
from .functions import Function
from .runners import ElementwiseRunner, EnsembleRunner, Runner, SequentialRunner

__all__ = ["Simulation", "Trajectories", "checked_starts", "farthest", "one_start", "simulate"]

SETTLED = 1e-6  # a loss below this share of the initial loss counts as zero
FAR = 100.0  # a path has diverged at this many half-widths of the drawn area from its middle


@dataclass(frozen=True)
class Trajectories:
    """The paths of optimizers on a function, as returned by `simulate`.

    The axes of the arrays are optimizers, combinations of varied arguments, starts, and steps; step 0 is the start itself.

    Attributes:
        function: the function that the optimizers minimized.
        names: the labels of the optimizers.
        values: the varied arguments of each combination, such as {"learning_rate": 0.1}; one empty dict if none were varied.
        learning_rates: float64 [n_optimizers, n_values], the learning rate of the first step; NaN for a torch optimizer
            without one.
        starts: float32 [n_starts, 2], the starting points.
        paths: float32 [n_optimizers, n_values, n_starts, steps + 1, 2], the points.
        losses: float32 [n_optimizers, n_values, n_starts, steps + 1], the function's values at the points, without noise.
        diverged: bool [n_optimizers, n_values, n_starts]: whether a path or loss became infinite or NaN, or a path got
            farther from the middle of the drawn area than 100 times half its width or height.
    """

    function: Function
    names: tuple[str, ...]
    values: tuple[dict[str, Any], ...]
    learning_rates: np.ndarray
    starts: np.ndarray
    paths: np.ndarray
    losses: np.ndarray
    diverged: np.ndarray

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self.losses.shape[-1] - 1

    @property
    def least(self) -> float:
        """The smallest loss of the function's known minima, or else of all paths that have not diverged."""
        if self.function.minima:
            return min(minimum.value for minimum in self.function.minima)
        finite = self.losses[~self.diverged]
        return float(finite.min()) if finite.size else 0.0

    @property
    def settled(self) -> np.ndarray:
        """The step at which each path has settled, float64 [n_optimizers, n_values, n_starts].

        From this step on, the loss above `least` is at most a millionth of its initial value. NaN for a path that has not
        settled by its last step.
        """
        height = self.losses - np.float64(self.least)
        above = ~(height <= SETTLED * height[..., :1])
        return np.where(above[..., -1], np.nan, above.shape[-1] - above[..., ::-1].argmax(axis=-1)) * above.any(axis=-1)

    @property
    def growth(self) -> np.ndarray:
        """How much the loss has grown over each path, float64 [n_optimizers, n_values, n_starts].

        The largest loss above `least` in the last quarter of the steps, divided by the initial one. A path above 1 has not
        converged; infinite if the quotient is not finite.
        """
        height = self.losses - np.float64(self.least)
        with np.errstate(divide="ignore", invalid="ignore"):
            grown = height[..., -(-3 * self.steps // 4) :].max(axis=-1) / height[..., 0]
        return np.where(np.isfinite(grown), grown, np.inf)

    @property
    def turns(self) -> np.ndarray:
        """How often x or y reversed its direction along each path, int [n_optimizers, n_values, n_starts].

        Moves below a millionth of the coordinate are ignored, because float32 rounds them.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.diff(self.paths, axis=-2)
            ahead = np.where(np.abs(moved) > 1e-6 * np.abs(self.paths[..., 1:, :]), np.sign(moved), 0)
        for t in range(1, self.steps):  # a coordinate that rests keeps its last direction
            ahead[..., t, :] = np.where(ahead[..., t, :] == 0, ahead[..., t - 1, :], ahead[..., t, :])
        return np.asarray((ahead[..., 1:, :] * ahead[..., :-1, :] < 0).sum(axis=(-2, -1)))

    def __repr__(self) -> str:
        _, v, s, _ = self.losses.shape
        return f"<trajectories on {self.function.name}: {', '.join(self.names)}; {v} values, {s} starts, {self.steps} steps>"


def simulate(
    on: str | Function | Callable[[torch.Tensor], torch.Tensor],
    optimizers: Any,
    start: Any = None,
    steps: int = 200,
    *,
    learning_rates: Sequence[float] | None = None,
    relative: bool = False,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
    engine: str | None = None,
    **unknown: Any,
) -> Trajectories:
    """Run optimizers on a function of two variables, from every start and with every combination of varied arguments.

    Args:
        on: a function's name, a `Function`, an expression in x and y, or a callable on tensors; see `function`.
        optimizers: names, such as ["sgd", "adam"], where "momentum" is SGD and "nag" is NAG with a momentum of 0.9 unless
            another is given; or a mapping from labels to optimizers. An optimizer is a dict of arguments, with its name
            under "optimizer" unless that is the label; an `Optimizer` or its class; a class of torch.optim, or a
            functools.partial of one; or a callable `(point, gradient, state, lr) -> new point` on tensors [2], with a dict
            of its own as `state`. Instances, torch's classes and callables can also be the "optimizer" of a dict, which may
            then add a "learning_rate" only. Torch's classes and callables are run one by one, which is slow.
        start: (x, y), or an array [n_starts, 2]; None for the function's own start.
        steps: the number of steps, >= 1.
        learning_rates: the learning rates to try with every optimizer; None for each optimizer's own rate.
        relative: whether `learning_rates` are factors of each optimizer's own rate.
        sweep: other arguments and their values to try, such as {"beta1": [0.5, 0.9]}. All are combined with each other and
            with the rates; the first argument varies slowest and the rate fastest.
        seed: the seed of the gradient noise, for a function that has noise. All optimizers get the same noise at the same
            step from the same start.
        engine: the engine of the updates on the CPU, as for `tristep.kernels.choose_engine`.
        **unknown: refused, with what to write instead.

    Returns:
        The points and losses of all steps.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

    Example:
        >>> from tristep.viz import simulate
        >>> found = simulate("ill_conditioned_bowl", ["sgd", "adam"], steps=100, learning_rates=[0.001, 0.01, 0.1])
        >>> found.paths.shape
        (2, 3, 1, 101, 2)
        >>> found.diverged[:, :, 0].tolist()
        [[False, False, True], [False, False, False]]
    """
    if unknown:
        name, value = next(iter(unknown.items()))
        name = "learning_rate" if name == "lr" else name
        of_one = 'optimizers={"adam": {' + f'"{name}": {value!r}' + "}} for one of them"
        of_all = f"learning_rates=[{value!r}]" if name == "learning_rate" else 'sweep={"' + f'{name}": [{value!r}]' + "}"
        refuse_arguments("simulate()", unknown, signature(Simulation).parameters, f"Give {of_all} for all, or {of_one}.")
    return Simulation(
        on, optimizers, steps, learning_rates=learning_rates, relative=relative, sweep=sweep, seed=seed, engine=engine
    ).run(start)


class Simulation:
    """A prepared `simulate`, with the same arguments, that can be run again from other starts, as while one is dragged.

    Example:
        >>> from tristep.viz.simulate import Simulation
        >>> simulation = Simulation("ill_conditioned_bowl", ["sgd", "adam"], steps=100, learning_rates=[0.001, 0.01])
        >>> simulation.run((1.0, 1.0)).paths.shape, simulation.run((2.0, 1.0)).starts.tolist()
        ((2, 2, 1, 101, 2), [[2.0, 1.0]])
    """

    def __init__(
        self,
        on: str | Function | Callable[[torch.Tensor], torch.Tensor],
        optimizers: Any,
        steps: int = 200,
        *,
        learning_rates: Sequence[float] | None = None,
        relative: bool = False,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        seed: int = 0,
        engine: str | None = None,
    ) -> None:
        self.function = function(on)
        self.steps, self._seed, self._engine = integer("steps", steps, low=1), integer("seed", seed, low=0), engine
        self._values, self._relative = settings_to_try(learning_rates, sweep), relative
        self._named = named_optimizers(optimizers)
        self.candidates = self._make_candidates()
        self._runners: list[Runner] = []
        self._room: tuple[Callable[..., Any], np.ndarray, np.ndarray] | None = None  # the function and its arrays, of a walk
        self._used = False  # whether runners have been made, or begun, of the candidates

    def run(self, start: Any = None) -> Trajectories:
        """Return the trajectories from (x, y) or from an array [n_starts, 2]; None means the function's own start."""
        where, steps, starts = self.function, self.steps, checked_starts(self.function, start)
        n, v, s = len(self._named), len(self._values), len(starts)
        points = np.empty((steps + 1, 2, n * v * s), np.float32)
        walked = np.empty((steps + 1, n * v * s), np.float32)
        for t, (x, y, loss, *_) in enumerate(self.walk(starts)):
            points[t], walked[t] = (x, y), loss
        order = self._in_order()
        back = [order.index(candidate) for candidate in self.candidates]  # compared by identity
        paths = np.ascontiguousarray(points.reshape(steps + 1, 2, n, v, s).transpose(2, 3, 4, 0, 1)[back])
        losses = np.ascontiguousarray(walked.reshape(steps + 1, n, v, s).transpose(1, 2, 3, 0)[back])
        rates = np.array([candidate.rates for candidate in self.candidates])
        values = tuple(map(dict, self._values))
        diverged = ~(farthest(where, paths) <= FAR) | ~np.isfinite(losses.max(axis=-1))
        return Trajectories(where, tuple(self._named), values, rates, starts, paths, losses, diverged)

    def walk(self, starts: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Take all steps from starts [n_starts, 2], and yield the points before each step and after the last.

        They are five arrays [n_points], which the next step overwrites: x, y, loss, and the noisy gradient in x and in y.
        Points are ordered by candidate (in the order of `_in_order`), value and start.
        """
        self._put_at(starts)
        size = sum(runner.size for runner in self._runners)
        stops = np.cumsum([runner.size for runner in self._runners])
        parts = [(runner, slice(stop - runner.size, stop)) for runner, stop in zip(self._runners, stops, strict=True)]
        if self._room is None or len(self._room[1]) != size:
            self._room = self.function.evaluator((size,)), np.empty(size, np.float32), np.empty(size, np.float32)
        evaluate, x, y = self._room
        noise = self._noise(len(starts))
        for runner, part in parts:
            runner.read(x[part], y[part])
        for t in range(self.steps + 1):
            loss, *slopes = evaluate(x, y)
            if noise is not None and t < self.steps:
                slopes = [
                    (slope.reshape(-1, len(starts)) + each).ravel() for slope, each in zip(slopes, noise[t], strict=True)
                ]
            yield x, y, loss, *slopes
            if t < self.steps:
                for runner, part in parts:
                    runner.step(slopes[0][part], slopes[1][part], x[part], y[part])

    def _noise(self, n_starts: int) -> np.ndarray | None:
        """Return the noise to add to the gradients, [steps, 2, n_starts]; None if the function has no noise."""
        if not self.function.noise:
            return None
        draw = np.random.default_rng([self.function.seed, self._seed])
        drawn = draw.standard_normal((n_starts, self.steps, 2), dtype=np.float32)
        return np.ascontiguousarray(drawn.transpose(1, 2, 0)) * np.float32(self.function.noise)

    def states(self) -> list[np.ndarray]:
        """Return the current states of the only optimizer, at the first start; it must be a `RuleOptimizer`."""
        (runner,) = self._runners
        assert not isinstance(runner, SequentialRunner)
        return runner.states(0)

    def _make_candidates(self) -> list[Candidate]:
        return [Candidate(name, optimizer, self._values, self._relative) for name, optimizer in self._named.items()]

    def _in_order(self) -> list[Candidate]:
        """Return the candidates by how they are updated: elementwise, by an ensemble, or one by one."""
        return [each for kind in (True, False, None) for each in self.candidates if each.elementwise is kind]

    def _put_at(self, starts: np.ndarray) -> None:
        """Put all runners at the starts; make new runners if the last walk's cannot start again."""
        if self._runners and all(runner.restart(starts) for runner in self._runners):
            return
        if self._used:
            self.candidates = self._make_candidates()  # the old ones have counts and states
        self._used, runners = True, list[Runner]()
        for elementwise, members in itertools.groupby(self._in_order(), key=lambda candidate: candidate.elementwise):
            trainings = [training for candidate in members for training in candidate.trainings]
            if elementwise is None:
                runners.append(SequentialRunner(trainings, starts))
            elif elementwise:
                runners.append(ElementwiseRunner(trainings, starts, self.steps, self._engine))
            else:
                runners.append(EnsembleRunner(trainings, starts, self._engine))
        self._runners = runners  # all of them, or the ones before if this was interrupted


def checked_starts(where: Function, start: Any) -> np.ndarray:
    """Return the starting points as a finite float32 array [n_starts, 2]; None means the function's own start."""
    try:
        starts = np.array(where.start if start is None else start, dtype=np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"start={start!r}: must be (x, y) or an array [n_starts, 2]") from None
    starts = starts[None] if starts.ndim == 1 else starts
    if starts.ndim != 2 or starts.shape[1] != 2 or not len(starts) or not np.isfinite(starts).all():
        what = f"={start!r}" if np.ndim(start) == 0 else f" has shape {np.shape(start)}"
        raise ValueError(f"start{what}: must be (x, y), such as (-1.2, 1), or [n_starts, 2], finite")
    return starts


def one_start(where: Function, start: Any) -> tuple[float, float]:
    """Return a single start (x, y); None means the function's own. Raise ValueError if `start` has several points."""
    if len(starts := checked_starts(where, start)) != 1:
        raise ValueError(f"start has {len(starts)} points: must be one, (x, y)")
    x, y = np.reshape(where.start if start is None else start, 2)
    return float(x), float(y)


def farthest(where: Function, paths: np.ndarray) -> np.ndarray:
    """Return how far paths [..., steps, 2] get from the middle of the drawn area, in halves of its width or height."""
    reach = np.float32(0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        for k, (low, high) in enumerate((where.xlim, where.ylim)):
            away = np.abs(paths[..., k] - np.float32((low + high) / 2)).max(axis=-1)
            reach = np.maximum(reach, away / np.float32((high - low) / 2))
    return reach
