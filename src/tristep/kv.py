"""Stores, under MXNet's short name for them: what `tristep.kvstore` offers."""

import sys
from typing import TYPE_CHECKING

from .trainer import kvstore

if TYPE_CHECKING:
    from .trainer.kvstore import *
else:  # the module itself, so that what is for several processes is still imported on first use
    sys.modules[__name__] = kvstore
