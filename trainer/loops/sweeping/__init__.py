"""sweep: train a small network with every combination of some settings, all copies at once.

The weights of all copies are stacked: `torch.func.vmap` runs the forward and backward passes of all copies as one, and
`Ensemble` updates them, in one launch for all optimizers with the same rule.
"""

from .result import Sweep
from .run import sweep

__all__ = ["Sweep", "sweep"]
