"""Six small tasks, each with one difficulty of training networks, for many copies of 20 weights at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SIZE = 20  # weights


class Given(NamedTuple):
    """A task with the random numbers of several seeds.

    Attributes:
        start: the initial weights, float32 [n_seeds, 20].
        loss: a function of weights [..., n_seeds, 20] and the step, from 0, that returns the loss without noise,
            [..., n_seeds]; its minimum is 0.
        gradient: a function of the same arguments that returns gradients with noise, in the shape of the weights. The noise
            depends on seed and step only.
    """

    start: torch.Tensor
    loss: Callable[[torch.Tensor, int], torch.Tensor]
    gradient: Callable[[torch.Tensor, int], torch.Tensor]


class Task(NamedTuple):
    """A task of the battery.

    Attributes:
        name: its name in pictures.
        make: a function of generators, one for each seed, and the number of steps, that returns a `Given`.
        target: the share of the first loss to reach, and to stay below.
        about: what is difficult, and what helps.
        source: a paper about this difficulty.
    """

    name: str
    make: Callable[[Sequence[torch.Generator], int], Given]
    target: float
    about: str
    source: str


def saddle(random: Sequence[torch.Generator], steps: int) -> Given:
    """Half of the weights in bowls w^2 / 2, half near the saddle of (w^2 - 1)^2 / 4."""
    half, start = SIZE // 2, _normal(random, SIZE)
    start[:, half:] *= 1e-4

    def loss(w: torch.Tensor, step: int) -> torch.Tensor:
        return (w[..., :half] ** 2).sum(-1) / 2 + ((w[..., half:] ** 2 - 1) ** 2).sum(-1) / 4

    def gradient(w: torch.Tensor, step: int) -> torch.Tensor:
        return torch.cat([w[..., :half], w[..., half:] ** 3 - w[..., half:]], dim=-1)

    return Given(start, loss, gradient)


def ill_conditioned(random: Sequence[torch.Generator], steps: int) -> Given:
    """A rotated bowl of condition 1,000, all directions of which have an equal part in the first loss."""
    curvature = torch.logspace(0, -3, SIZE)
    axes = torch.linalg.qr(_normal(random, SIZE, SIZE))[0]
    start = torch.einsum("sij,sj->si", axes, _normal(random, SIZE) / curvature.sqrt())
    matrix = axes * curvature @ axes.mT

    def loss(w: torch.Tensor, step: int) -> torch.Tensor:
        return (w * gradient(w, step)).sum(-1) / 2

    def gradient(w: torch.Tensor, step: int) -> torch.Tensor:
        return torch.einsum("...si,sij->...sj", w, matrix)

    return Given(start, loss, gradient)


def noisy(random: Sequence[torch.Generator], steps: int) -> Given:
    """A round bowl whose gradients have noise as large as the first gradient."""
    noise = _normal(random, steps, SIZE)
    return Given(_normal(random, SIZE), _bowl, lambda w, step: w + noise[:, step])


def sparse(random: Sequence[torch.Generator], steps: int) -> Given:
    """A round bowl, of whose gradient each element is seen at its own frequency, from every step to one in 30."""
    noise = 0.5 * _normal(random, steps, SIZE)
    often = torch.logspace(0, -math.log10(30), SIZE)
    seen = torch.stack([torch.rand(steps, SIZE, generator=each) for each in random]) < often
    return Given(_normal(random, SIZE), _bowl, lambda w, step: seen[:, step] * (w + noise[:, step]))


def drifting(random: Sequence[torch.Generator], steps: int) -> Given:
    """A round bowl whose minimum moves by 0.01 a step in each direction; gradients have noise."""
    noise, way = 0.3 * _normal(random, steps, SIZE), 0.01 * _normal(random, SIZE).sign()
    return Given(
        _normal(random, SIZE), lambda w, step: _bowl(w - way * step, step), lambda w, step: w - way * step + noise[:, step]
    )


def changing_scale(random: Sequence[torch.Generator], steps: int) -> Given:
    """A round bowl whose gradients, with their noise, are multiplied by a new factor from 0.03 to 30 every 50 steps."""
    noise = 0.3 * _normal(random, steps, SIZE)
    scales = torch.stack([30 ** (2 * torch.rand(-(-steps // 50), generator=each) - 1) for each in random])
    return Given(_normal(random, SIZE), _bowl, lambda w, step: scales[:, step // 50, None] * (w + noise[:, step]))


def _bowl(w: torch.Tensor, step: int) -> torch.Tensor:
    return (w**2).sum(-1) / 2


def _normal(random: Sequence[torch.Generator], *shape: int) -> torch.Tensor:
    return torch.stack([torch.randn(shape, generator=each) for each in random])


TASKS = {
    task.make.__name__: task
    for task in (
        Task(
            "saddle",
            saddle,
            0.01,
            "The gradient all but vanishes near a saddle; momentum and scaling leave it sooner.",
            "Dauphin et al. (2014), Identifying and attacking the saddle point problem",
        ),
        Task(
            "ill-conditioned",
            ill_conditioned,
            0.01,
            "The steepest direction limits the rate; rotated, so that scaling single weights helps little. Momentum does.",
            "Nocedal & Wright (2006), Numerical Optimization, section 3.3",
        ),
        Task(
            "noisy",
            noisy,
            0.02,
            "Steps must be small enough to average the noise, and large enough to arrive.",
            "Bottou, Curtis & Nocedal (2018), Optimization Methods for Large-Scale Machine Learning, theorem 4.6",
        ),
        Task(
            "sparse",
            sparse,
            0.03,
            "Weights that are seldom seen need larger steps than the others.",
            "Duchi, Hazan & Singer (2011), Adaptive Subgradient Methods",
        ),
        Task(
            "drifting",
            drifting,
            0.03,
            "What is to be found moves; averages over the past lag behind, and rates that vanish stop following.",
            "Sutton (1992), Adapting Bias by Gradient Descent",
        ),
        Task(
            "changing scale",
            changing_scale,
            0.02,
            "Gradients grow and shrink a hundredfold; scaling must follow, or the rate fits the largest only.",
            "Pascanu, Mikolov & Bengio (2013), On the difficulty of training recurrent neural networks",
        ),
    )
}
