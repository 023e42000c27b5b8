"""Drop-in replacements of `torch.optim`'s classes: what `tristep.trainer.optim` offers."""

from typing import TYPE_CHECKING

from .trainer.optim import *

if not TYPE_CHECKING:  # mypy takes a list that is imported for an empty one
    from .trainer.optim import __all__ as __all__
