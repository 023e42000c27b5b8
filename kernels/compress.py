"""Gradient codes: what is sent in the place of float values, packed into bytes, and what is kept back for the next time.

A message holds the values of one chunk, whose length is a multiple of `TILE`: first their codes, then, for codes that have
them, the scales of blocks of `BLOCK` values as float32. Of codes that are narrower than a byte the first value's lie in the
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
for ever with "2bit" and -1 with "1bit". Of the others a value that is not finite makes NaN of its block (fp16 and bf16: of
itself), on all ranks, so that whoever looks for overflows sees it; nothing of the block is kept then.

Sums are taken in the order of the ranks, and all engines find the same bits: sums within a block are of integers below
2^24, which no order changes.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); MXNet 1.9.1 and 2.0,
`gradient_compression` (2bit, 1bit); Bernstein et al. (2018), "signSGD", and Karimireddy et al. (2019), "Error feedback fixes
SignSGD" (sign); Dettmers (2016), "8-bit approximations for parallelism in deep learning" (int8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .engine import choose_engine
from .language import Function, jit, tl

__all__ = ["BLOCK", "CODES", "TILE", "Code", "decode", "decode_votes", "encode", "reduce", "reduce_votes"]

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
    # An integer from 1 to 2 steps + 1, also of what is not finite, which integers do not know.
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
    # NaN has the bits of the largest, which are the same on all engines.
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
    """What an engine is to do in one pass over n values of one or several chunks.

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


def encode(
    code: Code,
    values: torch.Tensor,
    residual: torch.Tensor | None,
    messages: torch.Tensor,
    parameter: float = 0.0,
    engine: str | None = None,
) -> None:
    """Fill `messages` with the codes of the values and of what was left of earlier ones; keep what is left of them.

    Args:
        code: one of `CODES`.
        values: float32, float16 or bfloat16 [n], contiguous.
        residual: float32 [n], in and out; None for no error feedback.
        messages: uint8 [chunks, code.size(code.chunk(n, chunks))], contiguous.
        parameter: the threshold of "2bit" and "1bit".
        engine: as for `choose_engine`.

    Raises:
        TypeError, ValueError: tensors that do not fit; nothing is changed then.

    Example:
        >>> import torch
        >>> from tristep.kernels import compress
        >>> code, residual = compress.CODES["2bit"], torch.zeros(5)
        >>> message = torch.empty(1, code.size(code.chunk(5)), dtype=torch.uint8)
        >>> compress.encode(code, torch.tensor([0.7, -0.5, 0.1, 0.0, 2.0]), residual, message, 0.5)
        >>> [f"{byte:08b}" for byte in message[0, :2].tolist()], residual
        (['11100000', '11000000'], tensor([0.2000, 0.0000, 0.1000, 0.0000, 1.5000]))
    """
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    _check_values("values", values, messages.shape[0] * chunk)
    _check_residual(residual, values.numel(), messages)
    _run(Job(code, values, residual, messages, values.numel(), chunk, parameter, 1, "values", "messages"), engine)


def reduce(
    code: Code,
    messages: torch.Tensor,
    residual: torch.Tensor | None,
    target: torch.Tensor,
    n: int | None = None,
    parameter: float = 0.0,
    engine: str | None = None,
) -> None:
    """Add up the values of one chunk that the ranks' messages hold, in their order, and put the sum into `target`.

    Args:
        code: one of `CODES`.
        messages: uint8 [ranks, code.size(chunk)].
        residual: float32 [chunk], what was left of earlier sums, in and out; None if nothing is.
        target: uint8 [1, code.size(chunk)] for a message of the sum, or values, [n], for the sum itself.
        n: how many values there are in the chunk; the others, up to its end, count as zeros. Default: all.
        parameter, engine: as for `encode`.

    Raises:
        TypeError, ValueError: tensors that do not fit; nothing is changed then.
    """
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    if target.dtype == torch.uint8:
        if _check_messages(code, "target", target, code.size(TILE)) != chunk or target.shape[0] != 1:
            raise ValueError(f"target is {tuple(target.shape)}: must be {(1, messages.shape[1])}, one message")
        n, writes = chunk if n is None else n, "messages"
        if not 0 <= n <= chunk:
            raise ValueError(f"n={n}: must be 0 to {chunk}, the length of the chunk")
        _check_residual(residual, n, messages)
    else:
        _check_values("target", target, chunk)
        n, writes = target.numel(), "values"
        if residual is not None:
            raise ValueError("residual goes with a message as the target: nothing is left of a sum that is not coded")
    _run(Job(code, messages, residual, target, n, chunk, parameter, messages.shape[0], "messages", writes), engine)


