"""Update rules by family, each citing its source: arithmetic on values and nothing else.

Every rule that a module of this folder defines is exported; there is no list to maintain. The first lines of a rule's body
name its state tensors and hyper-parameters; `kernels/language/derived.py` lists the hyper-parameters that are derived from
others.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..language import Rule, ShapedRule, StagedRule, TensorRule
from .matrix import soap_up_to  # noqa: F401
from .muon import muon_with, normuon_with  # noqa: F401

if TYPE_CHECKING:
    # Families that share their name with one of their rules. `__getattr__` stands for all other rules.
    adadelta: Any
    adagrad: Any
    adam: Any
    ftrl: Any
    muon: Any
    prodigy: Any
    rmsprop: Any
    sgd: Any

    def __getattr__(name: str) -> Any: ...


_families = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_rules = {
    name: value
    for family in _families
    for name, value in vars(family).items()
    if isinstance(value, (Rule, TensorRule)) and value.__module__ == family.__name__
}
globals().update(_rules)  # after all imports, because some families share their name with a rule

# Left out of `__all__`: gradient codecs, Muon's rule for tensors that are not matrices, rules that another one is made of or
# chooses by shape, and rules with states that depend on each other, for which a step from any states is meaningless.
_CHOSEN = {rule.name for shaped in _rules.values() if isinstance(shaped, ShapedRule) for rule in shaped.rules}
_PARTS = {part.name for rule in _rules.values() if isinstance(rule, StagedRule) for part in (rule.before, rule.after)}
_NOT_LISTED = {"one_bit", "two_bit", "adamw_of_vectors", "prodigy", "soap"}
__all__ = sorted(_rules.keys() - _NOT_LISTED - _CHOSEN - _PARTS)
