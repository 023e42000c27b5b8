"""Loss scaling: what `tristep.trainer.amp` offers."""

from typing import TYPE_CHECKING

from .trainer.amp import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.amp import __all__ as __all__
