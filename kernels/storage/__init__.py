"""How weights and states are stored in low precision, in torch's operations.

The tensors' types determine the format, so that nothing else has to be passed. A state may be bfloat16 where the
arithmetic is float32, or packed, in uint8 or int8 (packed.py). What is stored alongside a 16-bit weight: master.py.
"""

# ruff: noqa: F401  # what the modules define is used from here

from .low_precision import HASH, NEXT, CodesOnly, keys, multiplier, random_bits, rounded_at_random
from .master import MasterKind, Storage, combined, kind_of, master_for, of_tensors, split, unchanged
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
