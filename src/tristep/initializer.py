"""Initializers: the module `tristep.trainer.initializer`."""

from typing import TYPE_CHECKING

from .aliases import also_import_as
from .trainer import initializer

if TYPE_CHECKING:
    from .trainer.initializer import *
else:  # the module itself, which imports names of `tristep.contrib` on first use
    also_import_as(__name__, initializer)
