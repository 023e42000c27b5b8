"""Ftrl and FTML: optimizers that compute weights anew at every step from sums over all gradients so far."""

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
    """Follow-the-regularised-leader optimizer (FTRL): its L1 penalty makes unimportant weights exactly zero.

    Args:
        lamda1: strength of the L1 penalty, >= 0.
        learning_rate: step size, > 0; None means 0.1.
        beta: added to the root of the summed squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay acts as an L2 penalty.

    Raises:
        ValueError: at a step, the learning rate of a parameter is 0, by schedule or multiplier.

    Source: MXNet 1.9.1 Ftrl; McMahan et al. (2013). A sparse gradient updates only the rows that it lists.
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
    """Follow-the-moving-leader optimizer (FTML), between FTRL and Adam: recent gradients count more.

    Args:
        learning_rate: step size, > 0; None means 0.01.
        beta1, beta2: decay rates of the averages of the gradient and of its square, in [0, 1).
        epsilon: added to the root of the averaged squares in the denominator, >= 0.
        **kwargs: arguments of `RuleOptimizer` and `Optimizer`. Weight decay is added to the gradient, before clipping.

    Raises:
        ValueError: at a step, the learning rate of a parameter is 0, by schedule or multiplier.

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
            "than 0; to keep a parameter as it is, set requires_grad=False"
        )
