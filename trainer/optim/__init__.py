"""Drop-in for `torch.optim`: the same names and arguments, and each step fused over all parameters.

    from tristep.optim import AdamW  # instead of torch.optim

It has torch's optimizers (`ports`), and tristep's other optimizers with torch's interface (`adapters`).
"""

from typing import TYPE_CHECKING

from .adapters import *
from .base import FusedOptimizer as FusedOptimizer
from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .multi import MultiOptimizer as MultiOptimizer
from .ports import *

if not TYPE_CHECKING:  # mypy does not evaluate this list; without it, all names imported above are exported
    from . import adapters, ports

    __all__ = ["FusedOptimizer", "MultiOptimizer", "clip_grad_norm_", *adapters.__all__, *ports.__all__]
