"""Stores: the module `tristep.trainer.kvstore`."""

import sys
from typing import TYPE_CHECKING

from .trainer import kvstore

if TYPE_CHECKING:
    from .trainer.kvstore import *
else:  # the module itself, which imports the stores of several processes on first use
    sys.modules[__name__] = kvstore
