"""Gradient compression: ranks send short codes instead of float values; codecs.py has the formats."""

from .codecs import BLOCK, CODES, TILE, Code, Job
from .operations import VALUES, decode, decode_votes, encode, reduce, reduce_votes

__all__ = ["BLOCK", "CODES", "TILE", "VALUES", "Code", "Job", "decode", "decode_votes", "encode", "reduce", "reduce_votes"]
