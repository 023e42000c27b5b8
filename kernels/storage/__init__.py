"""Low-precision storage formats of weights and states, in torch operations.

A tensor's dtype determines its format, so nothing else has to be passed. With float32 arithmetic a state may be bfloat16, or
packed in uint8 or int8 (packed.py). master.py has the masters, which are stored alongside 16-bit weights.
"""

# ruff: noqa: F401  # re-exports

from .low_precision import HASH, NEXT, CodesOnly, keys, multiplier, random_bits, rounded_at_random
from .master import MasterKind, Storage, combined, kind_of, master_for, of_tensors, split
from .packed import (
    BLOCK,
    CODES,
    HALF,
    INFINITE,
    LEAST,
    ONE,
    PACKED,
    Code,
    as_bfloat16,
    check_scales,
    copy,
    decode,
    encode,
    is_packed,
    packed_size,
    pieces,
    scales_at,
    unpacked,
)
