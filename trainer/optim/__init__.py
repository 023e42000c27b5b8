"""Drop-in for `torch.optim`: the same names and arguments, and each step fused over all parameters.

from tristep.optim import AdamW  # instead of torch.optim

It has torch's own classes (`ports`) and an adapter of each of tristep's other optimizers (`adapters`).
"""

from typing import TYPE_CHECKING, Any

from . import adapters, ports
from .adapters import *
from .base import FusedOptimizer
from .clip_grad import clip_grad_norm_
from .multi import MultiOptimizer
from .ports import *

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = ["FusedOptimizer", "MultiOptimizer", "clip_grad_norm_", *adapters.__all__, *ports.__all__]
