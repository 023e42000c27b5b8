"""Compressed all-reduce of gradients over several processes.

A bucket is a flat tensor of gradients, divided into one chunk for each rank:

    each rank adds its residual to its bucket and encodes each chunk          (the worker's residual)
    all-to-all: rank r gets the messages of chunk r
    rank r sums their values in rank order, adds its residual and encodes     (the server's residual)
    all-gather: all ranks get the messages of all sums, and decode them

So all ranks end with the same bits, and each sends 2 (N - 1) / N b n bytes for n values that take b bytes each. With "2bit"
and "1bit" the second message is the exact sum of the votes, in a few more bits, without a residual. With two ranks, or few
values, all messages are gathered instead: then one collective is enough, and there is no second rounding error. "topk"
always gathers, since ranks choose different indices.

Where a rank needs the sum of its own part only, as with sharded updates, the algorithm ends after the local sums: without an
all-gather and without a second rounding error.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); Tang et al. (2019), "DoubleSqueeze" (both
directions); MXNet 1.9.1 and 2.0, `gradient_compression` ("2bit", "1bit"); Bernstein et al. (2018), "signSGD", and
Karimireddy et al. (2019), "Error feedback fixes SignSGD" ("sign"); Stich et al. (2018), "Sparsified SGD with memory"
("topk").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...kernels import choose_engine, compress
from ...kernels.compress.operations import check_form
from ..validation import instance, integer
from .base import Compressor, create_compressor
from .reduce import MessageReduce, ReduceAlgorithm


class Handle:
    """Handle of a running compressed sum. All ranks must advance their handles in the same order."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps: Iterator[Any] | None = steps
        self._work: Any = None
        self._next()

    def advance(self) -> bool:
        """Wait for the running collective and start the next one. Return True if that was the last."""
        if self._steps is not None:
            if self._work is not None:
                self._work.wait()
            self._next()
        return self.done

    def wait(self) -> None:
        """Wait until the bucket holds the sum."""
        while not self.advance():
            pass

    @property
    def done(self) -> bool:
        return self._steps is None

    def _next(self) -> None:
        steps, self._steps = self._steps, None  # an error ends it
        try:
            self._work = next(steps)  # type: ignore[arg-type]  # not None
        except StopIteration:
            return
        self._steps = steps


def wait_all(handles: Sequence[Handle]) -> None:
    """Wait for several compressed sums, and let their second collectives run at the same time."""
    running = list(handles)
    while running:
        running = [handle for handle in running if not handle.advance()]


