"""States of a trainer as a dict or a safetensors file, and back: settings, counts, schedule, and states of its optimizer.

A loaded state is checked completely before anything is changed; `files` writes and reads.
"""

from .check import HINT, MOST_UPDATES, check_buckets, check_residuals, plain_name, shape_of
from .fitting import Loaded, announce, check_fit, fitted, match, refuse_common
from .state import collect, load_read, read, restore, write

__all__ = [
    "HINT",
    "MOST_UPDATES",
    "Loaded",
    "announce",
    "check_buckets",
    "check_fit",
    "check_residuals",
    "collect",
    "fitted",
    "load_read",
    "match",
    "plain_name",
    "read",
    "refuse_common",
    "restore",
    "shape_of",
    "write",
]
