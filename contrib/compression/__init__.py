"""Gradient compression beyond codecs: sparse gradients, low-rank matrices, and a hook for DistributedDataParallel."""

from .ddp import ddp_hook
from .powersgd import PowerSGD
from .sparse import TopK

__all__ = ["PowerSGD", "TopK", "ddp_hook"]
