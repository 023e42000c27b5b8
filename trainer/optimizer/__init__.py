"""Optimizers: names, defaults, checks, and hyper-parameters as functions of the update count.

No arithmetic on tensors happens here: that is in `tristep.kernels.rules`, or in a user's own `update`.
"""

from .adam_variants import ADOPT, MARS, Adan, AdEMAMix, NovoGrad, RAdam, StableAdamW
from .adaptive import AdaBelief, AdaDelta, AdaGrad, Adam, Adamax, AdamW, GroupAdaGrad, Nadam, RMSProp
from .base import Optimizer, create, register, registered
from .ftrl import FTML, Ftrl
from .gradient_descent import DCASGD, NAG, SGD, SGLD, Signum, Test, ccSGD
from .layerwise import LAMB, LANS, LARS, LBSGD
from .matrix import CAME, SOAP, Adafactor, Muon
from .modern import ASGD, Lion, Prodigy, Rprop, Sophia
from .rule_optimizer import RuleOptimizer
from .schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
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
