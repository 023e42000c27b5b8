"""Update rules for lists of tensors, and the backends that run them. Knows torch, Triton and numba, nothing of training."""

if not __name__.startswith("tristep."):
    raise ImportError(f"this folder is 'tristep.kernels'; import it by that name (imported as {__name__!r})")

from . import compress, rules, transforms
from .backends import ENGINES, choose_engine
from .functional import update
from .language import (
    Function,
    Metric,
    Reduction,
    Rule,
    ShapedRule,
    TensorRule,
    jit,
    metric,
    reduction,
    rule,
    rule_by_shape,
    tensor_rule,
    tl,
)
from .metrics import MetricsBuffer
from .norms import clip_by_global_norm_, global_norm
from .update import Update

__all__ = [
    "ENGINES",
    "Function",
    "Metric",
    "MetricsBuffer",
    "Reduction",
    "Rule",
    "ShapedRule",
    "TensorRule",
    "Update",
    "choose_engine",
    "clip_by_global_norm_",
    "compress",
    "global_norm",
    "jit",
    "metric",
    "reduction",
    "rule",
    "rule_by_shape",
    "rules",
    "tensor_rule",
    "tl",
    "transforms",
    "update",
]
