"""Compressors that use the codecs of `tristep.kernels.compress`: each pass over a bucket is one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ...kernels import compress
from ..validation import number
from .base import Compressor, option_name, register_compressor
from .reduce import ReduceAlgorithm


class CodecReduce(ReduceAlgorithm):
    """Sums a bucket over the ranks by messages of a codec of `tristep.kernels.compress`."""

    takes_parts = True

    def __init__(self, compressor: CodecCompressor, *args: Any, **options: Any) -> None:
        super().__init__(compressor, *args, **options)
        code, ranks, chunks = compressor.code, self.ranks, self.choose_exchange(compressor)
        self.code, self.parameter = code, compressor.parameter
        if self.parts is not None:
            self.sizes = [code.size(code.chunk(part)) if part else 0 for part in self.parts]
            self.bytes_sent = sum(self.sizes) - self.sizes[self.rank]
            self.messages = self._room(1, sum(self.sizes))
            self.received = self.messages if ranks == 1 else self._room(ranks, self.sizes[self.rank])
            return
        self.chunk = code.chunk(self.numel, chunks)
        size = code.size(self.chunk)
        self.votes = not self.one_hop and code.vote is not None
        second = code.votes_size(self.chunk, ranks) if self.votes else size
        if compressor.error_feedback and not self.one_hop and not self.votes:
            self.server = self.zeros(self.chunk)
        self.bytes_sent = (ranks - 1) * (size if self.one_hop else size + second)
        self.messages = self._room(chunks, size)
        self.received = self.messages if ranks == 1 else self._room(ranks, size)
        if not self.one_hop:
            self.part, self.parts_of_sum = self._room(1, second), self._room(ranks, second)

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Iterator[Any]:
        code, last = self.code, (self.parameter, self.engine)
        if self.parts is not None:
            assert out is not None
            self._encode_parts(bucket, self.parts)
            if self.ranks > 1:
                yield self.all_to_all(self.received, self.messages, self.sizes)
            if len(out):
                compress.reduce(code, self.received, None, out, None, *last)
            return
        compress.encode(code, bucket, self.worker, self.messages, *last)
        if self.one_hop:
            if self.ranks > 1:
                yield self.all_gather(self.received, self.messages)
            compress.reduce(code, self.received, None, bucket, None, *last)
            return
        yield self.all_to_all(self.received, self.messages)
        if self.votes:
            compress.reduce_votes(code, self.received, self.part, self.engine)
        else:
            size = min(max(self.numel - self.rank * self.chunk, 0), self.chunk)
            compress.reduce(code, self.received, self.server, self.part, size, *last)
        yield self.all_gather(self.parts_of_sum, self.part)
        if self.votes:
            compress.decode_votes(code, self.ranks, self.parts_of_sum, bucket, *last)
        else:
            compress.decode(code, self.parts_of_sum, bucket, *last)

    def _encode_parts(self, bucket: torch.Tensor, parts: Sequence[int]) -> None:
        """Encode each rank's part as a message of its own: in one launch if they are equal, and multiples of a tile."""
        last = self.parameter, self.engine
        if len(set(parts)) == 1 and parts[0] % compress.TILE == 0:
            compress.encode(self.code, bucket, self.worker, self.messages.view(self.ranks, -1), *last)
            return
        residuals = [None] * self.ranks if self.worker is None else self.worker.split(parts)
        messages = self.messages[0].split(self.sizes)
        for values, residual, message in zip(bucket.split(parts), residuals, messages, strict=True):
            if len(values):
                compress.encode(self.code, values, residual, message[None], *last)

    def _room(self, n: int, size: int) -> torch.Tensor:
        return torch.zeros(n, size, dtype=torch.uint8, device=self.device)


class CodecCompressor(Compressor):
    """Base class of compressors that use a codec of `tristep.kernels.compress`, found by their `type`."""

    reduce_algorithm: ClassVar[Any] = CodecReduce
    parameter = 0.0

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return self.encode_with_feedback(values, None)

    def encode_with_feedback(self, values: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        message = torch.empty(1, self.code.size(self.code.chunk(values.numel())), dtype=torch.uint8, device=values.device)
        compress.encode(self.code, values.contiguous(), residual, message, self.parameter)
        return message[0]

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = torch.empty(n, device=message.device)
        compress.decode(self.code, message[None], values, self.parameter)
        return values

    @property
    def code(self) -> compress.Code:
        return compress.CODES[self.type]


class ThresholdCompressor(CodecCompressor):
    keeps_nonfinite = False  # infinity is sent as the threshold

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = number(option_name("threshold"), threshold, **self._limits)

    _limits: ClassVar[dict[str, float]] = {}

    @property
    def parameter(self) -> float:  # type: ignore[override]
        return self.threshold


@register_compressor
class TwoBit(ThresholdCompressor):
    type = "2bit"
    _limits: ClassVar[dict[str, float]] = {"above": 0.0}


@register_compressor
class OneBit(ThresholdCompressor):
    type = "1bit"


@register_compressor
class Float16(CodecCompressor):
    type = "fp16"


@register_compressor
class BFloat16(CodecCompressor):
    type = "bf16"


@register_compressor
class Int8(CodecCompressor):
    type = "int8"


@register_compressor
class Int4(CodecCompressor):
    type = "int4"


@register_compressor
class Sign(CodecCompressor):
    type = "sign"
