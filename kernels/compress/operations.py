"""Encode, sum and decode messages of compressed gradients; codecs.py has the format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends import choose_engine
from .codecs import TILE, Code, Job


def encode(
    code: Code,
    values: torch.Tensor,
    residual: torch.Tensor | None,
    messages: torch.Tensor,
    parameter: float = 0.0,
    engine: str | None = None,
) -> None:
    """Encode values plus `residual` into `messages`, and store the encoding error in `residual`.

    Args:
        code: one of `CODES`.
        values: float32, float16 or bfloat16 [n], contiguous.
        residual: float32 [n], in and out; None for no error feedback.
        messages: the output, uint8 [chunks, code.size(code.chunk(n, chunks))], contiguous.
        parameter: the threshold of "2bit" and "1bit".
        engine: the backend's name; None chooses it by the device.

    Raises:
        TypeError: a tensor has the wrong dtype or is not contiguous.
        ValueError: a tensor has the wrong size or device. Nothing has been changed.

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
    """Decode the ranks' messages of one chunk, sum them in the order of the ranks, and write the sum to `target`.

    Args:
        code: one of `CODES`.
        messages: uint8 [ranks, code.size(chunk)].
        residual: float32 [chunk], the encoding error of earlier sums, in and out; None for no error feedback.
        target: the output: uint8 [1, code.size(chunk)] for an encoded sum, or float values, [n], for the sum itself.
        n: the number of values in the chunk; the rest, up to its end, counts as zeros. Default: all.
        parameter: the threshold of "2bit" and "1bit".
        engine: the backend's name; None chooses it by the device.

    Raises:
        TypeError: a tensor has the wrong dtype or is not contiguous.
        ValueError: a tensor has the wrong size or device, `n` is out of range, or there is a residual for a float target.
            Nothing has been changed.
    """
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    if target.dtype == torch.uint8:
        _check_target(code, target, chunk, code.size(TILE))
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
    """Decode the messages of all chunks, uint8 [chunks, code.size(chunk)], into `values`, [n]."""
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    _check_values("values", values, messages.shape[0] * chunk)
    _run(Job(code, messages, None, values, values.numel(), chunk, parameter, 1, "messages", "values"), engine)


def reduce_votes(code: Code, messages: torch.Tensor, target: torch.Tensor, engine: str | None = None) -> None:
    """Sum the ranks' messages of one chunk as votes, without any rounding error.

    Args:
        code: "2bit" or "1bit" of `CODES`.
        messages: uint8 [ranks, code.size(chunk)].
        target: the output, a message of votes: uint8 [1, code.votes_size(chunk, ranks)].
        engine: the backend's name; None chooses it by the device.
    """
    chunk = _check_messages(code, "messages", messages, code.size(TILE))
    ranks = messages.shape[0]
    _check_votes(code, ranks)
    _check_target(code, target, chunk, code.votes_size(TILE, ranks))
    _run(Job(code, messages, None, target, chunk, chunk, 0.0, ranks, "messages", "votes"), engine)


def decode_votes(
    code: Code,
    ranks: int,
    messages: torch.Tensor,
    values: torch.Tensor,
    parameter: float = 0.0,
    engine: str | None = None,
) -> None:
    """Decode messages of votes, one for each chunk, into `values`, [n], the sums over this number of ranks."""
    _check_votes(code, ranks)
    chunk = _check_messages(code, "messages", messages, code.votes_size(TILE, ranks))
    _check_values("values", values, messages.shape[0] * chunk)
    _run(Job(code, messages, None, values, values.numel(), chunk, parameter, ranks, "votes", "values"), engine)


VALUES = (torch.float32, torch.float16, torch.bfloat16)


def check_form(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], form: str) -> None:
    """Raise TypeError unless a tensor is contiguous, of one of the dtypes, and has the dimensions of `form`, as "[n]"."""
    if tensor.dtype not in dtypes or tensor.dim() != len(form.split(",")) or not tensor.is_contiguous():
        kinds = f"{'one of ' * (len(dtypes) > 1)}{', '.join(map(str, dtypes))}"
        raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: must be {kinds}, {form}, contiguous")


def _check_target(code: Code, target: torch.Tensor, chunk: int, tile: int) -> None:
    if _check_messages(code, "target", target, tile) != chunk or target.shape[0] != 1:
        raise ValueError(f"target is {tuple(target.shape)}: must be {(1, chunk // TILE * tile)}, one message")


def _check_messages(code: Code, name: str, messages: torch.Tensor, tile: int) -> int:
    """Check messages, and return the length of their chunks."""
    check_form(name, messages, (torch.uint8,), "[n, bytes]")
    n, size = messages.shape
    if not n or not size or size % tile:
        raise ValueError(f"{name} is {(n, size)}: a message of {code.name!r} has a multiple of {tile} bytes")
    return size // tile * TILE


def _check_values(name: str, values: torch.Tensor, most: int) -> None:
    check_form(name, values, VALUES, "[n]")
    if values.numel() > most:
        raise ValueError(f"{name} has {values.numel()} elements, the messages have room for {most}")


def _check_residual(residual: torch.Tensor | None, n: int, messages: torch.Tensor) -> None:
    if residual is None:
        return
    check_form("residual", residual, (torch.float32,), "[n]")
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
        from .triton import run
    elif which == "cpu":
        from .cpu import run
    else:
        from .eager import run
    run(job)
