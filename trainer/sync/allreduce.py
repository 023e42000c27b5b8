"""Synchronization of several processes: gradients are summed in buckets while backward runs.

`AllReduceSync` gives every rank the sums, with which its trainer updates its replica; with `ZeroSync` every rank updates
its share of the weights, whose states only it has.
"""

from __future__ import annotations

import abc
import contextlib
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import cost_model, dist_utils
from ..compression import CompressedAllReduce, create_compressor
from ..dist_utils import check_alike, check_same
from ..optimizer import Optimizer
from ..replica import Replica
from .base import GradientSync, Residuals
from .bucket import Bucket
from .buckets import GradientBuckets
from .partition import memory_of

__all__ = ["AllReduceSync", "CollectiveSync", "check_compression"]

AUTO = "auto"
CANDIDATES = ("bf16", "int8", "int4")  # for it: whatever the gradients, these are close to them
_MOST_EXACT = 2**12  # ranks, whose flags have exact sums in float32
_SERVER = "server"  # the source of what is left of sums; those of ranks are their numbers


def check_compression(compression_params: Any) -> None:
    """Refuse what synchronous processes do not take as `compression_params`; None is fine.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if isinstance(compression_params, Mapping) and compression_params.get("type") == AUTO:
        if extra := [key for key in compression_params if key != "type"]:
            raise ValueError(f"compression_params has the key {extra[0]!r}: {AUTO!r} takes 'type' alone")
    elif compression_params is not None:
        create_compressor(compression_params)


class CollectiveSync(GradientSync):
    """Base of the synchronizations that sum gradients in buckets, while backward runs and in `count_fresh`.

    Args:
        group: the process group.
        replica: of the model, the only one in this process.
        names: of the parameters.
        optimizer: the optimizer, the same on all ranks.
        compression_params: for the sums; None compresses nothing.
        engine: as for `tristep.kernels.choose_engine`.
    """

    def __init__(
        self,
        group: Any,
        replica: Replica,
        names: Sequence[str],
        optimizer: Optimizer,
        compression_params: Mapping[str, Any] | None,
        engine: str | None,
    ) -> None:
        self._group, self._replica, self._names, self._engine = group, replica, list(names), engine
        self._optimizer = optimizer
        self._compression_params = compression_params
        check_compression(compression_params)
        self._buckets: GradientBuckets | None = None
        self._accumulating = contextlib.ExitStack()
        self._late: tuple[torch.Tensor, Any, torch.Tensor] | None = (
            None  # counts and flags, their copy on the host, what is trained
        )
        # Gradients that are sums already, of a step that was refused after that: the tensors, their versions, their counts.
        self._sums: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._last: dict[str, Any] = {}  # the optimizer's settings in the last step
        self.num_replicas = dist.get_world_size(group)
        self.writes = dist.get_rank(group) == 0

    def start(self) -> None:
        self._check_ranks()  # first: where they differ some would refuse what others go on with, or wait for them in vain
        if self._compression_params is not None and self._compression_params["type"] == AUTO:
            self._compression_params = self._choose()
        if self._compression_params is not None:
            for name, param in zip(self._names, self._replica.params, strict=True):
                dtype = getattr(param, "grad_dtype", None) or param.dtype
                if dtype == torch.float64:
                    raise TypeError(
                        f"compression_params={self._compression_params!r}: the gradient of {name!r} is torch.float64, which "
                        "cannot be compressed; convert the model, or leave it out"
                    )
        self._make()
        self._live.broadcast_weights()

    def _check_ranks(self) -> None:
        """See that all ranks have the same model, optimizer and settings."""
        params, optimizer = self._replica.params, self._optimizer
        check_alike("parameter", dict(zip(self._names, params, strict=True)), self._group)
        settings: dict[str, Any] = {"update_on_kvstore": self.updates, "compression_params": self._compression_params}
        settings |= {"optimizer": type(optimizer).__name__, "lr_scheduler": type(optimizer.lr_scheduler).__name__}
        described = _described(settings | _settings(optimizer))
        trained = {f"requires_grad of {n}": str(p.requires_grad) for n, p in zip(self._names, params, strict=True)}
        check_same("setting", described | trained, self._group, params[0].device)

    def _choose(self) -> dict[str, Any] | None:
        """The fastest compression on the link between these processes, by the cost model and measured speeds."""
        device = self._replica.params[0].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            link = cost_model.measure_link(self._group)
        speed = torch.tensor([_copy_speed(device)], device=device)
        dist_utils.all_reduce(speed, dist.ReduceOp.MIN, self._group)
        shapes = [param.shape for param in self._replica.params]
        rows = {
            row.name: row for row in cost_model.estimate_cost(shapes, self.num_replicas, link, memory=float(speed) / 1e9)
        }
        plain, best = rows["all-reduce"], min((rows[kind] for kind in CANDIDATES), key=lambda row: row.step)
        chosen = best if best.step < plain.step else None
        if self.writes:
            measured = f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us a message were measured"
            times = f"{best.name} {best.step * 1e3:.3g} ms, uncompressed {plain.step * 1e3:.3g} ms"
            verdict = "compression costs more than it saves" if chosen is None else f"{best.name} is taken"
            print(
                f"compression_params={{'type': 'auto'}}: {measured}; by a model a step takes {times}: {verdict}",
                file=sys.stderr,
            )
        return None if chosen is None else {"type": chosen.name}

    @abc.abstractmethod
    def _make(self) -> None:
        """Make the buckets."""

    @property
    def _live(self) -> GradientBuckets:
        assert self._buckets is not None
        return self._buckets

    def _reducer(self, bucket: Bucket) -> CompressedAllReduce:
        shapes, end = [], 0
        for member in sorted(bucket.members, key=lambda member: member.start):
            shape = member.view.shape if member.view.is_contiguous() else torch.Size([member.size])
            shapes += [torch.Size([member.start - end]), shape]
            end = member.start + member.size
        shapes.append(torch.Size([bucket.flat.numel() - end]))
        params: Any = self._compression_params
        return CompressedAllReduce(
            params, bucket.flat.numel(), shapes, device=bucket.flat.device, group=self._group, engine=self._engine
        )

    def count_fresh(self, fresh: Sequence[Sequence[bool]], ignore_stale_grad: bool = False) -> list[int]:
        summed = {
            i: count
            for i, (gradient, version, count) in self._sums.items()
            if self._replica.params[i].grad is gradient and gradient._version == version
        }
        # Of a sum rank 0 alone gives its own, so that it stays what it is.
        own = [new and (i not in summed or self.writes) for i, new in enumerate(fresh[0])]
        found = self._finish(own)
        counts = self._counts([new or i in summed for i, new in enumerate(own)], found, ignore_stale_grad)
        counts = [summed.get(i, count) for i, count in enumerate(counts)]
        if self._compression_params is not None or not self.updates:
            self._sums = {
                i: (param.grad, param.grad._version, counts[i])
                for i, param in enumerate(self._replica.params)
                if counts[i] and param.grad is not None
            }
        return counts

    def _finish(self, fresh: Sequence[bool]) -> torch.Tensor:
        return self._live.finish(fresh)

    def end_step(self) -> None:
        self._sums = {}
        # With the next gradients the ranks see whether they have taken this step alike.
        self._last = _settings(self._optimizer)
        digest = zlib.crc32(repr(self._last).encode())
        self._live.flag_slots = [number for part in (digest & 63, digest >> 6 & 63) for number in (part, part * part)]

    def _check_flags(self, sums: Sequence[float]) -> None:
        """See that all ranks have taken the last step alike: sums of squares are least where all numbers are equal.

        Raises:
            ValueError, RuntimeError: they have not.
        """
        pairs = zip(sums[::2], sums[1::2], strict=True)
        if self.num_replicas > _MOST_EXACT or all(self.num_replicas * square == total * total for total, square in pairs):
            return
        if not self._live.flag_sums.is_cuda:  # all ranks are here
            device = self._replica.params[0].device
            check_same("setting of the last step", _described(self._last), self._group, device)
        raise RuntimeError(
            "in the last step ranks had other batch sizes, learning rates or other settings of the optimizer: their weights "
            "are no longer what they should be; load saved states and weights, or start again"
        )

    def _counts(self, fresh: Sequence[bool], counts: torch.Tensor, ignore_stale_grad: bool) -> list[int]:
        """On how many ranks each gradient was fresh, without waiting for a GPU where this rank had all of them.

        Then it is not known yet whether another one lacked some, which that one knows and tells its user; here it is found
        out a step later.
        """
        if self._late is not None:
            late, event, trained = self._late
            self._late = None
            event.synchronize()
            late, sums = late.split([len(self._names), len(self._live.flag_slots)])
            self._check_flags(sums.tolist())
            missing = [repr(self._names[i]) for i in torch.nonzero(trained & (late < self.num_replicas)).flatten().tolist()]
            if missing:
                raise RuntimeError(
                    f"in the last step another rank had no fresh gradient for {', '.join(missing[:8])}: its weights are no "
                    "longer those of this one; load saved states and weights, or start again"
                )
        complete = all(new or not param.requires_grad for new, param in zip(fresh, self._replica.params, strict=True))
        if not (counts.is_cuda and complete):
            self._check_flags(self._live.flag_sums.tolist())
            return [int(count) for count in counts.tolist()]
        if not ignore_stale_grad:
            trained = torch.tensor([param.requires_grad for param in self._replica.params])
            found = torch.cat([counts, self._live.flag_sums])
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(counts.device))
            self._late = host, event, trained
        return [self.num_replicas] * len(fresh)

    def accumulate(self, on: bool) -> None:
        if on and self._buckets is not None:
            self._accumulating.enter_context(self._buckets.accumulate())
        elif not on:
            self._accumulating.close()

    def end_save(self) -> None:
        dist_utils.barrier(self._group)

    def residuals(self) -> Residuals:
        """As `GradientSync.residuals`, of all ranks. To be called on all of them."""
        found: Residuals = {}
        if self._compression_params is None or self._buckets is None:
            return found
        for bucket in self._buckets.buckets:
            if bucket.reducer is None:
                continue
            kept = bucket.reducer.state_dict()
            for name in ("worker", "server"):
                if kept[name] is None:
                    continue
                own = kept[name]
                gathered = own.new_empty(self.num_replicas * own.numel())
                dist_utils.all_gather(gathered, own, self._group)
                if name == "worker":
                    flats = {str(rank): flat for rank, flat in enumerate(gathered.view(self.num_replicas, -1))}
                else:
                    flats = {_SERVER: gathered}
                for source, flat in flats.items():
                    for member in bucket.members:
                        part = flat[member.start : member.start + member.size].cpu()
                        found.setdefault(self._names[member.param], {})[source] = _shaped(part, member.view)
        return found

    @torch.no_grad()
    def load_residuals(self, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if self._compression_params is None:
            return
        self._live.make()
        ranks = {str(rank) for rank in range(self.num_replicas)}
        for bucket in self._live.buckets:
            if bucket.reducer is None:
                continue
            state = bucket.reducer.state_dict()
            flats = {name: torch.zeros(bucket.flat.numel(), device=bucket.flat.device) for name in ("worker", "server")}
            for member in bucket.members:
                theirs = saved.get(self._names[member.param], {})
                part = slice(member.start, member.start + member.size)
                same = set(theirs) - {_SERVER} <= ranks and (state["server"] is not None or _SERVER not in theirs)
                for source, residual in theirs.items():
                    like = torch.empty_like(member.view, dtype=torch.float32)
                    values = memory_of(like.copy_(residual))
                    if not same:  # what is still to be sent is their sum
                        flats["worker"][part] += values / self.num_replicas
                    elif source in (_SERVER, str(bucket.reducer.rank)):
                        flats["server" if source == _SERVER else "worker"][part] = values
            if state["worker"] is not None:
                state["worker"] = flats["worker"]
            if state["server"] is not None:
                size = state["server"].numel()
                whole = torch.nn.functional.pad(
                    flats["server"], (0, max(self.num_replicas * size - len(flats["server"]), 0))
                )
                state["server"] = whole[bucket.reducer.rank * size : (bucket.reducer.rank + 1) * size]
            bucket.reducer.load_state_dict(state)


class AllReduceSync(CollectiveSync):
    """Every rank gets the sums of the gradients, and its trainer updates its replica with them (dist_sync)."""

    def _make(self) -> None:
        reducer = None if self._compression_params is None else self._reducer
        params: Any = self._replica.params
        self._buckets = GradientBuckets(params, self._names, self._group, reducer=reducer)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of an optimizer that must be the same on all ranks."""
    return optimizer.settings() | {"num_update": optimizer.num_update}


def _described(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in settings.items()}


def _copy_speed(device: torch.device) -> float:
    """Bytes per second that this device reads and writes, of a replica of 32 MiB, the best of three."""
    values = torch.ones(2**23, device=device)
    into, times = torch.empty_like(values), []
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        into.copy_(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return 2 * values.nbytes / min(times[1:])


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Elements in the order in which those of `like`, if dense, lie in memory, as a tensor of its shape, in C's order."""
    ordered = torch.empty_like(like, dtype=flat.dtype, device=flat.device)
    memory_of(ordered).copy_(flat)
    return ordered.contiguous()
