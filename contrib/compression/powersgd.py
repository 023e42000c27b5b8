"""PowerSGD: matrices as products of two narrow ones, which are summed by all-reduces (Vogels et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ...trainer.compression.base import Compressor, keep_residual, option_name
from ...trainer.compression.reduce import ReduceAlgorithm, all_reduce_bytes
from ...trainer.validation import integer


class PowerSGDReduce(ReduceAlgorithm):
    """PowerSGD: M is approximated by P Q^T, where P is an orthonormal basis of the columns of M Q, and Q = M^T P.

    Both are sums over ranks of what each computes of its own M, so two all-reduces are enough. The residual of a rank is its
    own M less its own part of the product, M - P (M^T P)^T. Tensors that two factors would not make smaller, vectors above
    all, are sent as they are with the first.
    """

    def __init__(self, compressor: PowerSGD, numel: int, shapes: Any, *args: Any) -> None:
        super().__init__(compressor, numel, shapes, *args)
        if shapes is None:
            raise ValueError("'powersgd' needs the shapes of the bucket's tensors: CompressedAllReduce(..., shapes=[...])")
        shapes = [torch.Size(shape) for shape in shapes]
        if sum(shape.numel() for shape in shapes) != numel:
            raise ValueError(f"shapes {list(map(tuple, shapes))} have other than numel={numel} elements together")
        self.matrices: list[tuple[slice, int, int, int]] = []  # its range in the bucket, rows, columns, rank
        self.others: list[slice] = []
        start = 0
        for shape in shapes:
            stretch = slice(start, start := start + shape.numel())
            rows, columns = (shape[0], shape.numel() // shape[0]) if len(shape) > 1 and shape.numel() else (1, shape.numel())
            rank = min(compressor.rank, rows, columns)
            if rank * (rows + columns) < rows * columns:
                self.matrices.append((stretch, rows, columns, rank))
            else:
                self.others.append(stretch)
        generator = torch.Generator().manual_seed(compressor.seed % 2**63)
        draw = [torch.randn(columns, rank, generator=generator) for _, _, columns, rank in self.matrices]
        self.first = [each.to(self.device) for each in draw]
        self.q = [each.clone() for each in self.first]
        sent = sum(rank * (rows + columns) for _, rows, columns, rank in self.matrices)
        sent += sum(stretch.stop - stretch.start for stretch in self.others)
        self.bytes_sent = all_reduce_bytes(self.ranks, sent)

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor) -> Iterator[Any]:
        x = self.with_residual(bucket)
        matrices = [x[stretch].view(rows, columns) for stretch, rows, columns, _ in self.matrices]
        p = [matrix @ q for matrix, q in zip(matrices, self.q, strict=True)]
        first = torch.cat([each.reshape(-1) for each in (*p, *(x[stretch] for stretch in self.others))])
        yield self.all_reduce(first)
        parts = first.split([*(each.numel() for each in p), *(stretch.stop - stretch.start for stretch in self.others)])
        p = [torch.linalg.qr(part.view_as(each)).Q for part, each in zip(parts, p, strict=False)]
        own = [matrix.mT @ each for matrix, each in zip(matrices, p, strict=True)]
        if self.worker is not None:
            sent = x.clone()
            for (stretch, *_), left, right in zip(self.matrices, p, own, strict=True):
                sent[stretch] = (left @ right.mT).view(-1)
            keep_residual(x, sent, self.worker)
        if own:
            second = torch.cat([each.reshape(-1) for each in own])
            yield self.all_reduce(second)
            found = second.split([each.numel() for each in own])
            own = [part.view_as(each) for part, each in zip(found, own, strict=True)]
        for (stretch, *_), left, right in zip(self.matrices, p, own, strict=True):
            bucket[stretch] = (left @ right.mT).view(-1).to(bucket.dtype)
        for stretch, values in zip(self.others, parts[len(p) :], strict=True):
            bucket[stretch] = values.to(bucket.dtype)
        # The next iteration starts where this one ended, unless that is NaN, or nothing at all.
        for q, new, drawn in zip(self.q, own, self.first, strict=True):
            q.copy_(torch.where(new.isfinite().all() & new.any(), new, drawn))

    def state(self) -> dict[str, Any]:
        return super().state() | {"q": self.q}

    def load(self, state: Mapping[str, Any]) -> None:
        new = list(state.get("q", ()))
        if [each.shape for each in new] != [each.shape for each in self.q]:
            raise ValueError(
                f"state has q of shapes {[tuple(each.shape) for each in new]}: "
                f"this all-reduce has {[tuple(each.shape) for each in self.q]}"
            )
        super().load(state)
        for own, each in zip(self.q, new, strict=True):
            own.copy_(each)


class PowerSGD(Compressor):
    """Each matrix as a product of two of few columns, found by one step of the power iteration from the last one's."""

    type, exchange = "powersgd", "all_reduce"
    reduce_algorithm: ClassVar[Any] = PowerSGDReduce

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        self.rank = integer(option_name("rank"), rank, 1)
        self.seed = integer(option_name("seed"), seed)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        raise TypeError("'powersgd' is for matrices over several ranks: make a CompressedAllReduce with their shapes")

    def decode(self, message: torch.Tensor, n: int) -> torch.Tensor:
        return self.encode(message)
