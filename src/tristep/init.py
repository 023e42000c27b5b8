"""Initializers, under MXNet's short name: the module `tristep.trainer.initializer`."""

import sys
from typing import TYPE_CHECKING

from .trainer import initializer

if TYPE_CHECKING:
    from .trainer.initializer import *
else:  # the module itself, which imports names of `tristep.contrib` on first use
    sys.modules[__name__] = initializer
