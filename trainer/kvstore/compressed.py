"""Compressed all-reduces of buckets, and their residuals by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import dist_utils, plugins
from ..compression import CompressedAllReduce, create_compressor
from .buckets import Bucket, GradientBuckets, gaps_of
from .partition import in_memory_order, shaped_like
from .sync import Residuals

_SERVER = "server"  # the source of the residual of sums; the source of a rank's own residual is its number


def check_compression(compression_params: Any) -> None:
    """Check the `compression_params` of synchronous processes; None is allowed.

    Raises:
        TypeError: `compression_params` is neither None nor a dict, or an option has a wrong type.
        ValueError: the type or an option is unknown or out of range.
    """
    if choice_of(compression_params) is not None:
        if extra := [key for key in compression_params if key != "type"]:
            raise ValueError(
                f"compression_params has the key {extra[0]!r}: {compression_params['type']!r} takes 'type' alone"
            )
    elif compression_params is not None:
        create_compressor(compression_params)


def choice_of(compression_params: Any) -> Any:
    """Return the plugin function that chooses the compression if the type asks for one, such as "auto"; else None.

    The function is called on all ranks with the parameters and the process group. It returns `compression_params`, equal
    on all ranks, or None for no compression.
    """
    kind = compression_params.get("type") if isinstance(compression_params, Mapping) else None
    return plugins.load("tristep.compression_choices", kind) if isinstance(kind, str) else None


def compressed_sum(
    bucket: Bucket, compression_params: Mapping[str, Any], group: Any, engine: str | None
) -> CompressedAllReduce:
    """Return the compressed all-reduce for a bucket; the other arguments have the meaning they have in `AllReduceSync`."""
    first, *gaps = gaps_of(bucket)
    shapes = [first.shape]
    for member, gap in zip(bucket.members, gaps, strict=True):
        shapes += [member.view.shape if member.view.is_contiguous() else member.room.shape, gap.shape]
    return CompressedAllReduce(
        compression_params, bucket.flat.numel(), shapes, device=bucket.flat.device, group=group, engine=engine
    )


def residuals_of(buckets: GradientBuckets) -> Residuals:
    """Return all ranks' compression residuals, on the CPU, by parameter name and source. To be called on all ranks."""
    residuals: Residuals = {}
    for bucket in buckets.buckets:
        if bucket.reducer is None:
            continue
        state = bucket.reducer.state_dict()
        for name in ("worker", "server"):
            residual = state[name]
            if residual is None:
                continue
            gathered = residual.new_empty(bucket.reducer.ranks * residual.numel())
            dist_utils.all_gather(gathered, residual, buckets.group)
            if name == "worker":
                flats = {str(rank): flat for rank, flat in enumerate(gathered.view(bucket.reducer.ranks, -1))}
            else:
                flats = {_SERVER: gathered}
            for source, flat in flats.items():
                for member in bucket.members:
                    part = shaped_like(flat[member.start : member.start + member.size].cpu(), member.view)
                    whole = part.clone(memory_format=torch.contiguous_format)
                    residuals.setdefault(buckets.names[member.param], {})[source] = whole
    return residuals


@torch.no_grad()
def load_residuals(buckets: GradientBuckets, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Load what `residuals_of` returned. To be called on all ranks.

    If it was saved on another number of ranks, each rank gets an equal share of the sum. A missing residual becomes 0.
    """
    buckets.make()
    for bucket in buckets.buckets:
        if bucket.reducer is None:
            continue
        rank, ranks = bucket.reducer.rank, bucket.reducer.ranks
        state = bucket.reducer.state_dict()
        flats = {name: torch.zeros(bucket.flat.numel(), device=bucket.flat.device) for name in ("worker", "server")}
        for member in bucket.members:
            saved_residuals = saved.get(buckets.names[member.param], {})
            part = slice(member.start, member.start + member.size)
            sources = {*map(str, range(ranks)), *([] if state["server"] is None else [_SERVER])}
            for source, residual in saved_residuals.items():
                values = in_memory_order(residual.to(bucket.flat.device), member.view)
                if not set(saved_residuals) <= sources:  # what is still to be sent is their sum
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
