"""Weight initializers for torch, with MXNet's names, defaults and numbers.

`initialize` fills a whole module. An initializer can also be called on a single tensor with its name, whose ending selects
the rule: `Xavier()("fc_weight", w)` draws random numbers and `Xavier()("fc_bias", b)` fills with zeros.
"""

from typing import TYPE_CHECKING, Any

from .base import InitDesc, Initializer, alias, register, registered
from .basic import Bilinear, Constant, MSRAPrelu, Normal, One, Orthogonal, Uniform, Xavier, Zero
from .by_name import Load, Mixed, create
from .module import initialize

if TYPE_CHECKING:
    from ...contrib.initializers import FusedRNN, LSTMBias

__all__ = [
    "Bilinear",
    "Constant",
    "FusedRNN",
    "InitDesc",
    "Initializer",
    "LSTMBias",
    "Load",
    "MSRAPrelu",
    "Mixed",
    "Normal",
    "One",
    "Orthogonal",
    "Uniform",
    "Xavier",
    "Zero",
    "alias",
    "create",
    "initialize",
    "register",
    "registered",
]

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> Any:
        """Import and return an initializer class of `tristep.contrib`."""
        klass = Initializer.registry.find(name) if name in __all__ else None
        if klass is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = klass
        return klass