class CompressedAllReduce:
    """Sums a flat bucket of gradients over the ranks by compressed messages; all ranks get the same bits.

    Args:
        compression_params: the type of the compression and its options, see `create_compressor`; or a compressor.
        numel: the number of elements of the bucket, >= 1.
        device: the bucket's device.
        group: the process group; None for the default group or, if torch.distributed is not initialized, for one rank.
        engine: the engine of encoding and decoding; see `tristep.kernels.choose_engine`.
        exchange: "all_to_all" or "all_gather", for compressors that can use both; None for the one that sends less.
        parts: the number of elements of each rank's part of the bucket, if a rank needs the sum of its own part only. No
            effect on "topk", which sums whole buckets. None: each rank gets the whole sum.

    Attributes:
        compressor: the compressor.
        rank: the number of this process in the group.
        ranks: the number of processes in the group.
        exchange: "all_to_all", "all_gather", or "reduce_scatter" for sums of parts.
        scatters: whether each rank gets the sum of its own part only, and buckets stay as they are.
        bytes_sent: bytes that each rank sends for one bucket, without network headers.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range.

    Example:
        >>> import torch
        >>> from tristep.kvstore import CompressedAllReduce
        >>> reduce = CompressedAllReduce({"type": "2bit", "threshold": 0.5}, 3)
        >>> bucket = torch.tensor([0.7, -2.0, 0.1])
        >>> reduce.start(bucket).wait()  # of one rank
        >>> bucket, reduce.state_dict()["worker"]
        (tensor([ 0.5000, -0.5000,  0.0000]), tensor([ 0.2000, -1.5000,  0.1000]))
    """

    def __init__(
        self,
        compression_params: Mapping[str, Any] | Compressor,
        numel: int,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        engine: str | None = None,
        exchange: str | None = None,
        parts: Sequence[int] | None = None,
    ) -> None:
        made = isinstance(compression_params, Compressor)
        self.compressor: Compressor = compression_params if made else create_compressor(compression_params)  # type: ignore[assignment,arg-type]
        self.numel, self.device = integer("numel", numel, 1), torch.device(device)
        choose_engine(self.device, engine)
        klass: type[ReduceAlgorithm] = self.compressor.reduce_algorithm or MessageReduce
        options: dict[str, Any] = {}
        if parts is not None:
            if exchange is not None:
                raise ValueError(f"exchange={exchange!r} with parts, which are sent to their ranks: leave one of them out")
            if sum(integer("parts", part, 0) for part in parts) != self.numel:
                raise ValueError(f"parts={list(parts)!r} must have numel={self.numel} elements together")
            if klass.takes_parts and self.compressor.exchange == "all_to_all":
                options["parts"] = parts
        arguments = self.compressor, self.numel, self.device, group, engine, exchange
        self._algorithm = algorithm = klass(*arguments, **options)
        self.rank, self.ranks = algorithm.rank, algorithm.ranks
        self.exchange, self.bytes_sent = algorithm.exchange, algorithm.bytes_sent
        self.scatters = bool(options)
        self._handle: Handle | None = None

    def start(self, bucket: torch.Tensor, out: torch.Tensor | None = None) -> Handle:
        """Encode a bucket, start the first collective, and return a handle to wait for.

        The bucket must not be read or written until the handle is done.

        Args:
            bucket: float32, float16 or bfloat16 [numel], contiguous; overwritten by the sum, which is computed in float32,
                unless `scatters`.
            out: with `scatters`, gets the sum of this rank's part: of the bucket's dtype, [parts[rank]], contiguous.

        Raises:
            TypeError: the bucket is not flat and contiguous, or has another dtype; nothing has been changed.
            ValueError: the bucket has another length or device; nothing has been changed.
            RuntimeError: the sum of the last bucket is not complete.
        """
        check_form("bucket", bucket, compress.VALUES, "[n]")
        if bucket.numel() != self.numel or bucket.device != self.device:
            raise ValueError(
                f"bucket has {bucket.numel()} elements on {bucket.device}: "
                f"this all-reduce is for {self.numel} on {self.device}"
            )
        if (out is not None) != self.scatters:
            raise ValueError("out is missing, or is given where buckets are overwritten: it goes with the sums of parts")
        self._check_done()
        steps = self._algorithm.steps(bucket.detach(), out) if self.scatters else self._algorithm.steps(bucket.detach())
        self._handle = Handle(steps)
        return self._handle

    def finish(self) -> None:
        """Wait for the sum that was started last, if there is one."""
        if self._handle is not None:
            self._handle.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: copies of its residuals, and the numbers that identify it.

        Raises:
            RuntimeError: the sum of the last bucket is not complete.
        """
        self._check_done()
        return self._identity() | {
            name: None if residual is None else residual.clone() for name, residual in self._algorithm.state().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned on this rank, of as many ranks.

        Raises:
            TypeError: the state, or an entry of it, has a wrong type.
            ValueError: the state is of another compressor, size, rank or number of ranks; nothing has been changed.
            RuntimeError: the sum of the last bucket is not complete.
        """
        self._check_done()
        instance("state", state, Mapping, "a dict, as state_dict() returns it")
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise ValueError(f"state has {name}={state.get(name)!r}: this all-reduce has {expected!r}")
        self._algorithm.load(state)

    def _identity(self) -> dict[str, Any]:
        return {"type": self.compressor.type, "rank": self.rank, "ranks": self.ranks, "numel": self.numel}

    def _check_done(self) -> None:
        if self._handle is not None and not self._handle.done:
            raise RuntimeError("the sum of the last bucket is not complete: wait for its handle first")

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compressor!r}, {self.numel}, {self.exchange}, rank {self.rank} of {self.ranks})"
