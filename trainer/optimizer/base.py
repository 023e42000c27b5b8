"""Optimizer: counts, rates and multipliers, as in MXNet. RuleOptimizer: an optimizer that is a rule and a few numbers.

The registry is here too. No arithmetic on tensors happens here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, compose, storage
from ...kernels.table import Recording, slot_dtypes, state_type, states_for
from ..arguments import choice, did_you_mean, flag, real, whole
from ..registry import Registry
from .counts import Index, StepCounts
from .sparse import RowUpdate, split

__all__ = ["Index", "Optimizer", "RuleOptimizer", "WithMaster", "create", "register", "registered"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_TORCHS_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "eps": "epsilon", "betas": "beta1", "alpha": "gamma1"}
_MXNETS_SCHEDULES = ("FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler")
_P = ParamSpec("_P")
_Class = TypeVar("_Class", bound="type[Optimizer]")
STATE_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
_OTHER_STATE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"} | dict.fromkeys(("uint8", "int8", "8-bit", "8bits"), "8bit")


class WithMaster(NamedTuple):
    """The state of a 16-bit weight with `multi_precision`: its float32 copy, and the state made for that."""

    master: torch.Tensor
    state: Any


class Optimizer:
    """Base class of all optimizers, with MXNet's interface for optimizers of one's own.

    A subclass, marked with `@Optimizer.register` so that it is known by its name, supplies `create_state(index, weight)` and
    `update(index, weight, grad, state)` in plain torch operations, and in `update` asks
    `_update_count(index)`, `_get_lr(index)` and `_get_wd(index)` for what it needs. With an attribute `aggregate_num` of 1
    or more, `update` gets lists of up to so many parameters of one type, as in MXNet. It runs as it is written, one tensor
    at a time. To get fused kernels instead, write a rule and subclass `RuleOptimizer`.

    Args:
        learning_rate: step size, >= 0; None means the class's default, or the scheduler's own rate if there is one.
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
    aggregate_num: int = 0
    default_overrules_schedule: ClassVar[bool] = False  # in MXNet, of which there is a warning
    opt_registry: ClassVar[Registry[type[Optimizer]]]  # by name, in lower case

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
        _refuse_unknown(type(self), unknown)
        self.trainer: Callable[[], Any] | None = None  # a weak reference to the Trainer that has it
        if learning_rate is not None:
            learning_rate = real("learning_rate", learning_rate, low=0)
        if lr_scheduler is not None and not callable(lr_scheduler):
            raise TypeError(
                f"lr_scheduler={lr_scheduler!r}: must be a scheduler, such as tristep.lr_scheduler.CosineScheduler(...), "
                "or another callable from the number of updates to a learning rate"
            )
        if param_idx2name is not None and not isinstance(param_idx2name, Mapping):
            raise TypeError(f"param_idx2name must map indices to names, got {type(param_idx2name).__name__}")
        self.wd = real("wd", wd, low=0)
        self.rescale_grad = real("rescale_grad", rescale_grad)
        # MXNet's kernels take 0 and negative numbers for "no limit".
        self.clip_gradient = None if clip_gradient is None else real("clip_gradient", clip_gradient)
        self.begin_num_update = whole("begin_num_update", begin_num_update, low=0)
        self.multi_precision: bool | str = flag("multi_precision", multi_precision)
        self.lr = self.default_learning_rate if learning_rate is None else learning_rate
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is not None and learning_rate is not None:
            _set_base_lr(lr_scheduler, learning_rate)
        elif self.default_overrules_schedule and type(lr_scheduler).__name__ in _MXNETS_SCHEDULES:
            rate, name = getattr(lr_scheduler, "base_lr", self.lr), type(self).__name__
            if rate != self.lr:
                _warn_once(
                    f"{name} without a learning_rate keeps base_lr={rate} of its schedule; in MXNet {name}'s default "
                    f"replaces it: give learning_rate={rate} if that is meant, learning_rate={self.lr} for MXNet's numbers"
                )
        self.step_counts = StepCounts(self.begin_num_update)
        self.idx2name = dict(param_idx2name or {})
        self.param_dict = dict(param_dict or {})
        self.param_names: dict[Index, str] = {}  # a Trainer's, by index
        self.lr_mult: dict[Index, float] = {}
        self.wd_mult: dict[Index, float] = {}
        self.set_lr_mult({})
        self.set_wd_mult({})

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
            TypeError: `name` is no string, an argument is unknown or of the wrong type, or comes beside an instance.
            ValueError: no such optimizer, or an argument out of its range.

        Example:
            >>> import tristep
            >>> tristep.optimizer.create("sgd", learning_rate=0.5).learning_rate
            0.5
        """
        if isinstance(name, Optimizer):
            if kwargs:
                raise TypeError(
                    f"arguments beside an optimizer instance: {', '.join(kwargs)}; give them to {type(name).__name__}"
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

    def update_multi_precision(self, index: Index, weight: torch.Tensor, grad: torch.Tensor, state: Any) -> None:
        """As `update`, on the float32 copy where there is one; the weight is that copy, rounded."""
        if self.keeps_master(weight):
            master, inner = state
            self.update(index, master, grad.float(), inner)
            weight.copy_(master)
        else:
            self.update(index, weight, grad, state)

    @property
    def can_update(self) -> bool:
        """Whether the class defines how to update, as this base class does not."""
        own = type(self)
        return own.update is not Optimizer.update or own.update_multi_precision is not Optimizer.update_multi_precision

    @property
    def depends_on_order(self) -> bool:
        """Whether the order of the parameters may change numbers."""
        return not getattr(self, "uniform_hyper", False)

    def follow(self, weight: torch.Tensor, state: Any) -> Any:
        """The state, after the weight may have been converted: its float32 copy comes and goes with 16 bits."""
        if type(self).create_state_multi_precision is not Optimizer.create_state_multi_precision:
            return state  # a form of one's own
        if isinstance(state, WithMaster):
            return state if self.keeps_master(weight) else state.state
        return WithMaster(weight.detach().float(), state) if self.keeps_master(weight) else state

    def keeps_master(self, weight: torch.Tensor) -> bool:
        """Whether this weight is updated through a float32 copy."""
        return bool(self.multi_precision) and weight.dtype in _LOW_PRECISION

    @property
    def learning_rate(self) -> float:
        """The rate at the present number of updates, before multipliers."""
        return self.rate_at(self.num_update)

    def rate_at(self, num_update: int) -> float:
        """The rate at this number of updates, before multipliers.

        Raises:
            ValueError, TypeError: the scheduler gave something else than a finite number >= 0.
        """
        if self.lr_scheduler is None:
            return self.lr
        return real(f"lr_scheduler({num_update})", self.lr_scheduler(num_update), low=0)

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
        self.lr = real("lr", lr, low=0)

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Multipliers of the learning rate by parameter index or name; replaces those set before.

        An attribute `lr_mult` of the parameter itself comes before these. Under a Trainer, names are its names, and indices
        count its parameters.

        Raises:
            TypeError, ValueError: no numbers >= 0; or, under a Trainer, a parameter that it does not have.
        """
        self.lr_mult = self._checked_multipliers("lr_mult", args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Multipliers of the weight decay by parameter index or name; replaces those set before.

        Where `param_idx2name` was given, names that end neither in weight nor in gamma start at 0, as in MXNet 1.9.1.
        """
        given = self._checked_multipliers("wd_mult", args_wd_mult)
        names = self.idx2name.values()
        undecayed: dict[Index, float] = {name: 0.0 for name in names if not name.endswith(self.decayed_names)}
        self.wd_mult = undecayed | given

    def multipliers(self, index: Index) -> tuple[float, float]:
        """lr_mult and wd_mult of a parameter: its own attribute, else by index, else by name, else 1."""
        own = getattr(self.param_dict.get(index), "__dict__", {})
        name: Index = self.idx2name.get(index) or self.param_names.get(index) or index
        if "grad_req" in own:
            _check_grad_req(name, own["grad_req"])
        lr_mult, wd_mult = own.get("lr_mult"), own.get("wd_mult")
        if lr_mult is None:
            lr_mult = self.lr_mult.get(index, self.lr_mult.get(name, 1.0))
        if wd_mult is None:
            wd_mult = self.wd_mult.get(index, self.wd_mult.get(name, 1.0))
        return real(f"lr_mult of parameter {name!r}", lr_mult, low=0), real(f"wd_mult of parameter {name!r}", wd_mult, low=0)

    def slots(self, indices: Sequence[Index]) -> np.ndarray:
        """Where `step_counts` has the counts of these parameters; new parameters start at `begin_num_update`."""
        return self.step_counts.slots(indices, self.begin_num_update)

    @property
    def counts(self) -> dict[Index, int]:
        """How often each parameter has been updated."""
        return self.step_counts.as_dict()

    @property
    def num_update(self) -> int:
        """The largest number of updates of any parameter, from which the schedule computes the learning rate."""
        return self.step_counts.largest

    @num_update.setter
    def num_update(self, number: int) -> None:
        self.step_counts.largest = number

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

    def _checked_multipliers(self, argument: str, given: Mapping[Index, float]) -> dict[Index, float]:
        if not isinstance(given, Mapping):
            raise TypeError(f"{argument} must map parameter indices or names to numbers, got {type(given).__name__}")
        self._check_known(argument, given)
        return {key: real(f"{argument}[{key!r}]", value, low=0) for key, value in given.items()}

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
                _check_grad_req(name, vars(param)["grad_req"])
        before = self.param_dict, self.param_names
        self.param_dict, self.param_names = dict(enumerate(params)), dict(enumerate(names))
        try:
            self._check_known("lr_mult", self.lr_mult)
            self._check_known("wd_mult", self.wd_mult)
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


class RuleOptimizer(Optimizer):
    """An optimizer that is an update rule and its hyper-parameters. Runs fused, on every engine.

    A subclass sets `rule`, takes its hyper-parameters in `__init__` and keeps each in an attribute of the name that the
    rule uses. `lr`, `wd`, `decay` (lr wd) and `clip` are there already, with multipliers and schedule in them, and
    `one_minus_x` is formed from `x`. What depends on the number of updates is returned by `hyper`.

    Args:
        clip_norm: multiply the gradients by min(1, clip_norm / (norm + 1e-6)) of the norm that all of a step have together,
            after `rescale_grad` and before `clip_gradient`, > 0; None means never. They stay as they are in `.grad`.
        cautious: use the step, decay apart from the gradient excepted, only in elements where it goes down the gradient,
            divided by their share in the tensor (Liang et al. 2024, "Cautious Optimizers", alg. 1).
        decoupled_wd: take learning rate times `wd` off the weights, instead of adding `wd` times them to the gradient
            (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization").
        lookahead: every so many updates of a parameter go from its slow weight `lookahead_alpha` of the way to where it
            is, and start again from there, >= 1; None means never (Zhang et al. 2019, "Lookahead Optimizer", alg. 1).
        lookahead_alpha: in (0, 1].
        ema_decay: keep a moving average of the weights, ema <- ema_decay ema + (1 - ema_decay) w after every update, in
            [0, 1); None means none. `Trainer.averaged_weights` shows it. It is the average of this optimizer then.
        skip_nonfinite: leave all weights and states exactly as they are where a step's gradients hold a NaN or an infinity,
            or squares whose sum is infinite. The step counts nevertheless: the host does not wait to be told.
        state_dtype: "float32", also None, "bfloat16" or "8bit": how states are stored, except for those that are weights,
            sums over all steps or nearly cancel each other. It is computed in float32. Saved states of another type are
            converted when they are loaded. With "8bit" it is a byte for each element and a float32 for each block of 128, in
            contiguous weights of 4,096 elements or more; others stay float32 (Dettmers et al. 2022, "8-bit Optimizers via
            Block-wise Quantization"). The bytes are always rounded as `stochastic_rounding` does it, or slow averages would
            stand still.
        stochastic_rounding: round bfloat16 weights without a float32 copy, and bfloat16 states, up or down with the
            probability of the bits that are cut off, so that they are right on average; the same at every run with the same
            `rounding_seed` (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision").
        rounding_seed: >= 0.
        kahan: keep beside 16-bit weights, in their type, what rounding took off them, and add it at the next update (Kahan
            1965, "Further remarks on reducing truncation errors").
        **kwargs: those of `Optimizer`. `multi_precision="remainder"` keeps of the float32 copy only the 16 bits that a
            bfloat16 weight lacks; a weight half-way between two numbers is then rounded away from zero, not to even.

    The options work together, the first four in this order, for all rules of single elements, and cost nothing where they
    are not used.

    Raises:
        TypeError: an option of an optimizer whose rule is one of whole tensors.
        ValueError: `decoupled_wd` of an optimizer that decays the weights apart from the gradient already, or not at all;
            `state_dtype` where there is no state that it is for; `kahan` beside `multi_precision`. At the first step, a
            weight of a type that `state_dtype`, `stochastic_rounding` or a remainder is not for.

    Example:
        >>> import tristep
        >>> from tristep.kernels import rules
        >>> class Plain(tristep.optimizer.RuleOptimizer):
        ...     rule = rules.sgd
        >>> Plain(learning_rate=0.5).lr
        0.5
    """

    rule: Rule
    decoupled_weight_decay: tuple[str, ...] = ("decay",)  # hyper-parameters of decay that is not part of the step
    reads_rate_first: ClassVar[bool] = False  # whether a schedule is asked for the count before the update
    counts_as_step: bool = True  # whether a step counts as an update
    uniform_hyper: ClassVar[bool] = True  # whether parameters of equal count, rate and decay have equal hyper-parameters
    host_state_names: ClassVar[tuple[str, ...]] = ()  # what `begin_step` and `hyper` change; put back where a step fails
    takes_sparse: ClassVar[bool] = False  # whether a sparse gradient updates its rows only, unless lazy_update is False
    decays_sparse: ClassVar[bool] = True  # whether these rows can be decayed
    weight_of_gradient: ClassVar[str | None] = None  # the state that is the weight at which the gradient was taken

    def __init__(
        self,
        *,
        clip_norm: float | None = None,
        cautious: bool = False,
        decoupled_wd: bool = False,
        lookahead: int | None = None,
        lookahead_alpha: float = 0.5,
        ema_decay: float | None = None,
        skip_nonfinite: bool = False,
        state_dtype: str | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        kahan: bool = False,
        **kwargs: Any,
    ) -> None:
        self.clip_norm = None if clip_norm is None else real("clip_norm", clip_norm, above=0)
        self.cautious = flag("cautious", cautious)
        self.decoupled_wd = flag("decoupled_wd", decoupled_wd)
        self.lookahead = None if lookahead is None else whole("lookahead", lookahead, low=1)
        self.lookahead_alpha = real("lookahead_alpha", lookahead_alpha, above=0, high=1)
        self.ema_decay = None if ema_decay is None else real("ema_decay", ema_decay, low=0, below=1)
        self.skip_nonfinite = flag("skip_nonfinite", skip_nonfinite)
        self.state_dtype = None if state_dtype is None else _state_dtype(state_dtype)
        self.stochastic_rounding = flag("stochastic_rounding", stochastic_rounding)
        self.rounding_seed = whole("rounding_seed", rounding_seed, low=0)
        self.kahan = flag("kahan", kahan)
        self._skips_overflow = False  # as `skip_nonfinite`, where a loss scaler needs it
        self._updater: Callable[[], Any] | None = None  # a weak reference to what has the states
        remainder = isinstance(given := kwargs.get("multi_precision"), str) and given == "remainder"
        super().__init__(**kwargs | ({"multi_precision": True} if remainder else {}))
        if remainder:
            self.multi_precision = "remainder"
        if self.has_options or self._stores_otherwise:
            self._check_options()

    @property
    def couples_wd(self) -> bool:
        """Whether `wd` is part of the step, and not taken off the weight apart from it."""
        return "wd" in self.rule.hyper and not {"wd", "decay"} & set(self.decoupled_weight_decay) & set(self.rule.hyper)

    @property
    def composed_rule(self) -> Rule:
        """`rule` with the options in it, right for all parameters at every step."""
        return self._composed(sync=True)

    def rule_for(self, slots: np.ndarray) -> Rule:
        """As `composed_rule`, for the next update of the parameters whose counts are in these slots.

        Between two of Lookahead's synchronisations that is a rule which leaves the slow weights alone.
        """
        if not self.has_options:  # asked at every step
            return self.rule
        if self.lookahead is None or Recording.general:
            return self._composed(sync=self.lookahead is not None)
        n = self.step_counts.values[slots] - self.begin_num_update + 1
        return self._composed(sync=not (n % self.lookahead).all())

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """Hyper-parameters at a parameter's update number `t` (the first is 1), where they are not plain attributes.

        `lr` and `wd` are the parameter's, multiplied already; what is returned under these names replaces them.
        """
        return {}

    def hyper_of(self, index: Index | None, t: int, lr: float, wd: float) -> dict[str, float]:
        """As `hyper`, where parameters differ: of a class with `uniform_hyper = False` each is asked for its own."""
        return self.hyper(t, lr, wd)

    def begin_step(self, lr: float) -> None:
        """Called before a step over any number of parameters, with the rate before multipliers."""

    def average(self) -> tuple[Rule, dict[str, float]] | None:
        """A rule that makes averaged weights of weights and states, and its hyper-parameters; None if there is none."""
        return None

    def average_in_use(self) -> tuple[Rule, dict[str, float]] | None:
        """As `average`; with `ema_decay` that of this option."""
        return self.average() if self.ema_decay is None else (compose.moving_average, {})

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Fill the state tensors, which are zero, where a rule starts otherwise."""

    def row(self, t: int, lr: float, wd: float, index: Index | None = None, rule: Rule | None = None) -> list[float]:
        """All hyper-parameters of the rule, or of `composed_rule`, in its order, after `rescale_grad`."""
        rule = self.composed_rule if rule is None else rule
        decay = decoupled_decay = lr * wd
        if self.decoupled_wd:
            wd, decay = 0.0, lr * 0.0
        values = {"lr": lr, "wd": wd, "decay": decay, "decoupled_decay": decoupled_decay}
        values["clip"] = self.clip_gradient or math.inf
        if self.lookahead is not None:
            values["sync"] = float((t - self.begin_num_update) % self.lookahead == 0)
        values.update(self.hyper_of(index, t, lr, wd))
        if values["clip"] < 0:
            values["clip"] = math.inf
        row: list[float] = [self.rescale_grad]
        own = vars(self)
        for name, other in _complements(rule):
            value = values.get(name)
            if value is None:
                value = own.get(name)
            row.append(self._attribute(name, other, rule) if value is None else value)
        if self.rounding is not None:
            row.append(t)
        return row

    def rows_of_step(self, times: Sequence[int], parameters: Sequence[tuple[Any, ...]], rule: Rule) -> list[list[float]]:
        """The rows of one step, of which the schedule is asked for the rate, and `begin_step` told of it.

        Args:
            times: the coming update numbers of parameters.
            parameters: for each a tuple that ends in lr_mult, wd_mult and the index.
            rule: the rule of the step.
        """
        asked = self.num_update if self.reads_rate_first else max(self.num_update, *times)
        lr = self.lr if self.lr_scheduler is None else self.rate_at(asked)
        self.begin_step(lr)
        return [
            self.row(t, lr * lr_mult, self.wd * wd_mult, index, rule)
            for t, (*_, lr_mult, wd_mult, index) in zip(times, parameters, strict=True)
        ]

    def _attribute(self, name: str, other: str | None, rule: Rule) -> float:
        """A hyper-parameter of the rule that is an attribute of this name, or one minus the other."""
        own = vars(self)
        if name not in own and other in own:
            return 1.0 - own[other]
        if hasattr(self, name):
            return getattr(self, name)
        if other is not None and hasattr(self, other):
            return 1.0 - getattr(self, other)
        raise TypeError(
            f"rule {rule.name!r} needs {name!r}, which {type(self).__name__} lacks: set self.{name} in "
            "__init__, or return it from hyper(t, lr, wd)"
        )

    @property
    def rounding(self) -> int | storage.CodesOnly | None:
        """The seed of stochastic rounding, if there is any."""
        if self.stochastic_rounding:
            return self.rounding_seed
        return storage.CodesOnly(self.rounding_seed) if self.narrow == torch.uint8 else None

    def master_dtype(self, weight: torch.Tensor) -> torch.dtype | None:
        """The type of what is kept beside this weight so that rounding loses nothing or little; None if there is nothing."""
        if weight.dtype not in _LOW_PRECISION:
            return None
        if self.kahan:
            return weight.dtype
        if self.multi_precision == "remainder":
            return torch.int16
        return torch.float32 if self.multi_precision else None

    def keeps_master(self, weight: torch.Tensor) -> bool:
        return self.master_dtype(weight) is not None

    def state_dtypes(self, weight: torch.Tensor) -> tuple[torch.dtype, ...]:
        """The types of what `composed_rule` keeps of this weight, in order."""
        return slot_dtypes(self.composed_rule, weight.dtype, state_type(weight, self.narrow))

    def states_for(self, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Zeros for all that `composed_rule` keeps of each weight."""
        return states_for(self.composed_rule, weights, self.narrow)

    def check_storage(self, name: str, weight: torch.Tensor) -> None:
        """Refuse a weight whose type does not go with the options.

        Raises:
            ValueError: it does not.
        """
        if self.narrow is not None and weight.dtype == torch.float64:
            raise ValueError(
                f"state_dtype={self.state_dtype!r}: {name} is torch.float64, whose states are so, too; it must be None"
            )
        if self.stochastic_rounding and weight.dtype == torch.float16 and not self.keeps_master(weight):
            raise ValueError(f"stochastic_rounding=True: {name} is torch.float16; it must be torch.bfloat16 or wider")
        if self.multi_precision == "remainder" and weight.dtype == torch.float16:
            raise ValueError(
                f"multi_precision='remainder': {name} is torch.float16, which lacks other bits; it must be True or False"
            )

    def create_state(self, index: Index, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One tensor for each state of the rule, in the arithmetic's type."""
        (state,) = self.states_for([weight])
        self.start_state(weight.detach(), state)
        return state

    def start_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Fill all that `composed_rule` keeps, zeros so far, as it is before the first update."""
        rule = self.composed_rule
        slots = dict(zip(rule.slots, state, strict=True))
        packed = {name for name, tensor in slots.items() if tensor.dtype == torch.uint8}
        if packed and type(self).init_state is not RuleOptimizer.init_state:
            plain = {name: torch.zeros_like(weight, dtype=torch.float32) for name in packed}
            self.init_state(weight, tuple((slots | plain)[name] for name in self.rule.slots))
            for name, values in plain.items():
                storage.copy(slots[name], values, weight.shape, name in rule.unsigned)
        else:
            self.init_state(weight, tuple(slots[name] for name in self.rule.slots))
        if self.lookahead is not None:
            slots["slow_weight"].copy_(weight)
        if self.ema_decay is not None:
            slots["ema"].copy_(weight)

    def update(self, index: Index, weight: torch.Tensor, grad: torch.Tensor, state: Any) -> None:
        """Update one weight in place. Slow for many: `get_updater` and `Trainer` launch once for all of them."""
        run: Update | RowUpdate
        rule = self.composed_rule
        self.check_storage("the weight", weight)
        whole, by_row = split(self, [index], ["the weight"], [weight], [grad])
        if by_row:
            run = RowUpdate(rule, [weight], [grad], [tuple(state)], [None], names=["the weight"], seed=self.rounding)
        else:
            run = Update(rule, [weight], [tuple(state)], names=["the weight"], seed=self.rounding)
            run.bind(whole)
        (slot,) = self.slots([index])
        t = int(self.step_counts.values[slot]) + 1
        number = max(self.num_update, t)
        lr_mult, wd_mult = self.multipliers(index)
        before = self.host_state()
        try:
            lr = self.rate_at(self.num_update if self.reads_rate_first else number)
            self.begin_step(lr)
            run.hyper[0] = self.row(t, lr * lr_mult, self.wd * wd_mult, index, rule)
            run()
        except BaseException:
            self.load_host_state(before)
            raise
        if self.counts_as_step:
            self.step_counts.advance(slot, number)

    def kept(self, name: str) -> dict[Index, float]:
        """A number that the rule keeps of each parameter, by index; none before the first step. Waits for the device."""
        updater = None if self._updater is None else self._updater()
        if updater is None:
            return {}
        place = self.composed_rule.slots.index(name)
        return {index: float(state[place]) for index, state in updater.states.items()}

    def host_state(self) -> tuple[Any, ...]:
        """The values of what a step carries on to the next, besides counts and states."""
        return tuple(getattr(self, name) for name in self.host_state_names)

    def load_host_state(self, carried: tuple[Any, ...]) -> None:
        """Undo what a step that failed has changed of these."""
        for name, value in zip(self.host_state_names, carried, strict=True):
            setattr(self, name, value)

    def _hidden(self) -> tuple[str, ...]:
        flags = ("cautious", "decoupled_wd", "skip_nonfinite", "stochastic_rounding", "kahan")
        off = [name for name in flags if not getattr(self, name)]
        off += [] if self.rounding is not None else ["rounding_seed"]
        return (*off, *(("lookahead_alpha",) if self.lookahead is None else ()))

    @property
    def narrow(self) -> torch.dtype | None:
        """What states are stored as where that is not the arithmetic's type."""
        return STATE_DTYPES[self.state_dtype] if self.state_dtype is not None else None

    @property
    def _stores_otherwise(self) -> bool:
        return self.narrow is not None or self.stochastic_rounding or self.kahan or self.multi_precision == "remainder"

    @property
    def has_options(self) -> bool:
        """Whether `composed_rule` is not just `rule`."""
        given = self.lookahead, self.clip_norm, self.ema_decay
        flags = self.cautious, self.decoupled_wd, self.skip_nonfinite, self._skips_overflow
        return any(flags) or given != (None, None, None)

    def _composed(self, sync: bool = False) -> Rule:
        rule = self.rule
        if not self.has_options:
            return rule
        if self.counts_as_step:  # what counts as no update is left as it is
            if self.clip_norm is not None:
                rule = compose.clipped_by_global_norm(rule)
            if self.cautious:
                rule = compose.cautious(rule, self.decoupled_weight_decay)
            if self.decoupled_wd:
                rule = compose.decoupled(rule)
        if self.lookahead is not None:
            rule = compose.lookahead(rule, sync and self.counts_as_step)
        if self.ema_decay is not None:
            rule = compose.averaging(rule, self.counts_as_step)
        return compose.skipping_nonfinite(rule) if self.skip_nonfinite or self._skips_overflow else rule

    def _check_options(self) -> None:
        name, rule = type(self).__name__, cast("Rule | TensorRule", self.rule)
        if isinstance(rule, TensorRule):
            names = (
                *("clip_norm", "cautious", "decoupled_wd", "lookahead", "ema_decay", "skip_nonfinite"),
                *("state_dtype", "stochastic_rounding", "kahan"),
            )
            values = {option: getattr(self, option) for option in names}
            if self.multi_precision == "remainder":
                values["multi_precision"] = "remainder"
            given = ", ".join(f"{option}={value!r}" for option, value in values.items() if value not in (None, False))
            raise TypeError(f"{given}: {name} has a rule of whole tensors; options are for rules of single elements")
        if self.decoupled_wd and not self.couples_wd:
            known = {"wd", "decay", *self.decoupled_weight_decay} & set(rule.hyper)
            why = "decays the weights apart from the gradient already" if known else "has no weight decay"
            raise ValueError(f"decoupled_wd=True: {name} {why}, so it must be False")
        if self.narrow is not None and not set(rule.state) - set(rule.exact):
            why = "all its states are weights or sums over all steps" if rule.state else "it has no states"
            raise ValueError(f"state_dtype={self.state_dtype!r}: must be None for {name}, as {why}")
        if self.kahan and self.multi_precision:
            raise ValueError(
                f"kahan=True beside multi_precision={self.multi_precision!r}: one of them must be False, both keep what "
                "rounding takes off a weight"
            )


Optimizer.opt_registry = Registry(
    "optimizer", Optimizer, argument="optimizer", hint="A class of your own needs @tristep.optimizer.register"
)
register = Optimizer.register
create = Optimizer.create_optimizer


def registered() -> dict[str, type[Optimizer]]:
    """The optimizers by name."""
    return dict(sorted(Optimizer.opt_registry.items()))


def _check_grad_req(name: Index, value: Any) -> None:
    """Gluon's `grad_req`, which torch does not know: gradients are added up, or there are none."""
    if value not in ("write", "add"):
        raise ValueError(
            f"grad_req={value!r} of parameter {name!r}: torch does not read it; to train the parameter no more, use "
            "parameter.requires_grad_(False), and delete the attribute"
        )


def _state_dtype(value: Any) -> str:
    return choice("state_dtype", value, STATE_DTYPES, other_names=_OTHER_STATE_DTYPES)


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
    klass.__init__(probe, **{name: values[name] for name in _arguments(klass) if name in values})  # type: ignore[misc]


def _arguments(klass: type) -> list[str]:
    """What the constructor of a class takes, and, by **kwargs, those of its bases."""
    allowed: list[str] = []
    for base in klass.__mro__:
        if base is not object and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            allowed += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in dict.fromkeys(allowed) if name != "self"]


def _refuse_unknown(klass: type, unknown: Mapping[str, Any]) -> None:
    if not unknown:
        return
    allowed = _arguments(klass)
    for name, value in unknown.items():
        meant = _TORCHS_NAMES.get(name)
        hint = f" Did you mean {meant!r}, as in MXNet?" if meant in allowed else did_you_mean(name, allowed)
        raise TypeError(f"{klass.__name__} has no argument {name!r} (={value!r}); it has {', '.join(allowed)}.{hint}")


def _set_base_lr(lr_scheduler: Any, learning_rate: float) -> None:
    base_lr = getattr(lr_scheduler, "base_lr", None)
    if base_lr is None:
        warnings.warn(
            f"learning_rate={learning_rate} has no effect: {lr_scheduler!r} decides the rate and has no base_lr; "
            "give only one of them",
            stacklevel=_stacklevel(),
        )
    elif learning_rate != base_lr:
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
                _warn_once(
                    f"the first positional argument of {made} is learning_rate; in MXNet 1.9.1 it is {name}: write "
                    f"{made}(learning_rate=...) or {made}({name}=...)"
                )
            init(*args, **kwargs)

        return __init__

    return wrap


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    """Warn of a number that MXNet takes otherwise, once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """How far up the first caller outside this package's constructors is."""
    frame, level = inspect.currentframe(), 0
    inner = ("_stacklevel", "_warn_once", "_set_base_lr", "__init__", "create_optimizer", "_make_optimizer")
    while frame is not None and frame.f_code.co_name in inner:
        frame, level = frame.f_back, level + 1
    return max(level, 1)


@functools.cache
def _complements(rule: Rule | TensorRule) -> tuple[tuple[str, str | None], ...]:
    """The names of a rule's hyper-parameters, and of those called `one_minus_x` what is taken from one."""
    return tuple((name, name[10:] if name.startswith("one_minus_") else None) for name in rule.hyper)
