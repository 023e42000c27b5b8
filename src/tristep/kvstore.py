"""Stores: the module `tristep.trainer.kvstore`."""

from typing import TYPE_CHECKING

from .aliases import also_import_as
from .trainer import kvstore

if TYPE_CHECKING:
    from .trainer.kvstore import *
else:  # the module itself, which imports the stores of several processes on first use
    also_import_as(__name__, kvstore)
