"""Optimizers: names, defaults, checks, and hyper-parameters as functions of the update count.

No arithmetic on tensors happens here: that is in `tristep.kernels.rules`, or in a user's own `update`.
"""

from .adaptive import AdaBelief, AdaDelta, AdaGrad, Adam, Adamax, AdamW, GroupAdaGrad, Nadam, RMSProp
from .base import Optimizer, RuleOptimizer, create, register, registered
from .follow_the_leader import FTML, Ftrl
from .gradient_descent import DCASGD, NAG, SGD, SGLD, Signum, Test, ccSGD
from .layerwise import LAMB, LANS, LARS, LBSGD
from .modern import (
    ADOPT,
    ASGD,
    CAME,
    MARS,
    SOAP,
    Adafactor,
    Adan,
    AdEMAMix,
    Lion,
    Muon,
    NovoGrad,
    Prodigy,
    RAdam,
    Rprop,
    ScheduleFreeAdamW,
    ScheduleFreeSGD,
    Sophia,
    StableAdamW,
)
from .updater import Updater, get_updater

__all__ = [
    "ADOPT",
    "ASGD",
    "CAME",
    "DCASGD",
    "FTML",
    "LAMB",
    "LANS",
    "LARS",
    "LBSGD",
    "MARS",
    "NAG",
    "SGD",
    "SGLD",
    "SOAP",
    "AdEMAMix",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "Adafactor",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Ftrl",
    "GroupAdaGrad",
    "Lion",
    "Muon",
    "Nadam",
    "NovoGrad",
    "Optimizer",
    "Prodigy",
    "RAdam",
    "RMSProp",
    "Rprop",
    "RuleOptimizer",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Signum",
    "Sophia",
    "StableAdamW",
    "Test",
    "Updater",
    "ccSGD",
    "create",
    "get_updater",
    "register",
    "registered",
]
