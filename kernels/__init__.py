"""Work on lists of tensors: update rules and the engines that run them. Knows torch and Triton, nothing of training."""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.kernels'; import it by that name (imported as {__name__!r})")

from . import rules
from .engine import ENGINES, Update, choose_engine, update
from .language import Function, Rule, jit, rule, tl

__all__ = ["ENGINES", "Function", "Rule", "Update", "choose_engine", "jit", "rule", "rules", "tl", "update"]
