"""`LRScheduler`, the base class of all schedules; making schedules by name; saving them as configurations."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import numpy as np

from ..registry import Registry
from ..validation import check_depth, choice, instance, int_or_float, integer, number
from .config import NOT_SAVED, checked_attributes, constructor_arguments, functions, saved_attributes, shown, to_plain

if TYPE_CHECKING:
    from typing_extensions import Self


class LRScheduler:
    """Base class of learning-rate schedules, callables from the update count to the learning rate, with a warm-up.

    With n the update count and W = ``warmup_steps``, the learning rate is ::

        linear      warmup_begin_lr + (base_lr - warmup_begin_lr) * n / W     for n < W
        constant    warmup_begin_lr                                           for n < W

    and for n >= W the subclass decides. In the formulas of subclasses, n counts from the start of training, too.

    To define a schedule, write a subclass with ``__call__(num_update)``. To have it printed and saved, keep each constructor
    argument, a number, a string, a schedule, or a list or dict of these, in an attribute of the same name. As in MXNet, a
    call may change the schedule, ``self.base_lr *= self.factor``: numbers, strings and lists in its attributes are saved.
    Decorate the class with ``@register`` to make it by its name; otherwise it must have been defined before it is loaded.

    Args:
        base_lr: the learning rate after the warm-up, >= 0. The attribute may be set later, which changes both the warm-up
            and the rates after it; an optimizer that is given a ``learning_rate`` sets it. In :class:`FactorScheduler` and
            :class:`MultiFactorScheduler` the attribute is the present learning rate, as in MXNet.
        warmup_steps: number of updates of the warm-up, an int >= 0; 0 means no warm-up.
        warmup_begin_lr: the learning rate at update 0 of a warm-up, from 0 to ``base_lr``.
        warmup_mode: shape of the warm-up, ``"linear"`` or ``"constant"``.

    Raises:
        TypeError: an argument has the wrong type, such as a float for a number of updates.
        ValueError: an argument is out of range, or the schedule is called with a negative update count.
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

    registry: ClassVar[Registry[type[LRScheduler]]]
    final_lr: float = 0.0  # the learning rate where `_height` is 0
    _warmup_final_lr: float | None = None  # None means base_lr
    _position: int | None = None  # the update count of the last call
    _base_lr_given: bool  # whether the constructor was called with base_lr

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        made._base_lr_given = "base_lr" in kwargs or "base_lr" in names[: len(args)]
        return made

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.warmup_begin_lr = number("warmup_begin_lr", warmup_begin_lr, low=0)
        self.start_from(base_lr)
        self.warmup_steps = integer("warmup_steps", warmup_steps, low=0)
        self.warmup_mode = choice("warmup_mode", warmup_mode, ("linear", "constant"))

    @property
    def base_lr(self) -> float:
        """The learning rate after the warm-up; may be set."""
        return self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = number("base_lr", value, low=0)
        if not self._defines_call():  # a class with its own __call__ may lower base_lr below warmup_begin_lr later
            self._check_base_lr(value)
        self._base_lr = value

    @property
    def has_default_base_lr(self) -> bool:
        """Whether ``base_lr`` still has its default: neither given to the constructor nor changed since."""
        return not self._base_lr_given and self._base_lr == constructor_arguments(type(self)).get("base_lr")

    @property
    def warmup_final_lr(self) -> float:
        """The learning rate at the end of the warm-up: ``base_lr`` as first set, even where calls have changed it since."""
        return self._base_lr if self._warmup_final_lr is None else self._warmup_final_lr

    def start_from(self, base_lr: float) -> None:
        """Set ``base_lr`` as if the schedule had been constructed with it, forgetting earlier changes of it.

        Raises:
            TypeError: ``base_lr`` is not a number.
            ValueError: ``base_lr`` is negative, or below ``warmup_begin_lr``.
        """
        value = number("base_lr", base_lr, low=0)
        self._check_base_lr(value)
        self._base_lr = value
        self._warmup_final_lr = value if self._defines_call() else None

    @overload
    def __call__(self, num_update: int) -> float: ...
    @overload
    def __call__(self, num_update: np.ndarray) -> np.ndarray: ...
    def __call__(self, num_update):
        """Return the learning rate at an update count.

        Args:
            num_update: the update count, an int >= 0, or a NumPy array of update counts of any shape.

        Returns:
            The learning rate as a float; for an array of counts, a float64 array of the same shape.
        """
        if isinstance(num_update, np.ndarray):
            if num_update.dtype.kind not in "iu":
                raise TypeError(f"num_update has dtype {num_update.dtype}: must be an int or an array of ints")
            if (num_update < 0).any():
                raise ValueError(f"num_update holds {num_update.min()}: must not be negative")
            n = num_update.astype(np.float64)  # differences of unsigned ints would wrap
            rates = self._after_warmup(np.maximum(n, self.warmup_steps))
            return np.where(n < self.warmup_steps, self.get_warmup_lr(n) if self.warmup_steps else 0.0, rates)
        n = integer("num_update", num_update, low=0)
        rate = float(self.get_warmup_lr(n) if n < self.warmup_steps else self._after_warmup(n))
        self._position = n
        return rate

    def get_warmup_lr(self, num_update):
        """Return the learning rate during the warm-up; subclasses with their own ``__call__`` may call it, as in MXNet.

        Args:
            num_update: the update count, less than ``warmup_steps``, or a NumPy array of such counts.
        """
        rise = self.warmup_final_lr - self.warmup_begin_lr if self.warmup_mode == "linear" else 0.0
        return self.warmup_begin_lr + rise * num_update / max(self.warmup_steps, 1)

    def to_config(self) -> dict[str, Any]:
        """Return the schedule as a dict that JSON can hold, ``{"class": name, "kwargs": arguments}``.

        A third key, ``"state"``, has what calls or a new ``base_lr`` may have changed since its construction.
        :func:`from_config` makes the schedule again. The name of a class that is not registered includes its module's.

        Raises:
            TypeError: a constructor argument of a subclass has no attribute of the same name, or holds what JSON does not
                have, or a function that is not registered; or schedules are nested more than 60 times.

        >>> create("poly", max_update=100, pwr=1).to_config()["kwargs"]["max_update"]
        100
        """
        name = type(self).__name__
        kwargs = {}
        for argument in constructor_arguments(type(self)):
            if not hasattr(self, argument):
                raise TypeError(
                    f"{name} has no attribute {argument!r}: to be saved, a scheduler keeps each constructor "
                    "argument in an attribute of the same name"
                )
            kwargs[argument] = to_plain(f"{argument} of {name}", self._argument(argument))
        state = self._state()
        config = {"class": self.registry.name_of(type(self)), "kwargs": kwargs} | ({"state": state} if state else {})
        try:
            check_depth(name, config)
        except ValueError as error:
            raise TypeError(f"{error}: it cannot be saved") from None
        return config

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the changes since construction that :meth:`to_config` saved under ``"state"``.

        Args:
            state: attribute names and their values, from a configuration.

        Raises:
            TypeError, ValueError: ``state`` has a name or value that :meth:`to_config` of this class never saves; nothing
                has been changed.
        """
        if state and not self._defines_call():
            raise ValueError(f"state of {type(self).__name__}: has {next(iter(state))!r}, which this class does not save")
        for name, value in checked_attributes(self, state).items():
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        compared = [{k: v for k, v in vars(side).items() if k not in NOT_SAVED} for side in (self, other)]
        return compared[0] == compared[1]

    def __hash__(self) -> int:
        return hash(type(self))  # the attributes may change

    def __repr__(self) -> str:
        arguments = constructor_arguments(type(self))
        if not all(hasattr(self, name) for name in arguments):  # a subclass that cannot be saved can still be shown
            return object.__repr__(self)
        values = ((name, self._argument(name), default) for name, default in arguments.items())
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value, d in values if value != d)})"

    def _after_warmup(self, n):
        """Return the learning rate at n >= warmup_steps, n an int or a float64 array; by default `_height`, scaled."""
        return self.final_lr + (self.base_lr - self.final_lr) * self._height(n - self.warmup_steps)

    def _height(self, n):
        """Return the schedule's height n updates after the warm-up: 1 stands for base_lr, 0 for final_lr."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass must define __call__(num_update)")

    def _check_base_lr(self, value: float) -> None:
        """Raise ValueError if `value` contradicts the other learning rates, which are set before it."""
        if self.warmup_begin_lr > value:
            raise ValueError(
                f"warmup_begin_lr={self.warmup_begin_lr!r}: must not exceed base_lr={value!r}, "
                "since a warm-up rises to base_lr"
            )

    def _argument(self, name: str) -> Any:
        """Return the value of a constructor argument that makes a schedule equal to this one."""
        return self.warmup_final_lr if name == "base_lr" and hasattr(self, "_base_lr") else getattr(self, name)

    def _state(self) -> dict[str, Any]:
        """Return the attributes to save in addition to the arguments: only a class with its own `__call__` has some.

        Those of arguments are among them, as the constructor may change an argument: `self.period = epochs * steps`.
        """
        return saved_attributes(self) if self._defines_call() else {}

    @classmethod
    def _defines_call(cls) -> bool:
        """Return whether the class overrides `__call__`, which then takes single counts only and may change the schedule."""
        return cls.__call__ is not LRScheduler.__call__


