"""SGD and its variants: steps along the gradient, its running sum or their signs, with or without noise."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from ...kernels import Rule, rules
from ..validation import integer
from .base import register
from .counts import Index
from .rule_optimizer import RuleOptimizer
from .settings import Setting, first_argument_in_mxnet, fraction, not_negative, switch

__all__ = ["DCASGD", "NAG", "SGD", "SGLD", "Signum"]


@register
class SGD(RuleOptimizer):
    """Stochastic gradient descent, with momentum if asked.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 keeps no state.
        lazy_update: with a sparse gradient update only the rows that it has, state and decay included; if False, all.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 SGD. The momentum is a step in weight space: a new rate does not rescale the past.
    """

    takes_sparse = True

    momentum = fraction()
    lazy_update = switch()

    @first_argument_in_mxnet("momentum")
    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any
    ) -> None:
        self.momentum, self.lazy_update = momentum, lazy_update
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.sgd_momentum if self.momentum else rules.sgd


@register
class NAG(RuleOptimizer):
    """Nesterov's accelerated gradient.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 is plain SGD and keeps no state.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 NAG, whose stored momentum takes the weight decay of the updated weight.
    """

    momentum = fraction()

    @first_argument_in_mxnet("momentum")
    def __init__(self, learning_rate: float | None = None, momentum: float = 0.0, **kwargs: Any) -> None:
        self.momentum = momentum
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.nag if self.momentum else rules.sgd


@register
class Signum(RuleOptimizer):
    """Steps of equal length, by the sign of the momentum, or of the gradient where there is none.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); with 0 only the gradient's sign counts, so that rescaling and clipping change nothing.
        wd_lh: decoupled weight decay, >= 0 (Loshchilov & Hutter).
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 Signum; `wd_lh` without momentum, which 1.9.1 refuses, as in 2.0.
    """

    default_overrules_schedule = True

    momentum = fraction()
    wd_lh = not_negative()

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.9, wd_lh: float = 0.0, **kwargs: Any) -> None:
        self.momentum, self.wd_lh = momentum, wd_lh
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.signum if self.momentum else rules.sign_sgd

    @property
    def decoupled_weight_decay(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("wd_lh",) if self.momentum else ("wd", "wd_lh")


@register
class SGLD(RuleOptimizer):
    """Stochastic gradient Langevin dynamics: half a step of SGD, and Gaussian noise of variance `learning_rate`.

    Args:
        learning_rate: default 0.01.
        seed: >= 0; the same seed gives the same noise, on every engine and after a resume.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 SGLD, which draws from a global generator; Welling & Teh (2011).
    """

    rule = rules.sgld
    uniform_hyper = False

    seed = Setting(integer, low=0)

    def __init__(self, learning_rate: float | None = None, seed: int = 0, **kwargs: Any) -> None:
        self.seed = seed
        super().__init__(learning_rate=learning_rate, **kwargs)

    def hyper_of(self, index: Index | None, t: int, lr: float, wd: float) -> dict[str, float]:
        # The keys come from the parameter's index and count, not from a stream, so that the order of updates is no matter.
        number = index if isinstance(index, int) and index >= 0 else zlib.crc32(str(index).encode())
        key0, key1 = np.random.SeedSequence([self.seed, number, t]).generate_state(2) >> 8
        return {"key0": float(key0), "key1": float(key1)}


@register
class DCASGD(RuleOptimizer):
    """SGD that makes up for the delay of asynchronous training, by how far the weight has moved meanwhile.

    On a server ("dist_async") that is since the worker pulled the weight that its gradient is of; elsewhere since the last
    update.

    Args:
        learning_rate: default 0.01.
        momentum: in [0, 1); 0 keeps no momentum.
        lamda: how much is made up for, >= 0.
        **kwargs: those of `Optimizer`.

    Source: MXNet 1.9.1 DCASGD, with momentum, which fails there, as in 2.0; Zheng et al. (2017).
    """

    weight_of_gradient = "previous"

    momentum = fraction()
    lamda = not_negative()

    @first_argument_in_mxnet("momentum")
    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.0, lamda: float = 0.04, **kwargs: Any
    ) -> None:
        self.momentum, self.lamda = momentum, lamda
        super().__init__(learning_rate=learning_rate, **kwargs)

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        return rules.dcasgd_momentum if self.momentum else rules.dcasgd

    def init_state(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        state[-1].copy_(weight)
