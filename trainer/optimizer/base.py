"""Optimizer: counts, learning rates and multipliers, as in MXNet, and the registry. No arithmetic on tensors here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from ..registry import Registry
from ..validation import boolean, did_you_mean, integer, number
from .counts import Index, StepCounts
from .settings import Setting, check_grad_req, refuse_unknown, set_base_lr, warn_once

LOW_PRECISION = (torch.float16, torch.bfloat16)
_MXNETS_SCHEDULES = ("FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler")
_Class = TypeVar("_Class", bound="type[Optimizer]")


def _schedule(name: str, value: Any) -> Callable[[int], float]:
    if not callable(value):
        raise TypeError(
            f"{name}={value!r}: must be a scheduler, such as tristep.lr_scheduler.CosineScheduler(...), or another callable "
            "from the number of updates to a learning rate"
        )
    return value


def _multipliers(name: str, value: Any) -> dict[Index, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map parameter indices or names to numbers, got {type(value).__name__}")
    return {key: number(f"{name}[{key!r}]", each, low=0) for key, each in value.items()}


class WithMaster(NamedTuple):
    """The state of a 16-bit weight with `multi_precision`: its float32 copy, and the state made for that."""

    master: torch.Tensor
    state: Any


class Optimizer:
    """Base class of all optimizers, with MXNet's interface for user-defined optimizers.

    A subclass, marked with `@Optimizer.register` so that it is known by its name, supplies `create_state(index, weight)` and
    `update(index, weight, grad, state)` in plain torch operations, and in `update` asks
    `_update_count(index)`, `_get_lr(index)` and `_get_wd(index)` for what it needs. With an attribute `aggregate_num` of 1
    or more, `update` gets lists of up to so many parameters of one type, as in MXNet. It runs in plain torch, one tensor
    at a time. For fused kernels, write a rule and subclass `RuleOptimizer`.

    Args:
        learning_rate: step size, >= 0; None means the class's default, or the scheduler's `base_lr` if there is one.
        wd: weight decay, >= 0.
        rescale_grad: what every gradient is multiplied by first. `Trainer.step` sets it to 1 / batch_size times this.
        clip_gradient: elements of the gradient are limited to [-clip_gradient, clip_gradient]; None means no limit.
        lr_scheduler: a callable from the number of updates to the learning rate, such as those of `tristep.lr_scheduler`.
            If `learning_rate` is given as well, it becomes the scheduler's `base_lr`.
        begin_num_update: where the count of updates starts, >= 0.
        multi_precision: keep a float32 copy of float16 and bfloat16 weights and update that.
        param_idx2name: names of the parameters by index. By MXNet's rule, names that end neither in weight nor in gamma
            then get a wd_mult of 0.
        param_dict: parameters by index, whose attributes `lr_mult` and `wd_mult` are read at every step.

    Raises:
        TypeError: an unknown argument, or one of the wrong type.
        ValueError: an argument out of its range.

    Source: MXNet 1.9.1, `python/mxnet/optimizer/optimizer.py`.
    """

    default_learning_rate: ClassVar[float] = 0.01
    decayed_names: ClassVar[tuple[str, ...]] = ("_weight", "_gamma", ".weight", ".gamma")
    host_state_names: ClassVar[tuple[str, ...]] = ()  # what a step of a rule changes on the host; restored where it fails
    aggregate_num: int = 0
    default_overrules_schedule: ClassVar[bool] = False  # in MXNet, of which there is a warning
    opt_registry: ClassVar[Registry[type[Optimizer]]]  # by name, in lower case
    _is_complete = False  # whether the constructor has come to its end, from which on settings are checked together

    lr = Setting(number, low=0, apart=True)
    wd = Setting(number, low=0)
    rescale_grad = Setting(number, apart=True)
    clip_gradient = Setting(number, optional=True)  # MXNet's kernels take 0 and negative numbers for "no limit"
    begin_num_update = Setting(integer, low=0)
    multi_precision: Setting[Any] = Setting(boolean)
    lr_scheduler: Setting[Callable[[int], float] | None] = Setting(_schedule, optional=True)
    lr_mult = Setting(_multipliers)
    wd_mult = Setting(_multipliers)

    def __init__(
        self,
        *,
        learning_rate: float | None = None,
        wd: float = 0.0,
        rescale_grad: float = 1.0,
        clip_gradient: float | None = None,
        lr_scheduler: Callable[[int], float] | None = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_idx2name: Mapping[Index, str] | None = None,
        param_dict: Mapping[Index, torch.Tensor] | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self.trainer: Callable[[], Any] | None = None  # a weak reference to the Trainer that has it
        if learning_rate is not None:
            learning_rate = number("learning_rate", learning_rate, low=0)
        if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
            raise TypeError(f"param_idx2name must map indices to names, got {type(param_idx2name).__name__}")
        self.wd, self.rescale_grad, self.clip_gradient = wd, rescale_grad, clip_gradient
        self.begin_num_update, self.multi_precision = begin_num_update, multi_precision
        self.lr = self.default_learning_rate if learning_rate is None else learning_rate
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is not None and learning_rate is not None:
            set_base_lr(lr_scheduler, learning_rate)
        elif self.default_overrules_schedule and type(lr_scheduler).__name__ in _MXNETS_SCHEDULES:
            rate, name = getattr(lr_scheduler, "base_lr", self.lr), type(self).__name__
            if rate != self.lr:
                warn_once(
                    f"{name} without a learning_rate keeps base_lr={rate} of its schedule; in MXNet {name}'s default "
                    f"replaces it: give learning_rate={rate} if that is meant, learning_rate={self.lr} for MXNet's numbers"
                )
        self.step_counts = StepCounts(self.begin_num_update)
        self.idx2name = dict(param_idx2name or {})
        self.param_dict = dict(param_dict or {})
        self.param_names: dict[Index, str] = {}  # a Trainer's, by index
        self.lr_mult = {}
        self.set_wd_mult({})
        self.check_settings()
        self._is_complete = True

    def check_settings(self) -> None:
        """Refuse settings that do not go together. Called by the constructor, and after each assignment to one.

        Raises:
            TypeError, ValueError: there are such.
        """
        self._check_known("lr_mult", self.lr_mult)
        self._check_known("wd_mult", self.wd_mult)

    def set_together(self, settings: Mapping[str, Any], with_states: bool = False) -> None:
        """Set settings, by the names of attributes, all of them or none.

        Args:
            settings: the new values.
            with_states: whether states are replaced, too, by those that go with them.

        Raises:
            TypeError, ValueError: one is not allowed, or they do not go together, or, after the first step, not with the
                states that there are; nothing has been changed.
        """
        own = vars(self)
        checked = {name: self._checked_setting(name, value) for name, value in settings.items()}
        before = dict(own)
        own.update(checked)
        if self._is_complete:
            try:
                self.check_settings()
            except BaseException:
                own.update(before)
                raise

    def _checked_setting(self, name: str, value: Any) -> Any:
        setting = getattr(type(self), name, None)
        if isinstance(setting, Setting):
            return setting.checked(value)
        if isinstance(value, float) and not math.isfinite(value) and value != vars(self).get(name):  # of a user's class
            raise ValueError(f"{name}={value!r}: must be finite")
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the Trainer, and what has the states, of which a copy has none yet."""
        without = {name: None for name in ("trainer", "_updater") if name in vars(self)}
        return vars(self) | without | {"step_counts": self.step_counts.copy()}

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Class decorator: make an optimizer known by its name, in lower case.

        Another class of that name is replaced, with a warning.
        """
        return Optimizer.opt_registry.register(klass, stacklevel=3)

    @staticmethod
    def create_optimizer(name: str | Optimizer, **kwargs: Any) -> Optimizer:
        """Make an optimizer by the name of its class, in any case.

        Args:
            name: such as "sgd" or "Adam"; an instance is returned as it is.
            **kwargs: the class's arguments.

        Raises:
            TypeError: `name` is no string, an argument is unknown or of the wrong type, or is given with an instance.
            ValueError: no such optimizer, or an argument out of its range.

        Example:
            >>> import tristep
            >>> tristep.optimizer.create("sgd", learning_rate=0.5).learning_rate
            0.5
        """
        if isinstance(name, Optimizer):
            if kwargs:
                raise TypeError(
                    f"arguments together with an optimizer instance: {', '.join(kwargs)}; give them to {type(name).__name__}"
                )
            return name
        if not isinstance(name, str):
            raise TypeError(f"optimizer={name!r}: must be a name, such as 'sgd', or an Optimizer, not {type(name).__name__}")
        return Optimizer.opt_registry.lookup(name)(**kwargs)

    def create_state(self, index: Index, weight: torch.Tensor) -> Any:
        """The state of one parameter before its first update: None, a tensor, or a tuple or list of such.

        Called without gradient recording. This base class keeps none.
        """
        return None

    def update(self, index: Index, weight: torch.Tensor, grad: torch.Tensor, state: Any) -> None:
        """Update one weight and its state in place. Called without gradient recording."""
        raise NotImplementedError(f"{type(self).__name__} does not define update(index, weight, grad, state)")

    def create_state_multi_precision(self, index: Index, weight: torch.Tensor) -> Any:
        """As `create_state`; with `multi_precision` and a 16-bit weight the pair (float32 copy, its state)."""
        if self.keeps_master(weight):
            master = weight.detach().float()
            return WithMaster(master, self.create_state(index, master))
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`, on the float32 copy where there is one; the weight is that copy, rounded.

        Lists of each go to `update` as lists.
        """
        indices, weights, grads, states = listed_arguments(index, weight, grad, state)
        masters = [i for i, each in enumerate(weights) if self.keeps_master(each)]
        updated = list(weights)
        for i in masters:
            updated[i], states[i] = states[i]
            grads[i] = grads[i].float()
        if isinstance(index, (list, tuple)):
            self.update(indices, updated, grads, states)  # type: ignore[arg-type]  # of a class that takes lists
        else:
            self.update(index, updated[0], grads[0], states[0])
        for i in masters:
            weights[i].copy_(updated[i])

    @property
    def can_update(self) -> bool:
        """Whether the class defines how to update, as this base class does not."""
        own = type(self)
        return own.update is not Optimizer.update or own.update_multi_precision is not Optimizer.update_multi_precision

    @property
    def depends_on_order(self) -> bool:
        """Whether the order of the parameters may change numbers."""
        return not getattr(self, "uniform_hyper", False)

    def has_others(self, index: Index) -> bool:
        """Whether it has parameters other than this one."""
        return bool((self.counts.keys() | self.param_names.keys()) - {index})

    def check_alone(self, index: Index) -> None:
        """Refuse to update one of several parameters by itself where the gradients of all are needed.

        Raises:
            ValueError: they are.
        """

    def follow(self, weight: torch.Tensor, state: Any) -> Any:
        """The state, after the weight may have been converted: its float32 copy comes and goes with 16 bits."""
        if type(self).create_state_multi_precision is not Optimizer.create_state_multi_precision:
            return state  # a user-defined form
        if isinstance(state, WithMaster):
            return state if self.keeps_master(weight) else state.state
        return WithMaster(weight.detach().float(), state) if self.keeps_master(weight) else state

    def keeps_master(self, weight: torch.Tensor) -> bool:
        """Whether this weight is updated through a float32 copy."""
        return bool(self.multi_precision) and weight.dtype in LOW_PRECISION

    @property
    def learning_rate(self) -> float:
        """The learning rate at the current update count, before multipliers."""
        return self.rate_at(self.num_update)

    def rate_at(self, num_update: int) -> float:
        """The learning rate at this update count, before multipliers.

        Raises:
            ValueError, TypeError: the scheduler gave something else than a finite number >= 0.
        """
        if self.lr_scheduler is None:
            return self.lr
        return number(f"lr_scheduler({num_update})", self.lr_scheduler(num_update), low=0)

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate.

        Raises:
            UserWarning: there is a scheduler, which decides the rate. (MXNet raises the warning class itself.)
            ValueError: negative or not finite.
        """
        if self.lr_scheduler is not None:
            raise UserWarning(
                f"the learning rate is decided by {self.lr_scheduler!r}, so it cannot be set to {lr}: change the "
                "scheduler's base_lr, or set optimizer.lr_scheduler = None first"
            )
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Multipliers of the learning rate by parameter index or name; replaces those set before.

        An attribute `lr_mult` of the parameter itself comes before these. Under a Trainer, names are its names, and indices
        count its parameters.

        Raises:
            TypeError, ValueError: no numbers >= 0; or, under a Trainer, a parameter that it does not have.
        """
        self.lr_mult = args_lr_mult

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Multipliers of the weight decay by parameter index or name; replaces those set before.

        Where `param_idx2name` was given, names that end neither in weight nor in gamma start at 0, as in MXNet 1.9.1.
        """
        names = self.idx2name.values()
        undecayed: dict[Index, float] = {name: 0.0 for name in names if not name.endswith(self.decayed_names)}
        self.wd_mult = undecayed | _multipliers("wd_mult", args_wd_mult)

    def multipliers(self, index: Index) -> tuple[float, float]:
        """lr_mult and wd_mult of a parameter: its own attribute, else by index, else by name, else 1."""
        own = getattr(self.param_dict.get(index), "__dict__", {})
        name: Index = self.idx2name.get(index) or self.param_names.get(index) or index
        if "grad_req" in own:
            check_grad_req(name, own["grad_req"])
        lr_mult, wd_mult = own.get("lr_mult"), own.get("wd_mult")
        if lr_mult is None:
            lr_mult = self.lr_mult.get(index, self.lr_mult.get(name, 1.0))
        if wd_mult is None:
            wd_mult = self.wd_mult.get(index, self.wd_mult.get(name, 1.0))
        return number(f"lr_mult of parameter {name!r}", lr_mult, low=0), number(
            f"wd_mult of parameter {name!r}", wd_mult, low=0
        )

    def slots(self, indices: Sequence[Index]) -> np.ndarray:
        """Where `step_counts` has the counts of these parameters; new parameters start at `begin_num_update`."""
        return self.step_counts.slots(indices, self.begin_num_update)

    def host_state(self) -> tuple[Any, ...]:
        """The host's values that a step passes to the next, in addition to counts and states."""
        return tuple(getattr(self, name) for name in self.host_state_names)

    def load_host_state(self, carried: tuple[Any, ...]) -> None:
        """Undo what a step that failed has changed of these."""
        for name, value in zip(self.host_state_names, carried, strict=True):
            setattr(self, name, value)

    @property
    def counts(self) -> dict[Index, int]:
        """How often each parameter has been updated."""
        return self.step_counts.as_dict()

    @property
    def num_update(self) -> int:
        """The largest number of updates of any parameter, from which the schedule computes the learning rate."""
        return self.step_counts.largest

    @num_update.setter
    def num_update(self, value: int) -> None:
        self.step_counts.largest = integer("num_update", value, low=0)

    def _update_count(self, index: Index | Sequence[Index]) -> None:
        """Count an update of these parameters; `num_update` is the largest count of all."""
        indices = list(index) if isinstance(index, (list, tuple)) else [index]
        for slot in self.slots(indices):  # type: ignore[arg-type]  # one after the other, as one may be there twice
            self.step_counts.advance(slot, int(self.step_counts.values[slot]) + 1)

    @property
    def _index_update_count(self) -> Mapping[Index, int]:
        """`counts`, under the name that optimizers written for MXNet read it by; `_update_count` writes it."""
        return MappingProxyType(self.counts)

    def _get_lr(self, index: Index) -> float:
        return self.learning_rate * self.multipliers(index)[0]

    def _get_wd(self, index: Index) -> float:
        return self.wd * self.multipliers(index)[1]

    def _get_lrs(self, indices: Sequence[Index]) -> list[float]:
        lr = self.learning_rate
        return [lr * self.multipliers(index)[0] for index in indices]

    def _get_wds(self, indices: Sequence[Index]) -> list[float]:
        return [self._get_wd(index) for index in indices]

    def use_parameters(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Let these be the parameters of indices 0, 1, ..., as a Trainer does.

        Raises:
            ValueError: `param_idx2name`, `set_lr_mult` or `set_wd_mult` named others, or one has a `grad_req` that torch has
                not; nothing has been changed.
        """
        for index, name in self.idx2name.items():
            if index not in range(len(params)):
                raise ValueError(
                    f"param_idx2name[{index!r}]={name!r}: there is no such parameter; indices are 0 to {len(params) - 1}"
                )
            if names[index] not in (name, str(index)):  # type: ignore[index]
                raise ValueError(
                    f"param_idx2name[{index!r}]={name!r}: parameter {index} of this Trainer is {names[index]!r}; "  # type: ignore[index]
                    "leave it out, or give params as a list in the order of these indices"
                )
        for param, name in zip(params, names, strict=True):
            if "grad_req" in vars(param):
                check_grad_req(name, vars(param)["grad_req"])
        before = self.param_dict, self.param_names
        self.param_dict, self.param_names = dict(enumerate(params)), dict(enumerate(names))
        try:
            Optimizer.check_settings(self)
        except ValueError:
            self.param_dict, self.param_names = before
            raise

    def _check_known(self, argument: str, given: Mapping[Index, float]) -> None:
        """Under a Trainer, multipliers of parameters that there are not would have no effect."""
        if not self.param_names:
            return
        names = {*self.param_names.values(), *self.idx2name.values()}
        listed = ", ".join(map(repr, sorted(names)[:8])) + (" and others" if len(names) > 8 else "")
        for key in given:
            if key not in self.param_names and key not in names:
                raise ValueError(
                    f"{argument}[{key!r}]: no parameter has this name or index; indices are 0 to {len(self.param_names) - 1}"
                    f", names {listed}.{did_you_mean(str(key), names)}"
                )

    def settings(self) -> dict[str, Any]:
        """The optimizer's own numbers and switches, as plain data for saving."""
        plain = (bool, int, float, str, type(None))
        own = {k: v.item() if isinstance(v, np.generic) else v for k, v in vars(self).items() if k[0] != "_"}
        return {k: v for k, v in own.items() if k not in ("lr_scheduler", "trainer") and isinstance(v, plain)}

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.settings().items() if isinstance(v, (bool, int, float)) and k not in self._hidden()}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def _hidden(self) -> tuple[str, ...]:
        """Settings that `repr` leaves out."""
        return ()


def listed_arguments(index: Any, weight: Any, grad: Any, state: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Arguments of `update` as lists, which they may be already.

    Raises:
        TypeError, ValueError: some are and others not, they have different lengths, or an index comes twice.
    """
    if not isinstance(index, (list, tuple)):
        return [index], [weight], [grad], [state]
    given = {"index": index, "weight": weight, "grad": grad, "state": state}
    for name, values in given.items():
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"index is a list, so {name} must be one, too, got {type(values).__name__}")
        if len(values) != len(index):
            raise ValueError(f"{len(index)} indices came with {len(values)} for {name}: there must be one for each")
    if len(set(index)) < len(index):
        raise ValueError(f"index={list(index)!r}: an index comes twice; update one after the other")
    return list(index), list(weight), list(grad), list(state)


Optimizer.opt_registry = Registry(
    "optimizer",
    Optimizer,
    argument="optimizer",
    hint="A class of your own needs @tristep.optimizer.register",
    group="tristep.optimizers",
)
register = Optimizer.register
create = Optimizer.create_optimizer


def registered() -> dict[str, type[Optimizer]]:
    """The optimizers by name, with the plugins', which are imported."""
    return Optimizer.opt_registry.everything()