def decode(
    code: Code, messages: torch.Tensor, values: torch.Tensor, parameter: float = 0.0, engine: str | None = None
) -> None:
    """Fill `values`, [n], with what the messages of its chunks, uint8 [chunks, code.size(chunk)], say."""
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    _check_values("values", values, messages.shape[0] * chunk)
    _run(Job(code, messages, None, values, values.numel(), chunk, parameter, 1, "messages", "values"), engine)


def reduce_votes(code: Code, messages: torch.Tensor, target: torch.Tensor, engine: str | None = None) -> None:
    """Add up the votes of one chunk that the ranks' messages, uint8 [ranks, code.size(chunk)], are; no error at all.

    Args:
        code: "2bit" or "1bit" of `CODES`.
        messages: uint8 [ranks, code.size(chunk)].
        target: uint8 [1, code.votes_size(chunk, ranks)].
        engine: as for `choose_engine`.
    """
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    ranks = messages.shape[0]
    _check_votes(code, ranks)
    if _check_messages(code, "target", target, code.votes_size(TILE, ranks)) != chunk or target.shape[0] != 1:
        raise ValueError(f"target is {tuple(target.shape)}: must be {(1, code.votes_size(chunk, ranks))}")
    _run(Job(code, messages, None, target, chunk, chunk, 0.0, ranks, "messages", "votes"), engine)


def decode_votes(
    code: Code,
    ranks: int,
    messages: torch.Tensor,
    values: torch.Tensor,
    parameter: float = 0.0,
    engine: str | None = None,
) -> None:
    """Fill `values`, [n], with the sums that messages of votes of so many ranks, one of each chunk, stand for."""
    _check_votes(code, ranks)
    chunk = _check_messages(code, "messages", messages, code.votes_size(TILE, ranks))
    _check_values("values", values, messages.shape[0] * chunk)
    _run(Job(code, messages, None, values, values.numel(), chunk, parameter, ranks, "votes", "values"), engine)


VALUES = (torch.float32, torch.float16, torch.bfloat16)


def _check_messages(code: Code, name: str, messages: torch.Tensor, tile: int) -> int:
    """The length of the chunks."""
    if messages.dtype != torch.uint8 or messages.dim() != 2 or not messages.is_contiguous():
        raise TypeError(f"{name} is {messages.dtype} {tuple(messages.shape)}: must be torch.uint8 [n, bytes], contiguous")
    n, size = messages.shape
    if not n or not size or size % tile:
        raise ValueError(f"{name} is {(n, size)}: a message of {code.name!r} has a multiple of {tile} bytes")
    return size // tile * TILE


def _check_values(name: str, values: torch.Tensor, most: int) -> None:
    if values.dtype not in VALUES or values.dim() != 1 or not values.is_contiguous():
        kinds = ", ".join(map(str, VALUES))
        raise TypeError(f"{name} is {values.dtype} {tuple(values.shape)}: must be one of {kinds}, [n], contiguous")
    if values.numel() > most:
        raise ValueError(f"{name} has {values.numel()} elements, the messages have room for {most}")


def _check_residual(residual: torch.Tensor | None, n: int, messages: torch.Tensor) -> None:
    if residual is None:
        return
    if residual.dtype != torch.float32 or residual.dim() != 1 or not residual.is_contiguous():
        shape = tuple(residual.shape)
        raise TypeError(f"residual is {residual.dtype} {shape}: must be torch.float32 [n], contiguous")
    if residual.numel() < n or residual.device != messages.device:
        raise ValueError(
            f"residual has {residual.numel()} elements on {residual.device}: must have {n} on {messages.device}, as the rest"
        )


def _check_votes(code: Code, ranks: int) -> None:
    if code.vote is None:
        raise ValueError(f"code {code.name!r} has no votes: '2bit' and '1bit' have")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be 1 or more")


def _run(job: Job, engine: str | None) -> None:
    if job.source.device != job.target.device:
        raise ValueError(f"tensors are on {job.source.device} and {job.target.device}: must be on one device")
    which = choose_engine(job.source.device, engine)
    if which == "triton":
        from . import compress_gpu

        compress_gpu.run(job)
    elif which == "cpu":
        from . import compress_native

        compress_native.run(job)
    else:
        _run_eagerly(job)


