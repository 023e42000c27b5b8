"""Gradient compression: compressors by name, and the all-reduces that send their messages."""

from . import codecs  # noqa: F401  # it registers its compressors
from .allreduce import CompressedAllReduce, Handle, wait_all
from .base import Compressor, check_float32, create_compressor, register_compressor, registered_compressors
from .local import GradientCompression, local_compression

__all__ = [
    "CompressedAllReduce",
    "Compressor",
    "GradientCompression",
    "Handle",
    "check_float32",
    "create_compressor",
    "local_compression",
    "register_compressor",
    "registered_compressors",
    "wait_all",
]
