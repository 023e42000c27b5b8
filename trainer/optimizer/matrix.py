"""SOAP, Adafactor and CAME, optimizers whose rules need whole matrices. Weight decay is decoupled."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...kernels import TensorRule, rules
from ...kernels.rules.matrix import turned_dimensions
from ..validation import integer, number
from .adaptive import WithBetas, bias_correction
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import Setting, fraction, not_negative, positive, switch

__all__ = ["CAME", "SOAP", "Adafactor"]


@register
class SOAP(WithBetas):
    """SOAP optimizer: Adam in the eigenbasis of Shampoo's preconditioner.

    Args:
        learning_rate: step size, >= 0; None means 0.003.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        shampoo_beta: decay rate of the averaged matrices whose eigenvectors are the basis, in [0, 1); None means beta2.
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        precondition_frequency: number of updates between two recomputations of the basis, >= 1.
        max_precondition_dim: the largest dimension that gets a basis, >= 1; each of these stores two square matrices.
        precondition_1d: whether vectors get a basis, too.
        correct_bias: whether the learning rate is corrected for averages that start at zero.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. A parameter's first update only computes
            its basis.

    Source: Vyas et al. (2024), "SOAP: Improving and Stabilizing Shampoo using Adam", alg. 3.
    """

    default_learning_rate = 0.003

    shampoo_beta = Setting(number, low=0, below=1, optional=True)
    precondition_frequency = Setting(integer, low=1)
    max_precondition_dim = Setting(integer, low=1)
    precondition_1d = switch()
    correct_bias = switch()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.95,
        beta2: float = 0.95,
        shampoo_beta: float | None = None,
        epsilon: float = 1e-8,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
        precondition_1d: bool = False,
        correct_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        self.shampoo_beta, self.precondition_frequency = shampoo_beta, precondition_frequency
        self.max_precondition_dim = max_precondition_dim
        self.precondition_1d, self.correct_bias = precondition_1d, correct_bias
        super().__init__(learning_rate, beta1, beta2, epsilon, **kwargs)

    @property
    def rule(self) -> TensorRule:  # type: ignore[override]
        return rules.soap_up_to(self.max_precondition_dim, self.precondition_1d)

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Start with identity matrices as basis; they remain until the next recomputation if the first update is skipped."""
        sides = turned_dimensions(weight.shape, self.max_precondition_dim, float(self.precondition_1d))
        bases = [torch.eye(side).flatten() for side in sides if side]
        if bases:
            state[self.rule.state.index("basis")].copy_(torch.cat(bases))

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        steps = t - self.begin_num_update - 1  # the first update only computes the basis
        rate = lr
        if self.correct_bias and steps:
            rate *= bias_correction(self.beta1, self.beta2, steps)
        return {
            "lr": rate,
            "shampoo_beta": self.beta2 if self.shampoo_beta is None else self.shampoo_beta,
            "limit": float(self.max_precondition_dim),
            "vectors": float(self.precondition_1d),
            "first": float(steps == 0),
            "turn": float(steps % self.precondition_frequency == 0),
        }


@register
class Adafactor(RuleOptimizer):
    """Adafactor optimizer: Adam's denominator from row and column means only, and steps relative to the weights' RMS.

    Args:
        learning_rate: the largest relative step, >= 0; None means 0.01.
        decay_rate: exponent, <= 0: at update t, a gradient enters the averages with the share t**decay_rate.
        epsilon1: lower limit of the denominator, > 0; None means the machine epsilon of float32.
        epsilon2: lower limit of the weights' root mean square that steps are relative to, >= 0.
        clip_threshold: limit of the root mean square of a step, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Shazeer & Stern (2018), "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"; defaults of torch.
    """

    rule = rules.adafactor

    decay_rate = Setting(number, high=0)
    epsilon1 = positive()
    epsilon2 = not_negative()
    clip_threshold = positive()

    def __init__(
        self,
        learning_rate: float | None = None,
        decay_rate: float = -0.8,
        epsilon1: float | None = None,
        epsilon2: float = 1e-3,
        clip_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.decay_rate = decay_rate
        self.epsilon1 = torch.finfo(torch.float32).eps if epsilon1 is None else epsilon1
        self.epsilon2, self.clip_threshold = epsilon2, clip_threshold
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"lr": min(lr, 1.0 / math.sqrt(t)), "new": float(t**self.decay_rate), "limit": self.clip_threshold}


@register
class CAME(RuleOptimizer):
    """CAME optimizer: Adafactor with momentum, and shorter steps where the newest step differs from the momentum.

    Args:
        learning_rate: step size, >= 0; None means 0.0002.
        beta1, beta2, beta3: decay rates of the momentum, the squared gradients and the squared differences, in [0, 1).
        epsilon1, epsilon2: added to the squared gradients and to the squared differences, > 0.
        clip_threshold: limit of the root mean square of a step, before momentum, > 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`, such as `wd` and `clip_gradient`.

    Source: Luo et al. (2023), "CAME: Confidence-guided Adaptive Memory Efficient Optimization", alg. 2.
    """

    default_learning_rate = 0.0002
    rule = rules.came

    beta1 = fraction()
    beta2 = fraction()
    beta3 = fraction()
    epsilon1 = positive()
    epsilon2 = positive()
    clip_threshold = positive()

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float = 0.9999,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-16,
        clip_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.beta1, self.beta2, self.beta3 = beta1, beta2, beta3
        self.epsilon1, self.epsilon2, self.clip_threshold = epsilon1, epsilon2, clip_threshold
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"limit": self.clip_threshold}
