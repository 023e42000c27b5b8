"""Schedules that MXNet does not have: periodic, exponential and piecewise ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..validation import choice, int_or_float, number
from .base import LRScheduler, half_cosine, increasing, register


@register
class CosineRestartsScheduler(LRScheduler):
    """Cosine annealing with warm restarts (SGDR).

    ::

        final_lr + (base_lr - final_lr) * (1 + cos(pi * t / T)) / 2

    with t the number of updates since the last restart, and T the length of this period. Periods are
    ``period``, ``period * period_mult``, ``period * period_mult**2``, ... long, counted from the end of the warm-up. The
    update at which a period ends has ``base_lr``.

    Args:
        period: number of updates of the first period, >= 1.
        period_mult: length of each period divided by that of the one before, >= 1.
        base_lr: the learning rate after each restart; as in :class:`LRScheduler`.
        final_lr: the learning rate that each period falls to, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`, and so are the errors.

    Source: Loshchilov and Hutter, "SGDR: Stochastic gradient descent with warm restarts" (2017), section 3;
    torch's ``CosineAnnealingWarmRestarts``.

    >>> schedule = CosineRestartsScheduler(period=10, period_mult=2, base_lr=1.0)
    >>> [round(schedule(n), 6) for n in (0, 5, 10, 20, 30)]
    [1.0, 0.5, 1.0, 0.5, 1.0]
    """

    _peaks = ("base_lr", "final_lr")

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

    def _after_warmup(self, n):
        since = n - self.warmup_steps
        if self.period_mult == 1:
            t = since % self.period / self.period
        else:
            last = np.max(since, initial=0)
            starts, lengths = [0], [self.period]
            while starts[-1] + lengths[-1] <= last:
                starts.append(starts[-1] + lengths[-1])
                lengths.append(lengths[-1] * self.period_mult)
            k = np.searchsorted(starts, since, side="right") - 1
            t = (since - np.array(starts)[k]) / np.array(lengths)[k]
        return self.final_lr + (self.base_lr - self.final_lr) * half_cosine(t)


@register
class CyclicScheduler(LRScheduler):
    """Cyclical learning rate: linear rise and fall, over and over.

    ::

        base_lr + (max_lr - base_lr) * height * scale

    with n counted from the end of the warm-up; height goes from 0 to 1 in ``step_up`` updates and back to 0 in
    ``step_down``; and scale is ::

        triangular      1
        triangular2     0.5**c     c = number of cycles completed
        exp_range       gamma**n

    Args:
        step_up: number of updates from ``base_lr`` to ``max_lr``, >= 1.
        max_lr: the highest learning rate, at least ``base_lr``.
        base_lr: the lowest learning rate; as in :class:`LRScheduler`.
        step_down: number of updates of the fall, >= 1; None means ``step_up``.
        mode: "triangular", "triangular2" or "exp_range".
        gamma: for "exp_range", from 0 to 1.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`, and so are the errors.

    Source: Smith, "Cyclical learning rates for training neural networks" (2017), section 3; torch's ``CyclicLR``.

    >>> schedule = CyclicScheduler(step_up=10, max_lr=1.0, base_lr=0.0, mode="triangular2")
    >>> [schedule(n) for n in (0, 5, 10, 20, 30)]
    [0.0, 0.5, 1.0, 0.0, 0.5]
    """

    _peaks = ("base_lr", "max_lr")

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
    """Exponential decay of the learning rate, ``base_lr * factor**((n - warmup_steps) / step)``.

    Args:
        factor: what the learning rate is multiplied by in ``step`` updates, from 0 to 1; torch's ``gamma``.
        step: number of updates, > 0, in which the learning rate changes by ``factor``.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`, and so are the errors.

    Source: torch's ``ExponentialLR``. :class:`FactorScheduler` is its staircase form.

    >>> schedule = ExponentialScheduler(factor=0.25, step=100, base_lr=1.0)
    >>> [schedule(n) for n in (0, 50, 100)]
    [1.0, 0.5, 0.25]
    """

    _peaks = ("base_lr",)

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

    def _after_warmup(self, n):
        return self.base_lr * self.factor ** ((n - self.warmup_steps) / self.step)


@register
class PiecewiseScheduler(LRScheduler):
    """Piecewise constant learning rates.

    ::

        base_lr          for n <= step[0]
        rates[k]         for step[k] < n <= step[k + 1], and for all n > step[k] where it is the last

    so a change comes one update after the number in ``step``, as with :class:`MultiFactorScheduler`.

    Args:
        step: list or tuple of update counts, each >= 1, strictly increasing, at least one.
        rates: as many learning rates, each >= 0.
        base_lr: the learning rate before the first of them; as in :class:`LRScheduler`.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`; ``step`` and ``rates`` differ in length.

    Source: He et al., "Deep residual learning" (2016), section 4.2, a warm-up at a low learning rate and two drops.

    >>> schedule = PiecewiseScheduler(step=[10, 30], rates=[0.5, 0.1], base_lr=1.0)
    >>> [schedule(n) for n in (10, 11, 30, 31)]
    [1.0, 0.5, 0.5, 0.1]
    """

    _peaks = ("base_lr", "rates")

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
        self.rates = _rates(rates, len(self.step))

    def _after_warmup(self, n):
        return np.array([self.base_lr, *self.rates])[np.searchsorted(self.step, n, side="left")]


@register
class InterpolatedScheduler(LRScheduler):
    """Linear interpolation between given learning rates at given updates.

    ::

        linear    r[k] + (r[k + 1] - r[k]) * t
        log       r[k] * (r[k + 1] / r[k])**t
        t = (n - s[k]) / (s[k + 1] - s[k])    for s[k] <= n <= s[k + 1]

    with s = (warmup_steps, *step) and r = (base_lr, *rates); after the last update it keeps the last learning rate.

    Args:
        step: list or tuple of update counts, each >= 1 and above ``warmup_steps``, strictly increasing, at least one.
        rates: as many learning rates, each >= 0, with "log" > 0.
        scale: ``"linear"``, or ``"log"`` for interpolation on a log scale.
        base_lr: the learning rate at the end of the warm-up; with "log" > 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`; ``step`` and ``rates`` differ in length.

    Source: NumPy's ``interp``.

    >>> schedule = InterpolatedScheduler(step=[10, 30], rates=[1.0, 0.5], base_lr=0.5)
    >>> [schedule(n) for n in (0, 5, 10, 20, 30, 99)]
    [0.5, 0.75, 1.0, 0.75, 0.5, 0.5]
    """

    _peaks = ("base_lr", "rates")

    def __init__(
        self,
        step: Sequence[float],
        rates: Sequence[float],
        scale: str = "linear",
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.scale = choice("scale", scale, ("linear", "log"))
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = increasing("step", step)
        if self.step[0] <= self.warmup_steps:
            raise ValueError(f"step={step!r}: must begin after warmup_steps={warmup_steps}")
        self.rates = _rates(rates, len(self.step))
        if scale == "log" and min(self.rates) == 0:
            raise ValueError(f"rates={rates!r}: must all be above 0 with scale='log'")

    def _after_warmup(self, n):
        updates, rates = [self.warmup_steps, *self.step], np.array([self.base_lr, *self.rates])
        if self.scale == "log":
            return np.exp(np.interp(n, updates, np.log(rates)))
        return np.interp(n, updates, rates)

    def _check_base_lr(self, value: float) -> None:
        super()._check_base_lr(value)
        if self.scale == "log" and value == 0:
            raise ValueError("base_lr=0: must be above 0 with scale='log'")


def _rates(rates: Any, count: int) -> list[float]:
    """`rates` as a list, if they are so many learning rates."""
    if not isinstance(rates, list | tuple):
        raise TypeError(f"rates={rates!r}: must be a list or tuple of learning rates")
    if len(rates) != count:
        raise ValueError(f"rates={rates!r}: must hold as many learning rates as step has update counts, {count}")
    return [number(f"rates[{k}]", rate, low=0) for k, rate in enumerate(rates)]
