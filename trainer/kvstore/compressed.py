"""Compressed all-reduces of buckets, and what of them is saved: residuals by parameter, and between parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..compression import CompressedAllReduce
from ..utils import distributed
from .buckets import Bucket, GradientBuckets
from .partition import in_memory_order, shaped_like
from .sync import Residuals

_SERVER = "server"  # the source of the residual of sums; the source of a rank's own residual is its number
_GAPS_OF_RANKS, _GAPS_OF_SUMS = "gaps of ranks", "gaps of sums"


def compressed_sum(
    bucket: Bucket, compression_params: Mapping[str, Any], group: Any, engine: str | None, scatter: bool = False
) -> CompressedAllReduce:
    """Return the compressed sum of a bucket; with `scatter`, a rank needs the sum of its own part only."""
    parts = bucket.parts if scatter else None
    where = {"device": bucket.flat.device, "group": group, "engine": engine}
    return CompressedAllReduce(compression_params, bucket.flat.numel(), **where, parts=parts)


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
            distributed.all_gather(gathered, residual, buckets.group)
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


def bucket_state(buckets: GradientBuckets) -> dict[str, Any]:
    """Return what a resumed training needs to sum gradients in the same buckets. To be called on all ranks.

    "buckets" has the number of "ranks", the "order" of the parameters, which are "trained", and a description of each
    bucket's reducer. "reducers" has, by the number of a bucket, the residuals between parameters, "gaps of ranks" [ranks, n]
    and "gaps of sums" [m], which some codecs average with the parameters next to them, on the CPU.
    """
    n = len(buckets.params)
    described = [_described(bucket) for bucket in buckets.buckets if bucket.reducer is not None]
    plain = {
        "ranks": buckets.ranks,
        "order": buckets.plan[:n],
        "trained": list(map(bool, buckets.plan[n:])),
        "reducers": described,
    }
    reducers = {}
    for number, bucket in enumerate(buckets.buckets):
        if bucket.reducer is None:
            continue
        state, tensors = bucket.reducer.state_dict(), dict[str, torch.Tensor]()
        if state["worker"] is not None:
            own = state["worker"][_gaps_in(bucket, len(state["worker"]))]
            gaps = own.new_empty(buckets.ranks * len(own))
            distributed.all_gather(gaps, own, buckets.group)
            if gaps.any():
                tensors[_GAPS_OF_RANKS] = gaps.view(buckets.ranks, -1).cpu()
        if state["server"] is not None:
            whole = state["server"].new_empty(buckets.ranks * len(state["server"]))
            distributed.all_gather(whole, state["server"], buckets.group)
            if (gaps := whole[_gaps_in(bucket, len(whole))]).any():
                tensors[_GAPS_OF_SUMS] = gaps.cpu()
        if tensors:
            reducers[str(number)] = tensors
    return {"buckets": plain} | ({"reducers": reducers} if reducers else {})


def use_saved_plan(buckets: GradientBuckets, saved: Mapping[str, Any]) -> None:
    """Let buckets that are not made yet be made as they were when a state was saved, on as many ranks."""
    plain = saved.get("buckets")
    if plain is None or buckets.buckets or plain["ranks"] != buckets.ranks:
        return
    buckets.plan = _saved_plan(buckets, saved)


@torch.no_grad()
def load_sums(buckets: GradientBuckets, saved: Mapping[str, Any]) -> None:
    """Load what `residuals_of` and `bucket_state` returned from a saved state. To be called on all ranks.

    If it was saved on another number of ranks, each rank gets an equal share of the sum. A missing residual becomes 0.
    Residuals between parameters are loaded only if the buckets, and the compression, are as they were.
    """
    buckets.make()
    plain, residuals = saved.get("buckets"), saved.get("residuals", {})
    same = plain is not None and [plain["ranks"], _saved_plan(buckets, saved), list(plain["reducers"])] == [
        buckets.ranks,
        buckets.plan,
        [_described(bucket) for bucket in buckets.buckets if bucket.reducer is not None],
    ]
    for number, bucket in enumerate(buckets.buckets):
        if bucket.reducer is None:
            continue
        rank, ranks = bucket.reducer.rank, bucket.reducer.ranks
        state = bucket.reducer.state_dict()
        size = 0 if state["server"] is None else len(state["server"])
        tensors = saved.get("reducers", {}).get(str(number), {}) if same else {}
        length = max(bucket.flat.numel(), ranks * size)
        flats = {name: torch.zeros(length, device=bucket.flat.device) for name in ("worker", "server")}
        for member in bucket.members:
            saved_residuals = residuals.get(buckets.names[member.param], {})
            part = slice(member.start, member.start + member.size)
            sources = {*map(str, range(ranks)), *([] if state["server"] is None else [_SERVER])}
            for source, residual in saved_residuals.items():
                values = in_memory_order(residual.to(bucket.flat.device), member.view)
                if not set(saved_residuals) <= sources:  # what is still to be sent is their sum
                    flats["worker"][part] += values / ranks
                elif source in (_SERVER, str(rank)):
                    flats["server" if source == _SERVER else "worker"][part] = values
        if state["worker"] is not None:
            state["worker"] = flats["worker"][: bucket.flat.numel()]
            if _GAPS_OF_RANKS in tensors:
                _fill(state["worker"], bucket, tensors[_GAPS_OF_RANKS][rank], number)
        if state["server"] is not None:
            if _GAPS_OF_SUMS in tensors:
                _fill(flats["server"][: ranks * size], bucket, tensors[_GAPS_OF_SUMS], number)
            state["server"] = flats["server"][rank * size : (rank + 1) * size]
        bucket.reducer.load_state_dict(state)


def _saved_plan(buckets: GradientBuckets, saved: Mapping[str, Any]) -> list[int]:
    """Return `GradientBuckets.plan` of a saved state, whose parameters may have been in another order; empty if others."""
    plain, places = saved["buckets"], {name: i for i, name in enumerate(buckets.names)}
    own = [places.get(name, -1) for name in saved["parameters"]]
    if sorted(own) != list(range(len(places))):
        return []
    trained = dict(zip(own, plain["trained"], strict=True))
    return [*(own[i] for i in plain["order"]), *(int(trained[i]) for i in range(len(own)))]


def _described(bucket: Bucket) -> str:
    """Return a text that is equal for buckets and reducers whose states mean the same."""
    reducer = bucket.reducer
    return f"{reducer.compressor!r} {reducer.exchange} {bucket.bounds} {[member.start for member in bucket.members]}"


def _gaps_in(bucket: Bucket, length: int) -> torch.Tensor:
    """Return which of `length` elements, from the bucket's first one on, are of no parameter: bool [length]."""
    mask = torch.ones(length, dtype=torch.bool, device=bucket.flat.device)
    for member in bucket.members:
        mask[member.start : member.start + member.size] = False
    return mask


def _fill(flat: torch.Tensor, bucket: Bucket, values: torch.Tensor, number: int) -> None:
    """Write the values between parameters; raise ValueError if there are more or fewer."""
    mask = _gaps_in(bucket, len(flat))
    if values.shape != (int(mask.sum()),):
        raise ValueError(f"saved state: reducers[{str(number)!r}] has gaps of shape {tuple(values.shape)}: {mask.sum()} fit")
    flat[mask] = values.to(flat)
