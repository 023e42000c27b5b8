"""Variants of Adam from recent papers. Weight decay is decoupled (learning rate times `wd`) unless stated."""

from __future__ import annotations

import math
from typing import Any

from ...kernels import rules
from ..validation import integer, number
from .adaptive import WithBetas
from .base import register
from .settings import Setting, fraction, not_negative, positive, switch

__all__ = ["ADOPT", "MARS", "AdEMAMix", "Adan", "Grams", "NovoGrad", "RAdam", "StableAdamW"]


@register
class Adan(WithBetas):
    """Adan optimizer: Adam with Nesterov momentum, from averages of the gradient and of its change since the last step.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2, beta3: decay rates of the averages of the gradient, of its change and of the square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is proximal: the weight
            is divided by 1 + learning rate times `wd`.

    Source: Xie et al. (2022), "Adan: Adaptive Nesterov Momentum Algorithm", alg. 1, whose betas are 1 minus these.
    """

    default_learning_rate = 0.001
    rule = rules.adan

    beta3 = fraction()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.98,
        beta2: float = 0.92,
        beta3: float = 0.99,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.beta3 = beta3
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)


@register
class AdEMAMix(WithBetas):
    """AdEMAMix optimizer: AdamW with a second, much slower average of the gradient.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the fast average of the gradient and of the average of its square, in [0, 1).
        beta3: decay rate of the slow average of the gradient, in (0, 1).
        alpha: weight of the slow average in the step, >= 0.
        warmup: number of updates over which `alpha` and `beta3` grow to their values; None means no warm-up.
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Pagliardini, Ablin & Grangier (2024), "The AdEMAMix Optimizer", alg. 1, the warm-up from section 3.
    """

    default_learning_rate = 0.001
    rule = rules.ademamix

    beta3 = Setting(number, above=0, below=1)
    alpha = not_negative()
    warmup = Setting(integer, low=1, optional=True)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float = 0.9999,
        alpha: float = 5.0,
        warmup: int | None = None,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.beta3, self.alpha, self.warmup = beta3, alpha, warmup
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        alpha, beta3 = self.alpha, self.beta3
        if self.warmup is not None and t < self.warmup and 0 < self.beta1 < beta3:
            part = t / self.warmup
            start, end = math.log(self.beta1), math.log(beta3)
            alpha, beta3 = part * alpha, min(math.exp(start * end / ((1.0 - part) * end + part * start)), beta3)
        return {"alpha": alpha, "beta3": beta3}


@register
class ADOPT(WithBetas):
    """ADOPT optimizer: Adam that leaves the newest gradient out of its denominator, and so converges with any beta2.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: lower limit of the denominator, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. The first update of a parameter only
            starts its averages.

    Source: Taniguchi et al. (2024), "ADOPT: Modified Adam Can Converge with Any beta2", alg. 2.
    """

    default_learning_rate = 0.001
    rule = rules.adopt
    epsilon = positive()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.9999,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"limit": (t - 1) ** 0.25}


@register
class Grams(WithBetas):
    """Grams optimizer: steps with the size of AdamW's and, element by element, the sign of the newest gradient.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Cao, Li & Song (2024), "Grams: Gradient Descent with Adaptive Momentum Scaling", alg. 1.
    """

    default_learning_rate = 0.001
    rule = rules.grams

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)


@register
class StableAdamW(WithBetas):
    """StableAdamW optimizer: AdamW that shortens the step of a tensor while its gradients exceed their running averages.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Wortsman et al. (2023), "Stable and low-precision training for large-scale vision-language models", alg. 2.
    """

    default_learning_rate = 0.001
    rule = rules.stable_adamw
    epsilon = positive()
    decoupled_weight_decay = ("wd",)

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.99,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        corrected = {}
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            corrected[f"one_minus_{name}"] = (1.0 - beta) / (1.0 - beta**t)
            corrected[name] = 1.0 - corrected[f"one_minus_{name}"]
        return corrected


@register
class MARS(WithBetas):
    """MARS optimizer: AdamW on gradients whose variance is reduced by adding a multiple of their change.

    Args:
        learning_rate: step size, >= 0; None means 0.003.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        gamma: strength of the variance reduction, the multiplier of the gradient's change, >= 0.
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Yuan et al. (2024), "MARS: Unleashing the Power of Variance Reduction", alg. 2 with gradients of one batch each.
    """

    default_learning_rate = 0.003
    rule = rules.mars

    gamma = not_negative()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.99,
        gamma: float = 0.025,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.gamma = gamma
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"gamma": self.gamma * self.beta1 / (1.0 - self.beta1)}


@register
class NovoGrad(WithBetas):
    """NovoGrad optimizer: momentum on gradients that are divided by a running norm of their whole tensor.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        beta1, beta2: decay rates of the momentum and of the average squared norm, in [0, 1).
        epsilon: added to the running norm in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the normalised
            gradient.

    Source: Ginsburg et al. (2019), "Stochastic Gradient Methods with Layer-wise Adaptive Moments", alg. 1.
    """

    rule = rules.novograd

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.98,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)


@register
class RAdam(WithBetas):
    """Rectified Adam: Adam that takes plain momentum steps until its average of squares is reliable enough to divide by.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        decoupled: whether weight decay is decoupled (True), or added to the gradient (False).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Liu et al. (2020), "On the Variance of the Adaptive Learning Rate and Beyond", alg. 2,
    with torch's threshold of 5.
    """

    default_learning_rate = 0.001
    rule = rules.radam

    decoupled = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        decoupled: bool = True,
        **kwargs: Any,
    ) -> None:
        self.decoupled = decoupled
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def couples_wd(self) -> bool:
        return not self.decoupled

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        decays = {"wd": 0.0, "decay": lr * wd} if self.decoupled else {"wd": wd, "decay": 0.0}
        return rectified(lr, self.beta1, self.beta2, t) | decays


def rectified(lr: float, beta1: float, beta2: float, t: int) -> dict[str, float]:
    """Return RAdam's "lr", with bias correction and rectification, and "adaptive", 1.0 or 0.0. Liu et al. (2020), alg. 2."""
    correction = 1.0 - beta2**t
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * t * beta2**t / correction
    rate = lr / (1.0 - beta1**t)
    if adaptive := length > 5.0:
        above = (length - 4.0) * (length - 2.0) * longest
        rate *= math.sqrt(correction * above / ((longest - 4.0) * (longest - 2.0) * length))
    return {"lr": rate, "adaptive": float(adaptive)}
