"""Initializers: what `tristep.trainer.initializer` offers."""

from typing import TYPE_CHECKING

from .trainer.initializer import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.initializer import __all__ as __all__
