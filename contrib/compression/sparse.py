"""Compressors that send a fraction of the values: "topk" the largest ones, "randomk" random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ...kernels import streams
from ...trainer.compression.base import Compressor, option_name
from ...trainer.compression.reduce import MessageReduce, ReduceAlgorithm, all_reduce_bytes
from ...trainer.validation import integer, number


class RandomKReduce(ReduceAlgorithm):
    """Sums a bucket by an all-reduce of the values at random indices, which are the same on all ranks."""

    def __init__(self, compressor: RandomK, *args: Any) -> None:
        super().__init__(compressor, *args)
        self.compressor, self.step = compressor, 0
        self.bytes_sent = all_reduce_bytes(self.ranks, share_of(self.numel, compressor.ratio))

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Iterator[Any]:
        indices = self.compressor.indices(self.step, self.numel, bucket.device)
        self.step += 1
        if self.worker is None:
            sent = bucket[indices].to(torch.float32)
        else:
            self.worker += bucket
            sent = self.worker[indices]
            self.worker[indices] = 0.0
        yield self.all_reduce(sent)
        bucket.zero_()
        bucket[indices] = sent.to(bucket.dtype)

    def state(self) -> dict[str, Any]:
        return super().state() | {"step": self.step}

    def load(self, state: Mapping[str, Any]) -> None:
        step = integer("step", state.get("step"), 0)
        super().load(state)
        self.step = step


class TopKReduce(MessageReduce):
    """Sums a bucket by messages of its largest values, without decoding each message to a whole bucket."""

    compressor: TopK

    def accumulate(self, message: torch.Tensor, total: torch.Tensor) -> None:
        self.compressor.add(message, total)


class TopK(Compressor):
    """Compressor that sends the values of the largest magnitude, NaN first, with their indices: 8 bytes for each.

    Args:
        ratio: the fraction of values that is sent, in (0, 1], default 0.01.
    """

    type, exchange = "topk", "all_gather"
    reduce_algorithm: ClassVar[Any] = TopKReduce

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = number(option_name("ratio"), ratio, above=0.0, high=1.0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        indices = values.abs().topk(share_of(values.numel(), self.ratio), sorted=False).indices
        return torch.cat([indices.to(torch.int32).view(torch.uint8), values[indices].view(torch.uint8)])

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = torch.zeros(n, device=message.device)
        self.add(message, values)
        return values

    def add(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of a message to `total` in place."""
        indices, values = message.view(2, -1)
        total.index_add_(0, indices.view(torch.int32), values.view(torch.float32))


class RandomK(Compressor):
    """Compressor that sends the values at random indices, which are the same on all ranks and need not be sent.

    The values are divided into ranges of equal size, and one index is drawn from each range.

    Args:
        ratio: the fraction of values that is sent, in (0, 1], default 0.01.
        seed: the seed of the indices, default 0.
    """

    type, exchange = "randomk", "all_reduce"
    keeps_nonfinite = False  # a non-finite value is sent only when its index is drawn
    reduce_algorithm: ClassVar[Any] = RandomKReduce

    def __init__(self, ratio: float = 0.01, seed: int = 0) -> None:
        self.ratio = number(option_name("ratio"), ratio, above=0.0, high=1.0)
        self.seed = integer(option_name("seed"), seed)

    def indices(self, step: int, n: int, device: torch.device) -> torch.Tensor:
        """Return the indices of the values that are sent in a step, int64, ascending.

        Args:
            step: the number of the step, from 0.
            n: the number of values of the bucket.
            device: the device of the result.
        """
        count = share_of(n, self.ratio)
        ends = torch.arange(count + 1) * n // count
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**63)
        # In float64 rounding never reaches the next range's first index.
        drawn = ends[:-1] + (torch.rand(count, generator=generator, dtype=torch.float64) * ends.diff()).long()
        return streams.staged(drawn, device).to(device, non_blocking=True)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return self.encode_step(values, 0)

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        return self.decode_step(message, n, 0)

    def encode_step(self, values: torch.Tensor, step: int) -> torch.Tensor:
        return values[self.indices(step, values.numel(), values.device)]

    def decode_step(self, message: torch.Tensor, n: int, step: int) -> torch.Tensor:
        return torch.zeros(n, device=message.device).index_copy_(0, self.indices(step, n, message.device), message)


def share_of(n: int, ratio: float) -> int:
    """Return how many of n values are sent: the fraction `ratio`, rounded up, and at least 1."""
    return min(max(math.ceil(ratio * n), 1), n)
