"""Functions from rule to rule: clipping, masked steps and decay, weights of fixed norm, averages of weights, skipped steps.

Each takes an elementwise rule and returns a new rule that calls it, so no equation of a rule is repeated.
"""

from .agc import agc
from .apply_if_finite import apply_if_finite
from .cautious import cautious
from .cautious_weight_decay import cautious_weight_decay
from .clip_by_block_rms import clip_by_block_rms
from .clip_by_global_norm import clip_by_global_norm
from .decoupled_weight_decay import decoupled_weight_decay
from .ema import ema, moving_average
from .hyperball import hyperball
from .lookahead import lookahead
from .skip_above_percentile import skip_above_percentile
from .skip_large_updates import skip_large_updates
from .zclip import zclip

__all__ = [
    "agc",
    "apply_if_finite",
    "cautious",
    "cautious_weight_decay",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "decoupled_weight_decay",
    "ema",
    "hyperball",
    "lookahead",
    "moving_average",
    "skip_above_percentile",
    "skip_large_updates",
    "zclip",
]