@torch.no_grad()
def _run_eagerly(job: Job) -> None:
    code, chunk, room = job.code, job.chunk, job.chunks * job.chunk
    if job.reads == "values":
        x = torch.nn.functional.pad(job.source.to(torch.float32), (0, room - job.n))
    elif job.reads == "votes":
        assert code.sum_of_votes is not None
        votes = _votes_of(job.source, code.vote_bits(job.ranks), chunk).view(-1).to(torch.float32)
        x = code.sum_of_votes(votes, float(job.ranks), _rounded(job.parameter))
    elif job.writes == "votes":
        assert code.vote is not None
        codes = _unpack(job.source, code.bits)
        votes = sum(code.vote(each.to(torch.float32)).to(torch.int64) for each in codes)
        planes = [_pack((votes >> k) & 1, 1) for k in range(code.vote_bits(job.ranks))]
        job.target.copy_(torch.cat(planes)[None])
        return
    else:
        found = [_values_of(code, message, chunk, job.parameter) for message in job.source]
        x = torch.cat(found) if job.ranks == 1 else found[0].clone()
        for each in found[1:] if job.ranks > 1 else ():
            x += each
    if job.residual is not None:
        x[: job.n] += job.residual[: job.n]
    if job.writes == "values":
        job.target.copy_(x[: job.n])
        return
    x[job.n :] = 0.0
    scales = None if code.scaled_by is None else _scales_of(code, x)
    if code.dtype is not None:
        codes = x.to(code.dtype)
        value, packed = codes.to(torch.float32), codes.view(torch.uint8)
    else:
        assert code.quantise is not None
        shrunk = torch.zeros((), device=x.device) if scales is None else _shrunk(_largest(x)).repeat_interleave(BLOCK)
        codes = code.quantise(x, _rounded(job.parameter), shrunk)
        if scales is None:
            codes[job.n :] = 0.0
        value = _value(code, codes, scales, job.parameter)
        packed = _pack(codes.to(torch.int64), code.bits)
    if job.residual is not None:
        job.residual[: job.n] = code.left(x, value)[: job.n]
    wide = chunk * code.bits // 8
    job.target[:, :wide] = packed.view(-1, wide)
    if scales is not None:
        job.target[:, wide:] = scales.view(torch.uint8).view(len(job.target), -1)


def _rounded(parameter: float) -> float:
    return torch.tensor(parameter, dtype=torch.float32).item()


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes, the first code in the highest bits."""
    groups = codes.view(-1, 8 // bits)
    return sum(groups[:, k] << (8 - bits * (k + 1)) for k in range(8 // bits)).to(torch.uint8)  # type: ignore[union-attr]


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, [n, 8 // bits bytes], of [n, bytes]; what lies behind the codes is left out by the caller."""
    shifts = torch.arange(8 - bits, -1, -bits, device=packed.device)
    return ((packed.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _votes_of(messages: torch.Tensor, width: int, chunk: int) -> torch.Tensor:
    planes = _unpack(messages.view(len(messages), width, chunk // 8), 1)
    return sum(planes[:, k] << k for k in range(width))  # type: ignore[return-value]


def _values_of(code: Code, message: torch.Tensor, chunk: int, parameter: float) -> torch.Tensor:
    wide = chunk * code.bits // 8
    if code.dtype is not None:
        return message.view(code.dtype).to(torch.float32)
    scales = None if code.scaled_by is None else message[wide:].view(torch.float32)
    return _value(code, _unpack(message[:wide], code.bits).to(torch.float32), scales, parameter)


def _value(code: Code, codes: torch.Tensor, scales: torch.Tensor | None, parameter: float) -> torch.Tensor:
    assert code.value is not None
    scale = torch.zeros(()) if scales is None else scales.repeat_interleave(BLOCK)
    return code.value(codes, _rounded(parameter), scale)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each block; NaN where one is not finite, 0 where all are subnormal."""
    largest = x.view(-1, BLOCK).abs().amax(dim=1)
    largest = torch.where(largest < torch.finfo(torch.float32).tiny, 0.0, largest)
    return torch.where(largest.isfinite(), largest, torch.nan)


def _shrunk(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, 1 / largest, torch.where(largest == 0, 0.0, largest))


def _scales_of(code: Code, x: torch.Tensor) -> torch.Tensor:
    largest = _largest(x)
    if code.scaled_by == "largest":
        return largest
    shares = share_of_largest(x, _shrunk(largest).repeat_interleave(BLOCK))
    return mean_of_shares(shares.view(-1, BLOCK).sum(dim=1), largest)
