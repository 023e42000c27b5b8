"""The language of update rules: `rule`, `reduction`, `tensor_rule`, `metric`, `jit` and `tl`.

A rule is a few lines of arithmetic on values, which every backend compiles or runs. The `tl` of this package is the torch
implementation. It imports neither triton nor numba, so that every rule runs without them.
"""

from .function import Function, jit
from .metric import Metric, metric
from .ops import OPS, tl
from .reduction import Reduction, reduction
from .rule import Rule, rule
from .tensor_rule import TensorRule, tensor_rule

__all__ = [
    "OPS",
    "Function",
    "Metric",
    "Reduction",
    "Rule",
    "TensorRule",
    "jit",
    "metric",
    "reduction",
    "rule",
    "tensor_rule",
    "tl",
]
