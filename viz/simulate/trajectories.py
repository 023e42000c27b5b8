"""Trajectories of optimizers on functions of two variables, with the library's own rules.

All is plain arrays; the views draw them. The points are the weights of many small trainings, which are updated as any other
weights are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.interrupts import interrupts_wait
from ...trainer.validation import integer
from .candidates import Candidate, named_optimizers, settings_to_try
from .catalog import function
from .functions import Function
from .runners import BatchedRunner, Runner, SequentialRunner

__all__ = ["Simulation", "Trajectories", "checked_starts", "farthest", "one_start", "simulate"]

SETTLED = 1e-6  # what share of the loss at the start is as good as none
FAR = 100.0  # times half the drawn width from its middle: who gets there has diverged


@dataclass(frozen=True)
class Trajectories:
    """What `simulate` found. The axes of its arrays are optimizers, values, starts, and steps from 0, the start itself.

    Attributes:
        function: what was raced on.
        names: of the optimizers.
        values: for each value what was varied, such as {"learning_rate": 0.1}; one empty dict if nothing was.
        learning_rates: float64 [n_optimizers, n_values], those in use at the first step; NaN of a callable without one.
        starts: float32 [n_starts, 2].
        paths: float32 [n_optimizers, n_values, n_starts, steps + 1, 2].
        losses: float32 [n_optimizers, n_values, n_starts, steps + 1], without noise.
        diverged: bool [n_optimizers, n_values, n_starts]: whether a path or loss became infinite or NaN, or a path got
            farther from the middle of what is drawn than 100 times half its size.
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
        return self.losses.shape[-1] - 1

    @property
    def least(self) -> float:
        """The least loss: of the known minima, or else of all paths that have not diverged."""
        if self.function.minima:
            return min(minimum.value for minimum in self.function.minima)
        finite = self.losses[~self.diverged]
        return float(finite.min()) if finite.size else 0.0

    @property
    def settled(self) -> np.ndarray:
        """float64 [n_optimizers, n_values, n_starts]: the step from which on the loss above `least` is no more than a
        millionth of the one at the start; NaN where it is not at the end."""
        height = self.losses - np.float64(self.least)
        above = ~(height <= SETTLED * height[..., :1])
        return np.where(above[..., -1], np.nan, above.shape[-1] - above[..., ::-1].argmax(axis=-1)) * above.any(axis=-1)

    @property
    def growth(self) -> np.ndarray:
        """float64 [n_optimizers, n_values, n_starts]: the largest loss above `least` of the last quarter of the steps over
        that at the start. What is above 1 has not converged; infinite where the loss is no finite number."""
        height = self.losses - np.float64(self.least)
        with np.errstate(divide="ignore", invalid="ignore"):
            grown = height[..., -(-3 * self.steps // 4) :].max(axis=-1) / height[..., 0]
        return np.where(np.isfinite(grown), grown, np.inf)

    @property
    def turns(self) -> np.ndarray:
        """int [n_optimizers, n_values, n_starts]: how often x or y has turned back.

        Steps that float32 rounds, those below a millionth of the coordinate, do not count.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.diff(self.paths, axis=-2)
            ahead = np.where(np.abs(moved) > 1e-6 * np.abs(self.paths[..., 1:, :]), np.sign(moved), 0)
        for t in range(1, self.steps):  # a coordinate that rests goes on as before, or turns
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
) -> Trajectories:
    """Let optimizers run on a function of two variables, each with all values of what is varied, from all starts.

    Args:
        on: as for `function`.
        optimizers: names, such as ["sgd", "adam"], of which "momentum" is SGD and "nag" is NAG with a momentum of 0.9,
            unless another is given; or a mapping from labels to what is to run: a dict of arguments, with the optimizer's
            name under "optimizer" unless that is the label; an `Optimizer` or its class; a class of torch's, or a
            functools.partial of one; or a callable `(point, gradient, state, lr) -> new point` of tensors [2], with a dict
            of its own as `state`. Instances, torch's and callables can be "optimizer" of a dict, too, with only a
            "learning_rate" in addition. The last two kinds are run one by one, which is slow.
        start: (x, y), or [n_starts, 2]; the function's own if left out.
        steps: >= 1.
        learning_rates: those to try, each with every optimizer; None for the best one of each.
        relative: whether `learning_rates` are factors of these.
        sweep: other arguments to try, as {"beta1": [0.5, 0.9]}; combined with each other and with the rates, the first
            named varying slowest and rates fastest.
        seed: of the function's noise, if it has any. At the same step from the same start all get the same noise.
        engine: as for `tristep.kernels.choose_engine`, on the CPU.

    Raises:
        TypeError, ValueError: what does not fit.

    Example:
        >>> from tristep.viz import simulate
        >>> found = simulate("ill_conditioned_bowl", ["sgd", "adam"], steps=100, learning_rates=[0.001, 0.01, 0.1])
        >>> found.paths.shape
        (2, 3, 1, 101, 2)
        >>> found.diverged[:, :, 0].tolist()
        [[False, False, True], [False, False, False]]
    """
    return Simulation(
        on, optimizers, steps, learning_rates=learning_rates, relative=relative, sweep=sweep, seed=seed, engine=engine
    ).run(start)


class Simulation:
    """What `simulate` does, prepared once for runs from many starts one after the other, as when a start is dragged.

    Args:
        on, optimizers, steps, learning_rates, relative, sweep, seed, engine: as for `simulate`.

    Raises:
        TypeError, ValueError: what does not fit.

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
        self._given = named_optimizers(optimizers)
        self.candidates = self._make_candidates()
        self._runners: list[Runner] = []

    def run(self, start: Any = None) -> Trajectories:
        """The trajectories from (x, y), or from [n_starts, 2]; from the function's own start if left out."""
        where, steps, starts = self.function, self.steps, checked_starts(self.function, start)
        n, v, s = len(self._given), len(self._values), len(starts)
        points = np.empty((steps + 1, 2, n * v * s), np.float32)
        losses = np.empty((steps + 1, n * v * s), np.float32)
        for t, (x, y, loss, *_) in enumerate(self.walk(starts, self.noise(s))):
            points[t], losses[t] = (x, y), loss
        order = self._in_order()
        back = [order.index(candidate) for candidate in self.candidates]  # no two are equal
        paths = np.ascontiguousarray(points.reshape(steps + 1, 2, n, v, s).transpose(2, 3, 4, 0, 1)[back])
        found = np.ascontiguousarray(losses.reshape(steps + 1, n, v, s).transpose(1, 2, 3, 0)[back])
        rates = np.array([candidate.rates for candidate in self.candidates])
        values = tuple(map(dict, self._values))
        return Trajectories(where, tuple(self._given), values, rates, starts, paths, found, _diverged(where, paths, found))

    def walk(self, starts: np.ndarray, noise: np.ndarray | None) -> Iterator[tuple[np.ndarray, ...]]:
        """Take all steps from these starts, and yield before each one, and after the last, where the points are.

        Args:
            starts: float32 [n_starts, 2].
            noise: of these, a part of what `noise` gives.

        Yields:
            x and y, the losses there, and the gradients' two elements with their noise, each [n_points], for all
            `candidates` in the order of `_in_order`, their values and the starts. The next step overwrites them.
        """
        self._put_at(starts)
        size = sum(runner.size for runner in self._runners)
        stops = np.cumsum([runner.size for runner in self._runners])
        parts = [(runner, slice(stop - runner.size, stop)) for runner, stop in zip(self._runners, stops, strict=True)]
        evaluate, x, y = self.function.evaluator((size,)), np.empty(size, np.float32), np.empty(size, np.float32)
        for t in range(self.steps + 1):
            for runner, part in parts:
                runner.read(x[part], y[part])
            loss, *slopes = evaluate(x, y)
            if noise is not None and t < self.steps:
                slopes = [
                    (slope.reshape(-1, len(starts)) + each).ravel() for slope, each in zip(slopes, noise[t], strict=True)
                ]
            yield x, y, loss, *slopes
            if t < self.steps:
                with interrupts_wait():  # once for all runners, each of which would do it
                    for runner, part in parts:
                        runner.step(slopes[0][part], slopes[1][part])

    def noise(self, n_starts: int) -> np.ndarray | None:
        """What is added to gradients, [steps, 2, n_starts]."""
        if not self.function.noise:
            return None
        draw = np.random.default_rng([self.function.seed, self._seed])
        drawn = draw.standard_normal((n_starts, self.steps, 2), dtype=np.float32)
        return np.ascontiguousarray(drawn.transpose(1, 2, 0)) * np.float32(self.function.noise)

    def states(self) -> list[np.ndarray]:
        """The states, where a walk is now, of a rule optimizer that is alone, from the first start."""
        (runner,) = self._runners
        assert isinstance(runner, BatchedRunner)
        return runner.states(0)

    def _make_candidates(self) -> list[Candidate]:
        return [Candidate(name, given, self._values, self._relative) for name, given in self._given.items()]

    def _in_order(self) -> list[Candidate]:
        """The candidates by how they are updated: all starts as one weight, one weight for each, and one by one."""
        return [each for together in (True, False, None) for each in self.candidates if each.together is together]

    def _put_at(self, starts: np.ndarray) -> None:
        """Put all runners at their starts: those of the walk before where that can be done, else new ones."""
        if self._runners:
            if all(runner.restart(starts) for runner in self._runners):
                return
            self.candidates = self._make_candidates()  # others have run
        self._runners = []
        for together, members in itertools.groupby(self._in_order(), key=lambda candidate: candidate.together):
            if together is None:
                self._runners += [SequentialRunner(candidate.trainings, starts) for candidate in members]
            else:
                trainings = [training for candidate in members for training in candidate.trainings]
                self._runners.append(BatchedRunner(trainings, starts, together, self._engine))


def checked_starts(where: Function, start: Any) -> np.ndarray:
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
    """A start of one's own, or the function's."""
    if len(found := checked_starts(where, start)) != 1:
        raise ValueError(f"start has {len(found)} points: must be one, (x, y)")
    x, y = np.reshape(where.start if start is None else start, 2)
    return float(x), float(y)


def _diverged(where: Function, paths: np.ndarray, losses: np.ndarray) -> np.ndarray:
    return ~(farthest(where, paths) <= FAR) | ~np.isfinite(losses.max(axis=-1))


def farthest(where: Function, paths: np.ndarray) -> np.ndarray:
    """How far paths [..., steps, 2] get from the middle of what is drawn, in halves of its width or height."""
    found = np.float32(0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        for k, (low, high) in enumerate((where.xlim, where.ylim)):
            away = np.abs(paths[..., k] - np.float32((low + high) / 2)).max(axis=-1)
            found = np.maximum(found, away / np.float32((high - low) / 2))
    return found
