"""race: compare optimizers by what they need to a target loss, each tuned by the same budget, with intervals over seeds."""

from .result import Comparison, RaceResult
from .run import race

__all__ = ["Comparison", "RaceResult", "race"]
