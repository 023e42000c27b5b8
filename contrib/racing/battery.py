"""battery: run optimizers on six small tasks, each with one difficulty and each at the best learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...trainer.ensemble import Ensemble
from ...trainer.presets import label, plainer
from ...trainer.validation import choice, integer, number
from .candidates import Candidate, candidates_of
from .result import text_table
from .tasks import SIZE, TASKS, Task

RATES = tuple(np.logspace(-4, 1, 21).tolist())  # four in a decade
WINDOW = 20  # steps over which losses are averaged


@dataclass(repr=False)
class BatteryResult:
    """The result of `battery`.

    Attributes:
        names: labels of the optimizers.
        tasks: keys of `TASKS`.
        steps: the number of steps of each training.
        learning_rates: the rates that were tried, float64 [n_rates].
        chosen: the best rate of each optimizer for each task, float64 [n_optimizers, n_tasks].
        needed: the step from which on the loss, averaged over 20 steps, stays at or below the target, float64
            [n_optimizers, n_tasks, n_seeds]; infinite if the loss is above the target at the end.
        same_as: for optimizers that update vectors as a simpler one does, as Muon does, the name of the simpler one.
    """

    names: tuple[str, ...]
    tasks: tuple[str, ...]
    steps: int
    learning_rates: np.ndarray
    chosen: np.ndarray
    needed: np.ndarray
    same_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Names for tables. An optimizer that updates vectors as a plainer one does says so: "muon (= adam)"."""
        return [label(name, self.same_as.get(name)) for name in self.names]

    @property
    def medians(self) -> np.ndarray:
        """Medians of `needed` over seeds, float64 [n_optimizers, n_tasks]; infinite if half of the seeds failed or more."""
        return np.sort(self.needed, axis=-1)[..., self.needed.shape[-1] // 2]

    @property
    def scores(self) -> np.ndarray:
        """The fewest steps of any optimizer divided by an optimizer's own, from 0 to 1, float64 [n_optimizers, n_tasks].

        An optimizer that failed has 0.

        Source: the inverse of the performance ratio of Dolan & Moré (2002), "Benchmarking optimization software with
        performance profiles", section 2.
        """
        best = self.medians.min(axis=0)
        return np.where(np.isfinite(self.medians), np.where(np.isfinite(best), best, 0.0) / self.medians, 0.0)

    def table(self) -> str:
        """Return a table as text: the steps needed, "-" if half of the seeds failed or more, and the mean score."""
        rows = [["", *(TASKS[task].name for task in self.tasks), "mean score"]]
        for name, medians, scores in zip(self.labels, self.medians, self.scores, strict=True):
            steps = [f"{value:.0f}" if math.isfinite(value) else "-" for value in medians]
            rows.append([name, *steps, f"{scores.mean():.2f}"])
        return text_table(rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<battery of {len(self.tasks)} tasks for {', '.join(self.names)}>"


def battery(
    optimizers: Any,
    tasks: Iterable[str] | None = None,
    *,
    steps: int = 1000,
    seeds: int = 5,
    tuning_seeds: int = 5,
    learning_rates: Sequence[float] = RATES,
    engine: str | None = None,
) -> BatteryResult:
    """Measure how many steps optimizers need on small tasks, each task with one difficulty, at the best learning rate.

    The tasks have 20 weights: "saddle", "ill_conditioned", "noisy", "sparse", "drifting" and "changing_scale"; `TASKS` in
    `tristep.contrib.racing.tasks` says what each is. A task is solved when its loss without noise, averaged over 20 steps,
    reaches a share of the first loss, 1 to 3 %, and stays there to the end. For each optimizer and
    task, the learning rate is the one with the fewest steps from the worst seed of the tuning; the result has the steps of
    other seeds.

    This shows which difficulties an optimizer copes with, not how good it is for a network; use `race` for that.

    Args:
        optimizers: names of optimizers, or a dict from a label to arguments, without a learning rate; see `race`. "momentum"
            is SGD, and "nag" is NAG, with a momentum of 0.9.
        tasks: names of tasks; None means all.
        steps: the number of steps of each training, >= 20.
        seeds: the number of seeds. A seed determines starting points and noise, the same for all optimizers.
        tuning_seeds: the number of other seeds, for the choice of the learning rate.
        learning_rates: the rates to try; by default 21 from 0.0001 to 10.
        engine: "triton", "cpu", "eager", or None for the fastest that is available.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> import tristep
        >>> found = tristep.battery(["sgd", "adam"], ["sparse"], steps=400, seeds=3, learning_rates=[0.01, 0.1])
        >>> found.scores.shape
        (2, 1)

    Optimizers of matrices, such as Muon, show nothing here: they update vectors as AdamW does. The table says so, as
    "muon (= adam)".

    Source: a battery of tasks that an optimizer solves or not is LightBench's idea (of HeavyBall); the tasks are our own.
    """
    if isinstance(optimizers, Mapping):
        for name, arguments in optimizers.items():
            if isinstance(arguments, Mapping) and "learning_rate" in arguments:
                raise ValueError(f"optimizers[{name!r}] has a learning_rate, which is tuned here: give learning_rates")
    candidates = candidates_of(optimizers, one_more=False)
    for candidate in candidates:
        if more := [name for name in candidate.ranges if name != "learning_rate"]:
            raise ValueError(f"optimizers[{candidate.name!r}] has a range for {more[0]}: only learning rates are tuned here")
    names = tuple(TASKS) if tasks is None else tuple(choice("tasks", task, TASKS) for task in tasks)
    if not names:
        raise ValueError("tasks is empty: name at least one, or leave it out for all")
    steps, seeds = integer("steps", steps, low=WINDOW), integer("seeds", seeds, low=1)
    tuning_seeds = integer("tuning_seeds", tuning_seeds, low=1)
    rates = np.array([number("learning_rates", rate, above=0) for rate in learning_rates])
    if not len(rates):
        raise ValueError("learning_rates is empty: give at least one")
    same = {each.name: plainer(each.name, {"optimizer": each.kind, **each.fixed}) for each in candidates}
    chosen, needed = [], []
    for name in names:
        settled, final = _trained(TASKS[name], candidates, rates, steps, tuning_seeds + seeds, engine)
        tuned, last = (each[..., :tuning_seeds].max(axis=-1) for each in (settled, final))
        best = [int(np.lexsort((b, a))[0]) for a, b in zip(tuned, last, strict=True)]
        chosen.append(rates[best])
        needed.append(settled[range(len(best)), best, tuning_seeds:])
    return BatteryResult(
        tuple(candidate.name for candidate in candidates),
        names,
        steps,
        rates,
        np.stack(chosen, axis=1),
        np.stack(needed, axis=1),
        {name: other for name, other in same.items() if other},
    )


def _trained(
    task: Task, candidates: Sequence[Candidate], rates: np.ndarray, steps: int, seeds: int, engine: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Train on a task. Returns steps to the target and last losses, float64 [n_optimizers, n_rates, n_seeds] each."""
    drawn = task.make([torch.Generator().manual_seed(seed) for seed in range(seeds)], steps)
    shape = (len(candidates), len(rates), seeds)
    weights = drawn.start.expand(*shape, SIZE).contiguous()
    at_rates = [replace(candidate, ranges={"learning_rate": (rates[0], rates[-1])}) for candidate in candidates]
    optimizers = [each.make([rate]) for each in at_rates for rate in rates for _ in range(seeds)]
    many = Ensemble(optimizers, [weights.view(-1, SIZE)], engine, stacked=True)
    gradient, losses = torch.empty_like(weights), torch.empty(steps + 1, *shape)
    for step in range(steps):
        losses[step] = drawn.loss(weights, step)
        gradient.copy_(drawn.gradient(weights, step))
        many.step(None if step else [gradient.view(-1, SIZE)])
    losses[steps] = drawn.loss(weights, steps)
    return _settled(losses.double().numpy(), task.target)


def _settled(losses: np.ndarray, target: float) -> tuple[np.ndarray, np.ndarray]:
    """Return from which step on losses [n + 1, ...] stay below `target` times the first one, and the last mean."""
    losses = np.where(np.isfinite(losses), losses, np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(losses, WINDOW, axis=0)
    means = windows.mean(axis=-1)  # of the losses after k to k + 19 steps
    above = means > target * losses[0]
    last = len(means) - 1 - above[::-1].argmax(axis=0)
    settled = np.where(above.any(axis=0), last + WINDOW, WINDOW - 1).astype(np.float64)
    return np.where(above[-1], np.inf, settled), means[-1]
