"""Lion, Tiger, Prodigy, ASGD and Rprop. Weight decay is decoupled unless a class says otherwise."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...kernels import Rule, rules
from ..validation import number
from .adaptive import WithBetas, bias_correction
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, carried, fraction, not_negative, positive, switch

__all__ = ["ASGD", "Lion", "Prodigy", "Rprop", "Tiger"]


@register
class Lion(RuleOptimizer):
    """Lion optimizer: each element steps by the learning rate, in the direction of the sign of an averaged gradient.

    Args:
        learning_rate: step size, >= 0; None means 0.0001. Use a tenth to a third of AdamW's.
        beta1, beta2: decay rates of the average that gives the sign and of the stored average, in [0, 1).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Chen et al. (2023), "Symbolic Discovery of Optimization Algorithms", alg. 2.
    """

    default_learning_rate = 0.0001
    rule = rules.lion

    beta1 = fraction()
    beta2 = fraction()

    def __init__(self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.99, **kwargs: Any) -> None:
        self.beta1, self.beta2 = beta1, beta2
        super().__init__(learning_rate=learning_rate, **kwargs)


@register
class Tiger(RuleOptimizer):
    """Tiger optimizer: Lion with a single average of the gradient, whose sign gives the step.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta: decay rate of the average, in [0, 1).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Su (2023), "Tiger: A Tight-fisted Optimizer", https://github.com/bojone/tiger, with one learning rate for all
    layers.
    """

    default_learning_rate = 0.001
    rule = rules.tiger

    beta = fraction()

    def __init__(self, learning_rate: float | None = None, beta: float = 0.965, **kwargs: Any) -> None:
        self.beta = beta
        super().__init__(learning_rate=learning_rate, **kwargs)


@register
class Prodigy(WithBetas):
    """Prodigy optimizer: Adam that estimates its own step size from how far the weights have moved.

    Args:
        learning_rate: multiplier of the estimated step size, >= 0; None means 1.0. A schedule may lower it. A step at a rate
            of 0 changes neither weights nor states.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        beta3: decay rate of the sums from which the step size is estimated, in [0, 1); None means sqrt(beta2).
        epsilon: multiplied by the estimate and added to the denominator, >= 0.
        d0: the first estimate of the step size, > 0.
        d_coef: multiplier of all estimates, > 0; change it if steps are too large or too small.
        growth_rate: limit of the estimate's growth factor in one update, > 1; None means no limit.
        safeguard_warmup: whether to leave the learning rate out of the estimate's denominator, for schedules with a warm-up.
        use_bias_correction: whether to correct the averages for starting at zero.
        decoupled: whether weight decay is decoupled (True), or added to the gradient (False).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. 16-bit weights need `multi_precision`,
            because the first steps are too small for them.

    Attributes:
        d: the present estimate of the step size, a float. Reading it waits for the device.

    Source: Mishchenko & Defazio (2023), "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", alg. 4.
    """

    default_learning_rate = 1.0
    rule = rules.prodigy
    host_state_names = ("steps_at_0",)

    steps_at_0 = carried()  # the number of steps at a rate of 0, which the bias correction does not count
    beta3 = Setting(number, low=0, below=1, optional=True)
    d0 = Setting(number, above=0, fixed=True)
    d_coef = positive()
    growth_rate = Setting(number, above=1, optional=True)
    safeguard_warmup = switch()
    use_bias_correction = switch()
    decoupled = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float | None = None,
        epsilon: float = 1e-8,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float | None = None,
        safeguard_warmup: bool = False,
        use_bias_correction: bool = False,
        decoupled: bool = True,
        **kwargs: Any,
    ) -> None:
        self.beta3, self.d0, self.d_coef = beta3, d0, d_coef
        self.growth_rate, self.safeguard_warmup = growth_rate, safeguard_warmup
        self.use_bias_correction, self.decoupled = use_bias_correction, decoupled
        self.steps_at_0 = 0
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def begin_step(self, lr: float) -> None:
        if not lr:
            self.steps_at_0 += 1

    @property
    def d(self) -> float:
        return next(iter(self.kept("d").values()), self.d0)

    @property
    def couples_wd(self) -> bool:
        return not self.decoupled

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        if self.use_bias_correction and lr:
            lr *= bias_correction(self.beta1, self.beta2, max(t - self.steps_at_0, 1))
        decays = {"wd": 0.0, "decay": lr * wd} if self.decoupled else {"wd": wd, "decay": 0.0}
        return decays | {
            "lr": lr,
            "beta3": math.sqrt(self.beta2) if self.beta3 is None else self.beta3,
            "growth_rate": math.inf if self.growth_rate is None else self.growth_rate,
            "safeguard": float(self.safeguard_warmup),
        }

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        slots = dict(zip(self.rule.slots, state, strict=True))
        slots["start"].copy_(weight)
        for name in ("d", "largest_d"):
            slots[name].fill_(self.d0)


@register
class ASGD(RuleOptimizer):
    """Averaged SGD: SGD with a decaying learning rate that also averages the weights, for `trainer.averaged_weights()`.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        lambd: decay coefficient of both the weights and the learning rate, >= 0.
        alpha: exponent of the learning rate's decay, from 0 to 10.
        t0: number of updates before the average of the weights starts, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. The weight decay `wd` is added to the
            gradient.

    Source: Polyak & Juditsky (1992), "Acceleration of stochastic approximation by averaging"; arguments as torch's.
    """

    rule = rules.asgd
    couples_wd = True

    lambd = not_negative()
    alpha = Setting(number, low=0, high=10)
    t0 = not_negative()

    def __init__(
        self,
        learning_rate: float | None = None,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        **kwargs: Any,
    ) -> None:
        self.lambd, self.alpha, self.t0 = lambd, alpha, t0
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        rate = lr / (1.0 + self.lambd * lr * (t - 1)) ** self.alpha
        return {"lr": rate, "decay": rate * self.lambd, "share": 1.0 / max(1.0, t - 1 - self.t0)}

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[0].copy_(weight)

    def average(self) -> tuple[Rule, dict[str, float]]:
        return rules.averaged, {}


@register
class Rprop(RuleOptimizer):
    """Rprop optimizer: each element has its own step size, which grows while its gradient keeps its sign; for full batches.

    Args:
        learning_rate: the first step size, >= 0; None means 0.01. A parameter's `lr_mult` multiplies it. Later learning
            rates have no effect, except that a rate of 0 leaves a weight and its states as they are.
        shrink, grow: factors of the step size when the sign changes or stays, 0 < shrink < 1 < grow.
        smallest, largest: limits of the step size, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. There is no weight decay: `wd` must be 0.

    Source: Riedmiller & Braun (1993), "A direct adaptive method for faster backpropagation learning: the RPROP algorithm".
    """

    rule = rules.rprop
    starts_as_rate = "size"

    shrink = Setting(number, above=0, below=1)
    grow = Setting(number, above=1)
    smallest = positive()
    largest = positive()

    def __init__(
        self,
        learning_rate: float | None = None,
        shrink: float = 0.5,
        grow: float = 1.2,
        smallest: float = 1e-6,
        largest: float = 50.0,
        **kwargs: Any,
    ) -> None:
        self.shrink, self.grow, self.smallest = shrink, grow, smallest
        self.largest = largest
        super().__init__(learning_rate=learning_rate, **kwargs)

    def check_settings(self) -> None:
        super().check_settings()
        if self.largest < self.smallest:
            raise ValueError(f"smallest={self.smallest!r}, largest={self.largest!r}: smallest must not exceed largest")
        if self.wd:
            raise ValueError(f"wd={self.wd!r}: Rprop has no weight decay, so it must be 0")
