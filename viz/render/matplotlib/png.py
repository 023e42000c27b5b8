"""PNG files, written fast."""

from __future__ import annotations

import struct
import zlib

import numpy as np

__all__ = ["encode_png"]


def encode_png(pixels: np.ndarray) -> bytes:
    """Return a PNG file (ISO/IEC 15948) of the RGB channels of pixels, uint8 [height, width, 4].

    This is faster than Pillow, which tries five filters on every row to make the file smaller.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter's number, 0 for none
    for k in range(3):  # all at once would take five times as long
        rows[:, 1 + k :: 3] = pixels[..., k]
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits of each of red, green and blue
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 1)), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return file
