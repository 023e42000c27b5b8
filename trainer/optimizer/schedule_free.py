"""Schedule-free optimizers, which average the weights instead of lowering the learning rate."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import Rule, rules
from ..validation import integer, number
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, carried, fraction, not_negative

__all__ = ["ScheduleFreeAdamW", "ScheduleFreeSGD"]


class _ScheduleFree(RuleOptimizer):
    """Base class of both optimizers: the share of each step in the average, and how to compute averaged weights."""

    host_state_names = ("steps", "largest_lr", "weight_sum", "share", "rate_scale")
    steps, largest_lr, weight_sum, share, rate_scale = carried(), carried(), carried(), carried(), carried()

    beta = Setting(number, above=0, below=1)
    warmup = Setting(integer, low=0)
    power = not_negative()
    r = not_negative()

    def __init__(self, learning_rate: float | None, beta: float, warmup: int, power: float, r: float, **kwargs: Any) -> None:
        self.beta, self.warmup, self.power = beta, warmup, power
        self.r = r
        self.steps = 0
        self.largest_lr = 0.0
        self.weight_sum = 0.0
        self.share = 1.0
        self.rate_scale = 1.0
        super().__init__(learning_rate=learning_rate, **kwargs)

    def begin_step(self, lr: float) -> None:
        self.steps += 1
        self.rate_scale = min(1.0, self.steps / self.warmup) if self.warmup else 1.0
        self.largest_lr = max(self.largest_lr, lr * self.rate_scale)
        weight = self.steps**self.r * self.largest_lr**self.power
        self.weight_sum += weight
        self.share = weight / self.weight_sum if self.weight_sum else 0.0

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": lr * self.rate_scale}

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[self.rule.state.index("z")].copy_(weight)

    def average(self) -> tuple[Rule, dict[str, float]]:
        return rules.toward, {"share": 1.0 - 1.0 / self.beta}


@register
class ScheduleFreeSGD(_ScheduleFree):
    """Schedule-free SGD: averages the weights, so the learning rate need not fall. Evaluate in `trainer.averaged_weights()`.

    Args:
        learning_rate: step size, >= 0; None means 1.0.
        beta: position between the plain weights (0) and their average (1) where gradients are taken, in (0, 1).
        warmup: number of steps over which the learning rate grows linearly, >= 0.
        power, r: exponents >= 0 of the weight of a step in the average: (largest rate so far)**power * (step number)**r.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient.

    Source: Defazio et al. (2024), "The Road Less Scheduled".
    """

    default_learning_rate = 1.0
    rule = rules.schedule_free_sgd

    def __init__(
        self,
        learning_rate: float | None = None,
        beta: float = 0.9,
        warmup: int = 0,
        power: float = 2.0,
        r: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta, warmup, power, r, **kwargs)


@register
class ScheduleFreeAdamW(_ScheduleFree):
    """Schedule-free AdamW: averages weights, so the learning rate need not fall. Evaluate in `trainer.averaged_weights()`.

    Args:
        learning_rate: step size, >= 0; None means 0.0025.
        beta: position between the plain weights (0) and their average (1) where gradients are taken, in (0, 1); replaces
            Adam's beta1.
        beta2: decay rate of the average of squared gradients, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        warmup: number of steps over which the learning rate grows linearly, >= 0.
        power, r: exponents >= 0 of the weight of a step in the average: (largest rate so far)**power * (step number)**r.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is learning rate times `wd`,
            applied where gradients are taken.

    Source: Defazio et al. (2024), "The Road Less Scheduled", as in the authors' class `AdamWScheduleFree`. Alg. 1 has the
    bias correction in the learning rate instead, and so in the decay and in the weights of the average.
    """

    default_learning_rate = 0.0025
    rule = rules.schedule_free_adamw
    decoupled_weight_decay = ("wd",)

    beta2 = fraction()
    epsilon = not_negative()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        warmup: int = 0,
        power: float = 2.0,
        r: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.beta2, self.epsilon = beta2, epsilon
        super().__init__(learning_rate, beta, warmup, power, r, **kwargs)
