"""Functions from rule to rule: clipping, masked steps and decay, averages of weights, skipped steps.

Each takes an elementwise rule and returns a new rule that calls it, so no equation of a rule is repeated.
"""

from .agc import agc
from .cautious import cautious
from .cautious_weight_decay import cautious_weight_decay
from .decoupled_weight_decay import decoupled_weight_decay
from .ema import ema, moving_average
from .limited import limited
from .lookahead import lookahead

__all__ = [
    "agc",
    "cautious",
    "cautious_weight_decay",
    "decoupled_weight_decay",
    "ema",
    "limited",
    "lookahead",
    "moving_average",
]
