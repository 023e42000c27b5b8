"""The base class of the schedules, and schedules by name and as configurations."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import numpy as np

from ..registry import Registry
from ..validation import choice, int_or_float, integer, number
from .config import constructor_arguments, functions, is_plain, shown, to_plain

if TYPE_CHECKING:
    from typing_extensions import Self

_NOT_COMPARED = ("_kept", "_position", "_base_lr_given")  # caches, and how a schedule was made


class LRScheduler:
    """Base class of the schedules: the warm-up, and what every schedule can do.

    With n the update count and W = ``warmup_steps``, the learning rate is ::

        linear      warmup_begin_lr + (base_lr - warmup_begin_lr) * n / W     for n < W
        constant    warmup_begin_lr                                           for n < W

    and for n >= W the subclass decides. The subclass counts n from the start of training unless it says otherwise.

    To define a schedule, write a subclass with ``__call__(num_update)``. To have it printed and saved, keep each constructor
    argument in an attribute of the same name, and decorate the class with ``@register``. As in MXNet, a call may change the
    schedule, ``self.base_lr *= self.factor``: numbers, strings and lists of them in its other attributes are saved too.

    Args:
        base_lr: the learning rate after the warm-up, >= 0. Setting it later changes the warm-up and the rule. An optimizer
            with a ``learning_rate`` sets it. In :class:`FactorScheduler` and :class:`MultiFactorScheduler` the attribute
            is the present learning rate, as in MXNet.
        warmup_steps: number of updates of the warm-up, an int >= 0; 0 means none.
        warmup_begin_lr: the learning rate at update 0 of a warm-up, from 0 to ``base_lr``.
        warmup_mode: ``"linear"`` or ``"constant"``.

    Raises:
        TypeError: an argument is not a number, or not an integer where it must be one.
        ValueError: an argument is out of range; an update count is negative.
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
    final_lr: float = 0.0  # the learning rate at height 0
    _peaks: ClassVar[tuple[str, ...]] = ()  # attributes whose largest value no rate of this very class exceeds
    _warmup_final_lr: float | None = None  # None: base_lr
    _position: int | None = None  # the update count of the last call
    _base_lr_given: bool  # to the constructor

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
        if not self._defines_call():  # such a class may go below warmup_begin_lr once the warm-up is over
            self._check_base_lr(value)
        self._base_lr = value

    @property
    def has_default_base_lr(self) -> bool:
        """Whether the constructor was called without ``base_lr``, and nobody has changed it."""
        return not self._base_lr_given and self._base_lr == constructor_arguments(type(self)).get("base_lr")

    @property
    def peak_lr(self) -> float | None:
        """The largest learning rate of the schedule.

        None if it is not known: for torch's schedules, functions, and subclasses of other packages that do not define it.
        """
        values = [getattr(self, name) for name in vars(type(self)).get("_peaks", ())]
        return max((rate for value in values for rate in (value if isinstance(value, list) else [value])), default=None)

    @property
    def warmup_final_lr(self) -> float:
        """The learning rate at the end of the warm-up: the first ``base_lr``, for a subclass that changes it."""
        return self._base_lr if self._warmup_final_lr is None else self._warmup_final_lr

    def start_from(self, base_lr: float) -> None:
        """Set ``base_lr`` as the constructor does."""
        value = number("base_lr", base_lr, low=0)
        self._check_base_lr(value)
        self._base_lr = value
        self._warmup_final_lr = value if self._defines_call() else None

    @overload
    def __call__(self, num_update: int) -> float: ...
    @overload
    def __call__(self, num_update: np.ndarray) -> np.ndarray: ...
    def __call__(self, num_update):
        """Return the learning rate of an update.

        Args:
            num_update: the update count, an int >= 0, or a NumPy array of such ints of any shape.

        Returns:
            The learning rate as a float; for an array a float64 array of its shape.
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
        """Return the learning rate of an update (or array of them) below ``warmup_steps``; for subclasses."""
        rise = self.warmup_final_lr - self.warmup_begin_lr if self.warmup_mode == "linear" else 0.0
        return self.warmup_begin_lr + rise * num_update / max(self.warmup_steps, 1)

    def to_config(self) -> dict[str, Any]:
        """Return the schedule as data for JSON, ``{"class": name, "kwargs": arguments}``; see :func:`from_config`.

        There is a third key, ``"state"``, if calls or a new ``base_lr`` have changed the schedule.

        Raises:
            TypeError: a subclass keeps a constructor argument under another name than the argument's.

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
        state = self._state(kwargs)
        return {"class": name, "kwargs": kwargs} | ({"state": state} if state else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the ``"state"`` of a configuration.

        Raises:
            ValueError: it has a key or value that no :meth:`to_config` of this class gives; nothing has been changed.
        """
        for name, value in state.items():
            if not self._defines_call() or name[:1] == "_" or not is_plain(value):
                raise ValueError(f"state of {type(self).__name__} has {name!r}, which such a schedule does not save")
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = ({k: v for k, v in vars(each).items() if k not in _NOT_COMPARED} for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(type(self))  # whatever else may change

    def __repr__(self) -> str:
        arguments = constructor_arguments(type(self))
        if not all(hasattr(self, name) for name in arguments):  # a subclass that cannot be saved can still be shown
            return object.__repr__(self)
        values = ((name, self._argument(name), default) for name, default in arguments.items())
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value, d in values if value != d)})"

    def _after_warmup(self, n):
        """The learning rate at n >= warmup_steps, n an int or a float64 array: by default from a height in [0, 1]."""
        return self.final_lr + (self.base_lr - self.final_lr) * self._height(n - self.warmup_steps)

    def _height(self, n):
        """The schedule as a function of the updates since the warm-up: 1 is base_lr, 0 is final_lr."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass must define __call__(num_update)")

    def _check_base_lr(self, value: float) -> None:
        """Raise if `value` contradicts the other learning rates, which are set before it."""
        if self.warmup_begin_lr > value:
            raise ValueError(
                f"warmup_begin_lr={self.warmup_begin_lr!r}: must not exceed base_lr={value!r}, "
                "since a warm-up rises to base_lr"
            )

    def _argument(self, name: str) -> Any:
        """The constructor argument that makes this schedule."""
        return self.warmup_final_lr if name == "base_lr" and hasattr(self, "_base_lr") else getattr(self, name)

    def _state(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The changes since construction: plain attributes of a class with its own `__call__`, without its arguments."""
        if not self._defines_call():
            return {}
        own = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in kwargs}
        state = {name: copy.deepcopy(value) for name, value in own.items() if is_plain(value)}
        return state | ({"base_lr": self._base_lr} if self._base_lr != self.warmup_final_lr else {})

    @classmethod
    def _defines_call(cls) -> bool:
        """Whether the class has a `__call__` of its own, which takes no arrays and may change the schedule."""
        return cls.__call__ is not LRScheduler.__call__


LRScheduler.registry = Registry("scheduler", LRScheduler, suffix="scheduler", hint="A class of your own needs @register")
Registered = TypeVar("Registered", bound=Callable[..., Any])


def register(cls: Registered) -> Registered:
    """Decorator: let :func:`create` and :func:`from_config` find a class or a function by its name.

    A class is a scheduler of your own; a function is one that a scheduler is made with, such as
    :class:`FunctionScheduler`. Another class or function of that name is replaced, with a warning.

    Args:
        cls: a subclass of :class:`LRScheduler`, known by its name in any case; or a function.

    Returns:
        ``cls``, unchanged.

    Raises:
        TypeError: ``cls`` is neither; or it is a function without a name.

    >>> @register
    ... def slower(n):
    ...     return 1 / (1 + n)
    >>> create("function", function="slower")
    FunctionScheduler(function='slower')
    """
    if inspect.isfunction(cls):
        if cls.__name__ == "<lambda>":
            raise TypeError(f"cls={cls!r}: has no name to be found by; write it with def")
        return functions.register(cls, stacklevel=3)
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise TypeError(f"cls={cls!r}: must be a subclass of LRScheduler, or a function")
    return LRScheduler.registry.register(cls, stacklevel=3)


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
    return LRScheduler.registry.lookup(name)(**kwargs)


def from_config(config: Mapping[str, Any]) -> LRScheduler:
    """Make the scheduler that :meth:`LRScheduler.to_config` described.

    Args:
        config: a mapping with the keys ``"class"``, ``"kwargs"`` and perhaps ``"state"``, possibly read back from JSON.

    Raises:
        TypeError: ``config``, its ``kwargs`` or its ``state`` is no mapping.
        ValueError: it has other keys; or as in :func:`create` and :meth:`LRScheduler.load_state`.

    >>> schedule = create("factor", step=10, factor=0.9)
    >>> from_config(schedule.to_config()) == schedule
    True
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config={config!r}: must be a mapping, as made by to_config()")
    if not _is_config(config):
        raise ValueError(f"config has the keys {sorted(map(str, config))}: must be 'class', 'kwargs' and perhaps 'state'")
    for key in set(config) - {"class"}:
        if not isinstance(config[key], Mapping):
            raise TypeError(f"config[{key!r}]={config[key]!r}: must be a mapping of arguments")
    made = create(config["class"], **{name: _from_plain(value) for name, value in config["kwargs"].items()})
    made.load_state(config.get("state", {}))
    return made


def evaluate(function: Callable[[Any], Any], n: Any, name: str) -> Any:
    """The learning rates of any schedule or callable at n, an int or a float64 array of integers.

    A callable, or a schedule with its own `__call__`, is called with one int at a time.

    Raises:
        TypeError, ValueError: an answer is not a finite number >= 0; the message names `name` and the update.
    """
    if not isinstance(n, np.ndarray):
        return number(f"{name}({n})", function(n), low=0)
    if isinstance(function, LRScheduler) and not function._defines_call():
        return function(n.astype(np.int64))
    rates = [number(f"{name}({k})", function(k), low=0) for k in map(int, n.ravel())]
    return np.array(rates, dtype=np.float64).reshape(n.shape)


def increasing(name: str, values: Any, least: int = 1) -> list[float]:
    """`values` as a list, if they are at least so many update counts >= 1, strictly increasing."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name}={values!r}: must be a list or tuple of update counts")
    if len(values) < least:
        raise ValueError(f"{name}={values!r}: must hold at least one update count")
    checked = [int_or_float(f"{name}[{i}]", value, low=1) for i, value in enumerate(values)]
    if any(later <= earlier for earlier, later in itertools.pairwise(checked)):
        raise ValueError(f"{name}={values!r}: must be strictly increasing")
    return checked


def final_update(max_update: Any, warmup_steps: int) -> int:
    """`max_update`, if it is an int above `warmup_steps`."""
    max_update = integer("max_update", max_update, low=1)
    if warmup_steps >= max_update:
        raise ValueError(
            f"warmup_steps={warmup_steps}: must be less than max_update={max_update}, else no update follows the warm-up"
        )
    return max_update


def half_cosine(t):
    """From 1 at t = 0 to 0 at t = 1 along half a cosine wave."""
    return (1 + np.cos(np.pi * t)) / 2


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) - {"state"} == {"class", "kwargs"}


def _from_plain(value: Any) -> Any:
    if _is_config(value):
        return from_config(value)
    return [_from_plain(item) for item in value] if isinstance(value, list) else value
