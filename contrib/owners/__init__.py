"""DTensors whose rule needs whole tensors, such as Muon's: one of the ranks that have the shards updates the whole."""

from .plan import OwnedPlan

__all__ = ["OwnedPlan"]
