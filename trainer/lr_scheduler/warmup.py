"""Schedules that were proposed together with their warm-up: one-cycle, warmup-stable-decay and inverse square root."""

from __future__ import annotations

import numpy as np

from ..validation import boolean, choice, integer, number
from .base import LRScheduler, final_update, half_cosine, register


@register
class OneCycleScheduler(LRScheduler):
    """Raise the learning rate to its peak, and anneal it to far below where it began.

    ::

        first = base_lr / div_factor        last = first / final_div_factor
        from first to base_lr               for n from 0 to P = pct_start * max_update
        from base_lr to last                for n from P to max_update

    and with ``three_phase`` from base_lr back to first for n from P to 2 P, and from first to last after that.
    From a to b, with s the fraction of the phase, "cos" is ``b + (a - b) * (1 + cos(pi * s)) / 2`` and "linear" is
    ``a + (b - a) * s``. After ``max_update`` the learning rate is constant. (The momentum, which the paper moves in the
    opposite direction, is left alone.)

    Args:
        max_update: the update at which the learning rate is lowest, an int >= 1.
        base_lr: the peak, >= 0; torch's ``max_lr``.
        pct_start: where the peak is, as a fraction of ``max_update``: between 0 and 1, and at most 0.5 with
            ``three_phase``.
        div_factor: ``base_lr`` divided by the first learning rate, >= 1.
        final_div_factor: the first learning rate divided by the last, >= 1.
        anneal_strategy: "cos" or "linear".
        three_phase: whether the learning rate falls in two phases, the first as long as the rise.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

    Source: Smith and Topin, "Super-convergence" (2018), section 4. With M = ``max_update`` and P its peak, torch's
    ``OneCycleLR`` with ``total_steps=M + 1`` and ``pct_start=(P + 1) / (M + 1)`` is the same.

    >>> schedule = OneCycleScheduler(max_update=100, base_lr=1.0, anneal_strategy="linear")
    >>> [round(schedule(n), 6) for n in (0, 15, 30, 65, 100)]
    [0.04, 0.52, 1.0, 0.500002, 4e-06]
    """

    _peaks = ("base_lr",)

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
    ) -> None:
        super().__init__(base_lr)
        self.max_update = integer("max_update", max_update, low=1)
        self.three_phase = boolean("three_phase", three_phase)
        self.pct_start = number("pct_start", pct_start, above=0, **({"high": 0.5} if three_phase else {"below": 1}))
        self.div_factor = number("div_factor", div_factor, low=1)
        self.final_div_factor = number("final_div_factor", final_div_factor, low=1)
        self.anneal_strategy = choice("anneal_strategy", anneal_strategy, ("cos", "linear"))

    def _after_warmup(self, n):
        first = self.base_lr / self.div_factor
        last = first / self.final_div_factor
        peak = self.pct_start * self.max_update
        if self.three_phase:
            ends, rates = [peak, 2 * peak, self.max_update], [first, self.base_lr, first, last]
        else:
            ends, rates = [peak, self.max_update], [first, self.base_lr, last]
        n = np.minimum(n, self.max_update)
        phase = np.minimum(np.searchsorted(ends, n), len(ends) - 1)
        starts = np.array([0.0, *ends[:-1]])[phase]
        part = (n - starts) / (np.array(ends)[phase] - starts)
        begin, end = np.array(rates)[phase], np.array(rates)[phase + 1]
        if self.anneal_strategy == "linear":
            return begin + (end - begin) * part
        wave = np.cos(np.pi * part)
        return (begin * (1 + wave) + end * (1 - wave)) / 2  # exact at both ends


@register
class WarmupStableDecayScheduler(LRScheduler):
    """Keep the learning rate constant, and lower it to its final value in the last updates only.

    ::

        base_lr                                              for n <= max_update - decay_steps
        final_lr + (base_lr - final_lr) * shape(t)           after that
        t = (n - max_update + decay_steps) / decay_steps
        shape(t) = 1 - t, 1 - sqrt(t), (1 + cos(pi * t)) / 2

    After ``max_update`` the learning rate is constant. The warm-up is that of all schedules.

    Args:
        max_update: the update at which the learning rate reaches its final value, an int >= 1.
        decay_steps: number of updates of the decay, an int >= 1.
        base_lr: as in :class:`LRScheduler`.
        final_lr: the learning rate at ``max_update`` and later, >= 0.
        decay: shape of the decay, "linear", "sqrt" or "cosine".
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`; warm-up and decay together are longer than ``max_update``.

    Source: Hu et al., "MiniCPM" (2024), section 4; Hägele et al., "Scaling laws and compute-optimal training beyond
    fixed training durations" (2024), section 3, for the shapes.

    >>> schedule = WarmupStableDecayScheduler(max_update=100, decay_steps=20, base_lr=1.0, warmup_steps=10)
    >>> [schedule(n) for n in (0, 10, 80, 90, 100, 200)]
    [0.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    _peaks = ("base_lr", "final_lr")

    def __init__(
        self,
        max_update: int,
        decay_steps: int,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        decay: str = "linear",
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = final_update(max_update, self.warmup_steps)
        self.decay_steps = integer("decay_steps", decay_steps, low=1)
        if self.warmup_steps + self.decay_steps > self.max_update:
            raise ValueError(
                f"decay_steps={decay_steps!r}: must be at most {self.max_update - self.warmup_steps}, "
                f"max_update={self.max_update} less warmup_steps={self.warmup_steps}"
            )
        self.final_lr = number("final_lr", final_lr, low=0)
        self.decay = choice("decay", decay, _DECAYS)

    def _after_warmup(self, n):
        begin = self.max_update - self.decay_steps
        t = (np.clip(n, begin, self.max_update) - begin) / self.decay_steps
        return self.final_lr + (self.base_lr - self.final_lr) * _DECAYS[self.decay](t)


_DECAYS = {"linear": lambda t: 1 - t, "sqrt": lambda t: 1 - np.sqrt(t), "cosine": half_cosine}


@register
class InverseSquareRootScheduler(LRScheduler):
    """Decay of the learning rate with the inverse square root of the update count.

    ::

        base_lr * sqrt(T / (n - warmup_steps + T)),  T = timescale

    which is ``base_lr * sqrt(warmup_steps / n)`` unless ``timescale`` is given.

    Args:
        base_lr: the learning rate at the end of the warm-up. That of the paper is
            ``1 / sqrt(width of the model * warmup_steps)``.
        timescale: number of updates, > 0, after which the learning rate has fallen to ``base_lr / sqrt(2)``; None means
            ``warmup_steps``, or 1 without a warm-up.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`, and so are the errors.

    Source: Vaswani et al., "Attention is all you need" (2017), section 5.3, equation 3.

    >>> schedule = InverseSquareRootScheduler(base_lr=1.0, warmup_steps=100)
    >>> [schedule(n) for n in (50, 100, 400, 10000)]
    [0.5, 1.0, 0.5, 0.1]
    """

    _peaks = ("base_lr",)

    def __init__(
        self,
        base_lr: float = 0.01,
        timescale: float | None = None,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.timescale = None if timescale is None else number("timescale", timescale, above=0)

    def _after_warmup(self, n):
        scale = self.timescale or max(self.warmup_steps, 1)
        return self.base_lr * np.sqrt(scale / (n - self.warmup_steps + scale))
