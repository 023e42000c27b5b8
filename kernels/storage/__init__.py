"""How weights and states are stored in low precision, in torch's operations.

The tensors' types determine the format, so that nothing else has to be passed. A state may be bfloat16 where the
arithmetic is float32, or packed, in uint8 (packed.py). What is stored alongside a 16-bit weight: master.py.
"""

from .kinds import Storage, of_tensors
from .low_precision import HASH, SALT, CodesOnly, keys, random_bits, rounded_at_random, salt_and_shift
from .master import MasterKind, combined, kind_of, master_for, split
from .packed import BLOCK, CUT, LEVELS, copy, decode, encode, packed_size, pieces, scales_at, stretch, unpacked, zero_level

__all__ = [
    "BLOCK",
    "CUT",
    "HASH",
    "LEVELS",
    "SALT",
    "CodesOnly",
    "MasterKind",
    "Storage",
    "combined",
    "copy",
    "decode",
    "encode",
    "keys",
    "kind_of",
    "master_for",
    "of_tensors",
    "packed_size",
    "pieces",
    "random_bits",
    "rounded_at_random",
    "salt_and_shift",
    "scales_at",
    "split",
    "stretch",
    "unpacked",
    "zero_level",
]
