"""Optimizers: names, defaults, checks, and hyper-parameters as functions of the update count.

No arithmetic on tensors happens here: that is in `tristep.kernels.rules`, or in a user's own `update`.
"""

from .adaptive import AdaGrad, Adam, AdamW, RMSProp
from .base import Optimizer, RuleOptimizer, create, register, registered
from .gradient_descent import NAG, SGD, Signum
from .updater import Updater, get_updater

__all__ = [
    "NAG",
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSProp",
    "RuleOptimizer",
    "Signum",
    "Updater",
    "create",
    "get_updater",
    "register",
    "registered",
]
