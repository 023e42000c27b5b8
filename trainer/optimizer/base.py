"""`Optimizer`, the base class: update counts, learning rates and multipliers as in MXNet, and the registry of names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from ...kernels import storage
from ...kernels.messages import did_you_mean, listed
from ..lr_scheduler import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler
from ..registry import Registry
from ..utils.read_only import ReadOnly
from ..validation import boolean, instance, integer, number
from .counts import Index, StepCounts
from .settings import Setting, check_grad_req, check_scheduled, refuse_unknown, set_base_lr, start_schedule, warn_once

LOW_PRECISION = (torch.float16, torch.bfloat16)
_MXNETS_SCHEDULES = (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
_Class = TypeVar("_Class", bound="type[Optimizer]")


def _schedule(name: str, value: Any) -> Callable[[int], float]:
    if not callable(value):
        raise TypeError(
            f"{name}={value!r}: must be a scheduler, such as tristep.lr_scheduler.CosineScheduler(...), or another callable "
            "from the number of updates to a number"
        )
    return value


def _multipliers(name: str, value: Any) -> dict[Index, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map parameter indices or names to numbers, got {type(value).__name__}")
    return {key: number(f"{name}[{key!r}]", multiplier, low=0) for key, multiplier in value.items()}


class WithMaster(NamedTuple):
    """State of a 16-bit weight with `multi_precision`: its float32 master copy, and the state created for the master."""

    master: torch.Tensor
    state: Any


class Optimizer:
    """Base class of all optimizers, with MXNet's interface for user-defined optimizers.

    To define an optimizer, write a subclass with `create_state(index, weight)` and `update(index, weight, grad, state)` in
    plain torch operations, and register its name with `@Optimizer.register`. In `update`, call `_update_count(index)`,
    `_get_lr(index)` and `_get_wd(index)` for the count, learning rate and weight decay of a parameter. If the attribute
    `aggregate_num` is 1 or more, `update` gets lists of up to that many parameters of one dtype, as in MXNet. Such a class
    runs in plain torch, one tensor at a time; for fused kernels, write a rule and subclass `RuleOptimizer`. The class
    attribute `default_learning_rate` is the learning rate without other information, 0.01 in this class.

    States are saved, and numbers and strings in attributes whose names do not begin with an underscore. Whatever else
    `update` changes, such as lists and tensors in attributes, is not saved: put it into the state. The class need not be
    registered to be saved: states are loaded into an optimizer whose class has the same name.

    Args:
        learning_rate: step size, >= 0; None means the scheduler's `base_lr`, or `default_learning_rate` without a scheduler.
        wd: weight decay, >= 0.
        rescale_grad: multiplier of every gradient, applied first. `Trainer.step` divides it by the batch size.
        clip_gradient: limit of the gradient's elements, which are clipped to [-clip_gradient, clip_gradient]; None means no
            limit.
        lr_scheduler: callable from the update count to the learning rate, such as a schedule of `tristep.lr_scheduler`. If
            `learning_rate` is given as well, it becomes the scheduler's `base_lr`.
        schedules: schedulers of other settings by name, such as `{"wd": CosineScheduler(...), "beta1": ...}`. They get the
            count that `lr_scheduler` gets, and set the setting at each step. A scheduler without a `base_lr` starts from
            the setting's value; a value other than the default replaces a `base_lr`.
        begin_num_update: the first value of the update counts, an int >= 0.
        multi_precision: whether to keep and update a float32 master copy of float16 and bfloat16 weights. An element whose
            weight is not its master rounded was written since the last step: the weight counts.
        param_idx2name: names of the parameters by index. If given, parameters whose names end neither in weight nor in gamma
            get a `wd_mult` of 0, as in MXNet.
        param_dict: parameters by index, whose attributes `lr_mult` and `wd_mult` are read at every step.

    Raises:
        TypeError: an argument is unknown or has the wrong type.
        ValueError: an argument is out of range.

    Source: MXNet 1.9.1, `python/mxnet/optimizer/optimizer.py`.
    """

    default_learning_rate: ClassVar[float] = 0.01
    decayed_names: ClassVar[tuple[str, ...]] = ("_weight", "_gamma", ".weight", ".gamma")
    host_state_names: ClassVar[tuple[str, ...]] = ()  # attributes that a step changes; restored if the step fails
    aggregate_num: int = 0
    default_overrules_schedule: ClassVar[bool] = False  # whether in MXNet the class's default rate replaces base_lr
    opt_registry: ClassVar[Registry[type[Optimizer]]]  # by name, in lower case
    _schedules: Mapping[str, Callable[[int], float]] = {}  # replaced as a whole
    _joint: Any = None  # a `MultiOptimizer` whose limits by the norm of all gradients hold, too
    _is_complete = False  # whether the constructor has ended; from then on settings are checked together

    lr = Setting(number, low=0, independent=True)
    wd = Setting(number, low=0)
    rescale_grad = Setting(number, independent=True)
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
        schedules: Mapping[str, Callable[[int], float]] | None = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_idx2name: Mapping[Index, str] | None = None,
        param_dict: Mapping[Index, torch.Tensor] | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        self.trainer: Callable[[], Any] | None = None  # a weak reference to the Trainer that uses this optimizer
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
        elif self.default_overrules_schedule and isinstance(lr_scheduler, _MXNETS_SCHEDULES):
            rate, name = getattr(lr_scheduler, "base_lr", self.lr), type(self).__name__
            if rate != self.lr:
                warn_once(
                    f"{name} without a learning_rate keeps base_lr={rate} of its schedule; in MXNet {name}'s default "
                    f"replaces it: give learning_rate={rate} if that is meant, learning_rate={self.lr} for MXNet's numbers"
                )
        self.step_counts = StepCounts(self.begin_num_update)
        self.idx2name = dict(param_idx2name or {})
        self.param_dict = dict(param_dict or {})
        self.param_names: dict[Index, str] = {}  # by index; set by a Trainer
        self.lr_mult = {}
        self.set_wd_mult({})
        if schedules is not None:
            self.schedules = schedules
        self.check_settings()
        self._is_complete = True

    def check_made(self) -> None:
        """Raise TypeError if a subclass's constructor has not called that of this class."""
        if not self._is_complete:
            raise TypeError(
                f"{type(self).__name__}.__init__ did not call super().__init__(**kwargs): it must, as its last line"
            )

    def check_settings(self) -> None:
        """Raise if settings contradict each other; called by the constructor and after each assignment to a setting.

        Subclasses extend it for their own arguments.

        Raises:
            TypeError, ValueError: two settings cannot be combined, or a multiplier names an unknown parameter.
        """
        self._check_multiplier_keys("lr_mult", self.lr_mult)
        self._check_multiplier_keys("wd_mult", self.wd_mult)

    def set_together(self, settings: Mapping[str, Any], with_states: bool = False) -> None:
        """Set several attributes at once: all of them, or none if one is refused.

        Args:
            settings: the new values by attribute name.
            with_states: whether the caller also replaces the states, so that the values need not fit the present ones.

        Raises:
            TypeError, ValueError: a value is not allowed, values contradict each other, or, after the first step, they do
                not fit the existing states; nothing has been changed.
        """
        attributes = vars(self)
        checked = {name: self._checked_setting(name, value) for name, value in settings.items()}
        before = dict(attributes)
        attributes.update(checked)
        if self._is_complete:
            try:
                self.check_settings()
            except BaseException:
                attributes.update(before)
                raise

    def _checked_setting(self, name: str, value: Any) -> Any:
        setting = getattr(type(self), name, None)
        if isinstance(setting, Setting):
            return setting.checked(value)
        if isinstance(value, float) and not math.isfinite(value) and value != vars(self).get(name):  # in a user's class
            raise ValueError(f"{name}={value!r}: must be finite")
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle: without the links to Trainer and Updater, which a copy does not have."""
        unlinked = {name: None for name in ("trainer", "_updater", "_joint") if name in vars(self)}
        return vars(self) | unlinked | {"step_counts": self.step_counts.copy()}

    @staticmethod
    def register(klass: _Class) -> _Class:
        """Register an optimizer class under its name, for `create` and `Trainer`; a class decorator.

        Names are looked up in any case. Registering a second class of the same name replaces the first, with a warning.

        Args:
            klass: a subclass of `Optimizer`.

        Returns:
            `klass`, unchanged.

        Raises:
            TypeError: `klass` is not a subclass of `Optimizer`.
        """
        return Optimizer.opt_registry.register(klass, stacklevel=3)

    @staticmethod
    def create_optimizer(name: str | Optimizer, **kwargs: Any) -> Optimizer:
        """Construct an optimizer from the name of its class.

        Args:
            name: a registered name in any case, such as "sgd" or "Adam". An instance is returned unchanged.
            **kwargs: the arguments of the class; not allowed with an instance.

        Raises:
            TypeError: `name` is neither a string nor an instance, an argument is unknown or has the wrong type, or arguments
                come with an instance.
            ValueError: no optimizer is registered under that name, or an argument is out of range.

        Example:
            >>> import tristep
            >>> tristep.optimizer.create("sgd", learning_rate=0.5).learning_rate
            0.5
        """
        if isinstance(name, Optimizer):
            name.check_made()
            if kwargs:
                raise TypeError(
                    f"arguments together with an optimizer instance: {', '.join(kwargs)}; give them to {type(name).__name__}"
                )
            return name
        hint = f"; write {name.__name__}(...) for an instance" if inspect.isclass(name) else ""
        instance("optimizer", name, str, "a name, such as 'sgd', or an Optimizer", hint, shown=True)
        return Optimizer.opt_registry.lookup(name)(**kwargs)

    def create_state(self, index: Index, weight: torch.Tensor) -> Any:
        """Return the state of a parameter before its first update: None, a tensor, or a (nested) tuple or list of these.

        Subclasses that have state override it; this base class returns None. It is called without gradient recording.

        Args:
            index: the parameter's index.
            weight: the parameter, or its float32 master.
        """
        return None

    def update(self, index: Index, weight: torch.Tensor, grad: torch.Tensor, state: Any) -> None:
        """Update one weight and its state in place; subclasses define it. It is called without gradient recording.

        Args:
            index: the parameter's index.
            weight: the parameter, or its float32 master.
            grad: its gradient.
            state: what `create_state` returned for it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update(index, weight, grad, state)")

    def create_state_multi_precision(self, index: Index, weight: torch.Tensor) -> Any:
        """Return the result of `create_state`, or for a weight with a master the pair (float32 master, master's state)."""
        if self.keeps_master(weight):
            master = weight.detach().float()
            return WithMaster(master, self.create_state(index, master))
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Call `update` on the float32 master of a weight that has one and round the result into the weight.

        Weights without a master are updated directly. Lists are passed to `update` as lists.

        Args:
            index: the parameter's index, or a list of indices.
            weight, grad: the parameter and its gradient, or lists of them.
            state: what `create_state_multi_precision` returned, or a list of these.
        """
        indices, weights, grads, states = listed_arguments(index, weight, grad, state)
        masters = [i for i, tensor in enumerate(weights) if self.keeps_master(tensor)]
        updated = list(weights)
        for i in masters:
            updated[i], states[i] = self._master_and_state(states[i])
            updated[i].copy_(storage.combined(weights[i].detach(), updated[i]))
            grads[i] = grads[i].float()
        if isinstance(index, (list, tuple)):
            self.update(indices, updated, grads, states)  # type: ignore[arg-type]  # of a class that takes lists
        else:
            self.update(index, updated[0], grads[0], states[0])
        for i in masters:
            weights[i].copy_(updated[i])

    def _master_and_state(self, state: Any) -> tuple[torch.Tensor, Any]:
        """Return the two parts of what `create_state_multi_precision` returned for a weight with a master."""
        master, rest = state
        return master, rest

    @property
    def can_update(self) -> bool:
        """Whether the class defines how to update weights, which this base class does not."""
        cls = type(self)
        return cls.update is not Optimizer.update or cls.update_multi_precision is not Optimizer.update_multi_precision

    @property
    def depends_on_order(self) -> bool:
        """Whether results may depend on the order in which parameters are updated."""
        return not getattr(self, "shares_rows", False)

    def has_others(self, index: Index) -> bool:
        """Return whether the optimizer has parameters other than this one."""
        return bool((self.counts.keys() | self.param_names.keys()) - {index})

    def check_alone(self, index: Index) -> None:
        """Raise if this parameter must not be updated without the others, because their gradients are needed, too.

        Raises:
            ValueError: there are other parameters, and an option such as a global norm needs all gradients.
        """
        if self._joint is not None and self.has_others(index):
            options = ", ".join(f"{name}={value!r}" for name, value in self._joint.limits().items())
            raise ValueError(
                f"an update of one parameter by {type(self).__name__}, one of several optimizers with {options}, which need "
                "the gradients of all parameters: give lists to get_updater(optimizer)(indices, gradients, weights), or use "
                "Trainer.step"
            )

    def follow(self, weight: torch.Tensor, state: Any) -> Any:
        """Return a state that fits the weight's present dtype: with a new master, or without one, if the dtype changed.

        Args:
            weight: the parameter, possibly converted to another dtype since the last step.
            state: its state from the last step.
        """
        if type(self).create_state_multi_precision is not Optimizer.create_state_multi_precision:
            return state  # the user's class defines its own form of state
        if isinstance(state, WithMaster):
            return state if self.keeps_master(weight) else state.state
        return WithMaster(weight.detach().float(), state) if self.keeps_master(weight) else state

    def keeps_master(self, weight: torch.Tensor) -> bool:
        """Return whether this weight is updated through a master copy: `multi_precision` is on, and it has 16 bits."""
        return bool(self.multi_precision) and weight.dtype in LOW_PRECISION

    @property
    def learning_rate(self) -> float:
        """The learning rate at the current update count, before multipliers."""
        return self.rate_at(self.num_update)

    def rate_at(self, num_update: int) -> float:
        """Return the learning rate at an update count, before multipliers.

        Args:
            num_update: the update count, which the scheduler gets. Without a scheduler the rate is `lr`.

        Raises:
            TypeError: the scheduler returned something that is not a number.
            ValueError: the scheduler returned a negative or infinite number.
        """
        if self.lr_scheduler is None:
            return self.lr
        return number(f"lr_scheduler({num_update})", self.lr_scheduler(num_update), low=0)

    @property
    def schedules(self) -> Mapping[str, Callable[[int], float]]:
        """The schedules of settings other than the learning rate, by name; may be set, and read-only otherwise.

        A setting whose schedule is taken away keeps its last value. A scheduler without a `base_lr` starts from the present
        value.

        Raises:
            TypeError: it is no mapping to callables, or a value of a schedule is no number.
            ValueError: a setting cannot have a schedule, two share a scheduler, or a value of a schedule is out of range.
        """
        return ReadOnly(self._schedules)

    @schedules.setter
    def schedules(self, value: Mapping[str, Callable[[int], float]]) -> None:
        instance("schedules", value, Mapping, "a mapping from names of settings to schedulers")
        schedules = {name: _schedule(f"schedules[{name!r}]", schedule) for name, schedule in value.items()}
        check_scheduled(self, schedules)
        with_base = [each for each in (self.lr_scheduler, *schedules.values()) if hasattr(each, "base_lr")]
        if len({*map(id, with_base)}) < len(with_base):
            raise ValueError("schedules: two settings share a scheduler, which has one base_lr: give each its own")
        for name, schedule in schedules.items():
            if schedule is not self._schedules.get(name):
                start_schedule(self, name, schedule, is_argument=not self._is_complete)
        self.set_together({"_schedules": schedules, **_values_of(self, schedules, self.num_update + 1)})

    def scheduled_at(self, num_update: int) -> dict[str, float]:
        """Return the values at an update count of the settings that have a schedule, by name.

        Args:
            num_update: the update count, which the schedulers get.

        Raises:
            TypeError, ValueError: a scheduler returned something that is not allowed for its setting.
        """
        return _values_of(self, self._schedules, num_update) if self._schedules else {}

    def follow_schedules(self, num_update: int) -> None:
        """Set the settings that have a schedule to their values at an update count; each step does it first."""
        if self._schedules:
            self.set_together(self.scheduled_at(num_update))

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of an optimizer without a scheduler.

        Args:
            lr: the new learning rate, >= 0.

        Raises:
            UserWarning: there is a scheduler, which decides the rate. (MXNet, too, raises the warning class as an error.)
            TypeError: `lr` is not a number.
            ValueError: `lr` is negative or not finite.
        """
        if self.lr_scheduler is not None:
            raise UserWarning(
                f"the learning rate is decided by {self.lr_scheduler!r}, so it cannot be set to {lr}: change the "
                "scheduler's base_lr, or set optimizer.lr_scheduler = None first"
            )
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Set the learning-rate multipliers of parameters, replacing all that were set before.

        An attribute `lr_mult` of a parameter takes precedence.

        Args:
            args_lr_mult: mapping from parameter index or name to a number >= 0. Under a Trainer, names and indices are those
                of its parameters.

        Raises:
            TypeError: it is not a mapping to numbers.
            ValueError: a multiplier is negative or, under a Trainer, there is no parameter of that index or name.
        """
        self.lr_mult = args_lr_mult

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Set the weight-decay multipliers of parameters, replacing all that were set before.

        An attribute `wd_mult` of a parameter takes precedence. If the optimizer was given `param_idx2name`, parameters whose
        names end neither in weight nor in gamma have the multiplier 0 unless it is set here, as in MXNet 1.9.1.

        Args:
            args_wd_mult: mapping from parameter index or name to a number >= 0.

        Raises:
            TypeError: it is not a mapping to numbers.
            ValueError: a multiplier is negative or, under a Trainer, there is no parameter of that index or name.
        """
        names = self.idx2name.values()
        undecayed: dict[Index, float] = {name: 0.0 for name in names if not name.endswith(self.decayed_names)}
        self.wd_mult = undecayed | _multipliers("wd_mult", args_wd_mult)

    def multipliers(self, index: Index) -> tuple[float, float]:
        """Return a parameter's (lr_mult, wd_mult): from its attributes, else set by index, else set by name, else 1.0.

        Raises:
            TypeError, ValueError: an attribute `lr_mult` or `wd_mult` is not a number >= 0, or `grad_req` is unknown.
        """
        attributes = getattr(self.param_dict.get(index), "__dict__", {})
        name: Index = self.idx2name.get(index) or self.param_names.get(index) or index
        if "grad_req" in attributes:
            check_grad_req(name, attributes["grad_req"])
        lr_mult, wd_mult = attributes.get("lr_mult"), attributes.get("wd_mult")
        if lr_mult is None:
            lr_mult = self.lr_mult.get(index, self.lr_mult.get(name, 1.0))
        if wd_mult is None:
            wd_mult = self.wd_mult.get(index, self.wd_mult.get(name, 1.0))
        return number(f"lr_mult of parameter {name!r}", lr_mult, low=0), number(
            f"wd_mult of parameter {name!r}", wd_mult, low=0
        )

    def slots(self, indices: Sequence[Index]) -> np.ndarray:
        """Return the positions (int64 array) of parameters' counts in `step_counts`, adding those of new parameters."""
        return self.step_counts.slots(indices, self.begin_num_update)

    def host_state(self) -> tuple[Any, ...]:
        """Return the host's numbers that one step passes to the next, besides counts and states; to undo a failed step."""
        return tuple(getattr(self, name) for name in self.host_state_names)

    def load_host_state(self, host_state: tuple[Any, ...]) -> None:
        """Restore what `host_state` returned before a step that failed."""
        for name, value in zip(self.host_state_names, host_state, strict=True):
            setattr(self, name, value)

    @property
    def counts(self) -> dict[Index, int]:
        """The number of updates of each parameter, as a new dict by index."""
        return self.step_counts.as_dict()

    @property
    def num_update(self) -> int:
        """The largest number of updates of any parameter, at which the schedule is evaluated; may be set."""
        return self.step_counts.largest

    @num_update.setter
    def num_update(self, value: int) -> None:
        self.step_counts.largest = integer("num_update", value, low=0)

    def _update_count(self, index: Index | Sequence[Index]) -> None:
        """Add 1 to the update count of a parameter, or of each of a list; for `update` of user-defined optimizers."""
        indices = list(index) if isinstance(index, (list, tuple)) else [index]
        for slot in self.slots(indices):  # type: ignore[arg-type]  # one by one, as an index may occur twice
            self.step_counts.advance(slot, int(self.step_counts.values[slot]) + 1)
        if self._schedules:
            self.follow_schedules(self.num_update)

    @property
    def _index_update_count(self) -> Mapping[Index, int]:
        """`counts`, read-only, under the name that optimizers written for MXNet use."""
        return ReadOnly(self.counts)

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
        """Take a Trainer's parameters as those of the indices 0, 1, ...

        Args:
            params: the parameters.
            names: their names.

        Raises:
            ValueError: `param_idx2name`, `set_lr_mult` or `set_wd_mult` name other parameters, or a parameter has a
                `grad_req` that torch does not support; nothing has been changed.
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

    def _check_multiplier_keys(self, argument: str, multipliers: Mapping[Index, float]) -> None:
        """Raise ValueError if a multiplier is for a parameter that the Trainer does not have."""
        if not self.param_names:
            return
        names = {*self.param_names.values(), *self.idx2name.values()}
        for key in multipliers:
            if key not in self.param_names and key not in names:
                raise ValueError(
                    f"{argument}[{key!r}]: no parameter has this name or index.{did_you_mean(key, names)} Indices are 0 to "
                    f"{len(self.param_names) - 1}, names {listed(map(repr, sorted(names)))}"
                )

    def settings(self) -> dict[str, Any]:
        """Return the optimizer's numbers, switches and strings by attribute name, as plain data for saving."""
        plain = (bool, int, float, str, type(None))
        public = {k: v.item() if isinstance(v, np.generic) else v for k, v in vars(self).items() if k[0] != "_"}
        return {k: v for k, v in public.items() if k not in ("lr_scheduler", "trainer") and isinstance(v, plain)}

    def unsaved_settings(self) -> dict[str, Any]:
        """Return further settings by name that change steps, as tuples of plain data, which files do not have."""
        return {}

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.settings().items() if isinstance(v, (bool, int, float)) and k not in self._hidden()}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def _hidden(self) -> tuple[str, ...]:
        """Return the names of settings that `repr` leaves out."""
        return ()


def _values_of(optimizer: Optimizer, schedules: Mapping[str, Callable[[int], float]], num_update: int) -> dict[str, float]:
    settings = {name: getattr(type(optimizer), name) for name in schedules}
    return {
        name: settings[name].checked(schedule(num_update), f"schedules[{name!r}]({num_update})")
        for name, schedule in schedules.items()
    }


def listed_arguments(index: Any, weight: Any, grad: Any, state: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return the arguments of `update` as lists, checked; for a single parameter, lists of one."""
    if not isinstance(index, (list, tuple)):
        return [index], [weight], [grad], [state]
    for name, values in {"index": index, "weight": weight, "grad": grad, "state": state}.items():
        instance(f"index is a list, so {name}", values, (list, tuple), "one, too")
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
    contrib="optimizers",
)
register = Optimizer.register
create = Optimizer.create_optimizer


def registered() -> dict[str, type[Optimizer]]:
    """Return all registered optimizer classes by name; those of `tristep.contrib` are imported."""
    return Optimizer.opt_registry.everything()
