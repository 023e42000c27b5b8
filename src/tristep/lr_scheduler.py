"""Learning-rate schedules: the names of `tristep.trainer.lr_scheduler`."""

from typing import TYPE_CHECKING

from .trainer.lr_scheduler import *

if not TYPE_CHECKING:  # mypy takes an imported list for an empty one
    from .trainer.lr_scheduler import __all__ as __all__
