"""Learning-rate schedules: what `tristep.trainer.lr_scheduler` offers."""

from typing import TYPE_CHECKING

from .trainer.lr_scheduler import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.lr_scheduler import __all__ as __all__
