"""The compressor "topk", which sends the largest values."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ...trainer.compression.base import Compressor, option_name
from ...trainer.compression.reduce import MessageReduce
from ...trainer.validation import number


class TopKReduce(MessageReduce):
    """Sums a bucket by messages of its largest values, without decoding each message to a whole bucket."""

    compressor: TopK

    def accumulate(self, message: torch.Tensor, total: torch.Tensor) -> None:
        self.compressor.add(message, total)


class TopK(Compressor):
    """Compressor that sends the values of the largest magnitude, NaN first, with their indices: 8 bytes for each.

    Args:
        ratio: the fraction of values that is sent, rounded up, at least one value; in (0, 1], default 0.01.
    """

    type, exchange = "topk", "all_gather"
    reduce_algorithm: ClassVar[Any] = TopKReduce

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = number(option_name("ratio"), ratio, above=0.0, high=1.0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        n = values.numel()
        count = min(max(math.ceil(self.ratio * n), 1), n)
        indices = values.abs().topk(count, sorted=False).indices
        return torch.cat([indices.to(torch.int32).view(torch.uint8), values[indices].view(torch.uint8)])

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = torch.zeros(n, device=message.device)
        self.add(message, values)
        return values

    def add(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of a message to `total` in place."""
        indices, values = message.view(2, -1)
        total.index_add_(0, indices.view(torch.int32), values.view(torch.float32))
