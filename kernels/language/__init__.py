"""The language of update rules: `rule`, `reduction`, `rule_by_shape`, `tensor_rule`, `metric`, `jit` and `tl`.

A rule is a few lines of arithmetic on values, which every backend compiles or runs. `derived` has the table of
hyper-parameters that are derived from others. The `tl` of this package is the torch implementation. Rules run without triton
and numba, which are not imported here.
"""

from .derived import Derivation, derivation, derivations
from .function import Function, jit
from .metric import Metric, metric
from .ops import OPS, tl
from .reduction import Reduction, reduction
from .rule import Limit, Rule, rule
from .shaped_rule import ShapedRule, rule_by_shape
from .staged_rule import StagedRule, staged_rule
from .tensor_rule import TensorRule, tensor_rule

__all__ = [
    "OPS",
    "Derivation",
    "Function",
    "Limit",
    "Metric",
    "Reduction",
    "Rule",
    "ShapedRule",
    "StagedRule",
    "TensorRule",
    "derivation",
    "derivations",
    "jit",
    "metric",
    "reduction",
    "rule",
    "rule_by_shape",
    "staged_rule",
    "tensor_rule",
    "tl",
]
