"""sweep: train a small network with every combination of some settings, all copies at once.

Forward and backward of all copies are those of one network by `torch.func.vmap`, over weights that are stacked; `Ensemble`
updates them, in one launch for all optimizers of one rule.
"""

from .result import Sweep
from .run import sweep

__all__ = ["Sweep", "sweep"]
