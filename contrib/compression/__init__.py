"""Gradient compression beyond codecs: parts of gradients, matrices of low rank, and a hook for DistributedDataParallel."""

from .ddp import ddp_hook
from .powersgd import PowerSGD
from .sparse import RandomK, TopK

__all__ = ["PowerSGD", "RandomK", "TopK", "ddp_hook"]
