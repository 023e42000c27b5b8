"""race: tune each optimizer, train it from several seeds, and measure how soon it reaches a target loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...trainer.loops.fitting import check_batches, check_loss
from ...trainer.loops.sweeping.train import NotStackableError
from ...trainer.validation import absolute_path, boolean, choice, integer, number
from .candidates import Candidate, candidates_of
from .result import RaceResult, steps_to
from .store import Store
from .training import Plan, time_steps, train

TUNING = 1_000_000  # the first seed of the tuning
Job = tuple[int, int]  # indices of an optimizer and of one of its trials


def race(
    make_model: Callable[[], torch.nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    data: Any,
    optimizers: Any,
    *,
    target: float,
    eval_data: Iterable[Any] | None = None,
    seeds: int | Iterable[int] = 5,
    steps: int = 500,
    every: int | None = None,
    trials: int = 16,
    baseline: str | None = None,
    level: float = 0.95,
    together: int = 64,
    folder: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    progress: bool = True,
) -> RaceResult:
    """Measure how many steps, samples and seconds optimizers need to a target loss, each tuned with the same budget.

    1. **Tuning.** Each optimizer is trained at `trials` settings of its learning rate and one other argument, log-uniform at
       points of a Sobol sequence, which all optimizers share. The setting with the smallest median number of steps to the
       target wins, and among equals that with the smallest final loss. The race uses other seeds than the tuning.
    2. **Race.** Each optimizer is trained at its settings once for each seed. A seed determines initial weights, batches and
       random numbers, which are the same for all optimizers, so each seed compares optimizers in pairs.
    3. **Measurement.** Every `every` steps the mean loss on `eval_data` is measured, with the model in evaluation mode; or
       without `eval_data` the mean training loss since the last measurement. The step at which the target is
       reached is interpolated linearly up to the first measurement at or below it.
    4. **Verdict.** The geometric mean, over seeds, of the ratio of steps to the baseline's, with a bootstrap interval. An
       optimizer that did not reach the target from every seed gets no ratio.

    Trainings run side by side, as in `sweep`; networks that `torch.func.vmap` refuses are trained one by one. Either way
    the numbers are those of a `Trainer`, up to float32 rounding. Steps are timed in separate runs without evaluation, see
    `RaceResult.step_seconds`.

    Use constant learning rates, with warm-up or without: with a decaying schedule the steps to a target say little, unless
    the schedule ends there.

    Args:
        make_model: a function that returns a new model, with random initial weights from torch's generator, which the race
            seeds. If it seeds or loads them itself, all seeds have the same, which the result's `warnings` say.
        loss: a function of the model's outputs and the labels; its result is averaged.
        data: batches (inputs, labels): a list, which is shuffled for each seed and epoch; a DataLoader or another iterable,
            whose random numbers then follow from the seed; or a function from a seed to one of these.
        optimizers: names of optimizers, or a dict from a label to the optimizer's arguments. If the label is not the
            optimizer's name, the arguments have "optimizer": its name, class, or list of (pattern, optimizer, arguments).
            "momentum" is SGD and "nag" is NAG with a momentum of 0.9, unless another is given or searched.
            An argument (low, high) is a range to search. By default the learning rate is searched from 1/30 to 30 times its
            given or default value. If nothing else is searched, `one_minus_momentum` or `one_minus_beta1` is, from 0.02 to
            0.5, if the optimizer has such an average by default; otherwise `wd` is, from 0.00001 to 0.01. The prefix
            `one_minus_` means that 1 minus the argument is searched. In a list of optimizers, `learning_rate` is that of the
            last one, and the others stay in proportion.
        target: the loss to reach; choose it before the race, such as one that the baseline is known to reach.
        eval_data: held-out batches, the same every time they are iterated.
        seeds: how many, or which, from 0 to 999,999. Intervals from fewer than 5 are too short.
        steps: of each training.
        every: steps between measurements; None takes a fiftieth of `steps`.
        trials: settings to try of each optimizer; powers of 2 fill the ranges most evenly.
        baseline: the label of the optimizer to compare the others with; None means the first.
        level: the level of the intervals, in (0, 1).
        together: how many trainings run side by side at most; with 1 a `Trainer` trains one after the other.
        folder: a folder for finished trainings, created if it does not exist. A second call reuses them: after an
            interruption, with another target, or with more seeds or trials. None writes nothing.
        engine: "triton", "cpu", "eager", or None for the fastest that is available.
        progress: show a progress bar.

    Raises:
        TypeError, ValueError: an argument is invalid, or the folder has a race with other settings; nothing has been
            trained or written.
        FileNotFoundError: the parent of `folder` does not exist.
        NotADirectoryError: `folder` is a file.

    Source: time to a target on held-out data, after a quasi-random search in ranges that are fixed beforehand, is how Dahl
    et al. (2023), "Benchmarking Neural Network Training Algorithms" (AlgoPerf), compare. That rankings depend on what is
    searched, and 1 - momentum on a log scale: Choi et al. (2019), "On Empirical Comparisons of Optimizers for Deep
    Learning".

    Example:
        >>> import torch, tristep
        >>> inputs = torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(0))
        >>> data = [(x, x.sum(dim=1, keepdim=True)) for x in inputs]
        >>> make, loss = lambda: torch.nn.Linear(4, 1), torch.nn.MSELoss()
        >>> found = tristep.race(make, loss, data, ["sgd", "adam"], target=0.1, steps=60, trials=8, progress=False)
        >>> print(found.verdict().splitlines()[0])
        adam reached the target in 0 of 5 seeds: no ratio.
        >>> found.needed().shape, sorted(found.settings("adam"))
        ((2, 5), ['learning_rate', 'one_minus_beta1'])
    """
    check_loss(loss)
    if not callable(data):
        check_batches("data", data)
    if eval_data is not None:
        check_batches("eval_data", eval_data)
    candidates = candidates_of(optimizers)
    names = tuple(candidate.name for candidate in candidates)
    target, steps, trials = number("target", target), integer("steps", steps, low=1), integer("trials", trials, low=1)
    every = max(1, steps // 50) if every is None else integer("every", every, low=1, high=steps)
    chosen_seeds = _seeds(seeds)
    baseline = names[0] if baseline is None else choice("baseline", baseline, names)
    place = None if folder is None else absolute_path("folder", folder)
    level, together = number("level", level, above=0, below=1), integer("together", together, low=1)
    boolean("progress", progress)

    plan = Plan(make_model, loss, data, eval_data, steps, every, engine)
    settings: dict[str, Any] = {"steps": steps, "every": every, "held-out data": eval_data is not None}
    if place is not None:  # otherwise a schedule need not be one that can be saved
        settings["optimizers"] = {candidate.name: candidate.about() for candidate in candidates}
    settings |= plan.first_losses(TUNING)
    starts_equally = plan.starts_equally(chosen_seeds)
    store = Store(place, settings)
    points = [candidate.points(trials) for candidate in candidates]

    from tqdm.auto import tqdm  # which looks for widgets when it is imported

    everything = [(i, k) for i in range(len(candidates)) for k in range(trials)]
    total = steps * (len(everything) + len(candidates) * len(chosen_seeds))
    with tqdm(total=total, unit=" steps", desc="tuning", disable=not progress) as bar:
        trainings = _Trainings(plan, candidates, points, store, together, bar.update)
        tuning = trainings.losses(everything, TUNING)[0].reshape(len(candidates), trials, 1, -1)
        winners = np.array([_best(losses, target, plan.measured) for losses in tuning])
        bar.set_description("race")
        raced = [trainings.losses(list(enumerate(winners.tolist())), seed) for seed in chosen_seeds]
        bar.set_description("timing")
        timed = store.get("timing", *winners.tolist())
        if timed is None:
            make = [partial(candidate.make, grid[k]) for candidate, grid, k in zip(candidates, points, winners, strict=True)]
            timed = {"seconds": time_steps(plan, make, TUNING)}
            store.put(timed, "timing", *winners.tolist())
    return RaceResult(
        names,
        baseline,
        target,
        eval_data is not None,
        chosen_seeds,
        plan.measured,
        np.stack([losses for losses, _ in raced], axis=1),
        np.stack([samples for _, samples in raced]),
        tuple(
            dict(zip(candidate.ranges, grid.T.copy(), strict=True))
            for candidate, grid in zip(candidates, points, strict=True)
        ),
        tuning,
        winners,
        timed["seconds"],
        level,
        starts_equally,
    )


class _Trainings:
    """Runs the trainings that the store does not have yet, side by side as long as the network can be stacked."""

    def __init__(
        self,
        plan: Plan,
        candidates: Sequence[Candidate],
        points: Sequence[np.ndarray],
        store: Store,
        together: int,
        tick: Callable[[int], Any],
    ) -> None:
        self._plan, self._candidates, self._points = plan, candidates, points
        self._store, self._together, self._tick = store, together, tick

    def losses(self, jobs: Sequence[Job], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses of jobs, float32 [n_jobs, n_points], and the samples seen at each point, int64 [n_points]."""
        missing = [job for job in jobs if self._store.get(*job, seed) is None]
        self._tick(self._plan.steps * (len(jobs) - len(missing)))
        while missing:
            now, missing = missing[: self._together], missing[self._together :]
            try:
                self._train(now, seed)
            except NotStackableError:
                self._together, missing = 1, now + missing
        trainings: list[Any] = [self._store.get(*job, seed) for job in jobs]
        return np.stack([each["losses"] for each in trainings]), trainings[0]["samples"]

    def _train(self, jobs: Sequence[Job], seed: int) -> None:
        optimizers = [self._candidates[i].make(self._points[i][k]) for i, k in jobs]
        trained, samples = train(self._plan, optimizers, seed, self._together > 1, self._tick)
        for job, losses in zip(jobs, trained, strict=True):
            self._store.put({"losses": losses, "samples": samples}, *job, seed)


def _best(losses: np.ndarray, target: float, measured: np.ndarray) -> int:
    """Return the best of trials [n_trials, n_seeds, n_points]: with the fewest steps, then the smallest final loss."""
    needed = np.sort(steps_to(target, losses, measured), axis=1)
    final = np.sort(np.where(np.isfinite(losses[..., -1]), losses[..., -1], np.inf), axis=1)
    middle = (losses.shape[1] - 1) // 2
    return int(np.lexsort((final[:, middle], needed[:, middle]))[0])


def _seeds(seeds: Any) -> tuple[int, ...]:
    if not isinstance(seeds, Iterable):
        return tuple(range(integer("seeds", seeds, low=1)))
    if isinstance(seeds, str):
        raise TypeError(f"seeds={seeds!r}: must be how many, or integers, such as range(5)")
    numbers = tuple(integer("seeds", seed, low=0, high=TUNING - 1) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds={numbers!r}: must be one or more, each once")
    return numbers
