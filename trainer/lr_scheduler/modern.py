"""Schedules that MXNet does not have: one cycle, warm-up-stable-decay, restarts, cyclic, exponential, piecewise, ..."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..validation import choice, instance, int_or_float, integer, number
from .base import LRScheduler, final_update, half_cosine, increasing, register


@register
class OneCycleScheduler(LRScheduler):
    """One-cycle schedule: raise the learning rate to its peak, then anneal it to far below its first value.

    With n the update count, the learning rate moves ::

        from first to base_lr               for n from 0 to P = pct_start * max_update
        from base_lr to last                for n from P to max_update
        first = base_lr / div_factor        last = first / final_div_factor

    A phase from a to b takes the values ``b + (a - b) * (1 + cos(pi * s)) / 2`` with "cos" and ``a + (b - a) * s`` with
    "linear", where s is the fraction of the phase that has passed. After ``max_update`` the learning rate is constant. The
    paper also varies the momentum; this schedule does not.

    Args:
        max_update: the last update of the cycle, where the learning rate is lowest, an int >= 1.
        base_lr: the peak learning rate, >= 0; torch calls it ``max_lr``.
        pct_start: fraction of ``max_update`` at which the peak is reached, above 0 and below 1.
        div_factor: ratio of the peak to the first learning rate, >= 1.
        final_div_factor: ratio of the first learning rate to the last, >= 1.
        anneal_strategy: shape of each phase, "cos" or "linear".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Source: Smith and Topin, "Super-convergence" (2018), section 4. With M = ``max_update`` and P its peak, torch's
    ``OneCycleLR`` with ``total_steps=M + 1`` and ``pct_start=(P + 1) / (M + 1)`` is the same.

    >>> schedule = OneCycleScheduler(max_update=100, base_lr=1.0, anneal_strategy="linear")
    >>> [round(schedule(n), 6) for n in (0, 15, 30, 65, 100)]
    [0.04, 0.52, 1.0, 0.500002, 4e-06]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal_strategy: str = "cos",
    ) -> None:
        super().__init__(base_lr)
        self.max_update = integer("max_update", max_update, low=1)
        self.pct_start = number("pct_start", pct_start, above=0, below=1)
        self.div_factor = number("div_factor", div_factor, low=1)
        self.final_div_factor = number("final_div_factor", final_div_factor, low=1)
        self.anneal_strategy = choice("anneal_strategy", anneal_strategy, ("cos", "linear"))

    def _after_warmup(self, n):
        first = self.base_lr / self.div_factor
        last, peak = first / self.final_div_factor, self.pct_start * self.max_update
        n = np.minimum(n, self.max_update)
        rises = n <= peak
        part = np.where(rises, n / peak, (n - peak) / (self.max_update - peak))
        begin, end = np.where(rises, first, self.base_lr), np.where(rises, self.base_lr, last)
        if self.anneal_strategy == "linear":
            return begin + (end - begin) * part
        wave = np.cos(np.pi * part)
        return (begin * (1 + wave) + end * (1 - wave)) / 2  # exact at both ends


