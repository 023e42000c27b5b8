"""Other optimizers: Lion, Tiger, Sophia, Prodigy, ASGD, Rprop. Decay is decoupled, if not said otherwise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels import Rule, rules
from ..validation import number
from .adaptive import WithBetas, bias_correction
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, fraction, not_negative, positive, switch

__all__ = ["ASGD", "Lion", "Prodigy", "Rprop", "Sophia", "Tiger"]


@register
class Lion(RuleOptimizer):
    """Steps of equal length, by the sign of an average of the gradient.

    Args:
        learning_rate: default 0.0001; a tenth to a third of AdamW's.
        beta1, beta2: decay of the average that votes and of the one that is kept, in [0, 1).
        **kwargs: those of `Optimizer`.

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
    """Steps of equal length, by the sign of the gradient's average: Lion with one decay for both.

    Args:
        learning_rate: default 0.001.
        beta: decay of the average, in [0, 1).
        **kwargs: those of `Optimizer`.

    Source: Su (2023), "Tiger: A Tight-fisted Optimizer", https://github.com/bojone/tiger, with one rate for all layers.
    """

    default_learning_rate = 0.001
    rule = rules.tiger

    beta = fraction()

    def __init__(self, learning_rate: float | None = None, beta: float = 0.965, **kwargs: Any) -> None:
        self.beta = beta
        super().__init__(learning_rate=learning_rate, **kwargs)


@register
class Sophia(RuleOptimizer):
    """Steps by the gradient's average over an estimate of the curvature, limited to the learning rate.

    The curvature is estimated every ten or so updates from labels drawn from the model:

        labels = torch.distributions.Categorical(logits=net(x)).sample()
        cross_entropy(net(x), labels).backward()
        with trainer.optimizer.estimating(scale=tokens):
            trainer.step(1)

    Args:
        learning_rate: default 0.001.
        beta1, beta2: decay of the averages of the gradient and of the curvature, in [0, 1).
        rho: what the curvature is multiplied by; the share of limited elements should be between 10 and 50 %.
        epsilon: the smallest denominator, > 0.
        **kwargs: those of `Optimizer`.

    Source: Liu et al. (2023), "Sophia: A Scalable Stochastic Second-order Optimizer", alg. 2 and 3 (Sophia-G).
    """

    default_learning_rate = 0.001

    beta1 = fraction()
    beta2 = fraction()
    rho = positive()
    epsilon = positive()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.965,
        beta2: float = 0.99,
        rho: float = 0.04,
        epsilon: float = 1e-15,
        **kwargs: Any,
    ) -> None:
        self.beta1, self.beta2, self.rho = beta1, beta2, rho
        self.epsilon = epsilon
        self._scale: float | None = None
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def counts_as_step(self) -> bool:  # type: ignore[override]
        return self._scale is None

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.sophia if self._scale is None else rules.sophia_curvature

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {} if self._scale is None else {"scale": self._scale}

    @contextlib.contextmanager
    def estimating(self, scale: float = 1.0) -> Iterator[None]:
        """A context in which a step takes its gradients for the curvature and leaves the weights as they are.

        Args:
            scale: the number of samples or tokens in the batch, > 0.
        """
        self._scale = number("scale", scale, above=0)
        try:
            yield
        finally:
            self._scale = None


@register
class Prodigy(WithBetas):
    """Adam that finds its learning rate, from how far the weights have come; the rate that is given is a factor of it.

    Args:
        learning_rate: default 1.0; a schedule may still lower it.
        beta1, beta2: decay of the averages, in [0, 1).
        beta3: decay of the sums that the estimate is made of, in [0, 1); None means the root of beta2.
        epsilon: added to the root, times the estimate, >= 0.
        d0: the first estimate, > 0.
        d_coef: what estimates are multiplied by, > 0; the number to change where rates are too large or too small.
        growth_rate: by how much the estimate may grow in one update, > 1; None means by any.
        safeguard_warmup: whether to leave the learning rate out of the estimate's denominator, for schedules that warm up.
        use_bias_correction: whether the averages are corrected for starting at zero.
        decoupled: whether the decay is apart from the gradient, or added to it.
        **kwargs: those of `Optimizer`. Weights of 16 bits need `multi_precision`: the first steps are too small for them.

    Attributes:
        d: the present estimate. To read it waits for the device.

    Source: Mishchenko & Defazio (2023), "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", alg. 4.
    """

    default_learning_rate = 1.0
    rule = rules.prodigy

    beta3 = Setting(number, low=0, below=1, optional=True)
    d0 = positive()
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
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def d(self) -> float:
        return next(iter(self.kept("d").values()), self.d0)

    @property
    def couples_wd(self) -> bool:
        return not self.decoupled

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        if self.use_bias_correction:
            lr *= bias_correction(self.beta1, self.beta2, t)
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
        for name in ("d", "largest_d", "last_d"):
            slots[name].fill_(self.d0)


@register
class ASGD(RuleOptimizer):
    """SGD with a falling rate that also averages the weights; `trainer.averaged_weights()` shows these.

    Args:
        learning_rate: default 0.01.
        lambd: decay of weights and rate, >= 0.
        alpha: power by which the rate falls, >= 0.
        t0: update from which on weights are averaged, >= 0.
        **kwargs: those of `Optimizer`. Their decay is added to the gradient.

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
    """Steps of each element's own size, which grows while its gradient keeps its sign. For gradients of the whole data.

    Args:
        learning_rate: the first step's size, default 0.01; later rates are not looked at.
        shrink, grow: what sizes are multiplied by, 0 < shrink < 1 < grow.
        smallest, largest: the limits of sizes, > 0.
        **kwargs: those of `Optimizer`. There is no decay, so `wd` must be 0.

    Source: Riedmiller & Braun (1993), "A direct adaptive method for faster backpropagation learning: the RPROP algorithm".
    """

    rule = rules.rprop

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
            raise ValueError(f"smallest={self.smallest!r}, largest={self.largest!r}: the first must not be above the second")
        if self.wd:
            raise ValueError(f"wd={self.wd!r}: Rprop has no weight decay, so it must be 0")

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[1].fill_(self.learning_rate)
