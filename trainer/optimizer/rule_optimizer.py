"""`RuleOptimizer`, the base class of fused optimizers: an update rule and its hyper-parameters as functions of the count."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, host_memory, storage, transforms
from ...kernels.graphs import for_all_steps
from ...kernels.language import Derivation, derivations
from ...kernels.states import slot_dtypes, state_type, states_for
from .base import LOW_PRECISION, Optimizer, WithMaster, listed_arguments
from .counts import Index
from .limits import JOINT, limit_values, limited
from .multi import part_of
from .options import OPTIONS, STATE_DTYPES, Option, StepNumbers, options_in_use
from .settings import SPLIT_MASTERS, Setting, split_master, switch
from .sparse import SparseRows, split


class RuleOptimizer(Optimizer):
    """Base class of optimizers defined by an update rule and its hyper-parameters; they run fused, on every engine.

    A subclass sets `rule`, takes its hyper-parameters in `__init__` and stores each in an attribute with the name that the
    rule uses. Some names are derived: `lr`, `wd`, `decay` (lr wd) and `clip`, which contain schedule and multipliers,
    `one_minus_x` from `x`, and the bias corrections `correctionN` from `betaN`: factors, 1 / (1 - betaN^t), where papers
    divide by 1 - betaN^t (all in `tristep.kernels.language.derived`).
    A subclass computes other numbers that depend on the update count in `hyper`. A class attribute made by `fraction()`,
    `positive()`, `not_negative()` or `Setting(check, **limits)` of `tristep.trainer.optimizer.settings` checks an argument
    whenever it is set. Weight decay is decoupled if the rule unpacks `decay`, and coupled, a part of the step, if it unpacks
    `wd`.

    The arguments below are options of every optimizer with an elementwise rule. They can be combined, and cost nothing when
    they are off. Rules of whole tensors (Muon, SOAP, ...) take `clip_norm`, `skip_norm`, `skip_nonfinite`, `cautious_wd`,
    `ema_decay` and the options on storage. The first three limit a step by the norm of all gradients. Gradients are clipped
    first, by `clip_norm` and then `agc`; the other options apply in the order of this list. In a skipped step none of it
    happens. The attributes of these names may be set between steps, with the same checks.

    Args:
        clip_norm: limit of the global norm of all gradients of a step, > 0; None means no limit. Gradients are multiplied by
            min(1, clip_norm / (norm + 1e-6)) after `rescale_grad` and before `clip_gradient`. `.grad` is not changed.
        agc: adaptive gradient clipping of each tensor: multiply its gradient by min(1, agc max(|w|, 0.001) / |g|), > 0; None
            means never (Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization", eq. 3,
            with norms of tensors; the paper uses norms of rows and filters).
        skip_norm: skip steps whose global gradient norm before clipping, in float32, exceeds this, > 0; None means never. It
            includes `skip_nonfinite`.
        skip_nonfinite: skip steps whose gradients contain NaN or infinity, or have an infinite sum of squares: no weight and
            no state changes. A skipped step counts as an update, since the host does not synchronize with the device.
        cautious: apply the step, without decoupled weight decay, only in elements where it descends the gradient, divided by
            the share of these elements in the tensor (Liang et al. 2024, "Cautious Optimizers", alg. 1).
        decoupled_wd: subtract learning rate times `wd` times the weights, instead of adding `wd` times the weights to the
            gradient (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization").
        cautious_wd: apply decoupled weight decay only in elements where it has the direction of the step (Chen et al. 2025,
            "Cautious Weight Decay", arXiv 2510.12402, alg. 1). Rules with coupled weight decay need `decoupled_wd`, too.
        lookahead: number of updates of a parameter, >= 1, after which its slow weight moves by the fraction
            `lookahead_alpha` towards the weight, and the weight is reset to it; None means never (Zhang et al. 2019,
            "Lookahead Optimizer", alg. 1).
        lookahead_alpha: step size of the slow weights, in (0, 1].
        ema_decay: decay rate, in [0, 1), of a moving average of the weights, ema <- ema_decay ema + (1 - ema_decay) w after
            every update; None means no average. `Trainer.averaged_weights` then uses it.
        state_dtype: storage of the states, "float32" (or None), "bfloat16", "8bit" or "4bit"; arithmetic is float32. States
            that are weights, sums over all steps, or nearly cancel each other stay float32. "8bit" and "4bit" store 1 or 1/2
            byte per element and a float32 scale per block of 128, with stochastic rounding, since slow averages would
            otherwise not change; weights that are not contiguous or have fewer than 4,096 elements keep float32 states.
            Saved states of another dtype are converted when loaded (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
            Quantization"; Li et al. 2023, "Memory Efficient Optimizers with 4-bit States").
        state_device: "cpu" keeps the states of a GPU's weights in page-locked memory of the host, where the kernels read and
            write them over the bus: the same numbers, less memory of the GPU, slower steps. Masters, and states of another
            shape than the weight's, stay on the GPU. Default None: on the weight's device.
        stochastic_rounding: round bfloat16 weights without a master, 24-bit masters and bfloat16 states up or down at
            random, so that the rounding error has mean 0; equal in every run with the same `rounding_seed` (Gupta et al.
            2015, "Deep Learning with Limited Numerical Precision").
        rounding_seed: seed of stochastic rounding, an int >= 0.
        **kwargs: arguments of `Optimizer`. In addition, `multi_precision="remainder"` stores only the 16 bits of the float32
            master that a bfloat16 weight lacks (a split master), and "split8" only the upper 8 of them, which makes a 24-bit
            master; ties are then rounded away from zero, not to even.

    Raises:
        TypeError: an option is given that rules of whole tensors do not take. When a Trainer is made, or at a step: the rule
            needs a hyper-parameter that the class lacks or that is no number.
        ValueError: options contradict each other or the rule: `clip_gradient` or `wd` with a rule that does not use it;
            `decoupled_wd` if weight decay is decoupled already or there is none; `cautious_wd` without decoupled weight
            decay; `state_dtype` if no state can be stored in it. At the first step: a weight has a dtype that `state_dtype`,
            `stochastic_rounding` or a split master does not support.

    Example:
        >>> import tristep
        >>> from tristep.kernels import rules
        >>> class Plain(tristep.optimizer.RuleOptimizer):
        ...     rule = rules.sgd
        >>> Plain(learning_rate=0.5).lr
        0.5
    """

    reads_rate_first: ClassVar[bool] = False  # whether the schedule is called with the count before the update
    begins_with_each: ClassVar[bool] = False  # whether `begin_step` is called per parameter if they are updated one by one
    uniform_hyper: bool = True  # whether parameters of equal count, rate and decay have equal hyper-parameters
    takes_sparse: ClassVar[bool] = False  # whether a sparse gradient updates only its rows, unless lazy_update is False
    decays_sparse: ClassVar[bool] = True  # whether such rows can have weight decay
    weight_of_gradient: ClassVar[str | None] = None  # the state that holds the weight at which the gradient was computed
    master_comes_last: ClassVar[bool] = False  # whether `create_state_multi_precision` returns (states, master)
    starts_as_rate: ClassVar[str | None] = None  # the state that starts as the parameter's learning rate
    takes_unused: ClassVar[tuple[str, ...]] = ()  # `clip_gradient` or `wd`, taken although a rule does not use it

    rule: Rule
    decoupled_weight_decay: tuple[str, ...] = ("decay",)  # hyper-parameters of decay that is not part of the step
    multi_precision = Setting(split_master)
    _skips_overflow = switch()  # `skip_nonfinite` on behalf of a loss scaler
    _in_use: tuple[str, ...] = ()  # names of options

    # The attributes of the rows of `OPTIONS` that are used by name.
    decoupled_wd: bool
    lookahead: int | None
    ema_decay: float | None
    state_dtype: str | None
    state_device: str | None
    stochastic_rounding: bool
    rounding_seed: int

    def __init__(self, **kwargs: Any) -> None:
        rule = getattr(self, "rule", None)
        if not isinstance(rule, (Rule, TensorRule)):
            raise TypeError(
                f"{type(self).__name__}.rule is {rule!r}: it must be a function marked with @rule or @tensor_rule, or the "
                "result of a transform"
            )
        for option in OPTIONS:
            setattr(self, option.name, kwargs.pop(option.name, option.default))
        self._skips_overflow = False
        self._updater: Callable[[], Any] | None = None  # a weak reference to the Updater that holds the states
        self._begun = 0  # the update count of the last step begun, if parameters are updated one by one
        super().__init__(**kwargs)

    def check_settings(self) -> None:
        super().check_settings()
        self._in_use = options_in_use(self)
        name = type(self).__name__
        rule: Any = self.rule if self._in_use else None
        if isinstance(rule, TensorRule):
            refused = ", ".join(f"{o.name}={vars(self)[o.name]!r}" for o in self._rows() if not o.takes(self))
            if refused:
                allowed = [option.name for option in OPTIONS if option.changes_rule and option.takes(self)]
                raise TypeError(
                    f"{refused}: {name} has a rule of whole tensors, which takes only the options {', '.join(allowed)} and "
                    "those on how weights and states are stored"
                )
        for option in self._rows():
            if option.refuse is not None:
                option.refuse(self)
        if self._has_plain_hyper:  # nothing else gives these settings to the rule
            used, taken = set(self.rule.hyper), self.takes_unused
            if self.clip_gradient is not None and "clip" not in used and "clip_gradient" not in taken:
                raise ValueError(
                    f"clip_gradient={self.clip_gradient!r}: the rule of {name} does not clip, so it must be None; or unpack "
                    "`clip` in the rule and clip the gradient with it"
                )
            if self.wd and not used & {"wd", "decay"} and "wd" not in taken:
                raise ValueError(
                    f"wd={self.wd!r}: the rule of {name} has no weight decay, so it must be 0; or unpack `wd` in the rule"
                )

    def set_together(self, settings: Mapping[str, Any], with_states: bool = False) -> None:
        if with_states or not self._is_complete or not self.counts:
            super().set_together(settings)
            return
        before, slots, rounding = dict(vars(self)), self.composed_rule.slots, self.rounding
        super().set_together(settings)
        lost = set(slots).intersection(self.composed_rule.slots) if slots != self.composed_rule.slots else set()
        if lost or rounding != self.rounding:
            vars(self).update(before)
            changed = ", ".join(f"{name}={value!r}" for name, value in settings.items())
            restarted = ", ".join(sorted(lost)) if lost else "random numbers"
            raise ValueError(
                f"{changed} after the first step: {restarted} would begin anew, so it must stay as it is; make a new "
                "optimizer"
            )

    def follow_schedules(self, num_update: int) -> None:
        if not self._schedules:
            return
        before, rule = dict(vars(self)), self.composed_rule
        super().follow_schedules(num_update)
        if self.composed_rule is not rule:
            values = ", ".join(
                f"{name}={value!r} after {before[name]!r}" for name, value in self.scheduled_at(num_update).items()
            )
            vars(self).update(before)
            raise ValueError(
                f"schedules at update {num_update}: {values} would change the update rule or its states, such as a momentum "
                "of 0 does: a schedule must stay on one side"
            )

    def use_parameters(self, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        if self._has_plain_hyper:
            self._check_hyper(self.rule, dict.fromkeys(("lr", "wd", "decay", "clip"), 0.0))
        super().use_parameters(params, names)

    @property
    def _has_plain_hyper(self) -> bool:
        """Whether hyper-parameters are attributes and derived values only, because no method `hyper` returns others."""
        return type(self).hyper is RuleOptimizer.hyper and type(self).hyper_of is RuleOptimizer.hyper_of

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """Return hyper-parameters that depend on the update count, by name; subclasses override it.

        The returned values replace attributes and derived values of the same names, and further values are derived from
        them. Keys of `tl.normal` are whole numbers, such as a seed and `t`; a tensor gets keys made of them and its index.

        Args:
            t: the number of the parameter's update; the first is 1.
            lr, wd: the parameter's learning rate and weight decay, including schedule and multipliers.
        """
        return {}

    @property
    def shares_rows(self) -> bool:
        """Whether parameters of equal count, rate and decay have equal hyper-parameters, with the keys of `tl.normal`."""
        return self.uniform_hyper and not self.rule.keys

    def hyper_of(self, index: Index | None, t: int, lr: float, wd: float) -> dict[str, float]:
        """Return one parameter's hyper-parameters, by default those of `hyper`; every row has them from here.

        With `uniform_hyper`, parameters of equal count, rate and decay share a row: the result must not depend on `index`.

        Args:
            index: the parameter, or one of those that share the row; None for the values of any parameter.
            t, lr, wd: the arguments of `hyper`.
        """
        return self.hyper(t, lr, wd)

    def begin_step(self, lr: float) -> None:
        """Prepare a step, once for all its parameters, given the learning rate before multipliers; subclasses override."""

    def average(self) -> tuple[Rule, dict[str, float]] | None:
        """Return a rule that computes averaged weights from weights and states, and its hyper-parameters.

        None means that the optimizer does not average weights, which is the default.
        """
        return None

    def average_in_use(self) -> tuple[Rule, dict[str, float]] | None:
        """Return the rule and hyper-parameters for averaged weights: of `ema_decay` if it is set, else of `average`."""
        return self.average() if self.ema_decay is None else (transforms.moving_average, {})

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Fill the state tensors of a parameter in place, for rules that do not start from zeros.

        Args:
            weight: the parameter, or its master.
            state: the state tensors of `rule`, filled with zeros.
        """

    def row(
        self,
        t: int,
        lr: float,
        wd: float,
        index: Index | None = None,
        rule: Rule | None = None,
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
    ) -> list[float]:
        """Return one parameter's row of hyper-parameters for a step, as the kernels take it.

        The row is `rescale_grad`, the hyper-parameters of the rule in its order and, with stochastic rounding, `t`. No other
        code multiplies a learning rate or a weight decay.

        Args:
            t: the number of the parameter's update; the first is 1.
            lr: the learning rate of the step, before multipliers.
            wd: the weight decay, before multipliers.
            index: the parameter.
            rule: the rule of the step; default `composed_rule`.
            lr_mult, wd_mult: the parameter's multipliers.

        Raises:
            TypeError: the rule needs a hyper-parameter that the class does not have, or that is no number.
        """
        rule = self.composed_rule if rule is None else rule
        lr, wd = lr * lr_mult, wd * wd_mult
        values = {"lr": lr, "wd": wd, "decay": lr * wd}
        if self._in_use:
            step = StepNumbers(t, lr, wd, values["decay"])
            for option in self._rows():
                if option.values is not None:
                    values.update(option.values(self, step))
            values.update(limit_values(self))
        if self._joint is not None:
            values.update(limit_values(self._joint, JOINT))
        values["clip"] = self.clip_gradient or math.inf
        given = self.hyper_of(index, t, lr, values["wd"])
        if not isinstance(given, dict):
            raise TypeError(
                f"{type(self).__name__}.hyper(t, lr, wd) returned {given!r}: it must return a dictionary of "
                "hyper-parameters by name, {} if there are none"
            )
        values.update(given)
        if values["clip"] < 0:
            values["clip"] = math.inf
        row: list[float] = [self.rescale_grad]
        attributes = vars(self)
        try:
            if rule.keys:
                values.update(self._keys_of(rule.keys, values, index))
            for name, derived in derivations(rule.hyper):
                value = values.get(name)
                if value is None:
                    value = attributes.get(name)
                if value is None and derived is not None:
                    source = values.get(derived.source)
                    if source is None:
                        source = attributes.get(derived.source)
                    if source is not None:
                        value = derived.compute(source, t) if derived.counts else derived.compute(source)
                if value is None:
                    value = self._class_attribute(name, derived, t)
                if value.__class__ is not float and not _is_number(value, lr):
                    raise TypeError
                row.append(value)
        except (AttributeError, TypeError):
            self._check_hyper(rule, values)
            raise
        if (self.stochastic_rounding or self.state_dtype is not None) and self.rounding is not None:
            row.append(t)
        return row

    def _keys_of(self, names: Sequence[str], values: Mapping[str, Any], index: Index | None) -> dict[str, float]:
        """Return keys of a parameter by itself: they depend on its index, so that the order of updates does not matter."""
        given = {name: values[name] if name in values else getattr(self, name) for name in names}
        for name, value in given.items():
            if float(value) != int(value):
                raise TypeError(f"{name}={value!r} is a key of tl.normal: must be a whole number")
        number = index if isinstance(index, int) and index >= 0 else zlib.crc32(str(index).encode())
        first, *others = (int(value) % 2**64 for value in given.values())  # a seed may be negative
        words = np.random.SeedSequence([first, number, *others]).generate_state(len(given)) >> 8
        return dict(zip(names, map(float, words), strict=True))  # float32 has 24 bits

    def rows_of_step(
        self,
        times: Sequence[int],
        parameters: Sequence[tuple[Any, ...]],
        rule: Rule,
        number: int | None = None,
        lr: float | None = None,
        alone: bool = False,
    ) -> list[list[float]]:
        """Return the rows of hyper-parameters of one step; evaluates the schedules and calls `begin_step`.

        Args:
            times: for each parameter, the number of its coming update.
            parameters: for each parameter, a tuple that ends in lr_mult, wd_mult and the index.
            rule: the rule of the step.
            number: `num_update` after the step, if the step also updates parameters that are not listed; default: the
                largest of `times`.
            lr: the learning rate of the step, before multipliers; default: the schedule's, or `self.lr`.
            alone: whether the parameters of a step are updated by separate calls, of which only the first begins the step.
        """
        if self._schedules:
            self.follow_schedules(self.count_for_rate(times, number))
        if lr is None:
            lr = self.lr if self.lr_scheduler is None else self.rate_at(self.count_for_rate(times, number))
        if not alone or self.begins_with_each:
            self.begin_step(lr)
        elif (reached := max(self.num_update, *times)) != self._begun:
            self.begin_step(lr)
            self._begun = reached
        return [
            self.row(t, lr, self.wd, index, rule, lr_mult, wd_mult)
            for t, (*_, lr_mult, wd_mult, index) in zip(times, parameters, strict=True)
        ]

    def count_for_rate(self, times: Sequence[int], number: int | None = None) -> int:
        """Return the update count at which a step evaluates the schedule; takes `times` and `number` of `rows_of_step`."""
        if self.reads_rate_first:
            return self.num_update
        return max(self.num_update, *times) if number is None else number

    def _class_attribute(self, name: str, derived: Derivation | None, t: int) -> Any:
        """Return a hyper-parameter that is a class attribute or derived from one."""
        if derived is None or hasattr(self, name):
            return getattr(self, name)
        source = getattr(self, derived.source)
        return derived.compute(source, t) if derived.counts else derived.compute(source)

    def _check_hyper(self, rule: Rule, values: Mapping[str, Any]) -> None:
        """Raise TypeError if the rule needs a hyper-parameter that is no number, or neither in `values` nor an attribute."""
        for name, derived in derivations(rule.hyper):
            sources = [name] if derived is None else [name, derived.source]
            source = next((each for each in sources if values.get(each, getattr(self, each, None)) is not None), sources[-1])
            if source not in values and not hasattr(self, source):
                why = "" if derived is None else f", derived from {source!r}"
                raise TypeError(
                    f"rule {rule.name!r} needs {name!r}{why}, which {type(self).__name__} lacks: set self.{source} in "
                    "__init__, or return it from hyper(t, lr, wd)"
                ) from None
            value = values.get(source, getattr(self, source, None))
            if not _is_number(value, 0.0):
                raise TypeError(f"{source}={value!r}: must be a number, not {type(value).__name__}") from None

    @property
    def rounding(self) -> int | storage.CodesOnly | None:
        """The seed of stochastic rounding, for states alone if wrapped in `CodesOnly`; None without stochastic rounding."""
        if self.stochastic_rounding:
            return self.rounding_seed
        return storage.CodesOnly(self.rounding_seed) if storage.is_packed(self.narrow) else None

    def cost_of(self, index: Index, weight: torch.Tensor) -> float:
        """Return the approximate number of operations that an update of this parameter takes."""
        return self.composed_rule.cost(weight.shape)

    def master_dtype(self, weight: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of this weight's master; None if it has none."""
        if weight.dtype not in LOW_PRECISION:
            return None
        return SPLIT_MASTERS.get(self.multi_precision, torch.float32 if self.multi_precision else None)

    def check_alone(self, index: Index) -> None:
        super().check_alone(index)
        if self.has_others(index) and any(reduction.scope == "global" for reduction in self.composed_rule.reductions):
            options = [f"{each.name}={vars(self)[each.name]!r}" for each in self._rows() if each.by_norm]
            with_options = f" with {', '.join(options)}" if options else ""
            raise ValueError(
                f"an update of one parameter by {type(self).__name__}{with_options}, which needs the gradients of all "
                "parameters: give lists to get_updater(optimizer)(indices, gradients, weights), as a store with "
                "takes_lists = True can, or use Trainer.step without such a store"
            )

    def keeps_master(self, weight: torch.Tensor) -> bool:
        return self.master_dtype(weight) is not None

    def state_dtypes(self, weight: torch.Tensor) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the states of `composed_rule` for this weight, in the order of its slots."""
        return slot_dtypes(self.composed_rule, weight.dtype, state_type(weight, self.narrow), weight.shape)

    def states_for(self, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return zero-filled states of `composed_rule`, a tuple of tensors for each weight."""
        return states_for(self.composed_rule, weights, self.narrow, on_host=self.state_device is not None)

    def check_storage(self, name: str, weight: torch.Tensor) -> None:
        """Raise if the options on storage do not support the dtype of a weight.

        Args:
            name: the name to show in the message.
            weight: the weight.

        Raises:
            ValueError: the dtype is not supported.
        """
        if self.narrow is not None and weight.dtype == torch.float64:
            raise ValueError(
                f"state_dtype={self.state_dtype!r}: {name} is torch.float64, and so are its states; it must be None"
            )
        if self.state_device is not None:
            host_memory.check_device(name, weight.device)
        if self.stochastic_rounding and weight.dtype == torch.float16 and not self.keeps_master(weight):
            raise ValueError(f"stochastic_rounding=True: {name} is torch.float16; it must be torch.bfloat16 or wider")
        if self.multi_precision in SPLIT_MASTERS and weight.dtype == torch.float16:
            raise ValueError(
                f"multi_precision={self.multi_precision!r}: {name} is torch.float16, but split masters are for "
                "torch.bfloat16; it must be True or False"
            )

    def create_state(self, index: Index, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the initial states of `composed_rule` for a weight, one tensor for each slot."""
        (state,) = self.states_for([weight])
        self.start_state(weight.detach(), dict(zip(self.composed_rule.slots, state, strict=True)), index)
        return state

    @property
    def starts_from_zeros(self) -> bool:
        """Whether all states of `composed_rule` are 0 before the first update, so that `start_state` has nothing to do."""
        return self._has_plain_start and not self.composed_rule.starts_as_weight

    @property
    def _has_plain_start(self) -> bool:
        return type(self).init_state is RuleOptimizer.init_state and self.starts_as_rate is None

    def start_state(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        index: Index | None = None,
        lr: float | None = None,
    ) -> None:
        """Fill zero-filled states of `composed_rule` in place with their values before the first update.

        Args:
            weight: the weight.
            slots: its states by slot name.
            index: the parameter; None if it has no multiplier.
            lr: the learning rate of its first update; default: that of its coming update.
        """
        if not self._has_plain_start:
            rule = self.composed_rule
            packed = [name for name in rule.slots if storage.is_packed(slots[name])]
            plain = {name: torch.zeros_like(weight, dtype=torch.float32) for name in packed}
            started = slots | plain
            if self.starts_as_rate is not None:
                started[self.starts_as_rate].fill_(self._coming_rate(index) if lr is None else lr)
            self.init_state(weight, tuple(started[name] for name in self.rule.slots))
            for name, values in plain.items():
                storage.copy(slots[name], values, weight.shape, name in rule.nonnegative)
        for name in self.composed_rule.starts_as_weight if self._in_use else ():
            slots[name].copy_(weight)

    def _coming_rate(self, index: Index | None) -> float:
        """Return the learning rate of a parameter's coming update, including schedule and multiplier."""
        if index is None:
            return self.rate_at(self.count_for_rate([self.num_update + 1]))
        slots = self.slots([index])  # may add the parameter's count
        return self.rate_at(self.count_for_rate([int(self.step_counts.values[slots[0]]) + 1])) * self.multipliers(index)[0]

    def create_state_multi_precision(self, index: Index, weight: torch.Tensor) -> Any:
        """Return the result of `create_state`, or for a weight with a master the pair (float32 master, master's states).

        As in MXNet 1.9.1, the pair of SGD, ccSGD, NAG and LARS is (master's states, float32 master).

        Raises:
            ValueError: the optimizer uses split masters, which this interface of MXNet cannot hold.
        """
        if self.master_dtype(weight) not in (None, torch.float32):
            raise ValueError(
                f"create_state_multi_precision with multi_precision={self.multi_precision!r}: its states have a float32 "
                "copy of the weight; use get_updater(optimizer) or a Trainer, or give multi_precision=True"
            )
        made = super().create_state_multi_precision(index, weight)
        return (made.state, made.master) if self.master_comes_last and isinstance(made, WithMaster) else made

    def _master_and_state(self, state: Any) -> tuple[torch.Tensor, Any]:
        master, rest = reversed(state) if self.master_comes_last else state
        if not isinstance(master, torch.Tensor):
            form = "(states, master)" if self.master_comes_last else "(master, states)"
            raise TypeError(
                f"state has a {type(master).__name__} as master: {type(self).__name__} needs {form}, as "
                "create_state_multi_precision returns them"
            )
        return master, rest

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update one weight and its state in place, or lists of them in one launch.

        `get_updater` and `Trainer` are faster, because they reuse their preparations at the next step.

        Args:
            index: the parameter's index, or a list of indices.
            weight: the parameter, or a list of as many parameters.
            grad: its gradient, or a list of them.
            state: what `create_state` returned for it, or a list of these.

        Raises:
            TypeError, ValueError: the arguments do not match each other or the options; nothing has been changed.
        """
        indices, weights, grads, states = listed_arguments(index, weight, grad, state)
        names = ["the weight"] if len(indices) == 1 else [f"weight {each!r}" for each in indices]
        rule, alone = self._composed(sync=True, joint=False), not isinstance(index, (list, tuple))
        if alone:
            self.check_alone(index)
        for name, each in zip(names, weights, strict=True):
            self.check_storage(name, each)
        run = Update(rule, weights, [tuple(each) for each in states], names=names, seed=self.rounding)
        sparse = SparseRows(names, functools.partial(split, self, indices, names, weights))
        sparse.bind(run, grads, own=False)
        slots = self.slots(indices)
        run.rng_offsets[:] = [each if isinstance(each, int) else slot for each, slot in zip(indices, slots, strict=True)]
        times = [int(count) + 1 for count in self.step_counts.values[slots]]
        parameters = [(*self.multipliers(each), each) for each in indices]
        before = self.host_state(), self._begun
        try:
            run.hyper[:] = self.rows_of_step(times, parameters, rule, alone=alone)
            sparse.run(run)
        except BaseException:
            self.load_host_state(before[0])
            self._begun = before[1]
            raise
        for slot, t in zip(slots, times, strict=True):
            self.step_counts.advance(slot, t)

    def kept(self, name: str) -> dict[Index, float]:
        """Return a number that steps keep, by parameter index; empty before the first step. Waits for the device.

        Args:
            name: a name of `rule.kept`, such as Prodigy's "d".
        """
        updater = None if self._updater is None else self._updater()
        if updater is None:
            return {}
        indices = [index for index in updater.state if part_of(updater.optimizer, index) is self]
        return {index: float(updater.state[index][name]) for index in indices if name in updater.state[index]}

    def _hidden(self) -> tuple[str, ...]:
        used = {option.name for option in self._rows()} | ({"stochastic_rounding"} if self.rounding is not None else set())
        return tuple(each.name for each in OPTIONS if (each.of is not None and each.of not in used) or not each.is_on(self))

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype in which states are stored, from `state_dtype`; None for the dtype of the arithmetic."""
        return STATE_DTYPES[self.state_dtype] if self.state_dtype is not None else None

    def _rows(self) -> list[Option]:
        """Return the options that are on, in the order of `OPTIONS`."""
        return [_BY_NAME[name] for name in self._in_use]

    @property
    def couples_wd(self) -> bool:
        """Whether the rule adds weight decay to the gradient, instead of decoupling it."""
        return "wd" in self.rule.hyper and not {"wd", "decay"} & set(self.decoupled_weight_decay) & set(self.rule.hyper)

    @property
    def has_decoupled_wd(self) -> bool:
        """Whether weight decay is decoupled, by the rule or by `decoupled_wd`."""
        return self.decoupled_wd or bool(set(self.decoupled_weight_decay) & set(self.rule.hyper))

    @property
    def has_options(self) -> bool:
        """Whether options change the rule, so that `composed_rule` differs from `rule`."""
        return self._joint is not None or any(option.changes_rule for option in self._rows())

    @property
    def options_in_use(self) -> dict[str, Any]:
        """The options that are on and change the rule, with their values by name."""
        return {each.name: vars(self)[each.name] for each in self._rows() if each.changes_rule and each.is_on(self)}

    @property
    def composed_rule(self) -> Rule:
        """The rule including all options that are on, valid for all parameters at every step."""
        return self._composed(sync=True)

    def rule_for(self, slots: np.ndarray) -> Rule:
        """Return the rule, including options, for the next update of the parameters whose counts are in these slots.

        It differs from `composed_rule` between two synchronizations of Lookahead, when slow weights are not needed.
        """
        if not self._in_use and self._joint is None:  # the common case, at every step
            return self.rule
        if self.lookahead is None or for_all_steps.get():
            return self._composed(sync=self.lookahead is not None)
        n = self.step_counts.values[slots] - self.begin_num_update + 1
        return self._composed(sync=not (n % self.lookahead).all())

    def transformed(self, sync: bool = True) -> Iterator[tuple[Option, Rule, Rule]]:
        """Yield each option in use that transforms the rule, with the rule before and after.

        `sync`: whether a step moves Lookahead's slow weights.
        """
        rule = self.rule
        for option in self._rows():
            if option.transform is not None:
                made = option.transform(self, rule, sync)
                yield option, rule, made
                rule = made

    def _composed(self, sync: bool, joint: bool = True) -> Rule:
        rule = self.rule
        for _, _, rule in self.transformed(sync):  # noqa: B007  # the last is needed
            pass
        if self._in_use:
            rule = limited(rule, self)
        return rule if self._joint is None or not joint else limited(rule, self._joint, JOINT)


def _is_number(value: Any, lr: Any) -> bool:
    """Return whether this may be a hyper-parameter; where the rate is a column of several parameters, it may be one."""
    return hasattr(value, "__float__") and (
        not getattr(value, "ndim", 0) or math.prod(value.shape) == 1 or getattr(lr, "ndim", 0) > 0
    )


_ARGUMENTS = inspect.signature(Optimizer.__init__).parameters
_BY_NAME: dict[str, Option] = {}
_self, _kwargs = inspect.signature(RuleOptimizer.__init__).parameters.values()


def _publish() -> None:
    """Make all options attributes and arguments of `RuleOptimizer`."""
    for option in OPTIONS:
        setattr(RuleOptimizer, option.name, option)
        _BY_NAME[option.name] = option
    parameters = [inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in OPTIONS]
    signature = inspect.Signature([_self, *parameters, _kwargs])
    RuleOptimizer.__init__.__signature__ = signature  # type: ignore[attr-defined]


def register_option(option: Option) -> Option:
    """Make an option an argument and an attribute of every optimizer with a rule.

    Its transform comes after the built-in ones that change a step, and before `lookahead` and `ema_decay`, which see its
    weights. Classes that `as_torch` makes from then on have it. docs/plugins.md has an example.

    Args:
        option: the option; it must have a `transform`, and a name that no optimizer uses.

    Returns:
        `option`, unchanged.

    Raises:
        TypeError: it is no `Option`, or has no `transform`.
        ValueError: the name is no identifier, or taken.
    """
    if not isinstance(option, Option) or option.transform is None:
        raise TypeError(f"option must be a tristep.optimizer.Option with a transform, got {option!r}")
    if option.name in _BY_NAME or option.name in _ARGUMENTS or hasattr(RuleOptimizer, option.name):
        raise ValueError(f"option {option.name!r}: optimizers have an argument or attribute of this name; choose another")
    if not option.name.isidentifier():
        raise ValueError(f"option {option.name!r}: its name must be an identifier")
    OPTIONS.insert(OPTIONS.index(_BY_NAME["lookahead"]), option)
    _publish()
    return option


_publish()
