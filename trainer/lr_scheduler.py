"""Learning rates as functions of the number of updates: MXNet 1.9.1's, by name and number, and others.

MXNet's schedulers change as they are asked; these are pure: an answer depends on the arguments, on
``base_lr`` (and when it was set) and on the update number, never on what was asked before, and it is the answer that MXNet
gives to a run that asks from update 0 onwards. So an array of update numbers may be asked at once (to draw a schedule,
say), and a scheduler is restored from its arguments alone. Imported by the optimizers.

An optimizer asks for the number of updates including the one it is about to make, so its first update has the
rate of number 1. `from_torch` and `to_torch` keep to that: where torch's first update has the rate of its epoch 0,
ours has that of number 1. The order here: the base class, MXNet's schedules, others, torch's, making them by name.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch

from .arguments import choice, did_you_mean, flag, number, real, whole

__all__ = [
    "CosineRestartsScheduler",
    "CosineScheduler",
    "CyclicScheduler",
    "ExponentialScheduler",
    "FactorScheduler",
    "FunctionScheduler",
    "InterpolatedScheduler",
    "InverseSquareRootScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "OneCycleScheduler",
    "PiecewiseScheduler",
    "PolyScheduler",
    "SequenceScheduler",
    "TorchScheduler",
    "WarmupStableDecayScheduler",
    "create",
    "from_config",
    "from_torch",
    "register",
    "sequence",
    "to_torch",
]


# What may change after a schedule has been made.
_CHANGING = ("_base_lr", "_warmup_final_lr", "_since")


class LRScheduler:
    """Base class of the schedules: the warm-up, and what every schedule can do.

    With n the number of updates and W = ``warmup_steps``, the rate for n < W is ::

        linear      warmup_begin_lr + (base_lr - warmup_begin_lr) * n / W
        constant    warmup_begin_lr

    and for n >= W that of the subclass, which counts n from the start of training unless it says otherwise.

    For a schedule of your own, write a subclass with ``__call__(num_update)``. So that it can be printed and
    saved, keep each constructor argument in an attribute of the same name, and put ``@register`` above it. It may change
    as it is asked, ``self.base_lr *= self.factor``, as in MXNet: numbers, strings and lists of them in its other
    attributes are saved with it.

    Args:
        base_lr: the rate from which the schedule starts once the warm-up is over, >= 0. It may be set later:
            warm-up and rule then use the new value. An optimizer that is given a ``learning_rate`` sets it. For
            :class:`FactorScheduler` and :class:`MultiFactorScheduler`, as in MXNet, it is the present rate.
        warmup_steps: number of updates of the warm-up, an int >= 0; 0 means none.
        warmup_begin_lr: the rate at update 0 of a warm-up, from 0 to ``base_lr``.
        warmup_mode: ``"linear"`` or ``"constant"``.

    Raises:
        TypeError: an argument is not a number, or not an integer where it must be one.
        ValueError: an argument lies outside its range; an update number is negative.
        NotImplementedError: this base class itself is called.

    Source: MXNet 1.9.1, ``python/mxnet/lr_scheduler.py``.

    >>> @register
    ... class Halving(LRScheduler):
    ...     def __call__(self, num_update):
    ...         return self.base_lr * 0.5**num_update
    >>> Halving(base_lr=0.8)(2)
    0.2
    >>> create("halving", base_lr=0.8) == Halving(base_lr=0.8)
    True
    """

    _warmup_final_lr: float | None = None  # None: base_lr

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.warmup_begin_lr = real("warmup_begin_lr", warmup_begin_lr, low=0)
        self.start_from(base_lr)
        self.warmup_steps = whole("warmup_steps", warmup_steps, low=0)
        self.warmup_mode = choice("warmup_mode", warmup_mode, ("linear", "constant"))

    @property
    def base_lr(self) -> float:
        """The rate from which the schedule starts once the warm-up is over; may be set."""
        return self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = real("base_lr", value, low=0)
        if not self._is_own():  # which may go below the warm-up's beginning once that is over
            self._check_base_lr(value)
        self._base_lr = value

    @property
    def warmup_final_lr(self) -> float:
        """The rate that the warm-up rises to: ``base_lr`` as the schedule started, for a subclass that changes it."""
        return self._base_lr if self._warmup_final_lr is None else self._warmup_final_lr

    def start_from(self, base_lr: float) -> None:
        """Set ``base_lr`` as if it had been given to the constructor, whatever has been asked or set since."""
        value = real("base_lr", base_lr, low=0)
        self._check_base_lr(value)
        self._base_lr = value
        self._warmup_final_lr = value if self._is_own() else None

    @overload
    def __call__(self, num_update: int) -> float: ...
    @overload
    def __call__(self, num_update: np.ndarray) -> np.ndarray: ...
    def __call__(self, num_update):
        """The learning rate for an update.

        Args:
            num_update: number of the update, an int >= 0, or a NumPy array of such ints of any shape.

        Returns:
            The rate as a float; for an array a float64 array of its shape.
        """
        n = _update_numbers(num_update)
        if isinstance(n, np.ndarray):
            rates = self._after_warmup(np.maximum(n, self.warmup_steps))
            return np.where(n < self.warmup_steps, self.get_warmup_lr(n), rates)
        return float(self.get_warmup_lr(n) if n < self.warmup_steps else self._after_warmup(n))

    def get_warmup_lr(self, num_update):
        """The rate of the warm-up at an update (or array of them) below ``warmup_steps``; for subclasses."""
        rise = self.warmup_final_lr - self.warmup_begin_lr if self.warmup_mode == "linear" else 0.0
        return self.warmup_begin_lr + rise * num_update / max(self.warmup_steps, 1)

    def to_config(self) -> dict[str, Any]:
        """The schedule as data for JSON, ``{"class": name, "kwargs": arguments}``; see :func:`from_config`.

        There is a third key, ``"state"``, if it has changed since it was made.

        Raises:
            TypeError: a subclass keeps a constructor argument under another name than the argument's.

        >>> PolyScheduler(100, pwr=1).to_config()["kwargs"]["max_update"]
        100
        """
        name = type(self).__name__
        kwargs = {}
        for argument in _constructor_arguments(type(self)):
            if not hasattr(self, argument):
                raise TypeError(
                    f"{name} has no attribute {argument!r}: to be saved, a scheduler keeps each constructor "
                    "argument in an attribute of the same name"
                )
            kwargs[argument] = _to_plain(f"{argument} of {name}", self._argument(argument))
        state = self._state(kwargs)
        return {"class": name, "kwargs": kwargs} | ({"state": state} if state else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what a configuration has under ``"state"``.

        Raises:
            ValueError: it has what no :meth:`to_config` of this class gives; nothing has been changed.
        """
        odd = [name for name, value in state.items() if not self._is_own() or name[:1] == "_" or not _is_plain(value)]
        if odd:
            raise ValueError(f"state of {type(self).__name__} has {odd[0]!r}, which is nothing that such a schedule saves")
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        """That of the class and of all but `base_lr`, which may change."""
        fixed = {name: value for name, value in self._compared().items() if name not in _CHANGING}
        return hash((type(self), _hashable(fixed)))

    def __repr__(self) -> str:
        arguments = _constructor_arguments(type(self))
        if not all(hasattr(self, name) for name in arguments):  # a subclass that cannot be saved can still be shown
            return object.__repr__(self)
        values = ((name, self._argument(name), default) for name, default in arguments.items())
        shown = (f"{name}={_shown(value)}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _after_warmup(self, n):
        """The rule at n >= warmup_steps, n an int or a float64 array."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass must define __call__(num_update)")

    def _check_base_lr(self, value: float) -> None:
        """Refuse a `base_lr` that does not go with the other rates, which are set before it."""
        if self.warmup_begin_lr > value:
            raise ValueError(
                f"warmup_begin_lr={self.warmup_begin_lr!r}: must not exceed base_lr={value!r}, "
                "since a warm-up rises to base_lr"
            )

    def _argument(self, name: str) -> Any:
        """What the constructor is to be given to make this schedule."""
        return self.warmup_final_lr if name == "base_lr" and hasattr(self, "_base_lr") else getattr(self, name)

    def _state(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What has changed since it was made: of a class that answers by itself all plain attributes but its arguments."""
        if not self._is_own():
            return {}
        own = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in kwargs}
        state = {name: copy.deepcopy(value) for name, value in own.items() if _is_plain(value)}
        return state | ({"base_lr": self._base_lr} if self._base_lr != self.warmup_final_lr else {})

    @classmethod
    def _is_own(cls) -> bool:
        """Whether it is of a class that answers by itself, and may change as it is asked."""
        return cls.__call__ is not LRScheduler.__call__

    def _compared(self) -> dict[str, Any]:
        """What makes two schedules equal: all attributes but what is kept for speed, and where it was asked last."""
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "_position")}


