"""Loss scaling: the names of `tristep.trainer.amp`."""

from typing import TYPE_CHECKING

from .trainer.amp import *

if not TYPE_CHECKING:  # mypy takes an imported list for an empty one
    from .trainer.amp import __all__ as __all__
