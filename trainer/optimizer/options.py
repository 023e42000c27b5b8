"""TransformOptions: the options of optimizers that are transforms of their rule. They are checked and composed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, transforms
from ...kernels.graphs import Recording
from ..validation import boolean, choice, integer, number
from .guard_options import GuardOptions

__all__ = ["TransformOptions"]

_FLAGS = ("cautious", "decoupled_wd", "cautious_wd", "hyperball")
_DECAYS = ("relative", "squared")
_OPTIONS = ("clip_norm", "zclip", "agc", *_FLAGS, "lookahead", "ema_decay", "skip_norm", "skip_percentile", "skip_nonfinite")


class TransformOptions(GuardOptions):
    """The options of a `RuleOptimizer` that are transforms of its rule.

    Args:
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
        **kwargs: those of `GuardOptions`, such as `clip_norm`, and of `Optimizer`.

    All of these options can be combined, for all elementwise rules, and cost nothing if they are not used; rules of whole
    tensors take `clip_norm`, `skip_nonfinite`, `cautious_wd`, `ema_decay` and `decay_schedule`. Gradients are
    clipped first, by `clip_norm` or `zclip` before `agc`; then comes what is listed here, in this order; and a skipped step
    is one in which nothing of all that happens.

    Raises:
        TypeError: another option of an optimizer whose rule is one of whole tensors.
        ValueError: `decoupled_wd` of an optimizer whose weight decay is decoupled already, or that has none; `cautious_wd`
            without decoupled weight decay; `hyperball` with `wd`, `decoupled_wd` or `cautious_wd`, as what is on a sphere
            does not decay; `decay_schedule` without decoupled weight decay, or with a schedule whose peak is not known. At
            the first step, `decay_schedule` without a known peak; at any, a learning rate above the peak.
    """

    rule: Rule
    decoupled_weight_decay: tuple[str, ...] = ("decay",)  # hyper-parameters of decay that is not part of the step

    def __init__(
        self,
        *,
        cautious: bool = False,
        decoupled_wd: bool = False,
        cautious_wd: bool = False,
        hyperball: bool = False,
        lookahead: int | None = None,
        lookahead_alpha: float = 0.5,
        ema_decay: float | None = None,
        decay_schedule: str | None = None,
        peak_lr: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.cautious = boolean("cautious", cautious)
        self.decoupled_wd = boolean("decoupled_wd", decoupled_wd)
        self.cautious_wd = boolean("cautious_wd", cautious_wd)
        self.hyperball = boolean("hyperball", hyperball)
        self.lookahead = None if lookahead is None else integer("lookahead", lookahead, low=1)
        self.lookahead_alpha = number("lookahead_alpha", lookahead_alpha, above=0, high=1)
        self.ema_decay = None if ema_decay is None else number("ema_decay", ema_decay, low=0, below=1)
        self.decay_schedule = None if decay_schedule is None else choice("decay_schedule", decay_schedule, _DECAYS)
        self.peak_lr = None if peak_lr is None else number("peak_lr", peak_lr, above=0)
        super().__init__(**kwargs)

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
        flags = self.cautious, self.decoupled_wd, self.cautious_wd, self.hyperball, self.has_guards
        return any(flags) or self.lookahead is not None or self.ema_decay is not None

    @property
    def options_in_use(self) -> dict[str, Any]:
        """The options that are not off, with their values."""
        return {name: value for name in _OPTIONS if (value := getattr(self, name)) not in (None, False)}

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

    def option_values(self, t: int, lr: float, wd: float) -> dict[str, float]:
        """What `lr`, `wd` and the hyper-parameters of the options are at a parameter's update number `t`."""
        decay = decoupled_decay = lr * wd
        if self.decoupled_wd:
            wd, decay = 0.0, lr * 0.0
        values = {"lr": lr, "wd": wd, "decay": decay, "decoupled_decay": decoupled_decay, "hyperball_lr": lr}
        values |= self.guard_values()
        if self.lookahead is not None:
            values["sync"] = float((t - self.begin_num_update) % self.lookahead == 0)
        return values

    def wd_at(self, lr: float, wd: float) -> float:
        """What stands for `wd` in `lr * wd`, so that it is what `decay_schedule` says; both are those before multipliers.

        Raises:
            ValueError: the peak is not known, or below this rate.
        """
        if self.decay_schedule is None:
            return wd
        peak = self.peak_lr if self.peak_lr is not None else getattr(self.lr_scheduler, "peak_lr", None)
        if peak is None:
            raise ValueError(
                f"decay_schedule={self.decay_schedule!r} with lr_scheduler={self.lr_scheduler!r}: the peak of the learning "
                "rate is not known; give peak_lr"
            )
        if lr > peak * (1 + 1e-9):
            raise ValueError(f"the learning rate is {lr!r}, above its peak {peak!r}: give a larger peak_lr")
        if not peak:
            return 0.0
        return wd / peak if self.decay_schedule == "relative" else wd * lr / peak

    def start_option_states(self, weight: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> None:
        """Fill the states of the options, by name, as they are before the first update of this weight."""
        if self.lookahead is not None:
            slots["slow_weight"].copy_(weight)
        if self.ema_decay is not None:
            slots["ema"].copy_(weight)

    def check_transforms(self) -> None:
        """Refuse options that do not go together, or not with the rule.

        Raises:
            ValueError: there are such.
        """
        name, rule = type(self).__name__, self.rule
        known = {"wd", "decay", *self.decoupled_weight_decay} & set(rule.hyper)
        if self.decoupled_wd and not self.couples_wd:
            why = "decays the weights apart from the gradient already" if known else "has no weight decay"
            raise ValueError(f"decoupled_wd=True: {name} {why}, so it must be False")
        if self.cautious_wd:
            self._check_decoupled("cautious_wd", "False")
        if self.hyperball:
            for option, off in (("wd", 0.0), ("decoupled_wd", False), ("cautious_wd", False)):
                if (value := getattr(self, option)) != off:
                    raise ValueError(
                        f"{option}={value!r} with hyperball=True: weights that are kept on a sphere do not decay, so it "
                        f"must be {off!r}"
                    )

    def check_decay_schedule(self) -> None:
        """Refuse a `decay_schedule` that has no effect, or whose peak cannot be known.

        Raises:
            ValueError: it is so.
        """
        if self.decay_schedule is not None:
            self._check_decoupled("decay_schedule", "None")
            if self.lr_scheduler is not None:
                self.wd_at(0.0, self.wd)
        elif self.peak_lr is not None:
            raise ValueError(f"peak_lr={self.peak_lr!r} without decay_schedule: it must be None, or give that, too")

    def _check_decoupled(self, option: str, off: str) -> None:
        if self.has_decoupled_wd:
            return
        why = "has no weight decay" if "wd" not in self.rule.hyper else "adds its weight decay to the gradient"
        hint = f"it must be {off}" + (", or give decoupled_wd=True, too" if self.couples_wd else "")
        raise ValueError(f"{option}={getattr(self, option)!r}: {type(self).__name__} {why}; {hint}")

    def _composed(self, sync: bool = False) -> Rule:
        rule = self.rule
        if not self.has_options:
            return rule
        rule = self._with_clipping(rule)
        if self.counts_as_step:  # what counts as no update is left as it is
            if self.cautious:
                rule = transforms.cautious(rule, self.decoupled_weight_decay)
            if self.decoupled_wd:
                rule = transforms.decoupled_weight_decay(rule)
            if self.cautious_wd:
                rule = transforms.cautious_weight_decay(rule, (*self.decoupled_weight_decay, "decoupled_decay"))
        if self.hyperball:  # keeps states, and keeps a weight in place that does not move
            rule = transforms.hyperball(rule)
        if self.lookahead is not None:
            rule = transforms.lookahead(rule, sync and self.counts_as_step)
        if self.ema_decay is not None:
            rule = transforms.ema(rule, self.counts_as_step)
        return self._with_skipping(rule)

    def _hidden(self) -> tuple[str, ...]:
        off = [name for name in _FLAGS if not getattr(self, name)]
        return (*super()._hidden(), *off, *(("lookahead_alpha",) if self.lookahead is None else ()))
