"""Gluon's optimizers: what `tristep.trainer.optimizer` offers."""

from typing import TYPE_CHECKING

from .trainer.optimizer import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.optimizer import __all__ as __all__
