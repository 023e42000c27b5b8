"""Ensemble: several models trained at once, with one launch for all updates with the same rule."""

from .ensemble import Ensemble, make_optimizer

__all__ = ["Ensemble", "make_optimizer"]
