"""Optimizers: names, defaults, checks, and hyper-parameters as functions of the update count.

No arithmetic on tensors happens here: that is in `tristep.kernels.rules`, or in a user's own `update`.
"""

from typing import TYPE_CHECKING, Any

from .adam_variants import *
from .adaptive import *
from .base import Optimizer as Optimizer
from .base import create as create
from .base import register as register
from .base import registered as registered
from .ftrl import *
from .gradient_descent import *
from .layerwise import *
from .matrix import *
from .modern import *
from .multi import MultiOptimizer as MultiOptimizer
from .muon import *
from .options import Option as Option
from .rule_optimizer import RuleOptimizer as RuleOptimizer
from .rule_optimizer import register_option as register_option
from .schedule_free import *
from .updater import Updater as Updater
from .updater import get_updater as get_updater

if TYPE_CHECKING:
    from ...contrib.dion import Dion2 as Dion2
    from ...contrib.dion import NorDion2 as NorDion2
    from ...contrib.optimizers import LBSGD as LBSGD
    from ...contrib.optimizers import Test as Test
    from ...contrib.optimizers import ccSGD as ccSGD

if not TYPE_CHECKING:  # mypy understands no sum of lists; without one, what is imported above is what is exported
    from . import adam_variants, adaptive, ftrl, gradient_descent, layerwise, matrix, modern, muon, schedule_free

    __all__ = [
        "Dion2",
        "LBSGD",
        "MultiOptimizer",
        "NorDion2",
        "Option",
        "Optimizer",
        "RuleOptimizer",
        "Test",
        "Updater",
        "ccSGD",
        "create",
        "get_updater",
        "register",
        "register_option",
        "registered",
        *adam_variants.__all__,
        *adaptive.__all__,
        *ftrl.__all__,
        *gradient_descent.__all__,
        *layerwise.__all__,
        *matrix.__all__,
        *modern.__all__,
        *muon.__all__,
        *schedule_free.__all__,
    ]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """Import and return a class of `tristep.contrib`."""
        klass = Optimizer.opt_registry.find(name) if name in __all__ else None
        if klass is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = klass
        return klass
