"""Adam and its variants, AdaGrad, AdaDelta and RMSProp: optimizers with a step size per element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, rules
from ..validation import number
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, also_called, carried, first_argument_in_mxnet, fraction, not_negative, positive, switch

__all__ = ["AdaBelief", "AdaDelta", "AdaGrad", "Adam", "AdamW", "Adamax", "GroupAdaGrad", "Nadam", "RMSProp"]


def bias_correction(beta1: Any, beta2: Any, t: Any) -> Any:
    """Return the factor that corrects Adam's learning rate at update `t` for averages that started at zero.

    Arguments may be NumPy arrays of Python numbers, for several optimizers or updates at once; the result is then float64.
    Source: Kingma & Ba (2015), section 2.
    """
    square, correction = 1.0 - beta2**t, 1.0 - beta1**t
    if isinstance(square, np.ndarray) or isinstance(correction, np.ndarray):
        return np.sqrt(np.asarray(square, dtype=float)) / np.asarray(correction, dtype=float)
    return math.sqrt(square) / correction


class WithBetas(RuleOptimizer):
    """Base class of optimizers with the arguments of Adam: two decay rates of averages, and an epsilon."""

    beta1 = fraction()
    beta2 = fraction()
    epsilon = not_negative()

    def __init__(self, learning_rate: float | None, beta1: float, beta2: float, epsilon: float, **kwargs: Any) -> None:
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        super().__init__(learning_rate=learning_rate, **kwargs)


@register
class Adam(WithBetas):
    """Adam optimizer: momentum divided, element by element, by the root of a running average of squared gradients.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0. It is the paper's epsilon-hat, since
            bias correction is part of the learning rate.
        lazy_update: whether a sparse gradient updates and decays only the rows that it lists; False means all rows.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Source: MXNet 1.9.1 Adam; Kingma & Ba (2015).
    """

    default_overrules_schedule = True
    default_learning_rate = 0.001
    rule = rules.adam
    takes_sparse = True

    lazy_update = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **kwargs: Any,
    ) -> None:
        self.lazy_update = lazy_update
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": lr * bias_correction(self.beta1, self.beta2, t)}


@register
class AdamW(WithBetas):
    """AdamW optimizer: Adam with decoupled weight decay.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        correct_bias: whether the learning rate is corrected for averages that start at zero.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: MXNet 2.0 AdamW, which multiplies the decay by the corrected rate; Loshchilov & Hutter (2019).
    """

    default_overrules_schedule = True
    default_learning_rate = 0.001
    rule = rules.adamw

    correct_bias = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        self.correct_bias = correct_bias
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        if self.correct_bias:
            lr = lr * bias_correction(self.beta1, self.beta2, t)
        return {"lr": lr, "decay": lr * wd}


@register
class AdaGrad(RuleOptimizer):
    """AdaGrad optimizer: the gradient divided, element by element, by the root of the sum of all squared gradients so far.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        eps: added under the root, >= 0; may also be given as `epsilon`, its name in MXNet 2.0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is decoupled, and must be 0
            for parameters with sparse gradients.

    Source: MXNet 1.9.1 AdaGrad; Duchi, Hazan & Singer (2011). A sparse gradient updates only the rows that it lists.
    """

    rule = rules.adagrad
    takes_sparse = True
    decays_sparse = False

    eps = not_negative()

    @also_called(epsilon="eps")
    @first_argument_in_mxnet("eps")
    def __init__(self, learning_rate: float | None = None, eps: float = 1e-7, **kwargs: Any) -> None:
        self.eps = eps
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"wd": 0.0, "epsilon": self.eps, "epsilon_outside": 0.0}


@register
class GroupAdaGrad(RuleOptimizer):
    """GroupAdaGrad optimizer: AdaGrad with one step size for each row of a matrix, as for embeddings.

    Args:
        learning_rate: step size, >= 0; None means 0.01.
        eps: added under the root, >= 0; may also be given as `epsilon`, its name in MXNet 2.0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`; `wd` must be 0.

    Source: MXNet 1.9.1 GroupAdaGrad. A sparse gradient updates only the rows that it lists.
    """

    rule = rules.group_adagrad
    takes_sparse = True

    eps = not_negative()

    @also_called(epsilon="eps")
    @first_argument_in_mxnet("eps")
    def __init__(self, learning_rate: float | None = None, eps: float = 1e-5, **kwargs: Any) -> None:
        self.eps = eps
        super().__init__(learning_rate=learning_rate, **kwargs)

    def check_settings(self) -> None:
        super().check_settings()
        if self.wd:
            raise ValueError(f"wd={self.wd!r}: GroupAdaGrad has no weight decay, so it must be 0")

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        if weight.dim() != 2:
            raise ValueError(f"GroupAdaGrad updates matrices, got a parameter of shape {tuple(weight.shape)}")

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"epsilon": self.eps}


@register
class RMSProp(RuleOptimizer):
    """RMSProp optimizer: the gradient divided, element by element, by the root of a running mean of its square.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        gamma1: decay rate of the running means, in [0, 1); may also be given as `rho`, its name in MXNet 2.0.
        gamma2: decay rate of the momentum, in [0, 1), used only if `centered`; may also be given as `momentum`.
        epsilon: added under the root, >= 0.
        centered: whether to divide by the root of the variance instead, and use momentum.
        clip_weights: limit of the weights, which are clipped to [-clip_weights, clip_weights]; None means no limit.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Source: MXNet 1.9.1 RMSProp; Tieleman & Hinton (2012), centered Graves (2013).
    """

    default_overrules_schedule = True
    default_learning_rate = 0.001

    gamma1 = fraction()
    gamma2 = fraction()
    epsilon = not_negative()
    centered = switch()
    clip_weights = Setting(number, low=0, optional=True)

    @also_called(rho="gamma1", momentum="gamma2")
    def __init__(
        self,
        learning_rate: float | None = None,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        epsilon: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.gamma1, self.gamma2, self.epsilon = gamma1, gamma2, epsilon
        self.centered, self.clip_weights = centered, clip_weights
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.rmsprop_centered if self.centered else rules.rmsprop

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        momentum = {"of_gradient": -lr, "of_delta": 1.0}
        return momentum | {"epsilon_outside": 0.0, "clip_weights": self.clip_weights or math.inf}


@register
class AdaDelta(RuleOptimizer):
    """AdaDelta optimizer: steps scaled by the running size of earlier steps; it ignores the learning rate.

    Args:
        rho: decay rate of the averages of squared gradients and squared steps, in [0, 1).
        epsilon: added under both roots, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is decoupled, and not
            multiplied by a learning rate.

    Source: MXNet 1.9.1 AdaDelta; Zeiler (2012).
    """

    rule = rules.adadelta

    rho = fraction()
    epsilon = positive()

    def __init__(self, rho: float = 0.90, epsilon: float = 1e-5, **kwargs: Any) -> None:
        self.rho, self.epsilon = rho, epsilon
        super().__init__(**kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": 1.0, "wd": 0.0, "decay": wd}


@register
class Adamax(RuleOptimizer):
    """Adamax optimizer: momentum divided, element by element, by the largest recent gradient, a maximum that decays.

    Args:
        learning_rate: step size, >= 0; None means 0.002.
        beta1, beta2: decay rates of the average and of the maximum, in [0, 1).
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Source: MXNet 1.9.1 Adamax; Kingma & Ba (2015), section 7.1. A weight whose gradients were all zero does not
    change.
    """

    default_overrules_schedule = True
    default_learning_rate = 0.002
    rule = rules.adamax

    beta1 = fraction()
    beta2 = fraction()

    def __init__(self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.999, **kwargs: Any) -> None:
        self.beta1, self.beta2 = beta1, beta2
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": lr / (1.0 - self.beta1**t), "epsilon": 0.0}


@register
class Nadam(WithBetas):
    """Nadam optimizer: Adam with Nesterov momentum.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        schedule_decay: how fast the momentum of a step approaches `beta1`, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Attributes:
        m_schedule: the product of the momenta of all updates so far. As in MXNet it is one number that every parameter's
            update changes, so results depend on the number of parameters.

    Source: MXNet 1.9.1 Nadam; Dozat (2016).
    """

    default_overrules_schedule = True
    default_learning_rate = 0.001
    rule = rules.nadam
    couples_wd = True
    uniform_hyper = False
    host_state_names = ("m_schedule",)
    m_schedule = carried()

    schedule_decay = not_negative()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        schedule_decay: float = 0.004,
        **kwargs: Any,
    ) -> None:
        self.schedule_decay = schedule_decay
        self.m_schedule = 1.0
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        now, following = (nesterov_momentum(self.beta1, self.schedule_decay, n) for n in (t, t + 1))
        self.m_schedule *= now
        return {
            "decay": 0.0,
            "of_gradient": (1.0 - now) / (1.0 - self.m_schedule),
            "of_mean": following / (1.0 - self.m_schedule * following),
        }


def nesterov_momentum(beta1: float, schedule_decay: float, t: int) -> float:
    """Return Nadam's momentum at update `t`, which approaches `beta1`. Dozat (2016), section 2.1, Sutskever's schedule."""
    return beta1 * (1.0 - 0.5 * 0.96 ** (t * schedule_decay))


@register
class AdaBelief(AdamW):
    """AdaBelief optimizer: Adam that divides by the root of the gradient's variance around its running average.

    Args:
        learning_rate: step size, >= 0; None means 0.001.
        beta1, beta2: decay rates of the average and of the variance, in [0, 1).
        epsilon: added to the variance at every step, and to its root in the denominator, >= 0.
        correct_bias: whether the learning rate is corrected for averages that start at zero.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Source: MXNet 2.0 AdaBelief; Zhuang et al. (2020).
    """

    rule = rules.adabelief
