"""Gluon's optimizers: another name of `tristep.trainer.optimizer`."""

import sys
from typing import TYPE_CHECKING

from .trainer import optimizer

if TYPE_CHECKING:
    from .trainer.optimizer import *
else:  # the module itself, so that what is in `tristep.contrib` is still imported on first use
    sys.modules[__name__] = optimizer
