"""RuleOptimizer: an optimizer that is an update rule and a few numbers. No arithmetic on tensors happens here."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...kernels import Rule, TensorRule, Update, storage, transforms
from ...kernels.graphs import for_all_steps
from ...kernels.language import Derivation, derivations
from ...kernels.states import slot_dtypes, state_type, states_for
from .base import LOW_PRECISION, Optimizer, listed_arguments
from .counts import Index
from .multi import part_of
from .options import OPTIONS, STATE_DTYPES, Option, StepNumbers, options_in_use, wd_at
from .settings import SPLIT_MASTERS, Setting, split_master, switch
from .sparse import SparseRows, split


class RuleOptimizer(Optimizer):
    """An optimizer that is an update rule and its hyper-parameters. Runs fused, on every engine.

    A subclass sets `rule`, takes its hyper-parameters in `__init__` and keeps each in an attribute of the name that the
    rule uses. Some names are derived: `lr`, `wd`, `decay` (lr wd) and `clip`, with multipliers and schedule in them,
    `one_minus_x`, and the bias corrections `correctionN` of `betaN`; `tristep.kernels.language.derived` has them all. What
    else depends on the update count is returned by `hyper`.

    Args:
        clip_norm: multiply the gradients by min(1, clip_norm / (norm + 1e-6)), with the global norm of all gradients of a
            step, after `rescale_grad` and before `clip_gradient`, > 0; None means never. `.grad` is not changed.
        zclip: clip the gradients to a lower norm where their global norm is a spike, one that exceeds the running mean of
            the norms before by more than so many running standard deviations, > 0, 2.5 in the paper; None means never. With
            `clip_norm`, to that at most (Kumar et al. 2025, "ZClip", arXiv 2504.02507; `kernels.transforms.zclip`).
        zclip_decay: what mean and variance keep of themselves at each update, in [0, 1).
        zclip_warmup: updates in which norms are counted and not yet compared, >= 1.
        agc: adaptive gradient clipping by whole tensors: multiply each gradient by min(1, agc max(|w|, 0.001) / |g|), after
            `clip_norm` and `zclip`, > 0; None means never (Brock et al. 2021, "High-Performance Large-Scale Image
            Recognition Without Normalization", eq. 3, with norms of tensors. The paper's are those of rows and filters, as
            in `kernels.clip_adaptively_`).
        skip_norm: skip steps whose global gradient norm, before it is clipped, exceeds this, > 0; None means never. It is
            compared in float32. Everything else is as of `skip_nonfinite`, which this includes.
        skip_percentile: skip steps whose global gradient norm, before it is clipped, exceeds `skip_factor` times a running
            estimate of this percentile p of the norms, in (0, 100), such as 95; None means never. Each norm above the
            estimate multiplies it by exp(0.002 p), each other one by exp(-0.002 (100 - p)), those of skipped steps, too:
            where all norms become r times as large, about ln(r / skip_factor) / (0.002 p) steps are skipped, and then none
            (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871;
            `kernels.transforms.skip_above_percentile`). Norms that are 0 or not finite change nothing of it. Everything else
            is as of `skip_nonfinite`, which this includes.
        skip_factor: how many times the percentile a norm may be, >= 1. With 1, 100 - p percent of all steps are skipped.
        skip_warmup: steps in which the percentile is estimated and nothing skipped for it, >= 1.
        skip_nonfinite: skip steps whose gradients contain NaN or infinity, or have an infinite sum of squares: no weight and
            no state changes. A skipped step is counted, since the host does not synchronize with the device.
        clip_step: divide the step, except for decoupled weight decay, by max(1, RMS / (clip_step lr)), with its root mean
            square over each tensor and the parameter's learning rate, > 0; None means never (Shazeer & Stern 2018,
            "Adafactor", section 6, where it is 1).
        cautious: use the step, except for decoupled weight decay, only in elements where it descends the gradient,
            divided by their share in the tensor (Liang et al. 2024, "Cautious Optimizers", alg. 1).
        decoupled_wd: take learning rate times `wd` off the weights, instead of adding `wd` times them to the gradient
            (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization").
        cautious_wd: use decoupled weight decay only in elements where it and the step have the same direction (Chen et al.
            2025, "Cautious Weight Decay", arXiv 2510.12402, alg. 1); with `decoupled_wd` also of rules that couple theirs.
        hyperball: keep each tensor on the sphere on which it was before its first update, and take from the optimizer only
            the direction of the step, whose length is the learning rate times the tensor's norm R: with u the direction,
            w <- R v / |v|, v = w - lr R u / |u| (Wen et al. 2026, "Hyperball Optimization", arXiv 2606.16899). Tensors of
            zeros take the optimizer's own steps; one of a single element stays. The paper does this to matrices only.
        lookahead: every so many updates of a parameter, move its slow weight by the fraction `lookahead_alpha` towards the
            weight, and reset the weight to it, >= 1; None means never (Zhang et al. 2019, "Lookahead Optimizer", alg. 1).
        lookahead_alpha: in (0, 1].
        ema_decay: maintain a moving average of the weights, ema <- ema_decay ema + (1 - ema_decay) w after every update, in
            [0, 1); None means none. `Trainer.averaged_weights` uses it, instead of an average of the optimizer's own.
        decay_schedule: how decoupled weight decay follows the learning rate, whose highest value is the schedule's peak.
            None: lr wd. "relative": wd lr / peak, which does not depend on how high the peak is (Loshchilov & Hutter 2019,
            "Decoupled Weight Decay Regularization", alg. 2, with lr / peak as the multiplier of the schedule). "squared":
            wd lr^2 / peak (AdamC of Defazio 2025, "Why Gradients Rapidly Increase Near the End of Training", arXiv
            2506.02285). Rates are those before `lr_mult`, which multiplies the result. Also for rules of whole tensors.
        peak_lr: the peak, before `lr_mult`, > 0; None means that of `lr_scheduler`, where that has a `peak_lr`.
        state_dtype: "float32", also None, "bfloat16", "8bit" or "4bit": how states are stored, except for those that are
            weights, sums over all steps or nearly cancel each other. It is computed in float32. Saved states of another type
            are converted when they are loaded. With "8bit" it is a byte for each element, with "4bit" half of one, and a
            float32 for each block of 128, in contiguous weights of 4,096 elements or more; others stay float32 (Dettmers et
            al. 2022, "8-bit Optimizers via Block-wise Quantization"; Li et al. 2023, "Memory Efficient Optimizers with 4-bit
            States"). These are always rounded stochastically, since slow averages would otherwise not change.
        stochastic_rounding: round bfloat16 weights without a master, 24-bit masters and bfloat16 states up or down with the
            probability of the bits that are cut off, so that they are unbiased; the same in every run with the same
            `rounding_seed` (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision").
        rounding_seed: >= 0.
        kahan: store the rounding error of 16-bit weights, in their type, and add it at the next update (Kahan
            1965, "Further remarks on reducing truncation errors").
        **kwargs: those of `Optimizer`. `multi_precision="remainder"` stores only the 16 bits of the float32 copy that a
            bfloat16 weight lacks (a split master), and "split8" only the upper 8 of them, a copy in 24 bits; ties are then
            rounded away from zero, not to even.

    All of these options can be combined, for all elementwise rules, and cost nothing if they are not used. Rules of whole
    tensors take `clip_norm`, `skip_nonfinite`, `cautious_wd`, `ema_decay`, `decay_schedule` and how weights and states are
    stored. Gradients are clipped first, by `agc` after `clip_norm` or `zclip`; then come the others in the order of this
    list; and a skipped step is one in which nothing of all that happens. Attributes of these names can be set to other
    values between steps, with the same checks.

    Raises:
        TypeError: an option that rules of whole tensors do not take.
        ValueError: options that do not go together, or not with the rule: `decoupled_wd` where weight decay is decoupled
            already, or where there is none; `cautious_wd` or `decay_schedule` without decoupled weight decay; `hyperball`
            with `wd`, `decoupled_wd` or `cautious_wd`, as what is on a sphere does not decay; `decay_schedule` with a
            schedule whose peak is not known; `state_dtype` without a state that it applies to; `kahan` together with
            `multi_precision`. At the first step, a weight of a type that `state_dtype`, `stochastic_rounding` or a split
            master does not support, and `decay_schedule` without a known peak; at any, a learning rate above the peak.

    Example:
        >>> import tristep
        >>> from tristep.kernels import rules
        >>> class Plain(tristep.optimizer.RuleOptimizer):
        ...     rule = rules.sgd
        >>> Plain(learning_rate=0.5).lr
        0.5
    """

    reads_rate_first: ClassVar[bool] = False  # whether a schedule is asked for the count before the update
    begins_with_each: ClassVar[bool] = False  # whether `begin_step` is called for each of parameters updated one by one
    uniform_hyper: bool = True  # whether parameters of equal count, rate and decay have equal hyper-parameters
    takes_sparse: ClassVar[bool] = False  # whether a sparse gradient updates its rows only, unless lazy_update is False
    decays_sparse: ClassVar[bool] = True  # whether these rows can be decayed
    weight_of_gradient: ClassVar[str | None] = None  # the state that is the weight at which the gradient was taken

    rule: Rule
    counts_as_step: bool = True  # whether a step counts as an update
    decoupled_weight_decay: tuple[str, ...] = ("decay",)  # hyper-parameters of decay that is not part of the step
    multi_precision = Setting(split_master)
    _skips_overflow = switch()  # as `skip_nonfinite`, where a loss scaler needs it
    _in_use: tuple[int, ...] = ()  # places in `OPTIONS`

    # The attributes of the rows of `OPTIONS` that are used by name.
    decay_schedule: str | None
    decoupled_wd: bool
    lookahead: int | None
    ema_decay: float | None
    state_dtype: str | None
    stochastic_rounding: bool
    rounding_seed: int
    kahan: bool

    def __init__(self, **kwargs: Any) -> None:
        for option in OPTIONS:
            setattr(self, option.name, kwargs.pop(option.name, option.default))
        self._skips_overflow = False
        self._updater: Callable[[], Any] | None = None  # a weak reference to what has the states
        self._begun = 0  # the update count of the step that has begun, where parameters are updated one by one
        super().__init__(**kwargs)

    def check_settings(self) -> None:
        super().check_settings()
        self._in_use = options_in_use(self)
        name = type(self).__name__
        rule: Any = self.rule if self._in_use else None
        if isinstance(rule, TensorRule):
            taken = [option.name for option in OPTIONS if option.whole_tensors and option.transform]
            given = ", ".join(f"{k}={v!r}" for k, v in self.options_in_use.items() if k not in taken)
            if given:
                raise TypeError(
                    f"{given}: {name} has a rule of whole tensors, which such options are not for; those for it are "
                    f"{', '.join(taken)} and how weights and states are stored"
                )
        for option in self._rows():
            if option.refuse is not None:
                option.refuse(self)

    def set_together(self, settings: Mapping[str, Any], with_states: bool = False) -> None:
        if with_states or not self._is_complete or not self.counts:
            super().set_together(settings)
            return
        before, slots, rounding = dict(vars(self)), self.composed_rule.slots, self.rounding
        super().set_together(settings)
        lost = set(slots).intersection(self.composed_rule.slots) if slots != self.composed_rule.slots else set()
        if lost or rounding != self.rounding:
            vars(self).update(before)
            given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
            anew = ", ".join(sorted(lost)) if lost else "random numbers"
            raise ValueError(
                f"{given} after the first step: {anew} would begin anew, so it must stay as it is; make a new optimizer"
            )

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """Hyper-parameters at a parameter's update number `t` (the first is 1), where they are not plain attributes.

        `lr` and `wd` are the parameter's, multiplied already. What is returned replaces attributes and derived values of
        these names, and others are derived from it.
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
        return self.average() if self.ema_decay is None else (transforms.moving_average, {})

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Fill the state tensors, which are zero, for rules that start from other values."""

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
        """The row of one parameter: `rescale_grad`, the hyper-parameters of the rule in its order, and the step for a seed.

        This is the only place where a learning rate or a weight decay is multiplied by anything.

        Args:
            t: the number of the parameter's update, from 1.
            lr: the rate of the step, before multipliers.
            wd: the weight decay, before multipliers and `decay_schedule`.
            index: the parameter.
            rule: default `composed_rule`.
            lr_mult, wd_mult: the parameter's multipliers.

        Raises:
            ValueError: `decay_schedule` does not know the peak of the rate, or the rate is above it.
        """
        rule = self.composed_rule if rule is None else rule
        wd = wd if self.decay_schedule is None else wd_at(self, lr, wd)
        lr, wd = lr * lr_mult, wd * wd_mult
        values = {"lr": lr, "wd": wd, "decay": lr * wd}
        if self._in_use:
            step = StepNumbers(t, lr, wd, values["decay"], self.counts_as_step)
            for option in self._rows():
                if option.values is not None:
                    values.update(option.values(self, step))
        values["clip"] = self.clip_gradient or math.inf
        values.update(self.hyper_of(index, t, lr, values["wd"]))
        if values["clip"] < 0:
            values["clip"] = math.inf
        row: list[float] = [self.rescale_grad]
        own = vars(self)
        for name, derived in derivations(rule.hyper):
            value = values.get(name)
            if value is None:
                value = own.get(name)
            if value is None and derived is not None:
                source = values.get(derived.source)
                if source is None:
                    source = own.get(derived.source)
                if source is not None:
                    value = derived.compute(source, t) if derived.counts else derived.compute(source)
            row.append(self._class_attribute(name, derived, t, rule) if value is None else value)
        if (self.stochastic_rounding or self.state_dtype is not None) and self.rounding is not None:
            row.append(t)
        return row

    def rows_of_step(
        self,
        times: Sequence[int],
        parameters: Sequence[tuple[Any, ...]],
        rule: Rule,
        number: int | None = None,
        lr: float | None = None,
        alone: bool = False,
    ) -> list[list[float]]:
        """The rows of one step. Asks the schedule for the rate, and tells `begin_step`.

        Args:
            times: for each parameter the number of its coming update.
            parameters: for each a tuple that ends in lr_mult, wd_mult and the index.
            rule: the rule of the step.
            number: `num_update` after the step, where it updates other parameters, too; default: the largest of `times`.
            lr: the rate of the step, before multipliers; default that of the schedule, or `self.lr`.
            alone: the parameters of a step come one call after the other, so that its first call alone begins it.
        """
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
        """The update count at which a step asks the schedule; arguments as for `rows_of_step`."""
        if self.reads_rate_first:
            return self.num_update
        return max(self.num_update, *times) if number is None else number

    def _class_attribute(self, name: str, derived: Derivation | None, t: int, rule: Rule) -> float:
        """A hyper-parameter of the rule that is an attribute of the class, or derived from one."""
        if hasattr(self, name):
            return getattr(self, name)
        if derived is not None and hasattr(self, derived.source):
            source = getattr(self, derived.source)
            return derived.compute(source, t) if derived.counts else derived.compute(source)
        lacking = name if derived is None else derived.source
        why = "" if derived is None else f", derived from {lacking!r}"
        raise TypeError(
            f"rule {rule.name!r} needs {name!r}{why}, which {type(self).__name__} lacks: set self.{lacking} in "
            "__init__, or return it from hyper(t, lr, wd)"
        )

    @property
    def rounding(self) -> int | storage.CodesOnly | None:
        """The seed of stochastic rounding, if there is any."""
        if self.stochastic_rounding:
            return self.rounding_seed
        return storage.CodesOnly(self.rounding_seed) if storage.is_packed(self.narrow) else None

    def master_dtype(self, weight: torch.Tensor) -> torch.dtype | None:
        """The type of this weight's master, with which rounding loses nothing or little; None without one."""
        if weight.dtype not in LOW_PRECISION:
            return None
        if self.kahan:
            return weight.dtype
        return SPLIT_MASTERS.get(self.multi_precision, torch.float32 if self.multi_precision else None)

    def check_alone(self, index: Index) -> None:
        if self.has_others(index) and any(reduction.scope == "global" for reduction in self.composed_rule.reductions):
            values = self.options_in_use
            options = [
                f"{each.name}={values[each.name]!r}" for each in OPTIONS if each.all_gradients and each.name in values
            ]
            given = f" with {', '.join(options)}" if options else ""
            raise ValueError(
                f"an update of one parameter by {type(self).__name__}{given}, which needs the gradients of all parameters: "
                "give lists to get_updater(optimizer)(indices, gradients, weights), or use Trainer.step"
            )

    def keeps_master(self, weight: torch.Tensor) -> bool:
        return self.master_dtype(weight) is not None

    def state_dtypes(self, weight: torch.Tensor) -> tuple[torch.dtype, ...]:
        """The types of what `composed_rule` keeps of this weight, in order."""
        return slot_dtypes(self.composed_rule, weight.dtype, state_type(weight, self.narrow), weight.shape)

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
        if self.multi_precision in SPLIT_MASTERS and weight.dtype == torch.float16:
            raise ValueError(
                f"multi_precision={self.multi_precision!r}: {name} is torch.float16, which lacks other bits; it must be "
                "True or False"
            )

    def create_state(self, index: Index, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One tensor for each state of the rule, in the arithmetic's type."""
        (state,) = self.states_for([weight])
        self.start_state(weight.detach(), dict(zip(self.composed_rule.slots, state, strict=True)))
        return state

    def start_state(self, weight: torch.Tensor, slots: dict[str, torch.Tensor]) -> None:
        """Fill all that `composed_rule` keeps, zeros so far, by slot, as it is before the first update."""
        rule = self.composed_rule
        packed = {name for name in rule.slots if storage.is_packed(slots[name])}
        if packed and type(self).init_state is not RuleOptimizer.init_state:
            plain = {name: torch.zeros_like(weight, dtype=torch.float32) for name in packed}
            self.init_state(weight, tuple((slots | plain)[name] for name in self.rule.slots))
            for name, values in plain.items():
                storage.copy(slots[name], values, weight.shape, name in rule.nonnegative)
        else:
            self.init_state(weight, tuple(slots[name] for name in self.rule.slots))
        for option in self._rows():
            if option.first_state is not None:
                slots[option.first_state].copy_(weight)

    def create_state_multi_precision(self, index: Index, weight: torch.Tensor) -> Any:
        """As `Optimizer.create_state_multi_precision`, for float32 masters only.

        Raises:
            ValueError: a split master, or `kahan`.
        """
        if self.master_dtype(weight) not in (None, torch.float32):
            option = "kahan=True" if self.kahan else f"multi_precision={self.multi_precision!r}"
            raise ValueError(
                f"create_state_multi_precision with {option}: its states have a float32 copy of the weight; use "
                "get_updater(optimizer) or a Trainer, or give multi_precision=True"
            )
        return super().create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update one weight in place, or a list of them in one go.

        `get_updater` and `Trainer` are faster, as they keep what can be reused at the next step.

        Args:
            index: of the parameter.
            weight: the parameter.
            grad: its gradient.
            state: what `create_state` made. Each may be a list, of as many.

        Raises:
            TypeError, ValueError: they do not fit; nothing has been changed.
        """
        indices, weights, grads, states = listed_arguments(index, weight, grad, state)
        names = ["the weight"] if len(indices) == 1 else [f"weight {each!r}" for each in indices]
        rule, alone = self.composed_rule, not isinstance(index, (list, tuple))
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
        if self.counts_as_step:
            for slot, t in zip(slots, times, strict=True):
                self.step_counts.advance(slot, t)

    def kept(self, name: str) -> dict[Index, float]:
        """A number that the rule keeps of each parameter, by index; none before the first step. Waits for the device."""
        updater = None if self._updater is None else self._updater()
        if updater is None:
            return {}
        own = [index for index in updater.state if part_of(updater.optimizer, index) is self]
        return {index: float(updater.state[index][name]) for index in own if name in updater.state[index]}

    def _hidden(self) -> tuple[str, ...]:
        used = {option.name for option in self._rows()} | ({"stochastic_rounding"} if self.rounding is not None else set())
        return tuple(
            each.name
            for each in OPTIONS
            if (each.of is not None and each.of not in used) or vars(self)[each.name] in (None, False)
        )

    @property
    def narrow(self) -> torch.dtype | None:
        """What states are stored as where that is not the arithmetic's type."""
        return STATE_DTYPES[self.state_dtype] if self.state_dtype is not None else None

    def _rows(self) -> list[Option]:
        """The options that are on."""
        return [OPTIONS[place] for place in self._in_use]

    @property
    def couples_wd(self) -> bool:
        """Whether `wd` is part of the step, rather than decoupled from it."""
        return "wd" in self.rule.hyper and not {"wd", "decay"} & set(self.decoupled_weight_decay) & set(self.rule.hyper)

    @property
    def has_decoupled_wd(self) -> bool:
        """Whether there is decoupled weight decay."""
        return self.decoupled_wd or bool(set(self.decoupled_weight_decay) & set(self.rule.hyper))

    @property
    def has_options(self) -> bool:
        """Whether `composed_rule` is not just `rule`."""
        return any(option.transform is not None for option in self._rows())

    @property
    def options_in_use(self) -> dict[str, Any]:
        """The options that make other rules of the optimizer's, and are not off, with their values."""
        return {each.name: vars(self)[each.name] for each in self._rows() if each.transform and each.is_on(self)}

    @property
    def composed_rule(self) -> Rule:
        """`rule` with the options in it, right for all parameters at every step."""
        return self._composed(sync=True)

    def rule_for(self, slots: np.ndarray) -> Rule:
        """As `composed_rule`, for the next update of the parameters whose counts are in these slots.

        Between two of Lookahead's synchronisations that is a rule which leaves the slow weights alone.
        """
        if not self._in_use:  # asked at every step
            return self.rule
        if self.lookahead is None or for_all_steps.get():
            return self._composed(sync=self.lookahead is not None)
        n = self.step_counts.values[slots] - self.begin_num_update + 1
        return self._composed(sync=not (n % self.lookahead).all())

    def _composed(self, sync: bool) -> Rule:
        rule, counts = self.rule, self.counts_as_step
        for option in self._rows():
            if option.transform is not None and (counts or not option.pauses):
                rule = option.transform(self, rule, sync)
        return rule


for _option in OPTIONS:
    setattr(RuleOptimizer, _option.name, _option)
_parameters = [inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in OPTIONS]
_self, _kwargs = inspect.signature(RuleOptimizer.__init__).parameters.values()
RuleOptimizer.__init__.__signature__ = inspect.Signature([_self, *_parameters, _kwargs])  # type: ignore[attr-defined]
