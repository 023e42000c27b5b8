"""Gluon's optimizers: the module `tristep.trainer.optimizer`."""

from typing import TYPE_CHECKING

from .aliases import also_import_as
from .trainer import optimizer

if TYPE_CHECKING:
    from .trainer.optimizer import *
else:  # the module itself, which imports names of `tristep.contrib` on first use
    also_import_as(__name__, optimizer)
