"""Learning rates as functions of the number of updates, with the names and numbers of MXNet 1.9.1.

MXNet's schedulers change as they are asked; these are pure: an answer depends on the arguments, on
``base_lr`` and on the update number, never on what was asked before, and it is the answer that MXNet gives to
a run that asks from update 0 onwards. So an array of update numbers may be asked at once (to draw a schedule,
say), and a scheduler is restored from its arguments alone. Imported by the optimizers; knows nothing of tensors.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from .arguments import choice, did_you_mean, number, real, whole

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "create",
    "from_config",
    "register",
]


class LRScheduler:
    """Base class of the schedules: the warm-up, and what every schedule can do.

    With n the number of updates and W = ``warmup_steps``, the rate for n < W is ::

        linear      warmup_begin_lr + (base_lr - warmup_begin_lr) * n / W
        constant    warmup_begin_lr

    and for n >= W that of the subclass, which counts n from the start of training unless it says otherwise.

    For a schedule of your own, write a subclass with ``__call__(num_update)``. So that it can be printed and
    saved, keep each constructor argument in an attribute of the same name, and put ``@register`` above it.

    Args:
        base_lr: the rate from which the schedule starts once the warm-up is over, >= 0. It may be set later:
            warm-up and rule then use the new value. An optimizer that is given a ``learning_rate`` sets it.
        warmup_steps: number of updates of the warm-up, an int >= 0; 0 means none.
        warmup_begin_lr: the rate at update 0 of a warm-up, from 0 to ``base_lr``.
        warmup_mode: ``"linear"`` or ``"constant"``.

    Raises:
        TypeError: an argument is not a number, or not a whole one where it must be.
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

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.warmup_begin_lr = real("warmup_begin_lr", warmup_begin_lr, low=0)
        self.base_lr = base_lr
        self.warmup_steps = whole("warmup_steps", warmup_steps, low=0)
        self.warmup_mode = choice("warmup_mode", warmup_mode, ("linear", "constant"))

    @property
    def base_lr(self) -> float:
        """The rate from which the schedule starts once the warm-up is over; may be set."""
        return self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = real("base_lr", value, low=0)
        if self.warmup_begin_lr > value:
            raise ValueError(
                f"warmup_begin_lr={self.warmup_begin_lr!r}: must not exceed base_lr={value!r}, "
                "since a warm-up rises to base_lr"
            )
        self._base_lr = value

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
            return np.where(n < self.warmup_steps, self.get_warmup_lr(n), self._after_warmup(n))
        return float(self.get_warmup_lr(n) if n < self.warmup_steps else self._after_warmup(n))

    def get_warmup_lr(self, num_update):
        """The rate of the warm-up at an update (or array of them) below ``warmup_steps``; for subclasses."""
        rise = self.base_lr - self.warmup_begin_lr if self.warmup_mode == "linear" else 0.0
        return self.warmup_begin_lr + rise * num_update / max(self.warmup_steps, 1)

    def to_config(self) -> dict[str, Any]:
        """The schedule as data for JSON, ``{"class": name, "kwargs": arguments}``; see :func:`from_config`.

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
            kwargs[argument] = copy.deepcopy(getattr(self, argument))
        return {"class": name, "kwargs": kwargs}

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # base_lr may change

    def __repr__(self) -> str:
        try:
            kwargs = self.to_config()["kwargs"]
        except TypeError:  # a subclass that cannot be saved can still be shown
            return object.__repr__(self)
        defaults = _constructor_arguments(type(self))
        shown = (f"{name}={value!r}" for name, value in kwargs.items() if value != defaults[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    def _after_warmup(self, n):
        """The rule at n >= warmup_steps, n an int or a float64 array; results for smaller n go unused."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass must define __call__(num_update)")


class FactorScheduler(LRScheduler):
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
        drops = np.maximum(np.ceil(n / self.step) - 1, 0)
        # As in MXNet, the floor holds from the first drop on: until then, a base_lr below it is left alone.
        floor = np.where(drops > 0, self.stop_factor_lr, self.base_lr)
        return np.maximum(self.base_lr * self.factor**drops, floor)


class MultiFactorScheduler(LRScheduler):
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
        if not isinstance(step, list | tuple):
            raise TypeError(f"step={step!r}: must be a list or tuple of update numbers")
        if not step:
            raise ValueError(f"step={step!r}: must hold at least one update number")
        self.step = [number(f"step[{i}]", value, low=1) for i, value in enumerate(step)]
        if any(later <= earlier for earlier, later in zip(self.step, self.step[1:], strict=False)):
            raise ValueError(f"step={step!r}: must be strictly increasing")
        self.factor = real("factor", factor, low=0, high=1)

    def _after_warmup(self, n):
        return self.base_lr * self.factor ** np.searchsorted(self.step, n, side="left")


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


_registry: dict[str, type[LRScheduler]] = {}  # lower-case class name -> class

SchedulerClass = TypeVar("SchedulerClass", bound=type[LRScheduler])


def register(cls: SchedulerClass) -> SchedulerClass:
    """Class decorator: let :func:`create` and :func:`from_config` find a scheduler by the name of its class.

    Defining the same class again, as happens when a notebook cell is run twice, replaces it.

    Args:
        cls: a subclass of :class:`LRScheduler`.

    Returns:
        ``cls``, unchanged.

    Raises:
        TypeError: ``cls`` is not a subclass of :class:`LRScheduler`.
        ValueError: another class has that name already (upper and lower case are the same).
    """
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise TypeError(f"cls={cls!r}: must be a subclass of LRScheduler")
    known = _registry.get(cls.__name__.lower(), cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"the scheduler name {cls.__name__!r} is taken by {known.__module__}.{known.__qualname__}; "
            "give the class another name"
        )
    _registry[cls.__name__.lower()] = cls
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
    if set(config) != {"class", "kwargs"}:
        raise ValueError(f"config has the keys {sorted(map(str, config))}: must be exactly 'class' and 'kwargs'")
    if not isinstance(config["kwargs"], Mapping):
        raise TypeError(f"config['kwargs']={config['kwargs']!r}: must be a mapping of arguments")
    return create(config["class"], **config["kwargs"])


def _progress(schedule, n):
    """How far from the end of the warm-up (0) to max_update (1), where it stays."""
    length = schedule.max_update - schedule.warmup_steps
    return (np.minimum(n, schedule.max_update) - schedule.warmup_steps) / length


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


for _class in (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler):
    register(_class)
