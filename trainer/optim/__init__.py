"""Drop-in for `torch.optim`: the same names and arguments, and each step fused over all parameters.

from tristep.optim import AdamW  # instead of torch.optim

It has torch's own classes (`ports`) and an adapter of each of tristep's other optimizers (`adapters`).
"""

from typing import TYPE_CHECKING

from .adapters import *
from .base import FusedOptimizer as FusedOptimizer
from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .multi import MultiOptimizer as MultiOptimizer
from .ports import *

if not TYPE_CHECKING:  # mypy understands no sum of lists; without one, what is imported above is what is exported
    from . import adapters, ports

    __all__ = ["FusedOptimizer", "MultiOptimizer", "clip_grad_norm_", *adapters.__all__, *ports.__all__]
