"""Ftrl and FTML: weights rebuilt at every step from sums over all gradients."""

from __future__ import annotations

from typing import Any

from ...kernels import rules
from ..validation import number
from .adaptive import WithBetas
from .base import register
from .rule_optimizer import RuleOptimizer
from .settings import first_argument_in_mxnet, not_negative

__all__ = ["FTML", "Ftrl"]


@register
class Ftrl(RuleOptimizer):
    """Follow the regularised leader: weights that matter little are exactly zero.

    Args:
        lamda1: the L1 penalty, >= 0.
        learning_rate: default 0.1, > 0.
        beta: added to the root, >= 0.
        **kwargs: those of `Optimizer`. The decay acts as an L2 penalty.

    Raises:
        ValueError: at a step, a rate of 0 for any parameter.

    Source: MXNet 1.9.1 Ftrl; McMahan et al. (2013). A sparse gradient updates only the rows that it has.
    """

    default_learning_rate = 0.1
    rule = rules.ftrl
    takes_sparse = True

    lamda1 = not_negative()
    beta = not_negative()

    def __init__(self, lamda1: float = 0.01, learning_rate: float | None = None, beta: float = 1.0, **kwargs: Any) -> None:
        self.lamda1, self.beta = lamda1, beta
        super().__init__(learning_rate=_positive(learning_rate), **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        _refuse_zero(self, lr)
        return {}


@register
class FTML(WithBetas):
    """Follow the moving leader.

    Args:
        learning_rate: default 0.01, > 0.
        beta1, beta2: decay of the averages, in [0, 1).
        epsilon: added to the root, >= 0.
        **kwargs: those of `Optimizer`. The decay is added to the gradient before clipping.

    Raises:
        ValueError: at a step, a rate of 0 for any parameter.

    Source: MXNet 1.9.1 FTML; Zheng & Kwok (2017).
    """

    rule = rules.ftml

    @first_argument_in_mxnet("beta1")
    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.6,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(_positive(learning_rate), beta1, beta2, epsilon, **kwargs)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        _refuse_zero(self, lr)
        return {"scale": (1.0 - self.beta1**t) / lr}


def _positive(learning_rate: float | None) -> float | None:
    return None if learning_rate is None else number("learning_rate", learning_rate, above=0)


def _refuse_zero(optimizer: RuleOptimizer, lr: float) -> None:
    if lr == 0:
        raise ValueError(
            f"a learning rate of 0, by schedule or lr_mult: {type(optimizer).__name__} divides by it, so it must be greater "
            "than 0; parameters with requires_grad=False stay as they are"
        )
