"""Compressed sums of buckets: which compression pays off, and what it has kept back, by parameter."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import streams
from .. import cost_model, dist_utils
from ..compression import CompressedAllReduce, create_compressor
from .buckets import Bucket, GradientBuckets, gaps_of
from .partition import in_memory_order, shaped_like
from .sync import Residuals

AUTO = "auto"
CANDIDATES = ("bf16", "int8", "int4")  # for it: whatever the gradients, these are close to them
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


def choose_compression(params: Sequence[torch.Tensor], group: Any) -> dict[str, Any] | None:
    """The fastest compression on the link between these processes, by the cost model and measured speeds."""
    device = params[0].device
    with streams.on_device(device):
        link = cost_model.measure_link(group)
    speed = torch.tensor([_copy_speed(device)], device=device)
    dist_utils.all_reduce(speed, dist.ReduceOp.MIN, group)
    shapes = [param.shape for param in params]
    estimated = cost_model.estimate_cost(shapes, dist.get_world_size(group), link, memory=float(speed) / 1e9)
    rows = {row.name: row for row in estimated}
    plain, best = rows["all-reduce"], min((rows[kind] for kind in CANDIDATES), key=lambda row: row.step)
    chosen = best if best.step < plain.step else None
    if dist.get_rank(group) == 0:
        measured = f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us a message were measured"
        times = f"{best.name} {best.step * 1e3:.3g} ms, uncompressed {plain.step * 1e3:.3g} ms"
        verdict = "compression costs more than it saves" if chosen is None else f"{best.name} is taken"
        print(
            f"compression_params={{'type': 'auto'}}: {measured}; by a model a step takes {times}: {verdict}",
            file=sys.stderr,
        )
    return None if chosen is None else {"type": chosen.name}


def compressed_sum(
    bucket: Bucket, compression_params: Mapping[str, Any], group: Any, engine: str | None
) -> CompressedAllReduce:
    """What sums a bucket, for the arguments of a `AllReduceSync`."""
    first, *gaps = gaps_of(bucket)
    shapes = [first.shape]
    for member, gap in zip(bucket.members, gaps, strict=True):
        shapes += [member.view.shape if member.view.is_contiguous() else member.room.shape, gap.shape]
    return CompressedAllReduce(
        compression_params, bucket.flat.numel(), shapes, device=bucket.flat.device, group=group, engine=engine
    )


def residuals_of(buckets: GradientBuckets) -> Residuals:
    """As `GradientSync.residuals`, of all ranks. To be called on all of them."""
    found: Residuals = {}
    for bucket in buckets.buckets:
        if bucket.reducer is None:
            continue
        kept = bucket.reducer.state_dict()
        for name in ("worker", "server"):
            if kept[name] is None:
                continue
            own = kept[name]
            gathered = own.new_empty(bucket.reducer.ranks * own.numel())
            dist_utils.all_gather(gathered, own, buckets.group)
            if name == "worker":
                flats = {str(rank): flat for rank, flat in enumerate(gathered.view(bucket.reducer.ranks, -1))}
            else:
                flats = {_SERVER: gathered}
            for source, flat in flats.items():
                for member in bucket.members:
                    part = shaped_like(flat[member.start : member.start + member.size].cpu(), member.view)
                    whole = part.clone(memory_format=torch.contiguous_format)
                    found.setdefault(buckets.names[member.param], {})[source] = whole
    return found


@torch.no_grad()
def load_residuals(buckets: GradientBuckets, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """As `GradientSync.load_residuals`. To be called on all ranks."""
    buckets.make()
    for bucket in buckets.buckets:
        if bucket.reducer is None:
            continue
        rank, ranks = bucket.reducer.rank, bucket.reducer.ranks
        state = bucket.reducer.state_dict()
        flats = {name: torch.zeros(bucket.flat.numel(), device=bucket.flat.device) for name in ("worker", "server")}
        for member in bucket.members:
            theirs = saved.get(buckets.names[member.param], {})
            part = slice(member.start, member.start + member.size)
            known = {*map(str, range(ranks)), *([] if state["server"] is None else [_SERVER])}
            for source, residual in theirs.items():
                values = in_memory_order(residual.to(bucket.flat.device), member.view)
                if not set(theirs) <= known:  # what is still to be sent is their sum
                    flats["worker"][part] += values / ranks
                elif source in (_SERVER, str(rank)):
                    flats["server" if source == _SERVER else "worker"][part] = values
        if state["worker"] is not None:
            state["worker"] = flats["worker"]
        if state["server"] is not None:
            size = state["server"].numel()
            whole = torch.nn.functional.pad(flats["server"], (0, max(ranks * size - len(flats["server"]), 0)))
            state["server"] = whole[rank * size : (rank + 1) * size]
        bucket.reducer.load_state_dict(state)


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