LRScheduler.registry = Registry("scheduler", LRScheduler, suffix="scheduler", hint="A class of your own needs @register")
Registered = TypeVar("Registered", bound=Callable[..., Any])


def register(cls: Registered) -> Registered:
    """Register a scheduler class, or a function used by a scheduler, under its name; a decorator.

    :func:`create` and :func:`from_config` find registered classes by name. Functions are registered so that schedules that
    hold them, such as :class:`FunctionScheduler`, can be saved. Registering a second class or function of the same name
    replaces the first, with a warning.

    Args:
        cls: a subclass of :class:`LRScheduler`, found by its name in any case; or a function with a name.

    Returns:
        ``cls``, unchanged.

    Raises:
        TypeError: ``cls`` is neither a subclass of :class:`LRScheduler` nor a function, or it is a lambda.

    >>> @register
    ... def slower(n):
    ...     return 1 / (1 + n)
    >>> create("function", function="slower")
    FunctionScheduler(function='slower')
    """
    if inspect.isfunction(cls):
        if cls.__name__ == "<lambda>":
            raise TypeError(f"cls={cls!r}: a lambda has no name to be found by; write it with def")
        return functions.register(cls, stacklevel=3)
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise TypeError(f"cls={cls!r}: must be a subclass of LRScheduler, or a function")
    return LRScheduler.registry.register(cls, stacklevel=3)


