"""Gradient codes in torch operations, on any device."""

from __future__ import annotations

import torch

from .codecs import BLOCK, Code, Job, mean_of_shares, share_of_largest


@torch.no_grad()
def run(job: Job) -> None:
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
        decoded = [_values_of(code, message, chunk, job.parameter) for message in job.source]
        x = torch.cat(decoded) if job.ranks == 1 else decoded[0].clone()
        for values in decoded[1:] if job.ranks > 1 else ():
            x += values
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
    groups = codes.view(-1, 8 // bits)
    return sum(groups[:, k] << (8 - bits * (k + 1)) for k in range(8 // bits)).to(torch.uint8)  # type: ignore[union-attr]


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes, [n, bytes], into codes, [n, 8 // bits * bytes]."""
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
    """Return the largest absolute value of each block: NaN if a value is not finite, 0 if all are subnormal."""
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
