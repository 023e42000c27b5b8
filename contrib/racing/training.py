"""The trainings of a race: their batches and measurements, side by side or one by one, and the time of a step."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...trainer.loops.batch_step import device_of, unpack_batch
from ...trainer.loops.fitting import evaluate
from ...trainer.loops.sweeping.train import Batches, Evaluate, start, start_equally, train_separately, train_together
from ...trainer.optimizer import Optimizer
from ...trainer.trainer import Trainer

ROUNDS, STEPS = 11, 3  # rounds of timing, and steps in each round


class SeededBatches:
    """Batches in an order that depends on seed and epoch only, so all optimizers of a race get the same ones.

    Args:
        data: a list of batches, which is shuffled; another iterable of batches, which is iterated while torch's generator is
            seeded; or a function from the seed to a list or iterable, which is not shuffled.
        seed: the seed of the training.

    Attributes:
        sizes: the number of samples of each batch so far.
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
            if isinstance(batch, (tuple, list)) and batch:  # other values raise when they are unpacked
                first = batch[0]
                self.sizes.append(len(first[0] if isinstance(first, (tuple, list)) else first))
            yield batch


def _with_random_numbers(data: Iterable[Any], generator: torch.Generator) -> Iterator[Any]:
    """Iterate over data while torch's global generator has the state of `generator`."""
    data_generator = getattr(data, "generator", None)
    if isinstance(data_generator, torch.Generator):  # as a DataLoader may have
        data_generator.set_state(generator.get_state())
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
    """The settings that all trainings of a race share; the fields are arguments of `race`."""

    make_model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    data: Any
    eval_data: Iterable[Any] | None
    steps: int
    every: int
    engine: str | None

    @property
    def measured(self) -> np.ndarray:
        """The steps after which the loss is measured, int64 [n_points]."""
        return np.array(sorted({*range(0, self.steps + 1, self.every), self.steps}))

    def starts_equally(self, seeds: Sequence[int]) -> bool:
        """Return whether the networks of the first two seeds have the same weights."""
        return start_equally([start(self.make_model, seed) for seed in seeds[:2]])

    def first_losses(self, seed: int) -> dict[str, float]:
        """Return losses of the initial weights, by which a store notices a changed network, loss or data.

        Raises:
            ValueError: the data give no batch.
        """
        model, losses = start(self.make_model, seed), {}
        first = [batch for batch, _ in zip(SeededBatches(self.data, seed), range(1), strict=False)]
        for name, data in (("data", first), ("eval_data", self.eval_data)):
            if data is not None:
                if next(iter(data), None) is None:
                    raise ValueError(f"{name} gave no batch: it must be a list of batches (inputs, labels), or the like")
                losses[f"loss on {name} of the first weights"] = evaluate(model, self.loss, data, {})["loss"]
        return losses


def train(
    plan: Plan, optimizers: Sequence[Optimizer], seed: int, together: bool, tick: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Train a copy of the network with each optimizer, from the same weights and on the same batches.

    Args:
        plan: what the trainings share.
        optimizers: one for each copy; more than one only with `together`.
        seed: the seed of weights, batches and the network's random numbers.
        together: whether the copies are run as one by `torch.func.vmap`.
        tick: called with the number of steps taken.

    Returns:
        Losses, float32 [n, n_points], and the number of samples seen at each point, int64 [n_points].

    Raises:
        NotStackableError: the copies cannot be run as one; no step has been taken.
    """
    model, batches = start(plan.make_model, seed), SeededBatches(plan.data, seed)
    at, looked = set(plan.measured.tolist()), []

    def watch(step: int, evaluate: Evaluate) -> None:
        if step:
            tick(len(optimizers))
        if plan.eval_data is not None and step in at:
            looked.append(evaluate(plan.eval_data).float().cpu().numpy())

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
    """Time a training step of each optimizer. Returns seconds, float64 [n_optimizers, 11].

    A step is forward, backward and update, by a `Trainer`. The optimizers take turns of 3 steps in 11 rounds, after one
    round to warm up, so that a temporary slowdown of the machine affects all of them.
    """
    model = start(plan.make_model, seed)
    place = device_of(model)
    batches = [batch for batch, _ in zip(SeededBatches(plan.data, seed), range(STEPS), strict=False)]
    models = [copy.deepcopy(model) for _ in make]
    trainers = [Trainer(net, make_optimizer(), engine=plan.engine) for net, make_optimizer in zip(models, make, strict=True)]
    seconds = np.zeros((len(make), ROUNDS + 1))
    with torch.random.fork_rng():
        for turn in range(ROUNDS + 1):
            for i, (net, trainer) in enumerate(zip(models, trainers, strict=True)):
                begun = time.perf_counter()
                for batch in batches:
                    inputs, labels = unpack_batch("data", batch, place)
                    trainer.zero_grad()
                    plan.loss(net(*inputs), labels).mean().backward()
                    trainer.step(1)
                if place.type == "cuda":
                    torch.cuda.synchronize(place)
                seconds[i, turn] = (time.perf_counter() - begun) / len(batches)
    return seconds[:, 1:]