def create(name: str, **kwargs: Any) -> LRScheduler:
    """Construct a scheduler from the name of its class.

    Args:
        name: the name of a registered class, in any case, with or without ``Scheduler`` at its end.
        **kwargs: the arguments of the class.

    Raises:
        TypeError: ``name`` is not a string, or the class has no argument of that name.
        ValueError: no class of that name is registered, or an argument is out of range.

    >>> create("cosine", max_update=100, base_lr=0.5)
    CosineScheduler(max_update=100, base_lr=0.5)
    """
    return LRScheduler.registry.lookup(name)(**kwargs)


def from_config(config: Mapping[str, Any], own: Any = None) -> LRScheduler:
    """Construct a scheduler from a configuration that :meth:`LRScheduler.to_config` returned.

    Args:
        config: a mapping with the keys ``"class"``, ``"kwargs"`` and optionally ``"state"``, possibly read back from JSON.
        own: the schedule that the new one will replace. If a function has defined several classes with the name in
            ``config``, its class is taken; otherwise the newest.

    Raises:
        TypeError: ``config``, its ``kwargs`` or its ``state`` is not a mapping.
        ValueError: ``config`` has other keys, no class of that name is registered or defined, a value is not allowed, or
            it is nested too deeply.

    >>> schedule = create("factor", step=10, factor=0.9)
    >>> from_config(schedule.to_config()) == schedule
    True
    """
    instance("config", config, Mapping, "a mapping, as made by to_config()", shown=True)
    check_depth("config", config)
    return _made(config, own)


def _made(config: Mapping[str, Any], own: Any) -> LRScheduler:
    if not _is_config(config):
        raise ValueError(f"config has the keys {sorted(map(str, config))}: must be 'class', 'kwargs' and optionally 'state'")
    for key in set(config) - {"class"}:
        instance(f"config[{key!r}]", config[key], Mapping, "a mapping of arguments", shown=True)
    kwargs = {name: _from_plain(value, getattr(own, name, None)) for name, value in config["kwargs"].items()}
    made = LRScheduler.registry.named(config["class"], own)(**kwargs)
    made.load_state(config.get("state", {}))
    return made


def evaluate(function: Callable[[Any], Any], n: Any, name: str) -> Any:
    """Return the learning rate of any schedule or callable at update `n`; for an array of updates, an array of rates.

    A callable that is not of this package, or a schedule with its own `__call__`, is called with one int at a time. Raise,
    with `name` as the argument's name, if a rate is not a finite number >= 0.
    """
    if not isinstance(n, np.ndarray):
        return number(f"{name}({n})", function(n), low=0)
    if isinstance(function, LRScheduler) and not function._defines_call():
        return function(n.astype(np.int64))
    rates = [number(f"{name}({k})", function(k), low=0) for k in map(int, n.ravel())]
    return np.array(rates, dtype=np.float64).reshape(n.shape)


def increasing(name: str, values: Any, least: int = 1) -> list[float]:
    """Return `values` as a list; raise unless they are strictly increasing update counts >= 1, at least `least` of them."""
    instance(name, values, list | tuple, "a list or tuple of update counts", shown=True)
    if len(values) < least:
        raise ValueError(f"{name}={values!r}: must hold at least one update count")
    checked = [int_or_float(f"{name}[{i}]", value, low=1) for i, value in enumerate(values)]
    if any(later <= earlier for earlier, later in itertools.pairwise(checked)):
        raise ValueError(f"{name}={values!r}: must be strictly increasing")
    return checked


def final_update(max_update: Any, warmup_steps: int) -> int:
    """Return `max_update`; raise TypeError or ValueError unless it is an int above `warmup_steps`."""
    max_update = integer("max_update", max_update, low=1)
    if warmup_steps >= max_update:
        raise ValueError(
            f"warmup_steps={warmup_steps}: must be less than max_update={max_update}, so that updates follow the warm-up"
        )
    return max_update


def half_cosine(t):
    """Return the height at t of half a cosine wave that falls from 1 at t = 0 to 0 at t = 1."""
    return (1 + np.cos(np.pi * t)) / 2


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) - {"state"} == {"class", "kwargs"}


def _from_plain(value: Any, own: Any = None) -> Any:
    """Return an argument from its JSON data; `own` is that of the schedule that will be replaced, if there is one."""
    if _is_config(value):
        return _made(value, own)
    if not isinstance(value, list):
        return value
    owns = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
    return [_from_plain(item, each) for item, each in zip(value, owns, strict=True)]
