"""Optimizers: names, defaults, checks, and hyper-parameters as functions of the update count.

Every class that a module of this folder registers is exported; there is no list to keep. No arithmetic on tensors happens
here: that is in `tristep.kernels.rules`, or in a user's own `update`.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from .base import Optimizer, create, register, registered
from .guard_options import GuardOptions
from .multi import MultiOptimizer
from .options import TransformOptions
from .rule_optimizer import RuleOptimizer
from .updater import Updater, get_updater

if TYPE_CHECKING:  # the same classes, for tools that do not run this
    from .adam_variants import *
    from .adaptive import *
    from .ftrl import *
    from .gradient_descent import *
    from .layerwise import *
    from .matrix import *
    from .modern import *
    from .muon import *
    from .schedule_free import *

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
_classes = {klass.__name__: klass for klass in registered().values() if klass.__module__.startswith(f"{__name__}.")}
globals().update(_classes)

__all__ = [
    "GuardOptions",
    "MultiOptimizer",
    "Optimizer",
    "RuleOptimizer",
    "TransformOptions",
    "Updater",
    "create",
    "get_updater",
    "register",
    "registered",
    *_classes,
]
