"""MXNet's four schedules, with MXNet's names, arguments and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..validation import int_or_float, integer, number
from .base import LRScheduler, final_update, half_cosine, increasing, register

_MOST_PRODUCTS = 2**20 - 1


@lru_cache(maxsize=32)
def _products(base_lr: float, factor: float, count: int) -> np.ndarray:
    """Return the rate after 0, 1, ... drops, multiplied at each as in MXNet, which a power differs from in its last bits."""
    return np.cumprod([base_lr, *[factor] * (count - 1)])


class _DropScheduler(LRScheduler):
    """Base class of schedules that multiply the learning rate by ``factor`` at certain updates, called drops.

    As in MXNet, ``base_lr`` is the present learning rate. When it is set, it is the next learning rate, however many drops
    have happened; later drops multiply it.
    """

    factor: float
    _since = 0  # number of drops before base_lr was last set

    @property
    def base_lr(self) -> float:
        """The present learning rate: of the last call, or until the warm-up ends the rate after it; may be set."""
        return float(self._after_warmup(self._position)) if self._is_past_warmup() else self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = number("base_lr", value, low=0)
        if self._is_past_warmup():
            self._warmup_final_lr, self._since = self.warmup_final_lr, int(self._drops(self._position))
        else:
            self._check_base_lr(value)
            self._since = 0
        self._base_lr = value

    def start_from(self, base_lr: float) -> None:
        super().start_from(base_lr)
        self._position, self._since = None, 0

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "since" not in state:
            super().load_state(state)
            return
        now, since = number("base_lr", state.get("base_lr"), low=0), integer("since", state["since"], low=0)
        super().load_state({name: value for name, value in state.items() if name not in ("base_lr", "since")})
        self._warmup_final_lr, self._base_lr, self._since = self.warmup_final_lr, now, since

    def _state(self) -> dict[str, Any]:
        changed = self._since or self._base_lr != self.warmup_final_lr
        return super()._state() | ({"base_lr": self._base_lr, "since": self._since} if changed else {})

    def _is_past_warmup(self) -> bool:
        return self._position is not None and self._position >= self.warmup_steps

    def _after_warmup(self, n):
        drops = np.maximum(self._drops(n) - self._since, 0)
        most = min(int(np.max(drops, initial=0)), _MOST_PRODUCTS)
        products = _products(float(self._base_lr), float(self.factor), 1 << most.bit_length())
        near = np.minimum(drops, _MOST_PRODUCTS).astype(int)
        return products[near] * self.factor ** (drops - near)

    def _drops(self, n):
        """Return the number of drops before update `n`; for an array of updates, an array."""
        raise NotImplementedError


@register
class FactorScheduler(_DropScheduler):
    """Schedule that multiplies the learning rate by ``factor`` after every ``step`` updates.

    With n the update count, the learning rate is ::

        base_lr                                            for n <= step
        max(base_lr * factor**k, stop_factor_lr)           for k*step < n <= (k + 1)*step, k >= 1

    so the first drop is at update ``step`` + 1. Drops during the warm-up take effect when it ends.

    Args:
        step: number of updates between two drops, >= 1.
        factor: multiplier of the learning rate at each drop, from 0 to 1; the default 1 leaves it constant.
        stop_factor_lr: the lowest learning rate that drops lead to.
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: MXNet 1.9.1, ``FactorScheduler``.

    >>> schedule = FactorScheduler(step=100, factor=0.5, base_lr=0.8)
    >>> [schedule(n) for n in (0, 100, 101, 201)]
    [0.8, 0.8, 0.4, 0.2]
    """

    def __init__(
        self,
        step: float,
        factor: float = 1.0,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = int_or_float("step", step, low=1)
        self.factor = number("factor", factor, low=0, high=1)
        self.stop_factor_lr = number("stop_factor_lr", stop_factor_lr)

    def _after_warmup(self, n):
        # As in MXNet, the floor holds from the first drop on: until then, a base_lr below it is left alone.
        return np.maximum(super()._after_warmup(n), np.where(self._drops(n) > self._since, self.stop_factor_lr, 0.0))

    def _drops(self, n):
        return np.maximum(np.ceil(n / self.step) - 1, 0)


@register
class MultiFactorScheduler(_DropScheduler):
    """Schedule that multiplies the learning rate by ``factor`` after each update listed in ``step``.

    At update n it is ``base_lr * factor**k``, where k is the count of numbers in ``step`` smaller than n.

    Args:
        step: list or tuple of at least one update count, each >= 1, strictly increasing.
        factor: multiplier of the learning rate at each drop, from 0 to 1; the default 1 leaves it constant.
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: MXNet 1.9.1, ``MultiFactorScheduler``.

    >>> schedule = MultiFactorScheduler(step=[10, 30], factor=0.5, base_lr=0.8)
    >>> [schedule(n) for n in (10, 11, 30, 31)]
    [0.8, 0.4, 0.4, 0.2]
    """

    def __init__(
        self,
        step: Sequence[float],
        factor: float = 1.0,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = increasing("step", step)
        self.factor = number("factor", factor, low=0, high=1)

    def _drops(self, n):
        return np.searchsorted(self.step, n, side="left")


@register
class PolyScheduler(LRScheduler):
    """Schedule that decays the learning rate as a polynomial of the update count, from ``base_lr`` to ``final_lr``.

    At update n it is ``final_lr + (base_lr - final_lr) * (1 - t)**pwr`` with t = (n - warmup_steps) / (max_update -
    warmup_steps), and constant after ``max_update``.

    Args:
        max_update: the update at which the learning rate reaches its final value, an int >= 1, above ``warmup_steps``.
        pwr: the power of the polynomial, >= 0.
        final_lr: the learning rate at ``max_update`` and later, >= 0.
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: MXNet 1.9.1, ``PolyScheduler``.

    >>> schedule = PolyScheduler(max_update=100, base_lr=1.0, pwr=2)
    >>> [schedule(n) for n in (0, 50, 100, 1000)]
    [1.0, 0.25, 0.0, 0.0]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = final_update(max_update, self.warmup_steps)
        self.pwr = int_or_float("pwr", pwr, low=0)
        self.final_lr = number("final_lr", final_lr, low=0)

    def _height(self, n):
        length = self.max_update - self.warmup_steps
        return (1 - np.minimum(n, length) / length) ** self.pwr


@register
class CosineScheduler(LRScheduler):
    """Schedule that decays the learning rate along half a cosine wave, from ``base_lr`` to ``final_lr``.

    At update n it is ``final_lr + (base_lr - final_lr) * (1 + cos(pi * t)) / 2`` with t = (n - warmup_steps) / (max_update -
    warmup_steps), and constant after ``max_update``.

    Args:
        max_update: the update at which the learning rate reaches its final value, an int >= 1, above ``warmup_steps``.
        final_lr: the learning rate at ``max_update`` and later, >= 0.
        base_lr: the learning rate after the warm-up, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: length, first rate and shape of the warm-up; see :class:`LRScheduler`.

    Source: MXNet 1.9.1, ``CosineScheduler``; Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts.

    >>> schedule = CosineScheduler(max_update=100, base_lr=1.0, warmup_steps=20)
    >>> [round(schedule(n), 6) for n in (0, 10, 20, 60, 100, 1000)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = final_update(max_update, self.warmup_steps)
        self.final_lr = number("final_lr", final_lr, low=0)

    def _height(self, n):
        length = self.max_update - self.warmup_steps
        return half_cosine(np.minimum(n, length) / length)