@register
class WarmupStableDecayScheduler(LRScheduler):
    """Warm-up-stable-decay schedule: keep the learning rate constant and decay it only in the last ``decay_steps`` updates.

    With n the update count, the learning rate is ::

        base_lr                                              for n <= max_update - decay_steps
        final_lr + (base_lr - final_lr) * shape(t)           after that, constant after max_update
        t = (n - max_update + decay_steps) / decay_steps
        shape(t) = 1 - t, 1 - sqrt(t), (1 + cos(pi * t)) / 2

    Args:
        max_update: the update at which the learning rate reaches its final value, an int >= 1.
        decay_steps: number of updates of the decay, an int from 1 to ``max_update - warmup_steps``.
        final_lr: the learning rate at ``max_update`` and later, >= 0.
        decay: shape of the decay, "linear", "sqrt" or "cosine".
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: Hu et al., "MiniCPM" (2024), section 4; Hägele et al., "Scaling laws and compute-optimal training beyond
    fixed training durations" (2024), section 3, for the shapes.

    >>> schedule = WarmupStableDecayScheduler(max_update=100, decay_steps=20, base_lr=1.0, warmup_steps=10)
    >>> [schedule(n) for n in (0, 10, 80, 90, 100, 200)]
    [0.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

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

    def _height(self, n):
        stable = self.max_update - self.warmup_steps - self.decay_steps
        return _DECAYS[self.decay](np.clip(n - stable, 0, self.decay_steps) / self.decay_steps)


_DECAYS = {"linear": lambda t: 1 - t, "sqrt": lambda t: 1 - np.sqrt(t), "cosine": half_cosine}


@register
class InverseSquareRootScheduler(LRScheduler):
    """Schedule that decays the learning rate with the inverse square root of the update count.

    At update n it is ``base_lr * sqrt(T / (n - warmup_steps + T))`` with T = ``timescale``. By default T is
    ``warmup_steps``, which makes this ``base_lr * sqrt(warmup_steps / n)``.

    Args:
        base_lr: the learning rate at the end of the warm-up; in the paper ``1 / sqrt(width of the model * warmup_steps)``.
        timescale: number of updates, > 0, after which the learning rate has fallen to ``base_lr / sqrt(2)``; None means
            ``warmup_steps``, or 1 without a warm-up.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: Vaswani et al., "Attention is all you need" (2017), section 5.3, equation 3.

    >>> schedule = InverseSquareRootScheduler(base_lr=1.0, warmup_steps=100)
    >>> [schedule(n) for n in (50, 100, 400, 10000)]
    [0.5, 1.0, 0.5, 0.1]
    """

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

    def _height(self, n):
        scale = self.timescale or max(self.warmup_steps, 1)
        return np.sqrt(scale / (n + scale))


@register
class CosineRestartsScheduler(LRScheduler):
    """Cosine annealing schedule with warm restarts (SGDR).

    The learning rate is ``final_lr + (base_lr - final_lr) * (1 + cos(pi * t / T)) / 2``, where t is the number of updates
    since the last restart and T the length of the current period. From the end of the warm-up on, periods have the lengths
    ``period``, ``period * period_mult``, ``period * period_mult**2``, ... The update at which a period ends has ``base_lr``.

    Args:
        period: number of updates of the first period, >= 1.
        period_mult: the ratio of a period's length to the previous period's, >= 1.
        base_lr: the learning rate after the warm-up and after each restart, >= 0.
        final_lr: the learning rate that each period falls to, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts" (2017), section 3;
    torch's ``CosineAnnealingWarmRestarts``.

    >>> schedule = CosineRestartsScheduler(period=10, period_mult=2, base_lr=1.0)
    >>> [round(schedule(n), 6) for n in (0, 5, 10, 20, 30)]
    [1.0, 0.5, 1.0, 0.5, 1.0]
    """

    def __init__(
        self,
        period: float,
        period_mult: float = 1,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.period = int_or_float("period", period, low=1)
        self.period_mult = int_or_float("period_mult", period_mult, low=1)
        self.final_lr = number("final_lr", final_lr, low=0)

    def _height(self, n):
        if self.period_mult == 1:
            return half_cosine(n % self.period / self.period)
        starts, lengths = [0], [self.period]
        while starts[-1] + lengths[-1] <= np.max(n, initial=0):
            starts.append(starts[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.period_mult)
        k = np.searchsorted(starts, n, side="right") - 1
        return half_cosine((n - np.array(starts)[k]) / np.array(lengths)[k])


@register
class CyclicScheduler(LRScheduler):
    """Cyclical schedule: the learning rate rises and falls linearly between two values, again and again.

    It is ``base_lr + (max_lr - base_lr) * height * scale``, where height rises from 0 to 1 in ``step_up`` updates and falls
    to 0 in ``step_down`` updates. With n the number of updates since the warm-up, scale is ::

        triangular      1
        triangular2     0.5**c     c = number of cycles completed
        exp_range       gamma**n

    Args:
        step_up: number of updates from ``base_lr`` to ``max_lr``, >= 1.
        max_lr: the highest learning rate, at least ``base_lr``.
        base_lr: the lowest learning rate, after the warm-up, from 0 to ``max_lr``.
        step_down: number of updates from ``max_lr`` back to ``base_lr``, >= 1; None means ``step_up``.
        mode: how the height of cycles shrinks, "triangular" (not at all), "triangular2" or "exp_range".
        gamma: the factor per update of "exp_range", from 0 to 1; other modes ignore it.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: Smith, "Cyclical learning rates for training neural networks" (2017), section 3; torch's ``CyclicLR``.

    >>> schedule = CyclicScheduler(step_up=10, max_lr=1.0, base_lr=0.0, mode="triangular2")
    >>> [schedule(n) for n in (0, 5, 10, 20, 30)]
    [0.0, 0.5, 1.0, 0.0, 0.5]
    """

    def __init__(
        self,
        step_up: float,
        max_lr: float,
        base_lr: float = 0.01,
        step_down: float | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.max_lr = number("max_lr", max_lr, low=0)
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step_up = int_or_float("step_up", step_up, low=1)
        self.step_down = None if step_down is None else int_or_float("step_down", step_down, low=1)
        self.mode = choice("mode", mode, ("triangular", "triangular2", "exp_range"))
        self.gamma = number("gamma", gamma, low=0, high=1)

    def _after_warmup(self, n):
        n = n - self.warmup_steps
        down = self.step_up if self.step_down is None else self.step_down
        cycle, since = np.divmod(n, self.step_up + down)
        height = np.minimum(since / self.step_up, (self.step_up + down - since) / down)
        if self.mode == "triangular2":
            height = height * 0.5**cycle
        elif self.mode == "exp_range":
            height = height * self.gamma**n
        return self.base_lr + (self.max_lr - self.base_lr) * height

    def _check_base_lr(self, value: float) -> None:
        super()._check_base_lr(value)
        if value > self.max_lr:
            raise ValueError(f"base_lr={value!r}: must not exceed max_lr={self.max_lr!r}")


@register
class ExponentialScheduler(LRScheduler):
    """Schedule that decays the learning rate exponentially: ``base_lr * factor**((n - warmup_steps) / step)`` at update n.

    Args:
        factor: multiplier of the learning rate over ``step`` updates, from 0 to 1; torch calls it ``gamma``.
        step: number of updates, > 0, over which the learning rate is multiplied by ``factor``.
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: torch's ``ExponentialLR``. :class:`FactorScheduler` is its staircase form.

    >>> schedule = ExponentialScheduler(factor=0.25, step=100, base_lr=1.0)
    >>> [schedule(n) for n in (0, 50, 100)]
    [1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        factor: float,
        step: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.factor = number("factor", factor, low=0, high=1)
        number("step", step, above=0)
        self.step = int_or_float("step", step)

    def _height(self, n):
        return self.factor ** (n / self.step)


@register
class PiecewiseScheduler(LRScheduler):
    """Schedule with a constant learning rate between listed updates.

    With n the update count, the learning rate is ::

        base_lr          for n <= step[0]
        rates[k]         for step[k] < n <= step[k + 1]
        rates[-1]        for n > step[-1]

    so it changes one update after each number in ``step``, as in :class:`MultiFactorScheduler`.

    Args:
        step: list or tuple of at least one update count, each >= 1, strictly increasing.
        rates: list or tuple of the learning rates after these updates, each >= 0, as many as ``step``.
        base_lr: the learning rate from the warm-up to update ``step[0]``, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: He et al., "Deep residual learning" (2016), section 4.2, a warm-up at a low learning rate and two drops.

    >>> schedule = PiecewiseScheduler(step=[10, 30], rates=[0.5, 0.1], base_lr=1.0)
    >>> [schedule(n) for n in (10, 11, 30, 31)]
    [1.0, 0.5, 0.5, 0.1]
    """

    def __init__(
        self,
        step: Sequence[float],
        rates: Sequence[float],
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = increasing("step", step)
        instance("rates", rates, list | tuple, "a list or tuple of learning rates", shown=True)
        if len(rates) != len(step):
            raise ValueError(f"rates={rates!r}: must hold as many learning rates as step has update counts, {len(step)}")
        self.rates = [number(f"rates[{k}]", rate, low=0) for k, rate in enumerate(rates)]

    def _after_warmup(self, n):
        return np.array([self.base_lr, *self.rates])[np.searchsorted(self.step, n, side="left")]
