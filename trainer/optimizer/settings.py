"""Checked attributes of optimizers, checks of constructor arguments, and warnings where MXNet's meaning differs."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch

from ...kernels.messages import did_you_mean, one_of
from ..validation import boolean, int_or_float, number, refuse_arguments
from .counts import Index

# The string values of `multi_precision`, with the dtype of the split master stored next to a bfloat16 weight.
SPLIT_MASTERS: dict[Any, torch.dtype] = {"remainder": torch.int16, "split8": torch.int8}
_TORCHS_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "eps": "epsilon", "betas": "beta1", "alpha": "gamma1"}
UNSCHEDULED: dict[str, Any] = {"lr_scheduler": None, "_schedules": {}}
_P = ParamSpec("_P")
_T = TypeVar("_T")


def check_grad_req(name: Index, value: Any) -> None:
    """Raise ValueError if a parameter's attribute `grad_req`, which torch ignores, is neither "write" nor "add"."""
    if value not in ("write", "add"):
        raise ValueError(
            f"grad_req={value!r} of parameter {name!r}: torch does not read it; to stop training the parameter, call "
            "parameter.requires_grad_(False) and delete the attribute"
        )


def split_master(name: str, value: Any) -> bool | str:
    """Check and return a value of `multi_precision`: True, False, or "remainder" or "split8", kinds of masters."""
    if not isinstance(value, str):
        return boolean(name, value)
    if value not in SPLIT_MASTERS:
        raise TypeError(f"{name}={value!r}:{one_of(value, SPLIT_MASTERS)}, True or False")
    return value


class Setting(Generic[_T]):
    """Attribute of an optimizer that is checked whenever it is set, by the constructor, the user or a loaded file.

    An assignment that the optimizer's `check_settings` refuses in combination with other settings changes nothing.

    Args:
        check: function of the attribute's name, a value and `limits` that returns the value to store; raises TypeError or
            ValueError for a value that is not allowed.
        optional: whether None is allowed, too.
        independent: whether the setting is allowed whatever the others are; `check_settings` is then skipped, so that
            setting it at every step is cheap.
        fixed: whether the rule or its states depend on the number, so that it cannot have a schedule.
        **limits: further arguments of `check`.
    """

    name: str

    def __init__(
        self,
        check: Callable[..., _T],
        *,
        optional: bool = False,
        independent: bool = False,
        fixed: bool = False,
        **limits: Any,
    ) -> None:
        self._check, self._optional, self._independent, self._limits = check, optional, independent, limits
        self.takes_schedule = check is number and not (independent or fixed)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    if TYPE_CHECKING:

        def __get__(self, optimizer: Any, owner: Any = None) -> _T: ...

    # Without a method __get__, the value is read from the instance's dictionary, as fast as any other attribute.
    def __set__(self, optimizer: Any, value: Any) -> None:
        if self._independent:
            vars(optimizer)[self.name] = self.checked(value)
            return
        if (schedule := optimizer._schedules.get(self.name)) is not None:
            raise UserWarning(
                f"{self.name} is decided by schedules[{self.name!r}], {schedule!r}, so it cannot be set to {value!r}: set "
                "its base_lr, or set optimizer.schedules without it first"
            )
        optimizer.set_together({self.name: value})

    def checked(self, value: Any, name: str | None = None) -> _T:
        """Return the value to store for an assigned value; `name` replaces the setting's in messages."""
        if value is None and self._optional:
            return value  # type: ignore[return-value]  # an optional setting may be None
        return self._check(name or self.name, value, **self._limits)


def fraction() -> Setting[float]:
    """Return a setting for a number in [0, 1), such as the decay rate of an average."""
    return Setting(number, low=0, below=1)


def not_negative() -> Setting[float]:
    """Return a setting for a number >= 0."""
    return Setting(number, low=0)


def positive() -> Setting[float]:
    """Return a setting for a number > 0."""
    return Setting(number, above=0)


def switch() -> Setting[bool]:
    """Return a setting for a bool."""
    return Setting(boolean)


def carried(optional: bool = False) -> Setting[Any]:
    """Return a setting for a number that one step passes to the next; an array of them in an ensemble of optimizers."""
    return Setting(_carried, optional=optional, independent=True)