class _Dropping(LRScheduler):
    """Schedules that multiply their rate by a factor now and then, and whose ``base_lr`` is the present rate, as in MXNet.

    Where it is set, drops before are over: the next rate is this one, until the next drop.
    """

    factor: float
    _position: int | None = None  # the update that was asked for last
    _since = 0  # drops there had been when base_lr was set

    @property
    def base_lr(self) -> float:
        """The rate at the update that was asked for last, warm-up aside; may be set."""
        past = self._position is not None and self._position >= self.warmup_steps
        return float(self._after_warmup(self._position)) if past else self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        past = self._position is not None and self._position >= self.warmup_steps
        value = real("base_lr", value, low=0)
        if past:
            self._warmup_final_lr = self.warmup_final_lr
        else:
            self._check_base_lr(value)
        self._base_lr, self._since = value, int(self._drops(self._position)) if past else 0

    def start_from(self, base_lr: float) -> None:
        super().start_from(base_lr)
        self._position, self._since = None, 0

    def __call__(self, num_update):
        answer = super().__call__(num_update)
        if not isinstance(num_update, np.ndarray):
            self._position = whole("num_update", num_update)
        return answer

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "since" not in state:
            super().load_state(state)
            return
        now, since = real("base_lr", state.get("base_lr"), low=0), whole("since", state["since"], low=0)
        super().load_state({name: value for name, value in state.items() if name not in ("base_lr", "since")})
        self._warmup_final_lr, self._base_lr, self._since = self.warmup_final_lr, now, since

    def _state(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._state(kwargs)
        if self._since or self._base_lr != self.warmup_final_lr:
            state |= {"base_lr": self._base_lr, "since": self._since}
        return state

    def _drops(self, n):
        """How many drops there are before an update, or an array of them."""
        raise NotImplementedError

    @classmethod
    def _is_own(cls) -> bool:
        return cls.__call__ is not _Dropping.__call__


class FactorScheduler(_Dropping):
    """Multiply the rate by a factor every so many updates.

    ::

        base_lr                                            for n <= step
        max(base_lr * factor**k, stop_factor_lr)           for k*step < n <= (k + 1)*step, k >= 1

    so the first drop is at update ``step`` + 1. Drops that fall into the warm-up take effect when it ends.

    Args:
        step: number of updates between two drops, >= 1.
        factor: what the rate is multiplied by, from 0 to 1. The default 1 keeps the rate.
        stop_factor_lr: the rate that no drop goes below.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.step = number("step", step, low=1)
        self.factor = real("factor", factor, low=0, high=1)
        self.stop_factor_lr = real("stop_factor_lr", stop_factor_lr)

    def _after_warmup(self, n):
        drops = np.maximum(self._drops(n) - self._since, 0)
        # As in MXNet, the floor holds from the first drop on: until then, a base_lr below it is left alone.
        floor = np.where(drops > 0, self.stop_factor_lr, self._base_lr)
        return np.maximum(self._base_lr * self.factor**drops, floor)

    def _drops(self, n):
        return np.maximum(np.ceil(n / self.step) - 1, 0)


class MultiFactorScheduler(_Dropping):
    """Multiply the rate by a factor after each of a list of updates.

    ::

        base_lr * factor**k, where k is how many of the numbers in ``step`` are smaller than n

    Args:
        step: list or tuple of update numbers, each >= 1, strictly increasing, at least one.
        factor: what the rate is multiplied by, from 0 to 1. The default 1 keeps the rate.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.step = _increasing("step", step)
        self.factor = real("factor", factor, low=0, high=1)

    def _after_warmup(self, n):
        return self._base_lr * self.factor ** np.maximum(self._drops(n) - self._since, 0)

    def _drops(self, n):
        return np.searchsorted(self.step, n, side="left")


class PolyScheduler(LRScheduler):
    """Lower the rate along a polynomial to its final value.

    ::

        final_lr + (base_lr - final_lr) * (1 - t)**pwr
        t = (n - warmup_steps) / (max_update - warmup_steps)

    for n <= ``max_update``; from then on the rate keeps the value it has there.

    Args:
        max_update: the update at which the rate reaches its final value, an int >= 1, above ``warmup_steps``.
        base_lr: as in :class:`LRScheduler`.
        pwr: the power of the polynomial, >= 0.
        final_lr: the rate at ``max_update`` and later, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.max_update = _last_update(max_update, self.warmup_steps)
        self.pwr = number("pwr", pwr, low=0)
        self.final_lr = real("final_lr", final_lr, low=0)

    def _after_warmup(self, n):
        remaining = 1 - _progress(self, n)
        return self.final_lr + (self.base_lr - self.final_lr) * remaining**self.pwr


class CosineScheduler(LRScheduler):
    """Lower the rate along half a cosine wave to its final value.

    ::

        final_lr + (base_lr - final_lr) * (1 + cos(pi * t)) / 2
        t = (n - warmup_steps) / (max_update - warmup_steps)

    for n <= ``max_update``; from then on the rate keeps the value it has there.

    Args:
        max_update: the update at which the rate reaches its final value, an int >= 1, above ``warmup_steps``.
        base_lr: as in :class:`LRScheduler`.
        final_lr: the rate at ``max_update`` and later, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

    Source: MXNet 1.9.1, ``CosineScheduler``; the shape is that of Loshchilov and Hutter, "SGDR" (2017),
    equation 5, without restarts.

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
        self.max_update = _last_update(max_update, self.warmup_steps)
        self.final_lr = real("final_lr", final_lr, low=0)

    def _after_warmup(self, n):
        share = (1 + np.cos(np.pi * _progress(self, n))) / 2
        return self.final_lr + (self.base_lr - self.final_lr) * share


class OneCycleScheduler(LRScheduler):
    """Raise the rate to its peak, and lower it far below where it began.

    ::

        first = base_lr / div_factor        last = first / final_div_factor
        from first to base_lr               for n from 0 to P = pct_start * max_update
        from base_lr to last                for n from P to max_update

    and with ``three_phase`` from base_lr back to first for n from P to 2 P, and from first to last after that.
    From a to b, with s the part of the way, "cos" is ``b + (a - b) * (1 + cos(pi * s)) / 2`` and "linear" is
    ``a + (b - a) * s``. After ``max_update`` the rate stays. (The momentum, which the paper moves the other
    way, is left alone.)

    Args:
        max_update: the update at which the rate reaches its lowest value, an int >= 1.
        base_lr: the peak, >= 0; torch's ``max_lr``.
        pct_start: where the peak is, as a part of ``max_update``: between 0 and 1, and at most 0.5 with
            ``three_phase``.
        div_factor: by what the rate begins below the peak, >= 1.
        final_div_factor: by what it ends below its beginning, >= 1.
        anneal_strategy: "cos" or "linear".
        three_phase: whether the rate goes down in two phases, the first as long as the way up.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        three_phase: bool = False,
    ) -> None:
        super().__init__(base_lr)
        self.max_update = whole("max_update", max_update, low=1)
        self.three_phase = flag("three_phase", three_phase)
        self.pct_start = real("pct_start", pct_start, above=0, **({"high": 0.5} if three_phase else {"below": 1}))
        self.div_factor = real("div_factor", div_factor, low=1)
        self.final_div_factor = real("final_div_factor", final_div_factor, low=1)
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


class CosineRestartsScheduler(LRScheduler):
    """Lower the rate along half a cosine wave, jump back, and begin again: SGDR.

    ::

        final_lr + (base_lr - final_lr) * (1 + cos(pi * t / T)) / 2

    with t the number of updates since the last restart, and T the length of this period. Periods are
    ``period``, ``period * period_mult``, ``period * period_mult**2``, ... long, from the end of the warm-up on. The
    update at which a period is over has ``base_lr``.

    Args:
        period: number of updates of the first period, >= 1.
        period_mult: how many times longer each period is than the one before, >= 1.
        base_lr: the rate after each restart; as in :class:`LRScheduler`.
        final_lr: the rate that each period goes down to, >= 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.period = number("period", period, low=1)
        self.period_mult = number("period_mult", period_mult, low=1)
        self.final_lr = real("final_lr", final_lr, low=0)

    def _after_warmup(self, n):
        since = n - self.warmup_steps
        if self.period_mult == 1:
            part = since % self.period / self.period
        else:
            last = np.max(since, initial=0)
            starts, lengths = [0], [self.period]
            while starts[-1] + lengths[-1] <= last:
                starts.append(starts[-1] + lengths[-1])
                lengths.append(lengths[-1] * self.period_mult)
            k = np.searchsorted(starts, since, side="right") - 1
            part = (since - np.array(starts)[k]) / np.array(lengths)[k]
        return self.final_lr + (self.base_lr - self.final_lr) * (1 + np.cos(np.pi * part)) / 2


class WarmupStableDecayScheduler(LRScheduler):
    """Keep the rate, and lower it to its final value in the last updates only.

    ::

        base_lr                                              for n <= max_update - decay_steps
        final_lr + (base_lr - final_lr) * shape(t)           after that
        t = (n - max_update + decay_steps) / decay_steps
        shape(t) = 1 - t, 1 - sqrt(t), (1 + cos(pi * t)) / 2

    From ``max_update`` on the rate stays. The warm-up is that of all schedules.

    Args:
        max_update: the update at which the rate reaches its final value, an int >= 1.
        decay_steps: number of updates of the decay, an int >= 1.
        base_lr: as in :class:`LRScheduler`.
        final_lr: the rate at ``max_update`` and later, >= 0.
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
        self.max_update = _last_update(max_update, self.warmup_steps)
        self.decay_steps = whole("decay_steps", decay_steps, low=1)
        if self.warmup_steps + self.decay_steps > self.max_update:
            raise ValueError(
                f"decay_steps={decay_steps!r}: must be at most {self.max_update - self.warmup_steps}, "
                f"max_update={self.max_update} less warmup_steps={self.warmup_steps}"
            )
        self.final_lr = real("final_lr", final_lr, low=0)
        self.decay = choice("decay", decay, ("linear", "sqrt", "cosine"))

    def _after_warmup(self, n):
        begin = self.max_update - self.decay_steps
        part = (np.clip(n, begin, self.max_update) - begin) / self.decay_steps
        if self.decay == "cosine":
            share = (1 + np.cos(np.pi * part)) / 2
        else:
            share = 1 - (np.sqrt(part) if self.decay == "sqrt" else part)
        return self.final_lr + (self.base_lr - self.final_lr) * share


class InverseSquareRootScheduler(LRScheduler):
    """Lower the rate with the square root of the number of updates.

    ::

        base_lr * sqrt(T / (n - warmup_steps + T)),  T = timescale

    which is ``base_lr * sqrt(warmup_steps / n)`` unless ``timescale`` is given.

    Args:
        base_lr: the rate at the end of the warm-up. That of the paper is
            ``1 / sqrt(width of the model * warmup_steps)``.
        timescale: number of updates, > 0, after which the rate has fallen to ``base_lr / sqrt(2)``; None means
            ``warmup_steps``, or 1 where there is no warm-up.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.timescale = None if timescale is None else real("timescale", timescale, above=0)

    def _after_warmup(self, n):
        scale = self.timescale or max(self.warmup_steps, 1)
        return self.base_lr * np.sqrt(scale / (n - self.warmup_steps + scale))


class CyclicScheduler(LRScheduler):
    """Raise the rate and lower it again, in straight lines, over and over.

    ::

        base_lr + (max_lr - base_lr) * height * scale

    with n counted from the end of the warm-up; height goes from 0 to 1 in ``step_up`` updates and back to 0 in
    ``step_down``; and scale is ::

        triangular      1
        triangular2     0.5**c     c = number of cycles completed
        exp_range       gamma**n

    Args:
        step_up: number of updates from ``base_lr`` to ``max_lr``, >= 1.
        max_lr: the highest rate, at least ``base_lr``.
        base_lr: the lowest rate; as in :class:`LRScheduler`.
        step_down: number of updates of the way back, >= 1; None means ``step_up``.
        mode: "triangular", "triangular2" or "exp_range".
        gamma: for "exp_range", from 0 to 1.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

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
        self.max_lr = real("max_lr", max_lr, low=0)
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step_up = number("step_up", step_up, low=1)
        self.step_down = None if step_down is None else number("step_down", step_down, low=1)
        self.mode = choice("mode", mode, ("triangular", "triangular2", "exp_range"))
        self.gamma = real("gamma", gamma, low=0, high=1)

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


class ExponentialScheduler(LRScheduler):
    """Multiply the rate by the same factor at every update.

    ::

        base_lr * factor**((n - warmup_steps) / step)

    Args:
        factor: what the rate is multiplied by in ``step`` updates, from 0 to 1; torch's ``gamma``.
        step: number of updates, > 0, in which the rate changes by ``factor``.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

    Source: torch's ``ExponentialLR``. :class:`FactorScheduler` is the same in stairs.

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
        self.factor = real("factor", factor, low=0, high=1)
        real("step", step, above=0)
        self.step = number("step", step)

    def _after_warmup(self, n):
        return self.base_lr * self.factor ** ((n - self.warmup_steps) / self.step)


class PiecewiseScheduler(LRScheduler):
    """A constant rate after each of a list of updates.

    ::

        base_lr          for n <= step[0]
        rates[k]         for step[k] < n <= step[k + 1], and for all n > step[k] where it is the last

    so a change comes one update after the number in ``step``, as with :class:`MultiFactorScheduler`.

    Args:
        step: list or tuple of update numbers, each >= 1, strictly increasing, at least one.
        rates: as many rates, each >= 0.
        base_lr: the rate before the first of them; as in :class:`LRScheduler`.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`; ``step`` and ``rates`` are not as many.

    Source: He et al., "Deep residual learning" (2016), section 4.2, a warm-up at a low rate and two drops.

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
        self.step = _increasing("step", step)
        self.rates = _rates(rates, len(self.step))

    def _after_warmup(self, n):
        return np.array([self.base_lr, *self.rates])[np.searchsorted(self.step, n, side="left")]


class InterpolatedScheduler(LRScheduler):
    """Straight lines between given rates at given updates.

    ::

        linear    r[k] + (r[k + 1] - r[k]) * t
        log       r[k] * (r[k + 1] / r[k])**t
        t = (n - s[k]) / (s[k + 1] - s[k])    for s[k] <= n <= s[k + 1]

    with s = (warmup_steps, *step) and r = (base_lr, *rates); after the last update it keeps the last rate.

    Args:
        step: list or tuple of update numbers, each >= 1 and above ``warmup_steps``, strictly increasing, at least one.
        rates: as many rates, each >= 0, with "log" > 0.
        scale: ``"linear"``, or ``"log"`` for lines that are straight where rates have a log scale.
        base_lr: the rate at the end of the warm-up; with "log" > 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`; ``step`` and ``rates`` are not as many.

    Source: NumPy's ``interp``.

    >>> schedule = InterpolatedScheduler(step=[10, 30], rates=[1.0, 0.5], base_lr=0.5)
    >>> [schedule(n) for n in (0, 5, 10, 20, 30, 99)]
    [0.5, 0.75, 1.0, 0.75, 0.5, 0.5]
    """

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
        self.step = _increasing("step", step)
        if self.step[0] <= self.warmup_steps:
            raise ValueError(f"step={step!r}: must begin after warmup_steps={warmup_steps}")
        self.rates = _rates(rates, len(self.step))
        if scale == "log" and min(self.rates) == 0:
            raise ValueError(f"rates={rates!r}: must all be above 0 with scale='log'")

    def _after_warmup(self, n):
        rates = np.array([self.base_lr, *self.rates])
        if self.scale == "log":
            return np.exp(np.interp(n, [self.warmup_steps, *self.step], np.log(rates)))
        return np.interp(n, [self.warmup_steps, *self.step], rates)

    def _check_base_lr(self, value: float) -> None:
        super()._check_base_lr(value)
        if self.scale == "log" and value == 0:
            raise ValueError("base_lr=0: must be above 0 with scale='log'")


class FunctionScheduler(LRScheduler):
    """``base_lr`` times a function of the number of updates.

    ::

        base_lr * function(n - warmup_steps)

    A function that gives the rate itself needs none of this: an optimizer takes any callable as its schedule. To be
    saved, the function is registered under its name (``@register`` above its ``def``), and so it must be before
    loading; of one that is not, a trainer's saved states only say that the schedule must be there again.

    Args:
        function: a callable from an int >= 0 to a number >= 0, the same for the same int; or its registered name.
        base_lr: as in :class:`LRScheduler`.
        warmup_steps, warmup_begin_lr, warmup_mode: as in :class:`LRScheduler`.

    Raises:
        TypeError: ``function`` cannot be called; and as in :class:`LRScheduler`.
        ValueError: it gave what is no rate; no function has that name; and as in :class:`LRScheduler`.

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
        self.function = _callable("function", function)

    def _after_warmup(self, n):
        return self.base_lr * _ask(self.function, n - self.warmup_steps, "function")


class SequenceScheduler(LRScheduler):
    """One schedule after another, each counted from its own start; `sequence` makes it from lengths.

    ::

        schedulers[0](n)                       for n < starts[0]
        schedulers[k + 1](n - starts[k])       for starts[k] <= n < starts[k + 1], or to the end

    It has no ``base_lr`` of its own; those of its schedules are set on them.

    Args:
        schedulers: list or tuple of schedules, at least one: of this file, or callables from the number of updates to
            a rate (or registered names of functions).
        starts: list or tuple of the numbers of updates, ints >= 1, strictly increasing, at which the second and each
            further one starts; one less than there are ``schedulers``.

    Raises:
        TypeError, ValueError: as in :class:`LRScheduler`.

    Source: torch's ``SequentialLR``, where ``starts`` are ``milestones``.

    >>> schedule = SequenceScheduler([PolyScheduler(10, base_lr=1.0, pwr=1), lambda n: 0.5], starts=[5])
    >>> [schedule(n) for n in (0, 4, 5, 6)]
    [1.0, 0.6, 0.5, 0.5]
    """

    def __init__(self, schedulers: Sequence[Callable[[int], float] | str], starts: Sequence[int]) -> None:
        if not isinstance(schedulers, list | tuple):
            raise TypeError(f"schedulers={schedulers!r}: must be a list or tuple of schedules")
        if not schedulers:
            raise ValueError(f"schedulers={schedulers!r}: must hold at least one schedule")
        self.schedulers = [_callable(f"schedulers[{k}]", schedule) for k, schedule in enumerate(schedulers)]
        self.starts = [whole(f"starts[{k}]", start) for k, start in enumerate(_increasing("starts", starts, least=0))]
        if len(self.starts) != len(schedulers) - 1:
            raise ValueError(
                f"starts={starts!r}: must hold one number for each of the schedulers but the first, {len(schedulers) - 1}"
            )
        self.warmup_steps = 0  # each schedule has its own

    @property
    def base_lr(self) -> float:
        """None of its own: asking for it is an AttributeError, setting it, too."""
        raise AttributeError("a SequenceScheduler has no base_lr: see those of its schedulers")

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        raise AttributeError("a SequenceScheduler has no base_lr: set it on one of its schedulers")

    def get_warmup_lr(self, num_update):
        """Never used: each schedule has its own warm-up."""
        return 0.0

    def _after_warmup(self, n):
        offsets = [0, *self.starts]
        which = np.searchsorted(self.starts, n, side="right")
        if not isinstance(n, np.ndarray):
            return _ask(self.schedulers[which], n - offsets[which], f"schedulers[{which}]")
        rates = np.empty(n.shape)
        for k, schedule in enumerate(self.schedulers):
            rates[which == k] = _ask(schedule, n[which == k] - offsets[k], f"schedulers[{k}]")
        return rates


def sequence(*parts: Any) -> SequenceScheduler:
    """One schedule after another, each for a number of updates, and counted from its own start.

    Args:
        *parts: pairs (schedule, number of updates, an int >= 1), and at last a schedule for the rest.

    Raises:
        TypeError, ValueError: a part is neither; as in :class:`SequenceScheduler`.

    >>> schedule = sequence((lambda n: 0.1, 100), (PolyScheduler(50, base_lr=1.0, pwr=1), 50), lambda n: 0.01)
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
        lengths.append(whole(f"parts[{k}][1]", pair[1], low=1))
    if isinstance(last, list | tuple):
        raise TypeError(f"parts[{len(pairs)}]={last!r}: the last must be a schedule alone, which lasts to the end")
    return SequenceScheduler([*schedulers, last], list(itertools.accumulate(lengths)))


class TorchScheduler(LRScheduler):
    """A schedule of ``torch.optim.lr_scheduler`` as one of ours; `from_torch` makes it.

    It is stepped over an optimizer of one parameter that is never trained, and its rates are written down. So it
    may be asked in any order, and the same update has the same rate as in a torch run whose schedule is stepped
    once after each update: number 1 that of torch's epoch 0, number n that of epoch n - 1 (and number 0 that of
    number 1). Momentum, which some of torch's schedules change as well, is left alone. The first request for
    update n steps torch's schedule n - 1 times, about a second per million; tristep's own need no such steps. To be
    saved, a ``factory`` that is no class of torch's is registered under its name (``@register`` above its ``def``).

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from an optimizer to a schedule, such
            as one of several combined, or the registered name of such a function.
        kwargs: the arguments of ``factory`` beside the optimizer, as a dict.
        base_lr: the rate of the optimizer that the schedule starts from. Some, such as ``OneCycleLR``, set their own.

    Raises:
        TypeError: ``factory`` gives what is no schedule, or one that needs losses (``ReduceLROnPlateau``).
        ValueError: no class or function has that name; asked for an update after the end of a schedule that has one.

    Source: ``torch.optim.lr_scheduler``.

    >>> schedule = from_torch("StepLR", step_size=2, gamma=0.5, base_lr=0.8)
    >>> [schedule(n) for n in (1, 2, 3, 4, 5)]
    [0.8, 0.8, 0.4, 0.4, 0.2]
    """

    def __init__(
        self,
        factory: Callable[..., Any] | str,
        kwargs: Mapping[str, Any] | None = None,
        base_lr: float = 0.01,
    ) -> None:
        super().__init__(base_lr)
        self.factory = _torch_factory(factory)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs={kwargs!r}: must be a dict of arguments")
        self.kwargs = {name: list(v) if isinstance(v, tuple) else v for name, v in (kwargs or {}).items()}
        self._kept = self._started()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the schedule of torch that is under way."""
        return {**vars(self), "_kept": None}

    def _after_warmup(self, n):
        epoch = np.maximum(n - 1, 0)
        last = int(np.max(epoch, initial=0))
        if self._kept is None or self._kept.base_lr != self.base_lr:
            self._kept = self._started()
        schedule, group, rates = self._kept.schedule, self._kept.group, self._kept.rates
        while len(rates) <= last:
            try:
                schedule.step()
            except ValueError as error:
                raise ValueError(
                    f"num_update={last + 1}: the schedule of torch ends after update {len(rates)} ({error})"
                ) from error
            rates.append(float(group["lr"]))
        return np.array(rates)[epoch.astype(np.int64)] if isinstance(n, np.ndarray) else rates[last]

    def _started(self) -> "_UnderWay":
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=self.base_lr, momentum=0.9)
        factory = getattr(torch.optim.lr_scheduler, self.factory) if isinstance(self.factory, str) else self.factory
        schedule = factory(optimizer, **copy.deepcopy(self.kwargs))
        if not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(f"factory={self.factory!r}: gave {schedule!r}, which is no torch.optim.lr_scheduler.LRScheduler")
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                f"factory={self.factory!r}: ReduceLROnPlateau needs losses, so it is no function of the number of updates; "
                "call trainer.set_learning_rate instead"
            )
        group = optimizer.param_groups[0]
        rates = [float(group["lr"])]
        optimizer.step()  # of nothing; torch warns if schedules are stepped without
        return _UnderWay(self.base_lr, schedule, group, rates)


class _UnderWay(NamedTuple):
    """A schedule of torch, and its rates up to where it has come."""

    base_lr: float
    schedule: Any
    group: dict[str, Any]
    rates: list[float]


def from_torch(factory: Callable[..., Any] | str, *, base_lr: float = 0.01, **kwargs: Any) -> TorchScheduler:
    """A schedule of torch's, for an optimizer or a Trainer of ours; see :class:`TorchScheduler`.

    Args:
        factory: a class of ``torch.optim.lr_scheduler`` or its name; or a function from an optimizer to a schedule.
        base_lr: the rate that the schedule starts from.
        **kwargs: the arguments of ``factory`` beside the optimizer.

    Raises:
        TypeError, ValueError: as in :class:`TorchScheduler`.

    >>> from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
    >>> def both(optimizer):
    ...     parts = [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.5)]
    ...     return SequentialLR(optimizer, parts, milestones=[2])
    >>> schedule = from_torch(both, base_lr=0.8)
    >>> [schedule(n) for n in (1, 2, 3, 4, 5)]
    [0.4, 0.4, 0.8, 0.4, 0.2]
    """
    return TorchScheduler(factory, kwargs, base_lr)


def to_torch(
    scheduler: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule of ours, driving a torch optimizer.

    Every group gets the schedule's rate, times its ``"lr_mult"`` where it has one; the rates that the groups had
    are replaced. Step it once after each ``optimizer.step()``: the first update then has the rate of number 1, as with
    a Trainer. ``state_dict`` holds the count, not the schedule.

    Args:
        scheduler: a schedule of this file, or another callable from the number of updates to a rate.
        optimizer: the torch optimizer.
        last_epoch: number of updates made already, less one; -1 at the start.

    Returns:
        An object of a subclass of ``torch.optim.lr_scheduler.LRScheduler``.

    Raises:
        TypeError: an argument of a wrong type.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> schedule = to_torch(PolyScheduler(4, base_lr=0.8, pwr=1), optimizer)
    >>> optimizer.step()
    >>> schedule.step()
    >>> schedule.get_last_lr()
    [0.4]
    """
    if not callable(scheduler):
        raise TypeError(f"scheduler={scheduler!r}: must be a schedule, a callable from the number of updates to a rate")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return _Driven(scheduler, optimizer, whole("last_epoch", last_epoch, low=-1))


class _Driven(torch.optim.lr_scheduler.LRScheduler):
    """What `to_torch` makes."""

    def __init__(self, schedule: Callable[[int], float], optimizer: torch.optim.Optimizer, last_epoch: int) -> None:
        self.schedule = schedule
        if last_epoch >= 0:  # torch asks for these where a run goes on
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rate of each group for the update that comes next."""
        rate = _ask(self.schedule, self.last_epoch + 1, "scheduler")
        return [rate * group.get("lr_mult", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The counts; the schedule is made anew from its arguments."""
        state = super().state_dict()
        del state["schedule"]
        return state


_registry: dict[str, type[LRScheduler]] = {}  # lower-case class name -> class
_functions: dict[str, Callable[..., Any]] = {}  # name -> function that a schedule may be saved with

Registered = TypeVar("Registered", bound=Callable[..., Any])


def register(cls: Registered) -> Registered:
    """Decorator: let :func:`create` and :func:`from_config` find a class or a function by its name.

    A class is a scheduler of one's own; a function is what a scheduler is made with, such as
    :class:`FunctionScheduler`. Defining the same one again, as happens when a notebook cell is run twice, replaces it.

    Args:
        cls: a subclass of :class:`LRScheduler`, or a function.

    Returns:
        ``cls``, unchanged.

    Raises:
        TypeError: ``cls`` is neither; or it is a function without a name.
        ValueError: another one has that name already (for classes, upper and lower case are the same).

    >>> @register
    ... def slower(n):
    ...     return 1 / (1 + n)
    >>> FunctionScheduler(slower).to_config()["kwargs"]["function"]
    'slower'
    """
    names: Any  # a dict by name
    if isinstance(cls, type) and issubclass(cls, LRScheduler):
        names, name, kind, thing = _registry, cls.__name__.lower(), "scheduler", "class"
    elif inspect.isfunction(cls):
        names, name, kind, thing = _functions, cls.__name__, "function", "function"
        if name == "<lambda>":
            raise TypeError(f"cls={cls!r}: has no name to be found by; write it with def")
    else:
        raise TypeError(f"cls={cls!r}: must be a subclass of LRScheduler, or a function")
    known = names.get(name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"the {kind} name {cls.__name__!r} is taken by {known.__module__}.{known.__qualname__}; "
            f"give the {thing} another name"
        )
    names[name] = cls
    return cls


def create(name: str, **kwargs: Any) -> LRScheduler:
    """Make a scheduler by the name of its class.

    Args:
        name: the class's name, with or without ``Scheduler`` at its end, in upper or lower case.
        **kwargs: the class's arguments.

    Raises:
        TypeError: ``name`` is not a string, or an argument is unknown.
        ValueError: no class has that name, or an argument is out of range.

    >>> create("cosine", max_update=100, base_lr=0.5)
    CosineScheduler(max_update=100, base_lr=0.5)
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be the name of a scheduler, a string")
    key = name.lower()
    cls = _registry.get(key) or _registry.get(key + "scheduler")
    if cls is None:
        short = [known.removesuffix("scheduler") for known in _registry]
        raise ValueError(
            f"name={name!r}: no scheduler is registered by that name; there are {', '.join(sorted(short))}."
            f"{did_you_mean(key.removesuffix('scheduler'), short)} A class of your own needs @register"
        )
    return cls(**kwargs)


def from_config(config: Mapping[str, Any]) -> LRScheduler:
    """Make the scheduler that :meth:`LRScheduler.to_config` described.

    Args:
        config: a mapping with the keys ``"class"`` and ``"kwargs"``, possibly read back from JSON.

    Raises:
        TypeError: ``config`` or its ``kwargs`` is no mapping.
        ValueError: its keys are others than these two, or as in :func:`create`.

    >>> schedule = FactorScheduler(step=10, factor=0.9)
    >>> from_config(schedule.to_config()) == schedule
    True
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config={config!r}: must be a mapping, as made by to_config()")
    if set(config) - {"state"} != {"class", "kwargs"}:
        raise ValueError(f"config has the keys {sorted(map(str, config))}: must be 'class', 'kwargs' and perhaps 'state'")
    for key in set(config) - {"class"}:
        if not isinstance(config[key], Mapping):
            raise TypeError(f"config[{key!r}]={config[key]!r}: must be a mapping of arguments")
    made = create(config["class"], **{name: _from_plain(value) for name, value in config["kwargs"].items()})
    made.load_state(config.get("state", {}))
    return made


def _progress(schedule, n):
    """How far from the end of the warm-up (0) to max_update (1), where it stays."""
    length = schedule.max_update - schedule.warmup_steps
    return (np.minimum(n, schedule.max_update) - schedule.warmup_steps) / length


def _increasing(name: str, values: Any, least: int = 1) -> list[float]:
    """Update numbers, each above the one before."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name}={values!r}: must be a list or tuple of update numbers")
    if len(values) < least:
        raise ValueError(f"{name}={values!r}: must hold at least one update number")
    checked = [number(f"{name}[{i}]", value, low=1) for i, value in enumerate(values)]
    if any(later <= earlier for earlier, later in itertools.pairwise(checked)):
        raise ValueError(f"{name}={values!r}: must be strictly increasing")
    return checked


def _rates(rates: Any, count: int) -> list[float]:
    """As many rates as there are update numbers."""
    if not isinstance(rates, list | tuple):
        raise TypeError(f"rates={rates!r}: must be a list or tuple of rates")
    if len(rates) != count:
        raise ValueError(f"rates={rates!r}: must hold as many rates as step has update numbers, {count}")
    return [real(f"rates[{k}]", rate, low=0) for k, rate in enumerate(rates)]


def _callable(name: str, function: Any) -> Callable[[int], float]:
    if isinstance(function, str):
        if function not in _functions:
            raise ValueError(
                f"{name}={function!r}: no function is registered by that name.{did_you_mean(function, _functions)} It "
                "needs @register above its def"
            )
        return _functions[function]
    if not callable(function):
        raise TypeError(f"{name}={function!r}: must be a callable from the number of updates to a number")
    return function


def _torch_factory(factory: Any) -> Callable[..., Any] | str:
    """A class of torch's by its name, or the function that makes a schedule."""
    module = torch.optim.lr_scheduler
    classes = [name for name in module.__all__ if name != "LRScheduler"]
    if isinstance(factory, module.LRScheduler):
        raise TypeError(
            f"factory={factory!r}: is bound to its optimizer already; give its class and its arguments, "
            f"from_torch({type(factory).__name__}, ...), or a function from an optimizer to it"
        )
    if isinstance(factory, str):
        if factory not in classes and factory not in _functions:
            raise ValueError(
                f"factory={factory!r}: neither a class of torch.optim.lr_scheduler nor a registered function."
                f"{did_you_mean(factory, [*classes, *_functions])}"
            )
        return factory if factory in classes else _functions[factory]
    if not callable(factory):
        raise TypeError(f"factory={factory!r}: must be a class of torch.optim.lr_scheduler, or a function that makes one")
    name = getattr(factory, "__name__", None)
    return name if name in classes and getattr(module, name) is factory else factory


def _ask(function: Callable[[Any], Any], n: Any, name: str) -> Any:
    """The answers of a callable for an int or a float64 array of ints; one by one unless it is a schedule of ours."""
    if not isinstance(n, np.ndarray):
        return real(f"{name}({n})", function(n), low=0)
    if isinstance(function, LRScheduler) and not function._is_own():
        return function(n.astype(np.int64))
    answers = [real(f"{name}({k})", function(k), low=0) for k in map(int, n.ravel())]
    return np.array(answers, dtype=np.float64).reshape(n.shape)


def _to_plain(name: str, value: Any) -> Any:
    """A copy of an argument for JSON: schedules as their configurations, registered functions by name."""
    if isinstance(value, LRScheduler):
        return value.to_config()
    if isinstance(value, list | tuple):
        return [_to_plain(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if callable(value):
        if not _is_registered(value):
            raise TypeError(
                f"{name}={value!r}: is not registered, so it cannot be saved: write it with def, and @register above that"
            )
        return value.__name__
    if isinstance(value, Mapping) and (functions := [key for key, item in value.items() if callable(item)]):
        raise TypeError(
            f"{name}[{functions[0]!r}] is a function, which cannot be saved: put the whole into a function with @register "
            "above its def"
        )
    return copy.deepcopy(value)


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) - {"state"} == {"class", "kwargs"}:
        return from_config(value)
    return [_from_plain(item) for item in value] if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def _shown(value: Any) -> str:
    """As `repr`, with registered functions by name."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value.__name__ if _is_registered(value) else value)


def _is_registered(value: Any) -> bool:
    return inspect.isfunction(value) and _functions.get(value.__name__) is value


def _hashable(value: Any) -> Any:
    """Something to hash, equal for equal values."""
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


def _constructor_arguments(cls: type) -> dict[str, Any]:
    """Names and defaults of the constructor's arguments, and of its base class's where it takes **kwargs."""
    arguments: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                arguments.setdefault(p.name, p.default)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return arguments


def _update_numbers(num_update):
    """The argument checked: an int, or a float64 array (unsigned ints would wrap in differences)."""
    if isinstance(num_update, np.ndarray):
        if num_update.dtype.kind not in "iu":
            raise TypeError(f"num_update has dtype {num_update.dtype}: must be an int or an array of ints")
        if (num_update < 0).any():
            raise ValueError(f"num_update holds {num_update.min()}: must not be negative")
        return num_update.astype(np.float64)
    return whole("num_update", num_update, low=0)


def _last_update(max_update, warmup_steps: int) -> int:
    max_update = whole("max_update", max_update, low=1)
    if warmup_steps >= max_update:
        raise ValueError(
            f"warmup_steps={warmup_steps}: must be less than max_update={max_update}, else no update follows the warm-up"
        )
    return max_update


for _class in (
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    CosineScheduler,
    OneCycleScheduler,
    CosineRestartsScheduler,
    WarmupStableDecayScheduler,
    InverseSquareRootScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    PiecewiseScheduler,
    InterpolatedScheduler,
    FunctionScheduler,
    SequenceScheduler,
    TorchScheduler,
):
    register(_class)
