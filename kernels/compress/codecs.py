"""Gradient codes: what is sent instead of float values, packed into bytes, and the residual for the next message.

A message holds the values of one chunk, whose length is a multiple of `TILE`: first their codes, then, for codes that have
them, the scales of blocks of `BLOCK` values as float32. Of codes that are narrower than a byte the first value's are the
highest bits, so those of "2bit" and "1bit" are, byte for byte, MXNet's. A buffer of n values is cut into chunks, of which
the last may be filled up with zeros, and each chunk has a message; that is what an all-to-all among as many ranks needs.

    x = value + residual                 the residual is what earlier messages have left out
    code = quantise(x), packed           the message
    residual = x - value_of(code)        for the next one; see below where the two are not finite

The codes:

    2bit    the threshold, its negative or nothing: 3, 2 or 0. The sum over ranks is an integer multiple of it
    1bit    1 where x is above the threshold, else -1: 1 or 0
    int8    x over the largest absolute value of its block, in 255 steps from -1 to 1: 1 to 255
    int4    the same in 15 steps: 1 to 15
    sign    the sign of x, scaled by the mean absolute value of its block: 1 or 0
    fp16    float16
    bf16    bfloat16

Of "2bit" and "1bit" the residual is x less what was sent, whatever x is, as in MXNet: one that is NaN stays so, and sends 0
forever with "2bit" and -1 with "1bit". Of the others a value that is not finite makes NaN of its block (fp16 and bf16: of
itself), on all ranks, so that checks for overflow see it; nothing of the block is kept then.

Sums are taken in the order of the ranks, and all backends find the same bits: sums within a block are of integers below
2^24, which no order changes.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); MXNet 1.9.1 and 2.0,
`gradient_compression` (2bit, 1bit); Bernstein et al. (2018), "signSGD", and Karimireddy et al. (2019), "Error feedback fixes
SignSGD" (sign); Dettmers (2016), "8-bit approximations for parallelism in deep learning" (int8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..language import Function, jit, tl

TILE = 1024  # values; chunks are multiples of it
BLOCK = 128  # values that share a scale: those that one warp of a GPU holds, 4 to a thread, so that it finds it alone


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
    """|x| over the largest of its block, in whole 2^-17; the sum of 128 of them is exact in any order."""
    return tl.floor(tl.abs(x) * shrunk * 131072.0 + 0.5)


@jit
def mean_of_shares(total, largest):
    """The mean absolute value of a block of 128, of the sum of its shares."""
    # NaN has the bits of the largest, which are the same on all backends.
    return tl.where(largest - largest == 0.0, total * 5.960464477539063e-08 * largest, largest)


@jit
def left_over(x, value):
    """What is kept back where a message is finite."""
    return x - value


@jit
def finite_left_over(x, value):
    """What is kept back, nothing where the message is not finite."""
    return tl.where(value - value == 0.0, x - value, 0.0)


class Code(NamedTuple):
    """How values are coded. Without `dtype`, codes are integers, which `quantise` and `value` find as floats.

    Attributes:
        name: what it is called.
        bits: of a code: 1, 2, 4, 8 or 16.
        quantise: (x, parameter, 1 / scale) -> code.
        value: (code, parameter, scale) -> value.
        left: (x, value) -> residual.
        scaled_by: "largest" or "mean" of a block's absolute values; None for codes without scales.
        vote: code -> an integer, 0 or more, whose sum over ranks says what the sum of the values is; or None.
        most_votes: the largest.
        sum_of_votes: (sum of votes, ranks, parameter) -> the sum of the ranks' values.
        dtype: of codes that are floats of 16 bits.
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
        """The length of each of so many chunks that n values are cut into."""
        return max(-(-n // (chunks * TILE)), 1) * TILE

    def size(self, chunk: int) -> int:
        """The bytes of a message of a chunk of this length, a multiple of 128."""
        return chunk * self.bits // 8 + (chunk // BLOCK * 4 if self.scaled_by else 0)

    def length(self, size: int) -> int:
        """The length of the chunk that a message of so many bytes is of."""
        return size // self.size(TILE) * TILE

    def vote_bits(self, ranks: int) -> int:
        """The bits of a sum of votes: enough for 0 to `most_votes` times the ranks."""
        return (self.most_votes * ranks).bit_length()

    def votes_size(self, chunk: int, ranks: int) -> int:
        """The bytes of a message of the sums of votes: planes of one bit of each, the lowest first."""
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
    """What a backend is to do in one pass over n values of one or several chunks.

    x is the values of `source`, or the sum of those that its messages hold; then comes the residual, then what goes into
    `target`.

    Attributes:
        code: the code.
        source: values, [n]; messages, uint8 [chunks, size] or, of several ranks, [ranks, size]; or messages of votes.
        residual: float32 [n or more], read and written; or None.
        target: values, [n]; messages, uint8 [chunks, size]; or messages of votes.
        n: how many values there are; those beyond count as zeros.
        chunk: the length of a chunk.
        parameter: of the code, such as a threshold.
        ranks: how many messages are added up for each chunk; of votes how many have been.
        reads, writes: "values", "messages" or "votes".
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
        """How many chunks there are."""
        messages = self.target if self.reads == "values" else self.source
        return 1 if self.reads == "messages" and self.ranks > 1 else messages.shape[0]
