"""Initializers: what `tristep.trainer.initializer` offers."""

import sys
from typing import TYPE_CHECKING

from .trainer import initializer

if TYPE_CHECKING:
    from .trainer.initializer import *
else:  # the module itself, so that what is in `tristep.contrib` is still imported on first use
    sys.modules[__name__] = initializer
