"""Checks of optimizers' arguments, with warnings where MXNet differs."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import torch

from ...kernels import Rule, TensorRule
from ..validation import did_you_mean
from .counts import Index

if TYPE_CHECKING:
    from .base import Optimizer
    from .rule_optimizer import RuleOptimizer

__all__ = [
    "OPTIONS_OF_WHOLE_TENSORS",
    "SPLIT_MASTERS",
    "also_called",
    "check_grad_req",
    "check_options",
    "check_settings",
    "check_state_dtype",
    "first_argument_in_mxnet",
    "refuse_unknown",
    "set_base_lr",
    "split_master",
    "warn_once",
]

# Values of `multi_precision` that are no bool, with the type of what is stored next to a bfloat16 weight.
SPLIT_MASTERS: dict[Any, torch.dtype] = {"remainder": torch.int16, "split8": torch.int8}
# The options of transforms that rules of whole tensors take, too.
OPTIONS_OF_WHOLE_TENSORS = ("clip_norm", "skip_nonfinite", "cautious_wd", "ema_decay")
_TORCHS_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "eps": "epsilon", "betas": "beta1", "alpha": "gamma1"}
_P = ParamSpec("_P")


def check_grad_req(name: Index, value: Any) -> None:
    """Gluon's `grad_req`, which torch does not know: gradients are added up, or there are none."""
    if value not in ("write", "add"):
        raise ValueError(
            f"grad_req={value!r} of parameter {name!r}: torch does not read it; to train the parameter no more, use "
            "parameter.requires_grad_(False), and delete the attribute"
        )


def split_master(value: Any) -> str | None:
    """The kind of split master that `multi_precision=value` stands for, if any.

    Raises:
        TypeError: it is another string.
    """
    if not isinstance(value, str):
        return None
    if value not in SPLIT_MASTERS:
        names = ", ".join(map(repr, SPLIT_MASTERS))
        raise TypeError(
            f"multi_precision={value!r}: must be True, False, or one of {names}.{did_you_mean(value, SPLIT_MASTERS)}"
        )
    return value


def check_options(optimizer: RuleOptimizer) -> None:
    """Refuse options that do not go together, or not with the optimizer's rule."""
    name, rule = type(optimizer).__name__, cast("Rule | TensorRule", optimizer.rule)
    if optimizer.narrow is not None:
        check_state_dtype(optimizer.state_dtype, name, rule)
    if isinstance(rule, TensorRule):
        given = ", ".join(f"{k}={v!r}" for k, v in optimizer.options_in_use.items() if k not in OPTIONS_OF_WHOLE_TENSORS)
        if given:
            raise TypeError(
                f"{given}: {name} has a rule of whole tensors, which such options are not for; those for it are "
                f"{', '.join(OPTIONS_OF_WHOLE_TENSORS)} and how weights and states are stored"
            )
    optimizer.check_transforms()
    if optimizer.kahan and optimizer.multi_precision:
        raise ValueError(
            f"kahan=True with multi_precision={optimizer.multi_precision!r}: one of them must be False, both keep what "
            "rounding takes off a weight"
        )


def check_state_dtype(value: Any, name: str, rule: Rule | TensorRule) -> None:
    """Refuse low precision for an optimizer none of whose states is ever stored in it."""
    if not set(rule.state) - set(rule.full_precision):
        why = "as all its states are weights or sums over all steps" if rule.state else "as it has no states"
        if isinstance(rule, TensorRule):
            why = "none of whose states is stored otherwise"
        raise ValueError(f"state_dtype={value!r}: must be None for {name}, {why}")


def check_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Refuse settings, by the names of attributes, that the optimizer's constructor would refuse; nothing is changed.

    Of a class from elsewhere it is the constructor of the class of ours that it is derived from.
    """
    ours = __name__.partition(".")[0]
    klass = next(base for base in type(optimizer).__mro__ if base.__module__.partition(".")[0] == ours)
    values = optimizer.settings() | dict(settings)
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value) and value != optimizer.settings().get(name):
            raise ValueError(f"{name}={value!r}: must be finite")
    values["learning_rate"] = values.pop("lr")
    probe = copy.copy(optimizer)
    klass.__init__(probe, **{name: values[name] for name in arguments_of(klass) if name in values})  # type: ignore[misc]


def arguments_of(klass: type) -> list[str]:
    """What the constructor of a class takes, and, by **kwargs, those of its bases."""
    allowed: list[str] = []
    for base in klass.__mro__:
        if base is not object and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            allowed += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in dict.fromkeys(allowed) if name != "self"]


def refuse_unknown(klass: type, unknown: Mapping[str, Any]) -> None:
    if not unknown:
        return
    allowed = arguments_of(klass)
    for name, value in unknown.items():
        meant = _TORCHS_NAMES.get(name)
        hint = f" Did you mean {meant!r}, as in MXNet?" if meant in allowed else did_you_mean(name, allowed)
        raise TypeError(f"{klass.__name__} has no argument {name!r} (={value!r}); it has {', '.join(allowed)}.{hint}")


def set_base_lr(lr_scheduler: Any, learning_rate: float) -> None:
    base_lr = getattr(lr_scheduler, "base_lr", None)
    if base_lr is None:
        warnings.warn(
            f"learning_rate={learning_rate} has no effect: {lr_scheduler!r} decides the rate and has no base_lr; "
            "give only one of them",
            stacklevel=_stacklevel(),
        )
    elif learning_rate != base_lr:
        if not getattr(lr_scheduler, "has_default_base_lr", False):
            warnings.warn(
                f"learning_rate={learning_rate} replaces base_lr={base_lr} of {lr_scheduler!r}; give only one of them",
                stacklevel=_stacklevel(),
            )
        if hasattr(lr_scheduler, "start_from"):
            lr_scheduler.start_from(learning_rate)
        else:
            lr_scheduler.base_lr = learning_rate


def first_argument_in_mxnet(name: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Decorator of a constructor whose first argument is `learning_rate`, but another one in MXNet 1.9.1: warns of it."""

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
    """Decorator of a constructor that takes arguments by other names, too, those of MXNet 2.0: `epsilon="eps"`."""

    def wrap(init: Callable[_P, None]) -> Callable[_P, None]:
        places = list(inspect.signature(init).parameters)

        @functools.wraps(init)
        def __init__(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for other, name in names.items():
                if other not in kwargs:
                    continue
                if name in kwargs or name in places[: len(args)]:
                    raise TypeError(
                        f"{other}={kwargs[other]!r} together with {name}, which are one argument: give one of them"
                    )
                kwargs[name] = kwargs.pop(other)
            init(*args, **kwargs)

        return __init__

    return wrap


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn of a number that MXNet takes otherwise, once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """How far up the first caller outside this package's constructors is."""
    frame, level = inspect.currentframe(), 0
    inner = ("_stacklevel", "warn_once", "set_base_lr", "__init__", "create_optimizer", "_make_optimizer")
    while frame is not None and frame.f_code.co_name in inner:
        frame, level = frame.f_back, level + 1
    return max(level, 1)
