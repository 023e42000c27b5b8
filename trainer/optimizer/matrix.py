"""Optimizers whose rules need whole matrices: SOAP, Adafactor, CAME. Decay is decoupled."""

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
    """Adam in coordinates that turn with the gradients, those of Shampoo's preconditioner.

    Args:
        learning_rate: default 0.003.
        beta1, beta2: decay of the averages, in [0, 1).
        shampoo_beta: decay of the matrices whose eigenvectors are the coordinates, in [0, 1); None means beta2.
        epsilon: added to the root, >= 0.
        precondition_frequency: the coordinates turn every so many updates, >= 1.
        max_precondition_dim: larger dimensions keep their coordinates, >= 1; each other one has two matrices of its size.
        precondition_1d: whether vectors have coordinates of their own, too.
        correct_bias: whether the rate is corrected for averages that start at zero.
        **kwargs: those of `Optimizer`. A parameter's first update only finds its coordinates.

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
        """Begin with the axes as coordinates, which remain until the next turn where the first update is skipped."""
        sides = turned_dimensions(weight.shape, self.max_precondition_dim, float(self.precondition_1d))
        bases = [torch.eye(side).flatten() for side in sides if side]
        if bases:
            state[self.rule.state.index("basis")].copy_(torch.cat(bases))

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        steps = t - self.begin_num_update - 1  # the first update is none
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
    """Adam's denominator from the means of rows and columns only, and steps in proportion to the size of the weights.

    Args:
        learning_rate: the largest relative step, default 0.01.
        decay_rate: the share of a gradient in the averages is its update number to this power, <= 0.
        epsilon1: the smallest root, None for the type's machine epsilon.
        epsilon2: the smallest size of weights that steps are in proportion to, >= 0.
        clip_threshold: the largest root mean square of a step, > 0.
        **kwargs: those of `Optimizer`.

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
    """Adafactor with momentum, and shorter steps where the momentum and the newest step disagree.

    Args:
        learning_rate: default 0.0002.
        beta1, beta2, beta3: decay of the momentum, of the squares and of the disagreement, in [0, 1).
        epsilon1, epsilon2: added to squares and to disagreement, > 0.
        clip_threshold: the largest root mean square of a step before momentum, > 0.
        **kwargs: those of `Optimizer`.

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
