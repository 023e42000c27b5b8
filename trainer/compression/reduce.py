"""Algorithms that sum a bucket over the ranks by compressed messages: the interface, and one for any compressor."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...kernels import compress
from ..utils import distributed
from ..validation import choice
from .base import Compressor, keep_residual

_EXCHANGES = ("all_to_all", "all_gather")


class ReduceAlgorithm(abc.ABC):
    """Base class of algorithms that sum a bucket over the ranks; a subclass defines `steps`, and its residuals if any.

    The arguments are the compressor, then those of `CompressedAllReduce`; `parts` is given only if the class has
    `takes_parts` and the compressor's `exchange` is "all_to_all".

    Attributes:
        takes_parts: whether an algorithm with `parts` writes the sum of this rank's part to `out` and leaves the bucket as
            it is; otherwise each rank gets the whole sum.
        parts: the number of elements of each rank's part; None if each rank gets the whole sum.
        rank: the number of this process in the group.
        ranks: the number of processes in the group.
        exchange: "all_to_all", "all_gather", or "reduce_scatter" with `parts`.
        bytes_sent: bytes that each rank sends for one bucket.
        worker: float32 [numel], the residual of this rank's bucket; None without error feedback.
        server: float32 [chunk], the residual of the sum of this rank's chunk; None if that sum is sent exactly.
    """

    takes_parts: ClassVar[bool] = False
    exchange = ""
    bytes_sent = 0.0
    server: torch.Tensor | None = None

    def __init__(
        self,
        compressor: Compressor,
        numel: int,
        device: torch.device,
        group: Any,
        engine: Any,
        exchange: Any,
        parts: Sequence[int] | None = None,
    ) -> None:
        self.parts = None if parts is None else list(parts)
        self.numel, self.device, self.group, self.engine = numel, device, group, engine
        together = group is not None or (dist.is_available() and dist.is_initialized())
        self.rank = dist.get_rank(group) if together else 0
        self.ranks = dist.get_world_size(group) if together else 1
        if parts is not None and len(parts) != self.ranks:
            raise ValueError(f"parts={list(parts)!r}: must have one number for each of {self.ranks} ranks")
        self.worker = self.zeros(numel) if compressor.error_feedback else None
        self._asked = None if exchange is None else choice("exchange", exchange, _EXCHANGES)
        if exchange not in (None, compressor.exchange) and compressor.exchange != "all_to_all":
            raise ValueError(f"exchange={exchange!r}: {compressor.type!r} uses {compressor.exchange!r}")

    def choose_exchange(self, compressor: Compressor) -> int:
        """Set `exchange` to "all_gather" or "all_to_all", and return the number of chunks to cut the bucket into."""
        default, exchange = compressor.exchange, self._asked
        if self.parts is not None:
            self.exchange, self.one_hop = "reduce_scatter", False
            return self.ranks
        choice(f"exchange of {compressor!r}", default, _EXCHANGES)
        if exchange is None and default == "all_to_all" and (self.ranks <= 2 or self.numel <= self.ranks * compress.TILE):
            exchange = "all_gather"
        self.exchange = "all_gather" if self.ranks == 1 else exchange or default
        self.one_hop = self.exchange == "all_gather"
        return 1 if self.one_hop else self.ranks

    @abc.abstractmethod
    def steps(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Iterator[Any]:
        """Replace the bucket by its sum over the ranks; yield each collective that must be waited for.

        With `parts`, write the sum of this rank's part to `out` instead.
        """

    def state(self) -> dict[str, Any]:
        """Return the residuals; the tensors themselves, not copies."""
        return {"worker": self.worker, "server": self.server}

    def load(self, state: Mapping[str, Any]) -> None:
        """Check and load a state; a residual that is None becomes zeros."""
        residuals = [(name, getattr(self, name), state.get(name)) for name in ("worker", "server")]
        for name, residual, new in residuals:
            if new is not None and residual is not None and new.shape != residual.shape:
                raise ValueError(
                    f"state has {name} of shape {tuple(new.shape)}: this all-reduce has {tuple(residual.shape)}"
                )
            if new is not None and residual is None and new.any():
                raise ValueError(f"state has a residual of the {name}: this all-reduce keeps none, so it would be lost")
        for _, residual, new in residuals:
            if residual is not None:
                residual.zero_() if new is None else residual.copy_(new)

    def zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, device=self.device)

    def with_residual(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the bucket plus the worker's residual."""
        x = bucket.to(torch.float32, copy=True)
        return x if self.worker is None else x.add_(self.worker)

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        """Start an all-gather of `own` into `output`, and return its handle, to be yielded by `steps`."""
        return distributed.all_gather(output.view(-1), own.view(-1), self.group, async_op=True)

    def all_to_all(self, output: torch.Tensor, own: torch.Tensor, sizes: Sequence[int] | None = None) -> Any:
        """Start an all-to-all of parts of `own` into `output`, and return its handle, to be yielded by `steps`.

        Args:
            output, own: the received and the sent parts, contiguous.
            sizes: the number of elements of the part for each rank; None for equal parts.
        """
        each = None if sizes is None else ([sizes[self.rank]] * self.ranks, sizes)
        return distributed.all_to_all(output.view(-1), own.view(-1), self.group, async_op=True, sizes=each)


