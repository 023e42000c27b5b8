"""Muon: momentum made orthogonal. Decay is decoupled."""

from __future__ import annotations

import math
from typing import Any

from ...kernels import rules
from ...kernels.rules.muon import COEFFICIENTS
from ..validation import boolean, integer, number
from .base import register
from .rule_optimizer import RuleOptimizer

__all__ = ["Muon"]


@register
class Muon(RuleOptimizer):
    """Momentum made orthogonal, for the matrices of hidden layers; other tensors take AdamW's steps.

    Embeddings and output layers are matrices, too, but should not be trained by Muon: give them a trainer of their own.

    Args:
        learning_rate: default 0.001.
        momentum: in [0, 1).
        nesterov: whether the gradient counts once more.
        steps: iterations of the orthogonalisation, >= 1.
        match_adamw: use the rate times 0.2 sqrt(max(rows, columns)), for steps as large as AdamW's (Liu et al. 2025), not
            the rate times sqrt(max(1, rows / columns)).
        epsilon: the smallest norm that is divided by, > 0.
        adam_learning_rate: AdamW's rate over Muon's is kept when a schedule changes it; None means the same rate.
        beta1, beta2, adam_epsilon: AdamW's.
        **kwargs: those of `Optimizer`.

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks".
    """

    default_learning_rate = 0.001
    rule = rules.muon

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        match_adamw: bool = False,
        epsilon: float = 1e-7,
        adam_learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        self.momentum = number("momentum", momentum, low=0, below=1)
        self.nesterov = boolean("nesterov", nesterov)
        self.steps = integer("steps", steps, low=1)
        self.match_adamw = boolean("match_adamw", match_adamw)
        self.epsilon = number("epsilon", epsilon, above=0)
        self.beta1 = number("beta1", beta1, low=0, below=1)
        self.beta2 = number("beta2", beta2, low=0, below=1)
        self.adam_epsilon = number("adam_epsilon", adam_epsilon, low=0)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.adam_ratio = 1.0
        if adam_learning_rate is not None:
            self.adam_ratio = number("adam_learning_rate", adam_learning_rate, low=0) / self.learning_rate

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        root = math.sqrt(1.0 - self.beta2**t)
        return {
            "of_gradient": 1.0 - self.momentum if self.nesterov else 0.0,
            "of_mean": self.momentum if self.nesterov else 1.0,
            "scale": 0.2 if self.match_adamw else 0.0,
            "adam_lr": lr * self.adam_ratio * root / (1.0 - self.beta1**t),
            "adam_decay": lr * self.adam_ratio * wd,
            "adam_epsilon": self.adam_epsilon * root,
            **COEFFICIENTS,
        }
