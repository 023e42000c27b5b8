"""Update rules by family, each citing its source. Arithmetic on values and nothing else.

Every rule that a module of this folder defines is exported; there is no list to keep. The functions' first lines name their
state tensors and hyper-parameters; `kernels/language/derived.py` has the table of those that are derived from others.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..language import Rule, TensorRule
from .matrix import soap_up_to  # noqa: F401
from .muon import muon_with, normuon_with  # noqa: F401

if TYPE_CHECKING:
    # Families that are named like one of their rules; then all other rules.
    adadelta: Any
    adagrad: Any
    adam: Any
    ftrl: Any
    muon: Any
    prodigy: Any
    rmsprop: Any
    sgd: Any

    def __getattr__(name: str) -> Any: ...


_families = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
_rules = {
    name: value
    for family in _families
    for name, value in vars(family).items()
    if isinstance(value, (Rule, TensorRule)) and value.__module__ == family.__name__
}
globals().update(_rules)  # after all imports, as some families are named like one of their rules

# Gradient codecs, what other rules do for tensors that are no matrices, and rules whose states depend on each other, so that
# a step from arbitrary states means nothing.
_NOT_LISTED = {"one_bit", "two_bit", "adamw_of_vectors", "prodigy", "soap"}
__all__ = sorted(_rules.keys() - _NOT_LISTED)
