"""Several models trained at once, with one launch for all updates that follow the same rule."""

from .ensemble import Ensemble, make_optimizer

__all__ = ["Ensemble", "make_optimizer"]
