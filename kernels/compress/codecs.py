"""Gradient codes: compressed values, packed into bytes, and the residual that is added to the next message.

A message holds the values of one chunk; the chunk's length is a multiple of `TILE`. The codes come first, then, for scaled
codes, the float32 scales of blocks of `BLOCK` values. In codes narrower than a byte, the first value has the highest bits,
so the bytes of "2bit" and "1bit" equal MXNet's. A buffer of n values is cut into chunks, the last one padded with zeros, and
each chunk becomes a message, as an all-to-all among that number of ranks needs.

    x = value + residual                 the residual is what earlier messages left out
    code = quantise(x), packed           the message
    residual = x - value_of(code)        for the next message; see below for non-finite values

The codes:

    2bit    the threshold, its negative or zero: 3, 2 or 0. The sum over ranks is an integer multiple of the threshold
    1bit    1 where x is above the threshold, else -1: 1 or 0
    int8    x over the largest absolute value of its block, as one of 255 levels from -1 to 1: 1 to 255
    int4    the same with 15 levels: 1 to 15
    sign    the sign of x, scaled by the mean absolute value of its block: 1 or 0
    fp16    float16
    bf16    bfloat16

With "2bit" and "1bit" the residual is x minus the sent value, whatever x is, as in MXNet: a residual that is NaN stays NaN,
and sends 0 forever with "2bit" and -1 with "1bit". With the other codes, a value that is not finite turns its whole block
(fp16 and bf16: only itself) into NaN on all ranks, so that overflow checks see it, and the residual becomes 0.

Sums are taken in the order of the ranks, and all backends compute the same bits: sums within a block are sums of integers
below 2^24, which are exact in any order.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); MXNet 1.9.1 and 2.0,
`gradient_compression` (2bit, 1bit); Bernstein et al. (2018), "signSGD", and Karimireddy et al. (2019), "Error feedback fixes
SignSGD" (sign); Dettmers (2016), "8-bit approximations for parallelism in deep learning" (int8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..language import Function, jit, tl

TILE = 1024  # values; chunks are multiples of it
BLOCK = 128  # values that share a scale: one GPU warp holds them, 4 per thread, and computes the scale by itself


@jit
def _two_bit(x, threshold, shrunk):
    return tl.where(x >= threshold, 3.0, tl.where(x <= -threshold, 2.0, 0.0))


@jit
def _two_bit_value(code, threshold, scale):
    return tl.where(code == 3.0, threshold, tl.where(code == 2.0, -threshold, 0.0))


@jit
def _two_bit_vote(code):
    return tl.where(code == 3.0, 2.0, tl.where(code == 2.0, 0.0, 1.0))


@jit
def _two_bit_sum(votes, ranks, threshold):
    return (votes - ranks) * threshold


@jit
def _one_bit(x, threshold, shrunk):
    return tl.where(x > threshold, 1.0, 0.0)


@jit
def _one_bit_value(code, threshold, scale):
    return tl.where(code == 1.0, 1.0, -1.0)


@jit
def _one_bit_vote(code):
    return code


@jit
def _one_bit_sum(votes, ranks, threshold):
    return votes + votes - ranks


@jit
def _steps_of(x, shrunk, steps):
    # An integer from 1 to 2 steps + 1, also for non-finite values, which integers do not have.
    y = x * shrunk * steps
    return tl.where(y - y == 0.0, tl.floor(y + 0.5) + (steps + 1.0), steps + 1.0)


@jit
def _int8(x, parameter, shrunk):
    return _steps_of(x, shrunk, 127.0)


@jit
def _int8_value(code, parameter, scale):
    return (code - 128.0) * 0.007874015718698502 * scale


@jit
def _int4(x, parameter, shrunk):
    return _steps_of(x, shrunk, 7.0)


@jit
def _int4_value(code, parameter, scale):
    return (code - 8.0) * 0.1428571492433548 * scale


@jit
def _sign(x, parameter, shrunk):
    return tl.where(x >= 0.0, 1.0, 0.0)


@jit
def _sign_value(code, parameter, scale):
    return tl.where(code == 1.0, scale, -scale)


@jit
def share_of_largest(x, shrunk):
    """Return |x| over the largest of its block, rounded to multiples of 2^-17; sums of 128 are exact in any order."""
    return tl.floor(tl.abs(x) * shrunk * 131072.0 + 0.5)


@jit
def mean_of_shares(total, largest):
    """Return the mean absolute value of a block of 128, given the sum of its shares."""
    # NaN has the bits of the largest, which are the same on all backends.
    return tl.where(largest - largest == 0.0, total * 5.960464477539063e-08 * largest, largest)


@jit
def left_over(x, value):
    return x - value


@jit
def finite_left_over(x, value):
    """Return the residual x - value, or 0 if the sent value is not finite."""
    return tl.where(value - value == 0.0, x - value, 0.0)


class Code(NamedTuple):
    """A gradient code. Without `dtype`, codes are integers, which `quantise` and `value` handle as floats.

    Attributes:
        name: the code's key in `CODES`.
        bits: the bits of a code: 1, 2, 4, 8 or 16.
        quantise: (x, parameter, 1 / scale) -> code.
        value: (code, parameter, scale) -> value.
        left: (x, value) -> residual.
        scaled_by: the scale is the "largest" or the "mean" of a block's absolute values; None for codes without scales.
        vote: code -> an integer, 0 or more; the sum of votes over ranks determines the sum of the values. None: no votes.
        most_votes: the largest vote.
        sum_of_votes: (sum of votes, ranks, parameter) -> the sum of the ranks' values.
        dtype: the dtype of codes that are 16-bit floats, else None.
    """

    name: str
    bits: int
    quantise: Function | None = None
    value: Function | None = None
    left: Function = finite_left_over
    scaled_by: str | None = None
    vote: Function | None = None
    most_votes: int = 0
    sum_of_votes: Function | None = None
    dtype: torch.dtype | None = None

    def chunk(self, n: int, chunks: int = 1) -> int:
        """Return the length of a chunk when n values are cut into this number of chunks."""
        return max(-(-n // (chunks * TILE)), 1) * TILE

    def size(self, chunk: int) -> int:
        """Return the size in bytes of the message of a chunk of this length, a multiple of 128."""
        return chunk * self.bits // 8 + (chunk // BLOCK * 4 if self.scaled_by else 0)

    def length(self, size: int) -> int:
        """Return the length of the chunk in a message of `size` bytes."""
        return size // self.size(TILE) * TILE

    def vote_bits(self, ranks: int) -> int:
        """Return the bits of a sum of votes: enough for 0 to `most_votes` times the number of ranks."""
        return (self.most_votes * ranks).bit_length()

    def votes_size(self, chunk: int, ranks: int) -> int:
        """Return the size in bytes of a message of sums of votes, stored as bit planes, the lowest bit first."""
        return chunk // 8 * self.vote_bits(ranks)


CODES = {
    code.name: code
    for code in (
        Code("2bit", 2, _two_bit, _two_bit_value, left_over, None, _two_bit_vote, 2, _two_bit_sum),
        Code("1bit", 1, _one_bit, _one_bit_value, left_over, None, _one_bit_vote, 1, _one_bit_sum),
        Code("int8", 8, _int8, _int8_value, scaled_by="largest"),
        Code("int4", 4, _int4, _int4_value, scaled_by="largest"),
        Code("sign", 1, _sign, _sign_value, scaled_by="mean"),
        Code("fp16", 16, dtype=torch.float16),
        Code("bf16", 16, dtype=torch.bfloat16),
    )
}


class Job(NamedTuple):
    """One pass of a backend over n values of one or more chunks.

    It reads the values of `source`, or sums the values of its messages, adds the residual, writes the result to `target`,
    and updates the residual. "values" are [n], "messages" and "votes" uint8 [chunks, size] or, as a source of several ranks,
    [ranks, size].

    Attributes:
        chunk: the length of a chunk.
        residual: float32 [n or more], read and written; None for no error feedback.
        n: the number of values; the rest of the chunks counts as zeros.
        parameter: the code's parameter, such as a threshold.
        ranks: the number of messages to sum for each chunk; for votes, the number of ranks in the sums.
        reads, writes: the format of source and target: "values", "messages" or "votes".
    """

    code: Code
    source: torch.Tensor
    residual: torch.Tensor | None
    target: torch.Tensor
    n: int
    chunk: int
    parameter: float
    ranks: int
    reads: str
    writes: str

    @property
    def chunks(self) -> int:
        messages = self.target if self.reads == "values" else self.source
        return 1 if self.reads == "messages" and self.ranks > 1 else messages.shape[0]
