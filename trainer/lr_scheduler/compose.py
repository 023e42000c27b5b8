"""Schedules made from functions and from other schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..validation import instance, integer
from .base import LRScheduler, evaluate, increasing, register
from .config import as_function


@register
class FunctionScheduler(LRScheduler):
    """Schedule whose learning rate after the warm-up is ``base_lr * function(n - warmup_steps)``, n the update count.

    A function that returns the learning rate itself does not need this class: an optimizer takes any callable as its
    schedule. To save the schedule, register the function (``@register`` above its ``def``), and register it again before
    loading. A trainer that has an unregistered function saves a note that the schedule must be given again.

    Args:
        function: a pure function from an int >= 0 to a number >= 0; or its registered name.
        base_lr: the factor of ``function``, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Raises:
        TypeError: ``function`` is not callable, or another argument has the wrong type.
        ValueError: ``function`` returned a negative or infinite number, no function is registered under that name, or
            another argument is out of range.

    Source: torch's ``LambdaLR``.

    >>> schedule = FunctionScheduler(lambda n: 1 / (1 + n), base_lr=0.5, warmup_steps=2)
    >>> [schedule(n) for n in (0, 1, 2, 3)]
    [0.0, 0.25, 0.5, 0.25]
    """

    def __init__(
        self,
        function: Callable[[int], float] | str,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.function = as_function("function", function)

    def _height(self, n):
        return evaluate(self.function, n, "function")


@register
class SequenceScheduler(LRScheduler):
    """Schedule that runs several schedules one after the other, each counting updates from its own start.

    ::

        schedulers[0](n)                       for n < starts[0]
        schedulers[k + 1](n - starts[k])       for starts[k] <= n < starts[k + 1], or to the end

    It has no ``base_lr``: set the attribute of the inner schedules instead. :func:`sequence` makes the same from durations.

    Args:
        schedulers: list or tuple of at least one schedule: schedules of this package, callables from update count to
            learning rate, or registered names of functions.
        starts: list or tuple of update counts at which the second and each later schedule starts: ints >= 1, strictly
            increasing, one fewer than ``schedulers``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``schedulers`` is empty, or ``starts`` has the wrong length or does not increase.

    Source: torch's ``SequentialLR``, where ``starts`` are ``milestones``.

    >>> schedule = SequenceScheduler([create("poly", max_update=10, base_lr=1.0, pwr=1), lambda n: 0.5], starts=[5])
    >>> [schedule(n) for n in (0, 4, 5, 6)]
    [1.0, 0.6, 0.5, 0.5]
    """

    def __init__(self, schedulers: Sequence[Callable[[int], float] | str], starts: Sequence[int]) -> None:
        instance("schedulers", schedulers, list | tuple, "a list or tuple of schedules", shown=True)
        if not schedulers:
            raise ValueError(f"schedulers={schedulers!r}: must hold at least one schedule")
        self.schedulers = [as_function(f"schedulers[{k}]", schedule) for k, schedule in enumerate(schedulers)]
        self.starts = [integer(f"starts[{k}]", start) for k, start in enumerate(increasing("starts", starts, least=0))]
        if len(self.starts) != len(schedulers) - 1:
            raise ValueError(
                f"starts={starts!r}: must hold one number for each scheduler but the first, {len(schedulers) - 1} in all"
            )
        self.warmup_steps = 0  # each schedule has its own

    @property
    def base_lr(self) -> float:
        """Raise AttributeError, when read or set: only the inner schedules have a ``base_lr``."""
        raise AttributeError("a SequenceScheduler has no base_lr: read it from one of its schedulers")

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        raise AttributeError("a SequenceScheduler has no base_lr: set it on one of its schedulers")

    def _after_warmup(self, n):
        offsets = [0, *self.starts]
        which = np.searchsorted(self.starts, n, side="right")
        if not isinstance(n, np.ndarray):
            return evaluate(self.schedulers[which], n - offsets[which], f"schedulers[{which}]")
        rates = np.empty(n.shape)
        for k, schedule in enumerate(self.schedulers):
            rates[which == k] = evaluate(schedule, n[which == k] - offsets[k], f"schedulers[{k}]")
        return rates


def sequence(*parts: Any) -> SequenceScheduler:
    """Return a schedule that runs several schedules one after the other, each for a given number of updates.

    Each schedule counts updates from its own start.

    Args:
        *parts: pairs (schedule, number of updates as an int >= 1), then one schedule alone for all later updates.

    Raises:
        TypeError: a part before the last is not a pair, the last is a pair, or a schedule is not callable.
        ValueError: there is no part, or a number of updates is below 1.

    >>> schedule = sequence((lambda n: 0.1, 100), (create("poly", max_update=50, base_lr=1.0, pwr=1), 50), lambda n: 0.01)
    >>> [schedule(n) for n in (99, 100, 125, 150)]
    [0.1, 1.0, 0.5, 0.01]
    """
    if not parts:
        raise ValueError("parts: must hold at least one schedule")
    *pairs, last = parts
    schedulers, lengths = [], []
    for k, pair in enumerate(pairs):
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise TypeError(f"parts[{k}]={pair!r}: must be a pair of a schedule and its number of updates")
        schedulers.append(pair[0])
        lengths.append(integer(f"parts[{k}][1]", pair[1], low=1))
    if isinstance(last, list | tuple):
        raise TypeError(f"parts[{len(pairs)}]={last!r}: must be a schedule without a number, as the last part never ends")
    return SequenceScheduler([*schedulers, last], list(itertools.accumulate(lengths)))
