"""Gradient compression beyond codecs: sparse gradients, and a hook for DistributedDataParallel."""

from .ddp import ddp_hook
from .sparse import TopK

__all__ = ["TopK", "ddp_hook"]
