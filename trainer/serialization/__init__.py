"""States of a trainer as a dict or a safetensors file, and back: settings, counts, schedule, and states of its optimizer.

A loaded state is checked completely before anything is changed; `files` writes and reads.
"""

from .check import MOST_UPDATES, check_buckets, check_residuals, plain_name, shape_of
from .state import collect, load_read, read, restore, write

__all__ = [
    "MOST_UPDATES",
    "check_buckets",
    "check_residuals",
    "collect",
    "load_read",
    "plain_name",
    "read",
    "restore",
    "shape_of",
    "write",
]
