"""Choose the compression that pays off on the link between these processes: `compression_params={"type": "auto"}`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...kernels import streams
from ...trainer import dist_utils
from .links import measure_link
from .model import estimate_cost

CANDIDATES = ("bf16", "int8", "int4")  # close to any gradients


def choose_compression(params: Sequence[torch.Tensor], group: Any, update_on_kvstore: bool) -> dict[str, Any] | None:
    """Return `compression_params` of the fastest compression on the link between these processes, by the cost model.

    It measures the link, so all processes must call it. None: no compression is faster than the same updates without it:
    ZeRO-1 with `update_on_kvstore`, otherwise an all-reduce.
    """
    device = params[0].device
    with streams.on_device(device):
        link = measure_link(group)
    speed = torch.tensor([_copy_speed(device)], device=device)
    dist_utils.all_reduce(speed, dist.ReduceOp.MIN, group)
    settings: dict[str, Any] = {"memory": float(speed) / 1e9, "update_on_kvstore": update_on_kvstore}
    estimated = estimate_cost(params, dist.get_world_size(group), link, **settings)
    rows = {row.name: row for row in estimated}
    plain = rows["ZeRO-1" if update_on_kvstore else "all-reduce"]
    best = min((rows[kind] for kind in CANDIDATES), key=lambda row: row.step)
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


def _copy_speed(device: torch.device) -> float:
    """Measure the bytes per second that this device reads and writes when it copies 32 MiB; the best of three copies."""
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
