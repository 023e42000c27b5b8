"""race: compare optimizers by what they need to a target loss, each tuned by the same budget, with intervals over seeds.

And battery: the same for six small tasks, each of one difficulty, that take seconds.
"""

from .battery import BatteryResult, battery
from .result import Comparison, RaceResult
from .run import race

__all__ = ["BatteryResult", "Comparison", "RaceResult", "battery", "race"]
