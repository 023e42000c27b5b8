"""Several trainings side by side, the updates of those that follow one rule in one launch."""

from .ensemble import Ensemble, make_optimizer

__all__ = ["Ensemble", "make_optimizer"]
