"""Gluon's optimizers: the module `tristep.trainer.optimizer`."""

import sys
from typing import TYPE_CHECKING

from .trainer import optimizer

if TYPE_CHECKING:
    from .trainer.optimizer import *
else:  # the module itself, which imports names of `tristep.contrib` on first use
    sys.modules[__name__] = optimizer
