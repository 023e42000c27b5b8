"""PowerSGD: low-rank approximations of gradient matrices, summed by all-reduces (Vogels et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ...trainer.compression.base import Compressor, keep_residual, option_name
from ...trainer.compression.reduce import ReduceAlgorithm
from ...trainer.validation import integer


class PowerSGDReduce(ReduceAlgorithm):
    """Sums a bucket by PowerSGD: M is approximated by P Q^T, with P an orthonormal basis of the columns of M Q, Q = M^T P.

    M Q and M^T P are sums over the ranks of products with each rank's own M, so two all-reduces are enough. A rank's
    residual is M - P (M^T P)^T with its own M. Tensors that two factors would not make smaller, such as vectors, are sent
    uncompressed with the first all-reduce.
    """

    def __init__(self, compressor: PowerSGD, numel: int, shapes: Any, *args: Any) -> None:
        super().__init__(compressor, numel, shapes, *args)
        if shapes is None:
            raise ValueError("'powersgd' needs the shapes of the bucket's tensors: CompressedAllReduce(..., shapes=[...])")
        shapes = [torch.Size(shape) for shape in shapes]
        if sum(shape.numel() for shape in shapes) != numel:
            raise ValueError(f"shapes={list(map(tuple, shapes))!r} must have numel={numel} elements together")
        self.matrices: list[tuple[slice, int, int, int]] = []  # range in the bucket, rows, columns, rank
        self.uncompressed: list[slice] = []
        start = 0
        for shape in shapes:
            stretch = slice(start, start := start + shape.numel())
            rows, columns = (shape[0], shape.numel() // shape[0]) if len(shape) > 1 and shape.numel() else (1, shape.numel())
            rank = min(compressor.rank, rows, columns)
            if rank * (rows + columns) < rows * columns:
                self.matrices.append((stretch, rows, columns, rank))
            else:
                self.uncompressed.append(stretch)
        generator = torch.Generator().manual_seed(compressor.seed % 2**63)
        drawn = [torch.randn(columns, rank, generator=generator) for _, _, columns, rank in self.matrices]
        self.first = [q.to(self.device) for q in drawn]
        self.q = [q.clone() for q in self.first]
        sent = sum(rank * (rows + columns) for _, rows, columns, rank in self.matrices)
        sent += sum(stretch.stop - stretch.start for stretch in self.uncompressed)
        self.bytes_sent = 2 * (self.ranks - 1) / self.ranks * 4 * sent

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Iterator[Any]:
        x = self.with_residual(bucket)
        matrices = [x[stretch].view(rows, columns) for stretch, rows, columns, _ in self.matrices]
        p = [matrix @ q for matrix, q in zip(matrices, self.q, strict=True)]
        first = torch.cat([tensor.reshape(-1) for tensor in (*p, *(x[stretch] for stretch in self.uncompressed))])
        yield self.all_reduce(first)
        sizes = [*(left.numel() for left in p), *(stretch.stop - stretch.start for stretch in self.uncompressed)]
        parts = first.split(sizes)
        p = [torch.linalg.qr(part.view_as(left)).Q for part, left in zip(parts, p, strict=False)]
        q_new = [matrix.mT @ left for matrix, left in zip(matrices, p, strict=True)]
        if self.worker is not None:
            sent = x.clone()
            for (stretch, *_), left, right in zip(self.matrices, p, q_new, strict=True):
                sent[stretch] = (left @ right.mT).view(-1)
            keep_residual(x, sent, self.worker)
        if q_new:
            second = torch.cat([right.reshape(-1) for right in q_new])
            yield self.all_reduce(second)
            sums = second.split([right.numel() for right in q_new])
            q_new = [part.view_as(right) for part, right in zip(sums, q_new, strict=True)]
        for (stretch, *_), left, right in zip(self.matrices, p, q_new, strict=True):
            bucket[stretch] = (left @ right.mT).view(-1).to(bucket.dtype)
        for stretch, values in zip(self.uncompressed, parts[len(p) :], strict=True):
            bucket[stretch] = values.to(bucket.dtype)
        # The next iteration starts from this one's Q, or from the drawn one if that is not finite or zero.
        for q, new, drawn in zip(self.q, q_new, self.first, strict=True):
            q.copy_(torch.where(new.isfinite().all() & new.any(), new, drawn))

    def state(self) -> dict[str, Any]:
        return super().state() | {"q": self.q}

    def load(self, state: Mapping[str, Any]) -> None:
        loaded = list(state.get("q", ()))
        if [q.shape for q in loaded] != [q.shape for q in self.q]:
            raise ValueError(
                f"state has q of shapes {[tuple(q.shape) for q in loaded]}: "
                f"this all-reduce has {[tuple(q.shape) for q in self.q]}"
            )
        super().load(state)
        for q, new in zip(self.q, loaded, strict=True):
            q.copy_(new)


class PowerSGD(Compressor):
    """Compressor that sends each matrix as a product of two narrow ones, found by one step of power iteration.

    Args:
        rank: the number of columns of the narrow matrices, >= 1, default 4.
        seed: the seed of the first iteration's matrices, default 0.
    """

    type, exchange = "powersgd", "all_reduce"
    sends_alone = False
    reduce_algorithm: ClassVar[Any] = PowerSGDReduce

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        self.rank = integer(option_name("rank"), rank, 1)
        self.seed = integer(option_name("seed"), seed)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        raise TypeError("'powersgd' has no messages of single ranks: make a CompressedAllReduce with the matrices' shapes")

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        return self.encode(message)