def _carried(name: str, value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else int_or_float(name, value)


def check_settings(optimizer: Any, settings: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if the optimizer would refuse these new attribute values; changes nothing."""
    copy.copy(optimizer).set_together({**UNSCHEDULED, **settings}, with_states=True)


def arguments_of(klass: type) -> list[str]:
    """Return the names of all arguments that a class's constructor takes, including its base classes' by **kwargs."""
    allowed: list[str] = []
    for base in klass.__mro__:
        if base is not object and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            allowed += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in dict.fromkeys(allowed) if name != "self"]


def refuse_unknown(klass: type, unknown: Mapping[str, Any]) -> None:
    """Raise TypeError if a class was given unknown arguments; the message suggests the right name."""
    if unknown:
        allowed, meant = arguments_of(klass), _TORCHS_NAMES.get(next(iter(unknown)))
        refuse_arguments(
            klass.__name__, unknown, allowed, f"Did you mean {meant!r}, as in MXNet?" if meant in allowed else ""
        )


def set_base_lr(schedule: Any, value: float, name: str = "learning_rate") -> None:
    """Set a schedule's `base_lr` to the value of an argument; warn if it had been given another one, or has none."""
    base_lr = getattr(schedule, "base_lr", None)
    if base_lr is None:
        warnings.warn(
            f"{name}={value} has no effect: {schedule!r} decides {'the rate' if name == 'learning_rate' else 'it'} and has "
            "no base_lr; give only one of them",
            stacklevel=stacklevel_of_caller(),
        )
    elif value != base_lr:
        if not getattr(schedule, "has_default_base_lr", False):
            warnings.warn(
                f"{name}={value} replaces base_lr={base_lr} of {schedule!r}; give only one of them",
                stacklevel=stacklevel_of_caller(),
            )
        if hasattr(schedule, "start_from"):
            schedule.start_from(value)
        else:
            schedule.base_lr = value


def check_scheduled(optimizer: Any, names: Iterable[str]) -> None:
    """Raise TypeError or ValueError if a setting of these names cannot have a schedule."""
    klass = type(optimizer)
    allowed = [name for name in arguments_of(klass) if getattr(getattr(klass, name, None), "takes_schedule", False)]
    for name in names:
        if name in ("lr", "learning_rate"):
            raise ValueError(f"schedules[{name!r}]: the schedule of the learning rate is lr_scheduler")
        if name not in allowed:
            raise ValueError(
                f"schedules[{name!r}]: is no number that each step of {klass.__name__} reads."
                f"{did_you_mean(name, allowed, _TORCHS_NAMES)} A schedule is for {', '.join(allowed)}"
            )


def start_schedule(optimizer: Any, name: str, schedule: Any, is_argument: bool) -> None:
    """Let a schedule without a `base_lr` of its own start from the setting; warn as `set_base_lr` does.

    `is_argument`: whether the setting was an argument besides the schedule, unless it has its default.
    """
    value = getattr(optimizer, name)
    if getattr(schedule, "has_default_base_lr", False):
        if not value:
            raise ValueError(
                f"schedules[{name!r}]={schedule!r}: was given no base_lr, and {name} is {value}: give one of them"
            )
        set_base_lr(schedule, value, name)
    elif is_argument and _was_given(type(optimizer), name, value):
        set_base_lr(schedule, value, name)


def _was_given(klass: type, name: str, value: Any) -> bool:
    """Return whether the value of a setting is not the default of its argument, or one that None stands for."""
    inits = [vars(base)["__init__"] for base in klass.__mro__ if base is not object and "__init__" in vars(base)]
    default = next(p[name].default for init in inits if name in (p := inspect.signature(init).parameters))
    return bool(value != default and (default is not None or getattr(klass, name)._optional))


def first_argument_in_mxnet(name: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Return a decorator of constructors that warns of positional arguments: in MXNet 1.9.1 the first one is `name`."""

    def wrap(init: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(init)
        def __init__(*args: _P.args, **kwargs: _P.kwargs) -> None:
            if len(args) > 1:
                made = type(args[0]).__name__
                warn_once(
                    f"the first positional argument of {made} is learning_rate; in MXNet 1.9.1 it is {name}: write "
                    f"{made}(learning_rate=...) or {made}({name}=...)"
                )
            init(*args, **kwargs)

        return __init__

    return wrap


def also_called(**names: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Return a decorator of constructors that accepts other names of arguments: `epsilon="eps"` passes epsilon as eps."""

    def wrap(init: Callable[_P, None]) -> Callable[_P, None]:
        places = list(inspect.signature(init).parameters)

        @functools.wraps(init)
        def __init__(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for alias, name in names.items():
                if alias not in kwargs:
                    continue
                if name in kwargs or name in places[: len(args)]:
                    raise TypeError(
                        f"{alias}={kwargs[alias]!r} together with {name}, which are one argument: give one of them"
                    )
                kwargs[name] = kwargs.pop(alias)
            init(*args, **kwargs)

        return __init__

    return wrap


_warned: set[str] = set()


def warn_once(message: str, key: str | None = None) -> None:
    """Warn with this message the first time in the process; `key` stands for several messages that say the same."""
    if (key or message) not in _warned:
        _warned.add(key or message)
        warnings.warn(message, stacklevel=stacklevel_of_caller())


def stacklevel_of_caller() -> int:
    """Return the `stacklevel` that makes `warnings.warn` name the line outside this package that led to the warning.

    Constructors are skipped, too, so that a warning about an argument names the line that gave it.
    """
    frame, level, package = inspect.currentframe(), 0, __name__.partition(".")[0]
    while frame is not None and (
        frame.f_code.co_name == "__init__" or frame.f_globals.get("__name__", "").partition(".")[0] == package
    ):
        frame, level = frame.f_back, level + 1
    return max(level, 1)