class MessageReduce(ReduceAlgorithm):
    """Sums a bucket by messages of any compressor, using its `encode` and `decode` only."""

    takes_parts = True

    def __init__(self, compressor: Compressor, *args: Any, **options: Any) -> None:
        super().__init__(compressor, *args, **options)
        self.compressor = compressor
        self.chunk = -(-self.numel // self.choose_exchange(compressor))
        chunks = [self.chunk] * self.ranks if self.parts is None else self.parts
        if compressor.error_feedback and not self.one_hop and self.parts is None:
            self.server = self.zeros(self.chunk)
        # Encode zeros once for each length, to check the class and to learn the size of its messages.
        self._forms: dict[int, tuple[torch.dtype, torch.Size]] = {}
        for n in {*chunks} - {0}:
            with torch.no_grad():
                message = compressor.encode(self.zeros(n))
            if not isinstance(message, torch.Tensor) or message.device != self.device:
                raise TypeError(f"{compressor!r}: encode gave {message!r}, must be a tensor on {self.device}")
            self._forms[n] = message.dtype, message.shape
            self._decoded(message, n)
        self._sizes = [self._size(n) for n in chunks]  # bytes of the message for each rank
        if self.parts is None:
            self.bytes_sent = (1 if self.one_hop else 2) * (self.ranks - 1) * self._sizes[0]
        else:
            self.bytes_sent = sum(self._sizes) - self._sizes[self.rank]

    @torch.no_grad()
    def steps(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Iterator[Any]:
        x = self.with_residual(bucket)
        if self.parts is not None:
            assert out is not None
            residuals = [None] * self.ranks if self.worker is None else self.worker.split(self.parts)
            chunks = zip(x.split(self.parts), residuals, strict=True)
            messages = torch.cat([self._encoded(chunk, residual) for chunk, residual in chunks if len(chunk)])
            received = messages[None]
            if self.ranks > 1:
                received = messages.new_empty(self.ranks, self._sizes[self.rank])
                yield self.all_to_all(received, messages, self._sizes)
            if len(out):
                out.copy_(self._sum(received, len(out)))
            return
        if self.one_hop:
            messages = self._encoded(x, self.worker)
            received = messages[None]
            if self.ranks > 1:
                received = messages.new_empty(self.ranks, *messages.shape)
                yield self.all_gather(received, messages)
            bucket.copy_(self._sum(received, self.chunk))
            return
        x = torch.nn.functional.pad(x, (0, self.ranks * self.chunk - self.numel)).view(self.ranks, -1)
        left = None if self.worker is None else torch.zeros_like(x)
        messages = torch.stack([self._encoded(chunk, None if left is None else left[r]) for r, chunk in enumerate(x)])
        if self.worker is not None and left is not None:
            self.worker.copy_(left.view(-1)[: self.numel])
        received = torch.empty_like(messages)
        yield self.all_to_all(received, messages)
        total = self._sum(received, self.chunk)
        part = self._encoded(total if self.server is None else total.add_(self.server), self.server)
        yield self.all_gather(received, part)
        values = torch.cat([self._decoded(self._message(data, self.chunk), self.chunk) for data in received])
        bucket.copy_(values[: self.numel])

    def _encoded(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the message of `x` as bytes, and set the residual to what the message leaves out."""
        message: Any = self.compressor.encode(x)
        if not isinstance(message, torch.Tensor):
            raise TypeError(f"{self.compressor!r}: encode gave a {type(message).__name__}, must be one tensor")
        dtype, shape = self._forms[len(x)]
        if message.dtype != dtype or message.shape != shape:
            raise ValueError(
                f"{self.compressor!r}: encode gave {message.dtype} {tuple(message.shape)}, and before {dtype} "
                f"{tuple(shape)}: messages of equally many values must have equal dtypes and shapes"
            )
        if residual is not None:
            keep_residual(x, self._decoded(message, len(x)), residual)
        return message.contiguous().view(-1).view(torch.uint8)

    def _size(self, n: int) -> int:
        if not n:
            return 0
        dtype, shape = self._forms[n]
        return shape.numel() * dtype.itemsize

    def _message(self, data: torch.Tensor, n: int) -> torch.Tensor:
        dtype, shape = self._forms[n]
        return data.view(dtype).view(shape)

    def _decoded(self, message: torch.Tensor, n: int) -> torch.Tensor:
        values = self.compressor.decode(message, n)
        if not isinstance(values, torch.Tensor) or values.shape != (n,) or values.dtype != torch.float32:
            got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)
            raise ValueError(f"{self.compressor!r}: decode gave {got}, must be torch.float32 ({n},)")
        return values

    def _sum(self, received: torch.Tensor, n: int) -> torch.Tensor:
        """Return the sum of the messages' n values, in rank order, in new memory."""
        total = self.zeros(n)
        for data in received:
            self.accumulate(self._message(data, n), total)
        return total

    def accumulate(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of a message to `total` in place; overridden where that needs no decoding of whole chunks."""
        total += self._decoded(message, len(total))
