"""The trainings of a race: with which batches, measured at which steps, side by side or alone; and how long a step takes."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.fitting import device_of, evaluate, unpack_batch
from ...trainer.optimizer import Optimizer
from ...trainer.sweeping.train import Batches, Look, start, train_separately, train_together
from ...trainer.trainer import Trainer

ROUNDS, STEPS = 11, 3  # of timing, and in each of them


class SeededBatches:
    """Batches in an order that depends on the seed and the epoch only: every optimizer of a race gets the same.

    Args:
        data: a list of batches, which is shuffled; something else that gives batches, which draws its random numbers from
            torch's generator, set by the seed meanwhile; or a function from the seed to one of these, which is not shuffled.
        seed: of the training.

    Attributes:
        sizes: how many samples each batch had that has been given out.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._seed, self._epoch = seed, 0
        self._shuffles = isinstance(data, (list, tuple))
        self._data = data(seed) if callable(data) else data
        self.sizes: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed((self._seed << 20) + self._epoch)
        self._epoch += 1
        if self._shuffles:
            batches: Iterator[Any] = (self._data[i] for i in torch.randperm(len(self._data), generator=generator))
        else:
            batches = _with_random_numbers(self._data, generator)
        for batch in batches:
            if isinstance(batch, (tuple, list)) and batch:  # else whoever unpacks it says what is wrong
                first = batch[0]
                self.sizes.append(len(first[0] if isinstance(first, (tuple, list)) else first))
            yield batch


def _with_random_numbers(data: Iterable[Any], generator: torch.Generator) -> Iterator[Any]:
    """What data gives while torch's generator has the state of this one."""
    own = getattr(data, "generator", None)
    if isinstance(own, torch.Generator):  # as a DataLoader may have
        own.set_state(generator.get_state())
    state, batches = generator.get_state(), None
    while True:
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            batches = iter(data) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(before)
        yield batch


@dataclass(frozen=True)
class Plan:
    """What all trainings of a race have in common; the arguments are those of `race`."""

    make_model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    data: Any
    eval_data: Iterable[Any] | None
    steps: int
    every: int
    engine: str | None

    @property
    def measured(self) -> np.ndarray:
        """int64 [n_points]: after which steps the loss is measured."""
        return np.array(sorted({*range(0, self.steps + 1, self.every), self.steps}))

    def first_losses(self, seed: int) -> dict[str, float]:
        """Losses of initial weights, by which a changed network, loss or data is noticed.

        Raises:
            ValueError: there is no data.
        """
        model, found = start(self.make_model, seed), {}
        first = [batch for batch, _ in zip(SeededBatches(self.data, seed), range(1), strict=False)]
        for name, data in (("data", first), ("eval_data", self.eval_data)):
            if data is not None:
                if next(iter(data), None) is None:
                    raise ValueError(f"{name} gave no batch: it must be a list of batches (inputs, labels), or the like")
                found[f"loss on {name} of the first weights"] = evaluate(model, self.loss, data, {})["loss"]
        return found


def train(
    plan: Plan, optimizers: Sequence[Optimizer], seed: int, together: bool, tick: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Train a copy of the network with each optimizer, from the same weights and on the same batches.

    Args:
        plan: of the race.
        optimizers: one for each copy; of several, only if they are trained together.
        seed: of weights, batches and what the network draws.
        together: whether they are run as one.
        tick: called with the number of steps taken.

    Returns:
        Losses float32 [n, n_points], and how many samples had been seen then, int64 [n_points].

    Raises:
        NotStackableError: they cannot be run as one; before the first step.
    """
    model, batches = start(plan.make_model, seed), SeededBatches(plan.data, seed)
    at, looked = set(plan.measured.tolist()), []

    def watch(step: int, look: Look) -> None:
        if step:
            tick(len(optimizers))
        if plan.eval_data is not None and step in at:
            looked.append(look(plan.eval_data).float().cpu().numpy())

    run = train_together if together else train_separately
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        losses, _, _ = run(
            [model] * len(optimizers), optimizers, plan.loss, Batches(batches, None, plan.steps), plan.engine, watch
        )
    samples = np.concatenate([[0], np.cumsum(batches.sizes)])[plan.measured]
    if plan.eval_data is None:
        ends = plan.measured
        looked = [losses[:, 0], *(losses[:, a:b].mean(axis=1) for a, b in itertools.pairwise(ends))]
    return np.stack(looked, axis=1), samples


def time_steps(plan: Plan, make: Sequence[Callable[[], Optimizer]], seed: int) -> np.ndarray:
    """Seconds of a step of each optimizer with nothing else running here, float64 [n_optimizers, 11].

    Forward, backward and update, by a `Trainer`, 3 steps at a time: the optimizers take turns, in 11 rounds after one that
    does not count, so that what slows the machine down for a while meets all of them.
    """
    model = start(plan.make_model, seed)
    place = device_of(model)
    batches = [batch for batch, _ in zip(SeededBatches(plan.data, seed), range(STEPS), strict=False)]
    models = [copy.deepcopy(model) for _ in make]
    trainers = [Trainer(own, one(), engine=plan.engine) for own, one in zip(models, make, strict=True)]
    seconds = np.zeros((len(make), ROUNDS + 1))
    with torch.random.fork_rng():
        for turn in range(ROUNDS + 1):
            for i, (own, trainer) in enumerate(zip(models, trainers, strict=True)):
                begun = time.perf_counter()
                for batch in batches:
                    inputs, labels = unpack_batch("data", batch, place)
                    trainer.zero_grad()
                    plan.loss(own(*inputs), labels).mean().backward()
                    trainer.step(1)
                if place.type == "cuda":
                    torch.cuda.synchronize(place)
                seconds[i, turn] = (time.perf_counter() - begun) / len(batches)
    return seconds[:, 1:]
