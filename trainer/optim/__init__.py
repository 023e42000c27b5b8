"""Drop-in for `torch.optim`: the same names and arguments, and each step fused over all parameters.

    from tristep.optim import AdamW  # instead of torch.optim

It has torch's optimizers (`ports`), and tristep's other optimizers with torch's interface (`adapters`).
"""

from typing import TYPE_CHECKING, Any

from .adapters import *
from .base import FusedOptimizer as FusedOptimizer
from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .multi import MultiOptimizer as MultiOptimizer
from .ports import *

if TYPE_CHECKING:
    from ...contrib.dion.optim import Dion2 as Dion2
    from ...contrib.dion.optim import NorDion2 as NorDion2
    from ...contrib.sam import SAM as SAM

if not TYPE_CHECKING:  # mypy does not evaluate this list; without it, all names imported above are exported
    from . import adapters, multi, ports

    _IN_CONTRIB = ["SAM", "Dion2", "NorDion2"]
    __all__ = ["FusedOptimizer", "MultiOptimizer", "clip_grad_norm_", *_IN_CONTRIB, *adapters.__all__, *ports.__all__]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """Import and return a class of `tristep.contrib`."""
        klass = multi.find(name) if name in _IN_CONTRIB else None
        if klass is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = klass
        return klass
