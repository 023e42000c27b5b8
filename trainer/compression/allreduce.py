"""Gradient compression over several processes: compressors by name, and the all-reduce that sends their messages.

A bucket is a flat tensor of gradients, cut into as many chunks as there are ranks:

    each rank encodes its bucket plus its residual                          (residual of the worker)
    all-to-all: rank r gets the messages of chunk r
    rank r adds them up in the ranks' order and encodes the sum, likewise   (residual of the server)
    all-gather: all ranks get the messages of all sums, and decode them

So every rank ends with the same bits, and sends 2 (N - 1) / N b n bytes for n values of b bytes each. Of "2bit" and "1bit"
the second message is the exact sum of the votes, in a few more bits, without a residual. With two ranks, or few
values, all messages are gathered instead: there one collective is enough, and there is no second error. "topk" is always
gathered, since ranks choose different indices; "randomk" and "powersgd" send by all-reduces what can be added up as it is.

Sources: Seide et al. (2014), "1-bit stochastic gradient descent" (error feedback); Tang et al. (2019), "DoubleSqueeze" (both
directions); MXNet 1.9.1 and 2.0, `gradient_compression` ("2bit", "1bit"); Bernstein et al. (2018), "signSGD", and
Karimireddy et al. (2019), "Error feedback fixes SignSGD" ("sign"); Stich et al. (2018), "Sparsified SGD with memory"
("topk", "randomk"); Vogels et al. (2019), "PowerSGD".
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...kernels import choose_engine, compress
from ..validation import integer
from .base import Compressor, create_compressor
from .reduce import MessageReduce, ReduceAlgorithm


class Handle:
    """An asynchronous sum. Ranks must advance theirs in the same order."""

    def __init__(self, steps: Iterator[Any]) -> None:
        self._steps: Iterator[Any] | None = steps
        self._work: Any = None
        self._next()

    def advance(self) -> bool:
        """Wait for the running collective, and start the next one; whether all are over."""
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
        """Whether the bucket holds the sum."""
        return self._steps is None

    def _next(self) -> None:
        steps, self._steps = self._steps, None  # an error ends it
        try:
            self._work = next(steps)  # type: ignore[arg-type]  # not None
        except StopIteration:
            return
        self._steps = steps


def wait_all(handles: Sequence[Handle]) -> None:
    """Wait for several, whose second collectives run at the same time."""
    running = list(handles)
    while running:
        running = [handle for handle in running if not handle.advance()]


class CompressedAllReduce:
    """Sums a flat bucket over the ranks of a group by compressed messages. All ranks get the same bits.

    Args:
        compression_params: as for `create_compressor`, or a compressor.
        numel: the bucket's elements; at least 1.
        shapes: those of the tensors in the bucket, one after the other; "powersgd" needs them, others ignore them.
        device: the bucket's.
        group: the process group; None for the default one or, where torch.distributed has not been started, for one rank.
        engine: as for `tristep.kernels.choose_engine`.
        exchange: "all_to_all" or "all_gather", for compressors that can do both; None for the one that sends less.

    Attributes:
        compressor: the compressor.
        rank, ranks: this process's number in the group, and how many there are.
        exchange: "all_to_all", "all_gather" or "all_reduce".
        bytes_sent: what each rank sends for one bucket, in bytes, headers of the network not counted.

    Raises:
        TypeError, ValueError: arguments that do not fit.

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
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        engine: str | None = None,
        exchange: str | None = None,
    ) -> None:
        made = isinstance(compression_params, Compressor)
        self.compressor: Compressor = compression_params if made else create_compressor(compression_params)  # type: ignore[assignment,arg-type]
        self.numel, self.device = integer("numel", numel, 1), torch.device(device)
        choose_engine(self.device, engine)
        klass: type[ReduceAlgorithm] = self.compressor.reduce_algorithm or MessageReduce
        self._algorithm = algorithm = klass(self.compressor, self.numel, shapes, self.device, group, engine, exchange)
        self.rank, self.ranks = algorithm.rank, algorithm.ranks
        self.exchange, self.bytes_sent = algorithm.exchange, algorithm.bytes_sent
        self._handle: Handle | None = None

    def start(self, bucket: torch.Tensor) -> Handle:
        """Encode the bucket and start the first collective. The bucket is to be left alone until the handle is done.

        Args:
            bucket: float32, float16 or bfloat16 [numel], contiguous; gets the sum, computed in float32.

        Raises:
            TypeError, ValueError: a bucket that does not fit; nothing has been changed.
            RuntimeError: the last one is still under way.
        """
        if bucket.dtype not in compress.VALUES or bucket.dim() != 1 or not bucket.is_contiguous():
            kinds = ", ".join(map(str, compress.VALUES))
            raise TypeError(f"bucket is {bucket.dtype} {tuple(bucket.shape)}: must be one of {kinds}, [n], contiguous")
        if bucket.numel() != self.numel or bucket.device != self.device:
            raise ValueError(
                f"bucket has {bucket.numel()} elements on {bucket.device}: "
                f"this all-reduce is for {self.numel} on {self.device}"
            )
        self._check_done()
        self._handle = Handle(self._algorithm.steps(bucket.detach()))
        return self._handle

    def finish(self) -> None:
        """Wait for what was started last, if anything was."""
        if self._handle is not None:
            self._handle.wait()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: copies of its residuals, and integers.

        Raises:
            RuntimeError: a bucket is under way.
        """
        self._check_done()
        settings = {"type": self.compressor.type, "rank": self.rank, "ranks": self.ranks, "numel": self.numel}
        return settings | {name: _copied(value) for name, value in self._algorithm.state().items()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load what `state_dict` gave.

        Args:
            state: of this rank; or a list of all ranks' states, of any number of ranks. Where the number of ranks has
                changed, what all of them kept back is added up and each rank goes on with an equal part of it. Of a single
                a state saved by another number of ranks, only what all ranks have in common is loaded, with a warning.

        Raises:
            TypeError, ValueError: it does not fit; nothing has been changed.
            RuntimeError: a bucket is under way.
        """
        self._check_done()
        states = [state] if isinstance(state, Mapping) else list(state)
        for each in states:
            for name, own in (("type", self.compressor.type), ("numel", self.numel)):
                if not isinstance(each, Mapping) or each.get(name) != own:
                    found = each.get(name) if isinstance(each, Mapping) else each
                    raise ValueError(f"state has {name}={found!r}: this all-reduce has {own!r}")
        if not states:
            raise ValueError("state is an empty list: must be one state, or those of all ranks")
        ranks = states[0]["ranks"]
        own_state = [each for each in states if each["ranks"] == self.ranks and each["rank"] == self.rank]
        if own_state:
            kept = dict(own_state[0])
        elif sorted(each["rank"] for each in states) == list(range(ranks)):
            total = total_residual(states, self.numel)
            kept = {**states[0], "worker": None if total is None else total / self.ranks, "server": None}
        else:
            if ranks == self.ranks:
                raise ValueError(f"state is of rank {states[0]['rank']}: this is rank {self.rank}")
            warnings.warn(
                f"what was kept back on {ranks} ranks is dropped, this group has {self.ranks}: "
                "hand over a list of all ranks' states to keep it",
                stacklevel=2,
            )
            kept = {**states[0], "worker": None, "server": None}
        self._algorithm.load(kept)

    def _check_done(self) -> None:
        if self._handle is not None and not self._handle.done:
            raise RuntimeError("the last bucket is still under way: wait for its handle first")

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compressor!r}, {self.numel}, {self.exchange}, rank {self.rank} of {self.ranks})"


def total_residual(states: Sequence[Mapping[str, Any]], numel: int) -> torch.Tensor | None:
    """The sum of all ranks' residuals, float32 [numel]; None without error feedback."""
    total = None
    for each in sorted(states, key=lambda state: state["rank"]):
        if each.get("worker") is not None:
            total = each["worker"].clone() if total is None else total + each["worker"]
        if each.get("server") is not None and total is not None:
            chunk = each["server"].numel()
            part = total[each["rank"] * chunk : (each["rank"] + 1) * chunk]
            part += each["server"][: part.numel()].to(part.device)
    assert total is None or total.numel() == numel
    return total


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(each) for each in value] if isinstance(value, list) else value
