"""Drop-in replacements of `torch.optim`'s classes: the module `tristep.trainer.optim`."""

from typing import TYPE_CHECKING

from .aliases import also_import_as
from .trainer import optim

if TYPE_CHECKING:
    from .trainer.optim import *
else:  # the module itself, which imports names of `tristep.contrib` on first use
    also_import_as(__name__, optim)
