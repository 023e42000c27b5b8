"""`python -m tristep cost`: print the estimated cost of a step on many GPUs, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

import torch
import torch.distributed as dist

from .links import LINKS, Link, measure_link, parse_link
from .model import estimate_cost
from .strategy import table
from .update import MEMORIES, OTHER_NAMES


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the subparsers of the command line."""
    cost = commands.add_parser(
        "cost",
        help="bytes on the wire, memory and time of a step on many GPUs, by a model",
        description="What a step costs with each strategy: bytes that a rank sends, its memory, and the time by a model of "
        "latency and bandwidth. Memory follows from the optimizer's own rule. See docs/scaling.md.",
    )
    names = ", ".join(LINKS)
    cost.add_argument("--params", type=float, required=True, metavar="N", help="parameters, such as 8e9")
    cost.add_argument("--gpus", type=int, metavar="N", help="ranks (with --measure: the number of processes)")
    link = cost.add_mutually_exclusive_group(required=True)
    link.add_argument("--link", metavar="LINK", help=f"link between ranks: {names}, or GB/s[,latency], such as 12.5,30us")
    link.add_argument("--measure", action="store_true", help="measure the link of the processes that torchrun has started")
    cost.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks in a node, if nodes have a faster link inside")
    cost.add_argument("--inner", default="nvlink", metavar="LINK", help="the link within a node (default: nvlink)")
    cost.add_argument("--optimizer", default="adam", metavar="NAME", help="(default: adam)")
    cost.add_argument("--state", metavar="TYPE", help="how states are stored: bfloat16, 8bit or 4bit")
    cost.add_argument(
        "--weights", default="float32", metavar="TYPE", help="dtype of weights and gradients (default: float32)"
    )
    cost.add_argument(
        "--master", choices=("float32", "remainder", "split8"), help="the master of 16-bit weights; none by default"
    )
    memories = ", ".join(MEMORIES)
    cost.add_argument("--memory", default="h100", metavar="GPU", help=f"GPU's memory: {memories}, or GB/s (default: h100)")
    cost.add_argument("--compute-ms", type=float, metavar="T", help="of forward and backward, which hide communication")
    cost.add_argument("--servers", type=int, default=1, metavar="N", help="servers of the parameter server (default: 1)")
    cost.add_argument(
        "--update-on-kvstore", action="store_true", help="compression with ZeRO-1 instead of updating all on each rank"
    )
    cost.add_argument("--json", action="store_true", help="print the rows as JSON, in bytes and seconds")
    return cost


def run(
    params: float,
    gpus: int | None,
    link: str | None,
    measure: bool,
    optimizer: str,
    state: str | None,
    weights: str,
    master: str | None,
    memory: str,
    **others: Any,
) -> int:
    """Print the estimate for these arguments as a table or as JSON, and return the exit status.

    Raises:
        TypeError, ValueError: an argument is invalid.
        RuntimeError: the link is to be measured, and there is only one process.
    """
    as_json, rank = others.pop("json"), 0
    options: dict[str, Any] = {}
    if state is not None:
        options["state_dtype"] = {"bf16": "bfloat16"}.get(state, state)
    if master is not None:
        options["multi_precision"] = True if master == "float32" else master
    weights = OTHER_NAMES.get(weights, weights)
    if measure:
        if others["gpus_per_node"] is not None:
            raise ValueError("--measure finds one link for all, so there is none for --gpus-per-node: leave one of them out")
        parsed, rank, ranks = _measured()
        gpus = ranks if gpus is None else gpus
    else:
        assert link is not None
        parsed = parse_link(link, "--link")
        if gpus is None:
            raise ValueError("--gpus is missing: how many ranks there are to be")
    rows = estimate_cost(
        params,
        gpus,
        parsed,
        optimizer=optimizer,
        optimizer_params=options,
        weights=weights,
        memory=memory,
        **others,
    )
    if rank:
        return 0
    if as_json:
        made = [dataclasses.asdict(row) | {"memory": row.memory} for row in rows]
        print(json.dumps({"params": params, "gpus": gpus, "link": parsed._asdict(), "strategies": made}, indent=2))
        return 0
    figures = (
        "the link has been measured, other figures are nominal" if parsed.measured else "with nominal figures, none measured"
    )
    print(
        f"By a model, {figures}.\n{params:,.0f} parameters on {gpus} GPUs over {parsed.name}: "
        f"{parsed.bandwidth / 1e9:.4g} GB/s, {parsed.latency * 1e6:.3g} us a message. "
        "Sent and kept by each rank, for a step:\n"
    )
    print(table(rows))
    return 0


def _measured() -> tuple[Link, int, int]:
    """Measure the link between torchrun's processes. Returns the link, this process's rank and the number of processes."""
    if "RANK" not in os.environ:
        raise RuntimeError("--measure needs several processes: torchrun --nproc_per_node 2 -m tristep cost --measure ...")
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        return measure_link(), dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
