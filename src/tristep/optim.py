"""Drop-in replacements of `torch.optim`'s classes: the names of `tristep.trainer.optim`."""

from typing import TYPE_CHECKING

from .trainer.optim import *

if not TYPE_CHECKING:  # mypy takes an imported list for an empty one
    from .trainer.optim import __all__ as __all__
